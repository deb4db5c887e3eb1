"""``opcast tune``: the search for hyper-parameters with its progress bar and its log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from .models.tracking import ParentRun
    from .models.tuned import TrialRecord, Tuning

logger = logging.getLogger(__name__)


def run_tune(
    console: Console,
    data: Sequence[Path],
    model: str,
    split: str,
    *,
    trials: int,
    timeout_s: float | None,
    folds: int,
    objective: str,
    seed: int,
    threads: int,
    study: Path | None,
    out: Path | None,
    track: bool,
) -> Tuning:
    """Search for hyper-parameters, print the best and, once, their figures on the test part."""
    from .features.dataset import Dataset
    from .models.prepared import prepare
    from .models.train import train
    from .models.tuned import write_params
    from .models.tuning import require_optuna, tune
    from .workflows import print_frame, print_metrics

    require_optuna()  # before the minutes that reading a large dataset takes
    prepared = prepare(Dataset.load(*data))
    with _parent(f"tune-{model}-{split}", track) as parent, _bar(console, trials) as advance:

        def on_trial(trial: TrialRecord, finished: int) -> None:
            advance(trial, finished)
            if parent is not None:
                _log_trial(parent, trial)

        found = tune(
            prepared, model, trials, split, seed, threads, timeout_s=timeout_s, folds=folds,
            objective=objective, study=study, on_trial=on_trial,
        )  # fmt: skip
        if parent is not None:
            _log_search(parent, found, seed, prepared.dataset_hash)
    print_frame(console, found.table(), f"{model}: best of {len(found.trials)} trials")
    console.print(_verdict(found), highlight=False)
    result = train(prepared, model, split, seed=seed, n_jobs=threads, **found.best)
    title = f"{model} with these parameters, kernels, test part of {split}: not used for choosing"
    print_metrics(console, result.metrics, title)
    file = out or Path("models-out") / f"{model}-params.json"
    write_params(file, found)
    console.print(
        f"wrote {file}; train with: opcast train --model {model} --params {file}", highlight=False
    )
    return found


def _verdict(found: Tuning) -> str:
    figure = found.objective.replace("_", " ")
    if not found.best:
        return (
            f"no trial beats the defaults ({figure} {found.default_error:.4f}, cross-validated on "
            "training rows): they are kept"
        )
    chosen = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                      for k, v in found.best.items())  # fmt: skip
    return (
        f"best: {chosen}; cross-validated {figure} {found.error:.4f}, "
        f"with the defaults {found.default_error:.4f}; trials are kept in {found.study}"
    )


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[TrialRecord, int], None]]:
    """A progress bar; what it gives takes each trial and how many are finished."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    own = [TextColumn(c) if isinstance(c, str) else c for c in columns]
    with Progress(*own, console=console, transient=True) as progress:
        task = progress.add_task("defaults", total=total)
        best = [float("inf")]

        def advance(trial: TrialRecord, finished: int) -> None:
            best[0] = min(best[0], float("inf") if trial.pruned else trial.error)
            progress.update(task, completed=finished, description=f"best {best[0]:.4f}")

        yield advance


@contextmanager
def _parent(name: str, track: bool) -> Iterator[ParentRun | None]:
    """The run that the trials are logged below; ``None`` without MLflow or ``track``."""
    if track and find_spec("mlflow") is not None:
        from .models.tracking import parent_run

        with parent_run(name) as parent:
            yield parent
        return
    if track:
        logger.warning("MLflow is not installed: the trials are not tracked")
    yield None


def _log_trial(parent: ParentRun, trial: TrialRecord) -> None:
    from .models.tracking import RunLog

    figures = {"error": trial.error, "seconds": trial.seconds}
    state = {"state": "pruned" if trial.pruned else "complete"}
    parent.log_child(RunLog(f"trial-{trial.number}", trial.params, figures, tags=state))


def _log_search(parent: ParentRun, found: Tuning, seed: int, dataset_hash: str) -> None:
    from .models.tracking import RunLog

    params = {
        "model": found.model, "split": found.split, "objective": found.objective, "seed": seed,
        "dataset_hash": dataset_hash, **found.best,
    }  # fmt: skip
    figures = {"error": found.error, "default_error": found.default_error}
    counted = {**figures, "trials": float(len(found.trials))}
    parent.log(RunLog("search", params, counted, {"trials": found.table(len(found.trials))}))
