"""Predictions beside measurements as tracked runs keep them: one form, capped, for pages."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..features.errors import ModelError

#: Artifact of a run, and the tag with its number of rows before the cap.
FILE, ROWS_TAG = "predictions.parquet", "predictions_rows"
COLUMNS = (
    "level", "kind", "device", "split", "measured_us", "predicted_us", "lo_us", "hi_us",
    "in_domain",
)  # fmt: skip
#: Rows that a run keeps; of more, a fixed random draw.
MOST_ROWS = 20_000
#: Table of figures by group, which a training logs with the label noise beside.
_METRICS = "tables/metrics.csv"


@dataclass(frozen=True)
class TrackedRun:
    """A run with its predictions.

    Attributes:
        run_id: Its id.
        name: Its name.
        when: Its start, ``YYYY-MM-DD hh:mm``, UTC.
        params: As logged.
        predictions: Columns :data:`COLUMNS`.
        rows: Rows before the cap.
        noise: Median difference of repeated measurements by group (``all``, ``kind=…``,
            ``device=…``), as a share; empty if there were none.
    """

    run_id: str
    name: str
    when: str
    params: dict[str, str]
    predictions: pd.DataFrame
    rows: int
    noise: dict[str, float]


def tidy(frame: pd.DataFrame, split: str = "", level: str = "kernel") -> pd.DataFrame:
    """Predictions in the columns of :data:`COLUMNS`.

    Args:
        frame: At least ``kind`` (or ``key``), ``device``, ``measured_us``, ``predicted_us``,
            ``lo_us`` and ``hi_us``.
        split: Name of the split, if the frame has none.
        level: ``kernel``, ``program`` or ``op``.
    """
    given: dict[str, Any] = {
        "level": level, "split": split, "in_domain": True,
        "kind": frame.get("key", level),
    }  # fmt: skip
    missing = {name: value for name, value in given.items() if name not in frame}
    return frame.assign(**missing)[list(COLUMNS)].reset_index(drop=True)


def capped(frame: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`MOST_ROWS` rows, drawn with a fixed seed."""
    if len(frame) <= MOST_ROWS:
        return frame
    drawn = np.sort(np.random.default_rng(0).permutation(len(frame))[:MOST_ROWS])
    return frame.iloc[drawn].reset_index(drop=True)


def log_predictions(mlflow: Any, frame: pd.DataFrame) -> None:
    """Log :func:`tidy`'s frame to the active run."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / FILE
        small = capped(frame).astype(
            {name: "float32" for name in COLUMNS if name.endswith("_us")}
            | dict.fromkeys(("level", "kind", "device", "split"), "category")
        )
        small.to_parquet(path, index=False)
        mlflow.log_artifact(str(path))
    mlflow.set_tag(ROWS_TAG, len(frame))


def read_runs(wanted: str, most: int = 8, root: Path | None = None) -> list[TrackedRun]:
    """Runs with predictions, newest first.

    Args:
        wanted: Id of a run or its beginning, its name (the newest of that name), or the name of the
            experiment for its newest runs; a run that has others below it stands for them.
        most: Most runs to read.
        root: Folder of the MLflow store.

    Raises:
        ModelError: There is no store, no such run, or it keeps no predictions.
    """
    from .tracking import connect, runs

    table = runs(root)
    chosen = _chosen(table, wanted)
    mlflow = connect(root)
    found: list[TrackedRun] = []
    for record in chosen.to_dict("records"):
        own = _read(mlflow, {str(k): v for k, v in record.items()}) if len(found) < most else None
        if own is not None:
            found.append(own)
    if not found:
        raise ModelError(
            f"no predictions in {wanted!r}",
            hint=f"runs keep {FILE} since they are logged by opcast train and opcast report",
        )
    return found


def _chosen(table: pd.DataFrame, wanted: str) -> pd.DataFrame:
    from .tracking import EXPERIMENT, PARENT

    if wanted == EXPERIMENT:
        return table
    ids, names = table["run_id"].astype(str), table["tags.mlflow.runName"].astype(str)
    own = table[ids == wanted]
    if not len(own):
        own = table[names == wanted].head(1)
    if not len(own) and len(wanted) >= 6:
        own = table[ids.str.startswith(wanted)].head(1)
    if not len(own):
        known = ", ".join(dict.fromkeys(names.head(8)))
        raise ModelError(f"no tracked run {wanted!r}", hint=f"newest: {known}; or {EXPERIMENT}")
    if PARENT in table:
        below = table[table[PARENT] == own["run_id"].iloc[0]]
        own = pd.concat([own, below])
    chosen: pd.DataFrame = own
    return chosen


def _read(mlflow: Any, record: dict[str, Any]) -> TrackedRun | None:
    client = mlflow.MlflowClient()
    run_id = str(record["run_id"])
    if FILE not in {item.path for item in client.list_artifacts(run_id)}:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        path = client.download_artifacts(run_id, FILE, scratch)
        frame = _frame(Path(path), run_id)
        tables = {item.path for item in client.list_artifacts(run_id, "tables")}
        noise = {}
        if _METRICS in tables:
            noise = _noise(pd.read_csv(client.download_artifacts(run_id, _METRICS, scratch)))
    total = record.get(f"tags.{ROWS_TAG}")
    params = {k[7:]: str(v) for k, v in record.items() if k.startswith("params.") and v}
    return TrackedRun(
        run_id=run_id,
        name=str(record["tags.mlflow.runName"]),
        when=pd.Timestamp(record["start_time"]).strftime("%Y-%m-%d %H:%M"),
        params=params,
        predictions=frame,
        rows=int(total) if isinstance(total, str) else len(frame),
        noise=noise,
    )


def _frame(path: Path, run_id: str) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise ModelError(f"{FILE} cannot be read: {error}", where=run_id) from None
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise ModelError(f"{FILE} has no column {missing[0]!r}", where=run_id)
    words = dict.fromkeys(("level", "kind", "device", "split"), str)
    times = {name: "float64" for name in COLUMNS if name.endswith("_us")}
    typed: pd.DataFrame = frame.astype({**words, **times})
    return typed


def _noise(metrics: pd.DataFrame) -> dict[str, float]:
    if "group" not in metrics or "noise_median_ape" not in metrics:
        return {}
    pairs: Sequence[tuple[Any, Any]] = list(
        zip(metrics["group"], metrics["noise_median_ape"], strict=True)
    )
    return {str(group): float(value) for group, value in pairs if value == value}
