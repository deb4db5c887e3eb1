"""Commands for library operators: import of tables, training, evaluation, calibration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .features.errors import DatasetError, ModelError

if TYPE_CHECKING:
    from rich.console import Console

    from .features.dataset import Dataset
    from .models.ops import OpModel

logger = logging.getLogger(__name__)

#: Splits of a published table that a model may learn from when it is to be judged on the others.
TRAINING = ("train",)
#: Columns that are printed in per cent.
PERCENTAGES = ("mape", "median_ape", "largest", "bias", "coverage", "in_domain")


def run_import(console: Console, folder: Path, out: Path) -> None:
    """Import published tables and say what came of it."""
    from .datagen.published import import_published

    found = import_published(folder, out, show=True)
    kept = f", {found.kept} shards were there" if found.kept else ""
    console.print(
        f"{out}: {found.rows} samples of {len(found.devices)} devices, {found.skipped} rows "
        f"without a latency skipped, {found.shards} shards written{kept}",
        highlight=False,
    )


def is_operator_dataset(dataset: Dataset) -> bool:
    """Whether every sample is a published operator."""
    source = dataset.frame["source"].astype(str)
    return bool(len(source)) and bool(source.str.startswith("published:").all())


def run_train_operators(
    console: Console,
    dataset: Dataset,
    model: str,
    *,
    out: Path | None,
    exclude: Sequence[str],
    seed: int,
    threads: int,
    final: bool,
    track: bool,
    max_rows: int = 1_000_000,
    params: Mapping[str, Any] | None = None,
) -> OpModel:
    """Train on the training rows, judge on the others, and save.

    Args:
        console: Where to print.
        dataset: Published operators.
        model: Name of the estimator.
        out: Folder for the model.
        exclude: Devices to leave out of training; the model is judged on all of their rows.
        seed: Of draws and estimators.
        threads: Of the estimators.
        final: Save a model that then learned from every row, judged or not.
        track: Whether to log to MLflow.
        max_rows: Most rows of a family.
        params: Of the estimator.

    Raises:
        DatasetError: No row is left to learn from, or a device is not in the dataset.
    """
    from .models.ops import OpModel, rows_of_dataset
    from .models.ops.model import default_settings
    from .models.ops.report import left_out_table, predictions, settings_of, summary
    from .workflows import print_frame

    rows = rows_of_dataset(dataset)
    outside = _excluded(rows, exclude)
    learn = ~outside & rows["split"].isin(TRAINING).to_numpy()
    if not learn.any():
        raise DatasetError("no row is left to train on", hint="splits to learn from: train")
    settings = default_settings(model, threads, seed, max_rows, **dict(params or {}))

    def fit(mask: np.ndarray) -> OpModel:
        def tell(key: str, seconds: float) -> None:
            console.print(f"{key}: {seconds:.0f} s", highlight=False)

        return OpModel().fit(rows[mask], dataset.devices, settings, tell)

    found = fit(learn)
    table = predictions(found, rows[~learn])
    metrics, left_out = summary(table), left_out_table(found)
    by_family = summary(table, ("split", "key"))
    print_frame(
        console, in_percent(metrics), f"{model}: rows that it did not learn from, errors in %"
    )
    print_frame(console, in_percent(by_family), f"{model}: the same by family")
    print_frame(console, in_percent(left_out), f"{model}: each chip left out of training in turn")
    if final:
        console.print("fitting to all rows", highlight=False)
        learn = ~outside
        found = fit(learn)
    found.info = {
        "dataset_hash": dataset.hash,
        "rows": int(learn.sum()),
        "excluded": list(exclude),
        "splits": "all" if final else list(TRAINING),
        "estimator": model,
        "seed": seed,
        "metrics": metrics.to_dict("records"),
        "metrics_of": "the same settings, fitted to the rows of split train alone",
    }
    if out is not None:
        found.save(out)
        console.print(f"saved to {out}", highlight=False)
    if track:
        _track(console, model, settings_of(found), metrics, table)
    return found


def _excluded(rows: pd.DataFrame, exclude: Sequence[str]) -> np.ndarray:
    from .features.catalogue import find_device

    names = [find_device(name).name for name in exclude]
    present = set(rows["device"])
    for name in names:
        if name not in present:
            raise DatasetError(
                f"device {name!r} is not in the dataset",
                hint="it has: " + ", ".join(sorted(present)),
            )
    return np.asarray(rows["device"].isin(names))


def _track(
    console: Console, model: str, settings: Mapping[str, Any], metrics: pd.DataFrame,
    judged: pd.DataFrame,
) -> None:  # fmt: skip
    from .models.ops.report import flat
    from .models.tracked import tidy
    from .models.tracking import RunLog, log_run

    tables = {"metrics": metrics} if len(metrics) else {}
    try:
        rows = tidy(judged, level="op")
        run = log_run(
            RunLog(f"operators-{model}", settings, flat(metrics), tables=tables, predictions=rows)
        )
    except ModelError as error:
        logger.warning("not tracked: %s", error)
        return
    console.print(f"logged to MLflow as {run}; see it with: opcast ui", highlight=False)


def run_evaluate(
    console: Console, folder: Path, out: Path, model: str, *, calibrate: bool, limit: int | None
) -> None:
    """Predict every row of a folder of published tables, and judge the answered ones."""
    from .features.dataset import write_table
    from .models.ops import OpModel
    from .predict.locate import OPERATOR_MODEL, find_model
    from .predict.published import predict_published
    from .workflows import print_frame

    name = OPERATOR_MODEL if model == "default" else model
    found = predict_published(
        folder, OpModel.load(find_model(name)), calibrate=calibrate, limit=limit
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_table(found.frame, out)
    for what, count in found.calibrated.items():
        console.print(f"calibrated {what}: {count} rows", highlight=False)
    summary = found.summary()
    if len(summary):
        print_frame(console, in_percent(summary), "rows whose latency is given, errors in %")
    console.print(f"{out}: {len(found.frame)} rows", highlight=False)


def in_percent(figures: pd.DataFrame) -> pd.DataFrame:
    """Shares as percentages with one decimal, for printing."""
    shares = [c for c in PERCENTAGES if c in figures]
    return figures.assign(**{c: (100 * figures[c]).round(1) for c in shares})
