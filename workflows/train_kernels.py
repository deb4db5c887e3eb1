"""Train a model of kernels and programs, print its metrics, and save and track it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..common.tables_text import print_metrics
from .settings import TrainSettings
from .training import keep_model, log_training, without_devices

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..models.tracking.mlflow_store import RunLog
    from ..models.training.train import TrainResult
    from ..models.training_data.prepared import PreparedDataset

logger = logging.getLogger(__name__)


def run_train(console: Console, dataset: Dataset, settings: TrainSettings) -> TrainResult:
    """Train on kernels, print the metrics beside the noise, save, register and track."""
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
        # Fitted to all rows, test rows included, with the parameters found above; the metrics saved
        # with it come from the model that did not see the test rows.
        bundle = train_final(
            prepared,
            model,
            seed=seed,
            n_jobs=threads,
            metrics={split: result.flat_metrics},
            **result.params,
        )
        # The manifest keeps why an ensemble was chosen, or was not.
        kept = {k: v for k, v in result.model.info.items() if k == "ensemble_choice"}
        bundle.info.update(kept)
    console.print(f"trained in {result.seconds:.1f} s", highlight=False)
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
    params: Mapping[str, Any],
) -> tuple[TrainResult, str]:
    """The training and the name of what was trained: an ensemble only if it beats its members."""
    from ..models.training.train import train

    # An ensemble costs several trainings, so it is kept only if it beats every member.
    if model != "ensemble":
        return train(prepared, model, split, seed=seed, n_jobs=threads, **params), model
    from ..models.training.ensemble_choice import train_ensemble

    result, choice = train_ensemble(prepared, split, seed, threads, **params)
    print_metrics(console, choice.table, "cross-validated on training rows, to choose by")
    print_metrics(console, choice.test, "test part, not used to choose")
    console.print(choice.sentence, highlight=False)
    return result, choice.winner


def _run_of(result: TrainResult, folder: Path, model: str, settings: TrainSettings) -> RunLog:
    """Collect what is logged of a training on kernels."""
    from ..models.tracking.mlflow_store import RunLog
    from ..models.tracking.plots import all_figures

    info, split = result.model.info, settings.split
    digest = info.get("dataset_hash")
    params = {
        # Defaults, too: all of them are needed to repeat a run.
        **getattr(result.model.estimator, "params", {}),
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
        # A split may be a file.
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
    """Collect predictions of the test part, kernels and programs."""
    from ..models.tracking.mlflow_store import tidy

    kernels = tidy(result.predictions, split)
    if not len(result.programs):
        return kernels
    programs = tidy(result.programs.drop(columns="kind", errors="ignore"), split, "program")
    return pd.concat([kernels, programs], ignore_index=True)


def _metric_name(name: str) -> str:
    """Make a name that MLflow allows: letters, digits and ``_ - . / space :``."""
    return name.replace("=", ":")
