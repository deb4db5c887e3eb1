"""Search for hyperparameters with a progress bar, logging the trials to MLflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.tracking.mlflow_store import ParentRun
    from ..models.training.tuning import TrialRecord, Tuning
    from .settings import TuneSettings

logger = logging.getLogger(__name__)


def run_tune(console: Console, settings: TuneSettings) -> Tuning:
    """Search for hyperparameters, print the best and, once, their errors on the test part."""
    from ..common.progress import counting, wrote
    from ..common.tables_text import print_frame, print_metrics
    from ..features.dataset import Dataset
    from ..models.training.train import train
    from ..models.training.tuning import require_optuna, tune, write_params
    from ..models.training_data.prepared import prepare

    require_optuna()  # before the minutes that reading a large dataset takes
    model, split = settings.model, settings.split
    # Features are computed once and shared by all trials.
    prepared = prepare(Dataset.load(*settings.data))
    with (
        _parent(f"tune-{model}-{split}", settings.track) as parent,
        counting("trials") as advance,
    ):

        def on_trial(trial: TrialRecord, finished: int) -> None:
            advance(finished, settings.trials)
            # As they finish, so that an interrupted search leaves its trials in MLflow.
            if parent is not None:
                _log_trial(parent, trial)

        tuning = tune(
            prepared,
            model,
            settings.trials,
            split,
            settings.seed,
            settings.threads,
            timeout_s=settings.timeout_s,
            folds=settings.folds,
            objective=settings.objective,
            study=settings.study,
            on_trial=on_trial,
        )
        if parent is not None:
            _log_search(parent, tuning, settings, prepared.dataset_hash)
    print_frame(console, tuning.table(), f"{model}: best of {len(tuning.trials)} trials")
    console.print(_verdict(tuning))
    # The test part is used here for the first time, once, with the parameters already chosen.
    result = train(
        prepared, model, split, seed=settings.seed, n_jobs=settings.threads, **tuning.best
    )
    title = f"{model} with these parameters, kernels, test part of {split}: not used for choosing"
    print_metrics(console, result.metrics, title)
    file = settings.out or Path("models-out") / f"{model}-params.json"
    write_params(file, tuning)
    wrote(file, f"train with: opcast train --model {model} --params {file}")
    return tuning


def _verdict(tuning: Tuning) -> str:
    figure = tuning.objective.replace("_", " ")
    if not tuning.best:
        return (
            f"no trial beats the defaults ({figure} {tuning.default_error:.4f}, cross-validated on "
            "training rows): they are kept"
        )
    chosen = " ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in tuning.best.items()
    )
    return (
        f"best: {chosen}; cross-validated {figure} {tuning.error:.4f}, "
        f"with the defaults {tuning.default_error:.4f}; trials are kept in {tuning.study}"
    )


@contextmanager
def _parent(name: str, track: bool) -> Iterator[ParentRun | None]:
    """Open the parent run of the trials; ``None`` without MLflow or ``track``."""
    if track and find_spec("mlflow") is not None:
        from ..models.tracking.mlflow_store import parent_run

        with parent_run(name) as parent:
            yield parent
        return
    if track:
        logger.warning("MLflow is not installed: the trials are not tracked")
    yield None


def _log_trial(parent: ParentRun, trial: TrialRecord) -> None:
    from ..models.tracking.mlflow_store import RunLog

    figures = {"error": trial.error, "seconds": trial.seconds}
    state = {"state": "pruned" if trial.pruned else "complete"}
    parent.log_child(RunLog(f"trial-{trial.number}", trial.params, figures, tags=state))


def _log_search(
    parent: ParentRun, tuning: Tuning, settings: TuneSettings, dataset_hash: str
) -> None:
    from ..models.tracking.mlflow_store import RunLog

    params = {
        "model": tuning.model,
        "split": tuning.split,
        "objective": tuning.objective,
        "seed": settings.seed,
        "dataset_hash": dataset_hash,
        **tuning.best,
    }
    figures = {"error": tuning.error, "default_error": tuning.default_error}
    counted = {**figures, "trials": float(len(tuning.trials))}
    tables = {"trials": tuning.table(len(tuning.trials))}
    datasets = {str(data): dataset_hash for data in settings.data}
    parent.log(RunLog("search", params, counted, tables, datasets=datasets))
