"""Import tables of library operators, and train and evaluate operator models on them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.progress import wrote
from ..common.tables_text import in_percent
from .training import excluded_names, keep_model, log_training

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..features.devices.device import DeviceSpec
    from ..models.operators import OpModel
    from ..models.tracking.mlflow_store import RunLog
    from .settings import TableSettings, TrainSettings

#: Splits of published tables for training; the others are for testing.
TRAINING = ("train",)
#: Families with so few layers that intervals from held-out layers are too narrow; they are
#: calibrated on the test rows, which have other layers.
RECALIBRATED = frozenset(("layer/product",))


def run_import(folder: Path, out: Path, devices: Sequence[str] = ()) -> None:
    """Import published tables and print the number of rows.

    Args:
        folder: Folder with tables, or a table.
        out: Dataset folder.
        devices: Files of devices that are not in the catalogue.
    """
    from ..datagen.published.importer import import_published

    imported = import_published(folder, out, show=True, described=described_devices(devices))
    kept = f", {imported.kept} shards already existed" if imported.kept else ""
    wrote(
        out,
        f"{imported.rows} samples of {len(imported.devices)} devices, {imported.skipped} rows "
        f"without a latency skipped, {imported.shards} shards written{kept}",
    )


def described_devices(devices: Sequence[str]) -> dict[str, DeviceSpec]:
    """Load devices by file or name; return them by name.

    Args:
        devices: Device files or names.

    Raises:
        DeviceError: A file is missing or invalid, or a name is unknown.
    """
    from ..predict.devices import resolve_device

    specs = (resolve_device(device, {}) for device in devices)
    return {spec.name: spec for spec in specs}


def run_train_operators(console: Console, dataset: Dataset, settings: TrainSettings) -> OpModel:
    """Train on the training rows, test on the others, save, register and track.

    Raises:
        DatasetError: There are no training rows, or an excluded device is not in the dataset.
    """
    from ..models.operators import rows_of_dataset

    return _train(console, rows_of_dataset(dataset), dataset.devices, dataset.hash, settings)


def run_train_blocks(console: Console, settings: TrainSettings) -> OpModel:
    """Train an operator model on tables of attention, experts and layers.

    Raises:
        DatasetError: There is no such table, there are no training rows, or an excluded device is
            not in the tables.
    """
    import hashlib

    from ..datagen.published.block_tables import training_blocks
    from ..datagen.published.packs import BLOCK_TABLES, kinds
    from ..features.devices.catalogue import find_device

    names = [kinds()[kind].files[-1] for kind in BLOCK_TABLES]
    (folder,) = settings.tables
    paths = [path for name in names for path in sorted(folder.rglob(name))]
    if not paths:
        hint = "expected " + ", ".join(names)
        raise DatasetError("no table to learn from", where=str(folder), hint=hint)
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    rows = training_blocks(paths)
    devices = {name: find_device(name) for name in rows["device"].unique()}
    return _train(console, rows, devices, content.hexdigest()[:16], settings)


def _train(
    console: Console,
    rows: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
    content: str,
    settings: TrainSettings,
) -> OpModel:
    """Train on rows of operators; ``content`` is the digest of their tables."""
    from ..common.tables_text import print_frame
    from ..models.operators import OpModel
    from ..models.operators.model import default_settings
    from ..models.operators.report import left_out_table, predictions, settings_of, summary

    model, exclude, seed = settings.model, settings.exclude_device, settings.seed
    outside = rows["device"].isin(excluded_names(exclude, rows["device"], devices)).to_numpy(bool)
    learn = ~outside & rows["split"].isin(TRAINING).to_numpy()
    # Some packs have only calibration and test splits.
    if not learn.any():
        splits = ", ".join(sorted({str(s) or "none" for s in rows["split"][~outside]})) or "none"
        raise DatasetError(
            f"no row to train on: the rows that are not excluded have the splits {splits}",
            hint=f"training rows have the split {' or '.join(TRAINING)}",
        )
    options = default_settings(model, settings.threads, seed, settings.max_rows, **settings.params)

    def fit(mask: np.ndarray) -> OpModel:
        def tell(key: str, seconds: float) -> None:
            console.print(f"{key}: {seconds:.0f} s", highlight=False)

        fitted = OpModel().fit(rows[mask], devices, options, tell)
        # For testing on excluded devices, which may not be in the catalogue.
        fitted.described = dict(devices)
        return fitted

    model_bundle = fit(learn)
    table = predictions(model_bundle, rows[~learn])
    # Before a final fit, which leaves no rows to test on.
    metrics, left_out = summary(table), left_out_table(model_bundle)
    by_family = summary(table, ("split", "key"))
    if len(metrics):
        title = f"{model}: held-out rows, errors in %"
        print_frame(console, in_percent(metrics), title)
        print_frame(console, in_percent(by_family), f"{model}: the same by family")
    else:
        console.print(
            f"no rows to test the model on: all {int(learn.sum())} are training rows; give some "
            f"rows a split other than {' or '.join(TRAINING)}, such as test",
            highlight=False,
        )
    if len(left_out):
        title = f"{model}: each chip left out of training in turn"
        print_frame(console, in_percent(left_out), title)
    if settings.final:
        console.print("fitting to all rows", highlight=False)
        learn = ~outside
        model_bundle = fit(learn)
    else:
        for key in RECALIBRATED & model_bundle.families.keys():
            unseen = rows[~learn & ~outside & (rows["key"] == key).to_numpy()]
            if len(unseen):
                model_bundle.families[key].recalibrate(unseen, devices)
    model_bundle.info = {
        "dataset_hash": content,
        "rows": int(learn.sum()),
        "excluded": list(exclude),
        "splits": "all" if settings.final else list(TRAINING),
        "estimator": model,
        "seed": seed,
        "metrics": metrics.to_dict("records"),
        # A final model has seen every row.
        "metrics_of": "the same settings, fitted to the rows of split train alone",
    }
    if settings.join is not None:
        from ..models.core.store import read_manifest
        from ..predict.locate import find_model

        path = find_model(settings.join)
        # Replaced families may be unreadable, because their features may have changed.
        known = read_manifest(path).get("families", {})
        kept = [key for key in known if key not in model_bundle.families]
        model_bundle = OpModel.load(path, only=kept).joined(model_bundle)
    folder = keep_model(model_bundle, settings, model)
    if settings.track:
        own = options("")
        asked = {
            "model": model,
            "split": ",".join(sorted(set(table["split"].astype(str)))),
            "threads": settings.threads,
            "final": settings.final,
            "exclude_device": ",".join(exclude),
            "max_rows": settings.max_rows,
            "join": settings.join or "",
            # Defaults of families without settings of their own.
            **{f"known_{name}": value for name, value in own.known.items()},
            **{f"general_{name}": value for name, value in own.general.items()},
        }
        run = _run_of(model, settings_of(model_bundle) | asked, metrics, table, folder)
        run.datasets = {str(data): content for data in settings.tables or settings.data}
        log_training(console, run, settings.register)
    return model_bundle


def _run_of(
    model: str,
    settings: Mapping[str, object],
    metrics: pd.DataFrame,
    judged: pd.DataFrame,
    folder: Path,
) -> RunLog:
    """Collect the MLflow log of a training on operators."""
    from ..models.operators.report import flat
    from ..models.tracking.mlflow_store import RunLog, tidy
    from ..models.training_data.metrics import summary

    whole = summary(
        *(judged[c].to_numpy(float) for c in ("measured_us", "predicted_us", "lo_us", "hi_us"))
    )
    return RunLog(
        f"operators-{model}",
        settings,
        # Figures of all rows, with the same names as in runs on kernels, then figures of parts.
        {**whole, **{f"parts/{name}": value for name, value in flat(metrics).items()}},
        tables={"metrics": metrics} if len(metrics) else {},
        predictions=tidy(judged, level="op"),
        model_dir=folder,
    )


def run_evaluate(console: Console, settings: TableSettings) -> None:
    """Predict every row of published tables, and print the errors of the measured ones.

    Finished pieces of long tables are stored beside the output until it is written, so that a
    stopped evaluation can be resumed.

    Args:
        console: Console to print to.
        settings: The tables, the model and the file for the predictions.
    """
    from .. import __version__
    from ..common.parquet import write_table
    from ..common.progress import counting
    from ..common.tables_text import print_frame
    from ..models.operators import OpModel
    from ..predict.locate import BLOCK_MODEL, OPERATOR_MODEL, find_model, model_hash
    from ..predict.published.judged import Pieces
    from ..predict.published.tables import predict_published

    name = OPERATOR_MODEL if settings.model == "default" else settings.model
    model = OpModel.load(find_model(name))
    model.described = described_devices(settings.devices)
    learned = _learned(model) if settings.model != "default" else ""
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    kept = settings.parts()
    if kept.is_dir():
        console.print(f"{kept}: resuming an earlier evaluation", highlight=False)
    with counting("predicting rows") as progress:
        described = str(sorted(model.described.items()))
        identity = (__version__, model_hash(name), model_hash(BLOCK_MODEL), described)
        predicted = predict_published(
            settings.table,
            model,
            calibrate=settings.calibrate,
            limit=settings.limit,
            pieces=Pieces(settings.ray, kept, identity, progress),
        )
    write_table(predicted.frame, settings.out)
    if kept.is_dir():
        shutil.rmtree(kept)
    for what, count in predicted.calibrated.items():
        console.print(f"calibrated {what}: {count} rows", highlight=False)
    for note in predicted.notes:
        console.print(note, highlight=False)
    summary = predicted.summary()
    if len(summary):
        print_frame(console, in_percent(summary), "measured rows, errors in %")
        if learned:
            console.print(f"note: {settings.model} {learned}", highlight=False)
    wrote(settings.out, f"{len(predicted.frame)} rows")


def _learned(model: OpModel) -> str:
    """Note that the evaluated rows may be among a model's training rows; empty if unknown."""
    splits, info = model.info.get("splits"), model.info
    if not splits or "rows" not in info:
        return ""
    named = splits if isinstance(splits, list) else [splits]
    return (
        f"was trained on {info['rows']} rows of split {', '.join(map(str, named))} of its dataset "
        f"({info.get('dataset_hash', 'unnamed')}); errors on those rows do not test it"
    )
