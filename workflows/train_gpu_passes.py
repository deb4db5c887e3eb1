"""Train the model of XLA's memory-bound kernels on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..models.cost_model import CostModel
    from .settings import TrainSettings


def run_train_passes(console: Console, dataset: Dataset, settings: TrainSettings) -> CostModel:
    """Make the model of XLA's GPU kernels from published operators, print its errors, save it.

    Raises:
        DatasetError: The dataset has no passes over memory, or not the devices to leave out.
    """
    from ..common.tables_text import print_frame
    from ..models.gpu.memory_passes_fit import build_gpu_model, pass_rows
    from ..models.tracking.mlflow_store import RunLog
    from .training import keep_model, log_training, without_devices

    if settings.exclude_device:
        dataset = without_devices(dataset, settings.exclude_device)
    rows, digest = pass_rows(dataset)
    about = {"rows": len(rows), "dataset_hash": digest}
    # Each chip is left out in turn, since the model answers above all for GPUs without any rows.
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
