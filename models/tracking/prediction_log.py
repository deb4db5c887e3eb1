"""Reads the predictions that tracked runs keep, for the pages that show them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import ModelError
from ...common.types import JsonMapping
from .mlflow_store import COLUMNS, FILE, ROWS_TAG

#: Table of figures by group, which a training logs together with the label noise.
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
    from .mlflow_store import connect, runs

    table = runs(root)
    chosen = _chosen(table, wanted)
    mlflow = connect(root)
    tracked: list[TrackedRun] = []
    for record in chosen.to_dict("records"):
        own = _read(mlflow, {str(k): v for k, v in record.items()}) if len(tracked) < most else None
        if own is not None:
            tracked.append(own)
    if not tracked:
        raise ModelError(
            f"no predictions in {wanted!r}",
            hint=f"runs keep {FILE} since they are logged by opcast train and opcast report",
        )
    return tracked


def _chosen(table: pd.DataFrame, wanted: str) -> pd.DataFrame:
    from .mlflow_store import EXPERIMENT, PARENT, find_run

    if wanted == EXPERIMENT:
        return table
    own = find_run(table, wanted, f"; or {EXPERIMENT}")
    if PARENT in table:
        below = table[table[PARENT] == own["run_id"].iloc[0]]
        own = pd.concat([own, below])
    chosen: pd.DataFrame = own
    return chosen


def _read(mlflow: Any, record: JsonMapping) -> TrackedRun | None:
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
    pairs: Sequence[tuple[object, float]] = list(
        zip(metrics["group"], metrics["noise_median_ape"], strict=True)
    )
    return {str(group): float(value) for group, value in pairs if value == value}
