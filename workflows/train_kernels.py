"""Train, save and track a model of kernels, and search its hyperparameters.

The dataset and the model determine the trainer: for kernels and programs, for operators, or for
memory-bound kernels of XLA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..common.tables_text import print_metrics
from ..common.types import JsonMapping
from .settings import TrainSettings
from .training import keep_model, log_training, without_devices

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..models.cost_model import CostModel
    from ..models.tracking.mlflow_store import ParentRun, RunLog
    from ..models.training.train import TrainResult
    from ..models.training.tuning import TrialRecord, Tuning
    from ..models.training_data.prepared import PreparedDataset
    from .settings import TuneSettings

logger = logging.getLogger(__name__)


def run_train(console: Console, dataset: Dataset, settings: TrainSettings) -> TrainResult:
    """Train on kernels, print the metrics beside the label noise, save, register and track."""
    from ..models.training.train import train_final
    from ..models.training_data.prepared import prepare

    split, seed, threads = settings.split, settings.seed, settings.threads
    if settings.exclude_device:
        dataset = without_devices(dataset, settings.exclude_device)
    prepared = prepare(dataset)
    result, model = _train_or_choose(
        console, prepared, settings.model, split, seed, threads, settings.params
    )
    print_metrics(console, result.metrics, f"{model}, kernels, split {split}")
    if len(result.program_metrics):
        print_metrics(console, result.program_metrics, f"{model}, programs, split {split}")
    bundle = result.model
    if settings.final:
        # Fitted to all rows, including test rows; its metrics are those of the model above, which
        # has not seen the test rows.
        bundle = train_final(
            prepared,
            model,
            seed=seed,
            n_jobs=threads,
            metrics={split: result.flat_metrics},
            **result.params,
        )
        kept = {k: v for k, v in result.model.info.items() if k == "ensemble_choice"}
        bundle.info.update(kept)
    console.print(f"trained in {result.seconds:.1f} s")
    folder = keep_model(bundle, settings, model)
    if settings.track:
        run = _run_of(result, folder, model, settings)
        log_training(console, run, settings.register)
    return result


def _train_or_choose(
    console: Console,
    prepared: PreparedDataset,
    model: str,
    split: str,
    seed: int,
    threads: int,
    params: JsonMapping,
) -> tuple[TrainResult, str]:
    """Train a model; for ``ensemble``, choose it or its best member.

    Returns:
        The training, and the name of the model.
    """
    from ..models.training.train import train

    if model != "ensemble":
        return train(prepared, model, split, seed=seed, n_jobs=threads, **params), model
    from ..models.training.ensemble_choice import train_ensemble

    result, choice = train_ensemble(prepared, split, seed, threads, **params)
    print_metrics(console, choice.table, "cross-validated on training rows, for the choice")
    print_metrics(console, choice.test, "test part, not used for the choice")
    console.print(choice.sentence)
    return result, choice.winner


def _run_of(result: TrainResult, folder: Path, model: str, settings: TrainSettings) -> RunLog:
    """Collect the MLflow log of a training on kernels."""
    from ..models.tracking.mlflow_store import RunLog
    from ..models.tracking.plots import all_figures

    info, split = result.model.info, settings.split
    digest = info.get("dataset_hash")
    params = {
        # Including defaults, so that the run can be repeated.
        **getattr(result.model.estimator, "settings", {}),
        "model": model,
        "split": split,
        "seed": settings.seed,
        "threads": settings.threads,
        "final": settings.final,
        "exclude_device": ",".join(settings.exclude_device),
        "dataset_hash": digest,
        "devices": ",".join(result.model.devices),
        "rows": info.get("rows"),
        **result.params,
    }
    title = f"{model}, split {split}"
    tables = {"metrics": result.metrics, "predictions": result.predictions}
    if len(result.programs):
        tables["programs"] = result.programs
    return RunLog(
        name=f"{model}-{Path(split).stem}",
        params=params,
        metrics={_metric_name(k): v for k, v in result.flat_metrics.items()}
        | {"train_seconds": result.seconds},
        tables=tables,
        figures=all_figures(result.predictions, title),
        model_dir=folder,
        datasets={str(data): str(digest) for data in settings.data},
        predictions=_tracked_rows(result, split),
    )


def _tracked_rows(result: TrainResult, split: str) -> pd.DataFrame:
    """Collect the predictions of the test part, of kernels and programs."""
    from ..models.tracking.mlflow_store import tidy

    kernels = tidy(result.predictions, split)
    if not len(result.programs):
        return kernels
    programs = tidy(result.programs.drop(columns="kind", errors="ignore"), split, "program")
    return pd.concat([kernels, programs], ignore_index=True)


def _metric_name(name: str) -> str:
    """Convert a name to what MLflow allows: letters, digits and ``_ - . / space :``."""
    return name.replace("=", ":")


def run_train_passes(console: Console, dataset: Dataset, settings: TrainSettings) -> CostModel:
    """Train the model of XLA's GPU kernels on published operators, print errors, and save it.

    Raises:
        DatasetError: The dataset has no memory-bound operators, or lacks an excluded device.
    """
    from ..common.tables_text import print_frame
    from ..models.gpu.memory_passes_fit import build_gpu_model, pass_rows
    from ..models.tracking.mlflow_store import RunLog

    if settings.exclude_device:
        dataset = without_devices(dataset, settings.exclude_device)
    rows, digest = pass_rows(dataset)
    about = {"rows": len(rows), "dataset_hash": digest}
    # Errors with each chip left out, because most uses are on GPUs without measurements.
    model, fit = build_gpu_model(rows, dataset.devices, about, settings.seed)
    table = pd.DataFrame(
        [
            {
                "left out": name,
                "rows": int(e["rows"]),
                "median %": 100 * e["median"],
                "mean %": 100 * e["mape"],
            }
            for name, e in fit.errors.items()
        ]
    )
    print_frame(console, table, "memory-bound kernels, each chip left out")
    folder = keep_model(model, settings, settings.model)
    if settings.track:
        run = RunLog(
            f"operators-{settings.model}",
            {"model": settings.model, "seed": settings.seed, **about},
            {
                f"{name}/{k}": float(e[k])
                for name, e in fit.errors.items()
                for k in ("median", "mape")
            },
            tables={"metrics": table},
            model_dir=folder,
            datasets={str(data): str(digest) for data in settings.data},
        )
        log_training(console, run, settings.register)
    return model


@dataclass(frozen=True)
class Trainer:
    """A trainer.

    Attributes:
        subject: Description for messages.
        fields: Fields of :class:`TrainSettings` that it reads.
        run: Function that trains, prints the metrics, saves and tracks.
    """

    subject: str
    fields: frozenset[str]
    run: Callable[[Console, Dataset, TrainSettings], object]


def trainer_of(dataset: Dataset, model: str) -> Trainer:
    """Choose the trainer of a model for a dataset.

    Raises:
        DatasetError: The dataset mixes operators with kernels.
    """
    from .train_operators import run_train_operators

    every = frozenset(own.name for own in fields(TrainSettings)) - {"tables"}
    if not dataset.of_operators:
        return Trainer("training on kernels and programs", every - {"max_rows", "join"}, run_train)
    if model == "gpu-xla":
        spare = {"split", "threads", "final", "params", "max_rows", "join"}
        return Trainer("training gpu-xla on operators", every - spare, run_train_passes)
    subject = "training on operators, whose split is a column of the tables"
    return Trainer(subject, every - {"split"}, run_train_operators)


def run_tune(console: Console, settings: TuneSettings) -> Tuning:
    """Search for hyperparameters, and print the best and their errors on the test part."""
    from ..common.progress import counting, wrote
    from ..common.tables_text import print_frame, print_metrics
    from ..features.dataset import Dataset
    from ..models.training.train import train
    from ..models.training.tuning import require_optuna, tune, write_params
    from ..models.training_data.prepared import prepare

    require_optuna()  # before reading the dataset, which may take minutes
    model, split = settings.model, settings.split
    prepared = prepare(Dataset.load(*settings.data))
    with (
        _parent(f"tune-{model}-{split}", settings.track) as parent,
        counting("trials") as advance,
    ):

        def on_trial(trial: TrialRecord, finished: int) -> None:
            advance(finished, settings.trials)
            # Logged as they finish, so that an interrupted search keeps them.
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
    # The first and only use of the test part, after the choice.
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
            f"keeping the defaults, which no trial beats ({figure} {tuning.default_error:.4f}, "
            "cross-validated on training rows)"
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
    """Open the parent run of the trials; yields ``None`` without MLflow or ``track``."""
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
