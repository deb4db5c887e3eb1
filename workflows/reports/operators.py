"""Report on operators: fit and test estimators on published tables, part by part."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ...common.errors import DatasetError, ModelError
from ...common.parquet import read_table
from ...common.progress import wrote

if TYPE_CHECKING:
    from rich.console import Console

    from ...features.devices.device import DeviceSpec
    from ...models.operators.report import Part
    from .settings import OperatorReportSettings

logger = logging.getLogger(__name__)

#: Table of repeated measurements of rows of the tensor-core tables.
REPEATS = "repeats_tc.parquet"
#: Columns that identify a row of the figures in the output.
CELL = ("study", "estimator", "left_out", "samples", "split", "key", "dtype", "device")


def run_operator_report(console: Console, settings: OperatorReportSettings) -> pd.DataFrame:
    """Fit and test all missing parts, and print, write and track the figures.

    Args:
        console: Console to print to.
        settings: The tables, the studies and the output.

    Returns:
        The figures, one row per study, estimator, held-out chip, split, family, dtype and device.

    Raises:
        DatasetError: There is no table, or no rows for the studies.
        ModelError: A study or an estimator is unknown.
    """
    from ...models.operators.report import summary
    from ...models.operators.studies import STUDIES
    from .operator_tables import print_shipped, print_studies

    settings = replace(settings, studies=settings.studies or tuple(STUDIES))
    out, folder = settings.out, settings.folder
    rows, devices = _load(settings.published, _methods(settings.studies))
    noise = _noise(settings.published, rows)
    if any(STUDIES[name].next_version for name in settings.studies):
        rows = _with_earlier(settings.published, rows)
    parts = _parts(console, settings, rows, devices)
    judged = _judge(console, parts, rows, devices, folder, settings.threads)
    figures = summary(judged, CELL).drop(columns="scope")
    print_studies(console, judged, noise)
    print_shipped(console, sorted(set(rows["key"].str.split("/").str[0])))
    _write(out, settings, figures, noise)
    wrote(out, f"{len(figures)} figures; parts in {folder}")
    if settings.track:
        _track(console, settings, judged, _digest(rows))
    return figures


def _methods(studies: Sequence[str]) -> set[str]:
    from ...models.operators.studies import STUDIES

    for name in studies:
        if name not in STUDIES:
            known = ", ".join(STUDIES)
            raise ModelError(f"no study {name!r}", hint=f"choose from: {known}")
    return {method for name in studies for method in STUDIES[name].methods}


def _load(folder: Path, methods: set[str]) -> tuple[pd.DataFrame, dict[str, DeviceSpec]]:
    """Load the rows that were measured by one of the methods, and their devices."""
    from ...datagen.published.importer import OPERATOR_FILES
    from ...features.devices.catalogue import find_device
    from ...features.operators.schema import methods as known_methods
    from ...models.operators import rows_of_published

    files = [p for name in OPERATOR_FILES for p in sorted(folder.rglob(name))]
    if not files:
        expected = "expected " + ", ".join(OPERATOR_FILES)
        raise DatasetError("no operator table here", where=str(folder), hint=expected)
    columns = ("id", "source", "split", "latency_us")
    # Filtered while reading, because the tables have millions of rows.
    wanted = [("source", "in", [s for s, method in known_methods().items() if method in methods])]
    tables = [t for t in (_table(path, columns, wanted) for path in files) if len(t)]
    if not tables:
        raise DatasetError(
            f"no rows for this study, which were measured by {' or '.join(sorted(methods))}",
            where=str(folder),
            hint="choose another --study",
        )
    rows = rows_of_published(pd.concat(tables, ignore_index=True), find_device)
    rows = rows[rows["latency_us"].to_numpy(float) > 0].reset_index(drop=True)
    return rows, {name: find_device(name) for name in sorted(set(rows["device"]))}


def _table(
    path: Path, columns: Sequence[str], wanted: list[tuple[str, str, list[str]]] | None = None
) -> pd.DataFrame:
    frame = read_table(path, filters=wanted)
    for column in columns:
        if column not in frame:
            raise DatasetError(f"column {column!r} is missing", where=str(path))
    return frame


def _noise(folder: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Compute label noise from repeated measurements if there are any, else from equal rows."""
    from ...models.operators.studies import repeat_noise, replicate_noise

    columns = ("family", "dtype", "latency_first_us", "latency_us")
    repeats = [repeat_noise(_table(path, columns)) for path in sorted(folder.rglob(REPEATS))]
    # Repeated measurements are better evidence of noise than rows with equal parameters.
    repeated = {key for table in repeats for key in set(table["key"])}
    return pd.concat(
        [*repeats, replicate_noise(rows[~rows["key"].isin(repeated)])], ignore_index=True
    )


def _with_earlier(folder: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Append the rows that were also measured with an earlier version of their library."""
    from ...models.operators.studies import earlier_versions

    columns = ("of_id", "version", "latency_us")
    repeats = [_table(path, columns) for path in sorted(folder.rglob(REPEATS))]
    if not repeats or "version" not in rows:
        return rows
    earlier = earlier_versions(rows, pd.concat(repeats, ignore_index=True))
    return pd.concat([rows.assign(earlier=False), earlier], ignore_index=True)


def _digest(rows: pd.DataFrame) -> str:
    # Identifiers and labels determine the figures; other columns may vary.
    labels = rows[["id", "latency_us"]].astype({"id": str})
    hashes = pd.util.hash_pandas_object(labels, index=False).to_numpy()
    return hashlib.sha256(hashes.tobytes()).hexdigest()[:16]


def _parts(
    console: Console,
    settings: OperatorReportSettings,
    rows: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
) -> list[Part]:
    """List all parts, skipping default estimators that are not installed.

    Raises:
        DatasetError: A requested family has no rows.
        ModelError: A requested estimator is unknown or not installed.
    """
    from ...models.core.registry import make_estimator
    from ...models.operators.studies import parts_of

    unknown = sorted(set(settings.families) - set(rows["key"]))
    if unknown:
        hint = "there are: " + ", ".join(sorted(set(rows["key"])))
        raise DatasetError(f"no rows of family {unknown[0]!r} for this study", hint=hint)
    parts = list(
        parts_of(
            settings.studies,
            rows,
            devices,
            settings.estimators,
            settings.families,
            settings.max_rows,
            settings.seed,
        )
    )
    missing = set()
    for name in dict.fromkeys(part.estimator for part in parts):
        try:
            make_estimator(name)
        except ModelError as error:
            if settings.estimators:
                raise
            missing.add(name)
            console.print(f"skipping {name}: {error}", highlight=False)
    return [part for part in parts if part.estimator not in missing]


def _judge(
    console: Console,
    parts: Sequence[Part],
    rows: pd.DataFrame,
    devices: Mapping[str, DeviceSpec],
    folder: Path,
    threads: int,
) -> pd.DataFrame:
    """Predict all parts, reading finished ones from files of earlier runs."""
    from ...common.parquet import kept_table
    from ...common.progress import tracked
    from ...models.operators.report import draw, judge, kept_path, possible

    tables, kept = [], 0
    families = {str(key): own for key, own in rows.groupby("key")}
    for number, part in enumerate(tracked(parts, len(parts), "fitting"), 1):
        drawn = draw(part, families.get(part.key, rows.iloc[:0]))
        if not possible(drawn):
            console.print(f"{part.title}: skipped, too few rows", highlight=False)
            continue
        path = kept_path(folder, part, drawn)
        finished = path.is_file()
        table = kept_table(path, partial(judge, part, drawn, devices, threads))
        if not finished:
            spent = f"{table['fit_s'].iloc[0]:.0f} s"
            console.print(f"{number} of {len(parts)}  {part.title}: {spent}", highlight=False)
        kept += finished
        tables.append(table)
    if kept:
        console.print(f"{kept} parts were already finished", highlight=False)
    if not tables:
        raise DatasetError(
            "no family has enough rows", where=str(folder), hint="raise --max-rows, or import more"
        )
    return pd.concat(tables, ignore_index=True)


def _write(
    out: Path, settings: OperatorReportSettings, figures: pd.DataFrame, noise: pd.DataFrame
) -> None:
    from ...common.files import write_text
    from ...models.operators.studies import noise_table

    tables = {"figures": figures, "noise": noise_table(noise, ("key", "dtype"))}
    data: dict[str, object] = {
        k: json.loads(t.to_json(orient="records")) for k, t in tables.items()
    }
    data["settings"] = {
        "studies": list(settings.studies),
        "max_rows": settings.max_rows,
        "seed": settings.seed,
    }
    write_text(out, json.dumps(data, indent=1))


def _track(
    console: Console, settings: OperatorReportSettings, judged: pd.DataFrame, digest: str
) -> None:
    """Log a run with a child run per estimator."""
    from ...models.operators.report import summary
    from ...models.tracking.mlflow_store import RunLog, parent_run
    from .operator_tables import metric_names

    by = ("study", "left_out", "samples", "split", "key")
    shared = {
        "studies": ",".join(settings.studies),
        "dataset_hash": digest,
        "seed": settings.seed,
        "max_rows": settings.max_rows,
    }
    try:
        with parent_run("operators-report") as parent:
            whole = summary(judged, (*by, "estimator"))
            parent.log(RunLog("operators-report", shared, {}, {"figures": whole}))
            for name, own in judged.groupby("estimator", sort=False):
                figures = summary(own, by)
                parts = own.drop_duplicates(["study", "key", "left_out"])
                metrics = metric_names(figures) | {"fit_seconds": float(parts["fit_s"].sum())}
                tables = {"families": figures, "devices": summary(own, CELL)}
                parameters = {"model": name, **shared}
                parent.log_child(
                    RunLog(str(name), parameters, metrics, tables, predictions=_rows(own))
                )
    except ModelError as error:
        logger.warning("not tracked: %s", error)
        return
    console.print(f"logged to MLflow as {parent.run_id}; see it with: opcast ui", highlight=False)


def _rows(judged: pd.DataFrame) -> pd.DataFrame:
    """Predictions of an estimator for accuracy pages; the split includes the study's name."""
    from ...models.tracking.mlflow_store import tidy

    return tidy(judged.assign(split=judged["study"] + ": " + judged["split"]), level="op")
