"""Searches for hyper-parameters by cross-validation, with Optuna.

A trial's error is that on held-out rows in folds of the *training and validation part*, made like
the split itself (whole families with ``unseen_family``). The test part is never used. The default
parameters are evaluated first, on the same folds: a search that does not beat them reports that and
keeps them.

Trials are stored in an SQLite file, so that an interrupted search can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import ModelError
from ...common.files import own_data, parse_json, write_text
from ...common.paths import home
from ...common.types import JsonObject
from ...features.dataset import Dataset
from ..core.registry import estimator_class
from ..training_data.crossfit import fold_models, predict_entries
from ..training_data.metrics import mean_abs_log, median_ape
from ..training_data.prepared import PreparedDataset, prepare
from ..training_data.splits import make_split
from .train import estimator_factory

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

#: Draws keywords of an estimator from a trial.
Space = Callable[["Trial"], dict[str, object]]
#: Settings of training rather than parameters of an estimator, which do not belong in the file.
_SETTINGS = {"dataset", "model", "split", "seed", "n_jobs", "folds", "held_out"}
#: Fewer than in training: a search fits this many models per trial.
DEFAULT_FOLDS = 3
#: Trials before the first one may be stopped early for being worse than the median (Optuna's
#: default for its median pruner).
_STARTUP_TRIALS = 5
#: Errors that a search can minimize, by name.
OBJECTIVES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mean_abs_log": mean_abs_log,
    "median_ape": median_ape,
}


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial.

    Attributes:
        number: Its number in the study.
        params: Keywords of the estimator.
        error: Cross-validated error; over the completed folds if it was pruned.
        pruned: Whether it was stopped early.
        seconds: Wall time of the trial.
    """

    number: int
    params: dict[str, object]
    error: float
    pruned: bool
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        model: Name of the estimator.
        split: Name of the split.
        objective: Name of the minimized error.
        best: Keywords of the estimator to train with; empty if its defaults were not beaten.
        error: Cross-validated error of ``best``.
        default_error: Cross-validated error of the defaults, on the same folds.
        trials: All finished trials of the study.
        study: SQLite file of the study.
    """

    model: str
    split: str
    objective: str
    best: JsonObject
    error: float
    default_error: float
    trials: tuple[TrialRecord, ...]
    study: Path

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data, the format of ``opcast train --params``."""
        return {
            "model": self.model,
            "params": self.best,
            "split": self.split,
            "objective": self.objective,
            "error": self.error,
            "default_error": self.default_error,
            "trials": len(self.trials),
        }

    def table(self, count: int = 10) -> pd.DataFrame:
        """The finished trials with the least error, one row each."""
        done = sorted((t for t in self.trials if not t.pruned), key=lambda t: t.error)[:count]
        return pd.DataFrame([{"trial": t.number, "error": t.error, **t.params} for t in done])


def search_space(model: str) -> Space:
    """The search space declared by an estimator, else that of ``tuning.yaml``.

    Raises:
        ModelError: No such estimator, or it declares no search space.
    """
    declared: Space | None = getattr(estimator_class(model), "search_space", None)
    if declared is not None:
        return declared
    spaces: dict[str, dict[str, JsonObject]] = own_data("models/training/tuning.yaml")
    if model not in spaces:
        raise ModelError(
            f"estimator {model!r} declares no search space",
            hint=f"tune one of: {', '.join(sorted(spaces))}",
        )
    return lambda trial: {name: _drawn(trial, name, **how) for name, how in spaces[model].items()}


def _drawn(trial: Trial, name: str, suggest: str, **options: object) -> object:
    return getattr(trial, f"suggest_{suggest}")(name, **options)


def write_params(path: Path, tuning: Tuning) -> None:
    """Write a file for ``opcast train --params``."""
    write_text(path, json.dumps(tuning.to_dict(), indent=1) + "\n")


def read_params(path: Path, model: str) -> JsonObject:
    """Parameters of an estimator from a JSON file.

    Args:
        path: File of :func:`write_params`, or an object of the estimator's keywords.
        model: Name of the estimator.

    Raises:
        ModelError: The file is missing or not such an object, or was tuned for another estimator.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("no such parameter file", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"parameters cannot be read: {error}", where=str(path)) from None
    params = data.get("params", data) if isinstance(data, dict) else None
    if not isinstance(params, dict):
        raise ModelError("not a JSON object of parameters", where=str(path))
    if params is not data and data.get("model", model) != model:
        raise ModelError(
            f"parameters are for {data['model']!r}, not {model!r}",
            where=str(path),
            hint=f"pass --model {data['model']}",
        )
    for name in sorted(_SETTINGS & set(params)):
        raise ModelError(
            f"{name!r} is a setting of the training, not a parameter of the estimator",
            where=str(path),
            hint="take it out of the file, and pass it on the command line",
        )
    return dict(params)


def tune(
    dataset: Dataset | PreparedDataset,
    model: str = "xgboost",
    trials: int = 20,
    split: str = "unseen_family",
    seed: int = 0,
    n_jobs: int = 1,
    *,
    timeout_s: float | None = None,
    folds: int = DEFAULT_FOLDS,
    objective: str = "mean_abs_log",
    study: Path | None = None,
    on_trial: Callable[[TrialRecord, int], None] | None = None,
) -> Tuning:
    """Search for the hyper-parameters of an estimator.

    Args:
        dataset: Samples.
        model: Name of an estimator that declares a search space.
        trials: Trials in the study, including trials of earlier searches.
        split: Split whose training and validation rows are used.
        seed: Seed of the split, the folds, the estimator and the search.
        n_jobs: Threads of the estimator.
        timeout_s: Seconds after which no further trial starts.
        folds: Folds of the cross-validation.
        objective: One of :data:`OBJECTIVES`.
        study: SQLite file of the trials; by default one for all studies in opcast's home.
        on_trial: Called after every trial with its record and the number of finished trials.

    Raises:
        DatasetError: Too little data for the split.
        ModelError: Optuna is not installed, no such estimator or objective, the estimator declares
            no search space, or the study file is not a study.
    """
    space = search_space(model)
    if objective not in OBJECTIVES:
        raise ModelError(
            f"no objective {objective!r}", hint=f"choose one of: {', '.join(OBJECTIVES)}"
        )
    require_optuna()
    data = prepare(dataset)
    rows = make_split(data.frame, split, seed, inside=data.inside).fitting
    judge = _Judge(data, rows, model, split, seed, n_jobs, folds, objective)
    file = study or home() / "tuning.db"
    # The two spaces match the names of existing studies.
    key = f"{model} {split} {objective}  seed={seed} folds={folds}"
    # The name has everything that defines an error: a resumed search only continues comparable
    # trials.
    open_study = _open_study(file, f"{key} data={data.dataset_hash} {data.table.schema}", seed)
    default = _default_error(open_study, judge)
    _search(open_study, judge, space, trials, timeout_s, on_trial)
    return _result(open_study, judge, default, file)


@dataclass(frozen=True)
class _Judge:
    """Cross-validated error of an estimator with given parameters."""

    data: PreparedDataset
    rows: np.ndarray
    model: str
    split: str
    seed: int
    n_jobs: int
    folds: int
    objective: str

    def errors(self, params: Mapping[str, object]) -> Iterator[float]:
        """Error after each fold, over all rows predicted so far; the last one is the result."""
        factory = estimator_factory(self.model, self.seed, self.n_jobs, params)
        data, rows = self.data, self.rows
        measured: list[np.ndarray] = []
        predicted: list[np.ndarray] = []
        for model, test in fold_models(factory, data, rows, self.split, self.folds, self.seed):
            held = data.kernel_rows(rows[test])
            if len(held):
                predicted.append(predict_entries(model, data, data.entry[held]).latency)
                measured.append(data.latency_s[held])
                yield OBJECTIVES[self.objective](*map(np.concatenate, (measured, predicted)))

    def error(self, params: Mapping[str, object]) -> float:
        """Error over all folds.

        Raises:
            ModelError: No fold has rows on both sides.
        """
        errors = list(self.errors(params))
        if not errors:
            raise ModelError("too few training rows to tune on", hint="profile more programs")
        return errors[-1]


def require_optuna() -> ModuleType:
    """Import Optuna, and limit its logging to warnings.

    Raises:
        ModelError: It is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ModelError("Optuna is not installed", hint="pip install 'optuna>=4,<5'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_study(file: Path, name: str, seed: int) -> Study:
    optuna = require_optuna()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{file.absolute()}")
        study: Study = optuna.create_study(
            storage=storage, study_name=name, direction="minimize", load_if_exists=True
        )
    except Exception as error:  # SQLAlchemy's own classes, which are no dependency of ours
        text = str(error).splitlines()[0]
        raise ModelError(f"cannot keep trials there: {text}", where=str(file)) from None
    # The seed depends on the finished trials: a resumed search would otherwise repeat the first.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    # Stop a trial that is worse than the median of the others after a fold.
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS)
    return study


def _default_error(study: Study, judge: _Judge) -> float:
    # Stored in the study, so that a resumed search does not evaluate the defaults again.
    known = study.user_attrs.get("default_error")
    if known is None:
        known = judge.error({})
        study.set_user_attr("default_error", known)
    return float(known)


def _search(
    study: Study,
    judge: _Judge,
    space: Space,
    trials: int,
    timeout_s: float | None,
    on_trial: Callable[[TrialRecord, int], None] | None,
) -> None:
    optuna = require_optuna()

    def run(trial: Trial) -> float:
        params = space(trial)
        # The estimator's keywords, which may differ from the names of the trial's suggestions.
        trial.set_user_attr("params", params)
        error = float("nan")
        for step, error in enumerate(judge.errors(params)):
            trial.report(error, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return error

    def report(study: Study, trial: FrozenTrial) -> None:
        if on_trial is not None and (record := _record(trial)) is not None:
            on_trial(record, len(_finished(study)))

    left = trials - len(_finished(study))
    if left > 0:
        study.optimize(run, n_trials=left, timeout=timeout_s, callbacks=[report])


def _record(trial: FrozenTrial) -> TrialRecord | None:
    """A finished trial; ``None`` if it failed or was interrupted."""
    if trial.value is None or trial.state.name not in ("COMPLETE", "PRUNED"):
        return None
    seconds = trial.duration.total_seconds() if trial.duration is not None else 0.0
    return TrialRecord(
        number=trial.number,
        params=dict(trial.user_attrs["params"]),
        error=float(trial.value),
        pruned=trial.state.name == "PRUNED",
        seconds=seconds,
    )


def _finished(study: Study) -> list[TrialRecord]:
    records = (_record(trial) for trial in study.trials)
    return [record for record in records if record is not None]


def _result(study: Study, judge: _Judge, default_error: float, file: Path) -> Tuning:
    records = _finished(study)
    # The error of a pruned trial only covers its first folds, which is not comparable.
    whole = [r for r in records if not r.pruned]
    best = min(whole, key=lambda r: r.error, default=None)
    better = best is not None and best.error < default_error
    return Tuning(
        model=judge.model,
        split=judge.split,
        objective=judge.objective,
        best=dict(best.params) if best is not None and better else {},
        error=best.error if best is not None and better else default_error,
        default_error=default_error,
        trials=tuple(records),
        study=file,
    )
