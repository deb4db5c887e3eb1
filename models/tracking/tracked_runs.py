"""Reads tracked runs: tables of them, their differences, and their stored predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd

from ...common.errors import ModelError
from ...common.types import JsonMapping
from .mlflow_store import COLUMNS, EXPERIMENT, FILE, ROWS_TAG, connect, store_dir

#: Metrics that ``opcast compare`` prints, if a run has them.
COMPARED = ("median_ape", "mape", "bias", "spearman", "coverage", "noise_median_ape")
#: Column of a table of runs with the id of the parent run (MLflow's tag for nested runs).
PARENT = "tags.mlflow.parentRunId"
#: Table of figures by group, which a training logs together with the label noise.
_METRICS = "tables/metrics.csv"
#: Most runs to read for an experiment.
_MOST = 8


def runs(root: Path | None = None) -> pd.DataFrame:
    """All runs, newest first: name, time, parameters and metrics as columns.

    Raises:
        ModelError: There is no store yet.
    """
    base = root or store_dir()
    if not (base / "mlflow.db").is_file():
        raise ModelError("no MLflow store here", where=str(base), hint="run opcast train first")
    table = connect(root).search_runs(experiment_names=[EXPERIMENT])
    if not isinstance(table, pd.DataFrame):
        raise ModelError("MLflow returned no table of runs", where=str(base))
    return table


def compare(root: Path | None = None, limit: int = 20) -> pd.DataFrame:
    """Compare runs: model, split, names of the data, and the metrics of the split.

    Child runs, such as the trials of a search, are left out. Missing values are missing in a row.
    """
    table = runs(root)
    if PARENT in table:
        table = table[table[PARENT].isna()]
    table = table.head(limit)
    columns = {
        "run": "tags.mlflow.runName",
        "model": "params.model",
        "split": "params.split",
        "data": "params.data",
        **{m: f"metrics.{m}" for m in COMPARED},
    }
    return pd.DataFrame({k: table.get(v) for k, v in columns.items() if v in table})


def differences(names: Sequence[str]) -> pd.DataFrame:
    """Differences between runs: parameters, data and version, then the overall metrics.

    Args:
        names: Names of runs (the newest of each), or ids or prefixes of ids.

    Returns:
        ``what``, and a column of texts per run; empty where a run lacks the parameter.

    Raises:
        ModelError: There is no store, or no such run.
    """
    table = runs()
    found = [find_run(table, name).iloc[0] for name in names]
    shown = {}
    for column in table.columns:
        kind, _, name = str(column).partition(".")
        values = ["" if pd.isna(run[column]) else str(run[column]) for run in found]
        if kind == "params" or column == "tags.opcast_version":
            if len(set(values)) > 1:
                shown[name] = values
        elif kind == "metrics" and "/" not in name and any(values):
            shown[name] = [f"{float(v):.4g}" if v else "" for v in values]
    # Parameters first; then the compared metrics in order, then the others.
    first = [name for name in shown if f"metrics.{name}" not in table]
    order = [*sorted(first), *(m for m in COMPARED if m in shown)]
    order += [name for name in shown if name not in order]
    rows = [[name, *shown[name]] for name in order]
    labels = [str(run["tags.mlflow.runName"]) for run in found]
    return pd.DataFrame(rows, columns=["what", *labels])


def find_run(table: pd.DataFrame, wanted: str, or_else: str = "") -> pd.DataFrame:
    """The row of a run by its id, its name (the newest), or a prefix of its id.

    Raises:
        ModelError: There is no such run; the message lists the newest.
    """
    ids, names = table["run_id"].astype(str), table["tags.mlflow.runName"].astype(str)
    # Six hexadecimal digits identify a run; fewer are more likely a mistyped name.
    begins = ids.str.startswith(wanted) & (len(wanted) >= 6)
    for rows in (ids == wanted, names == wanted, begins):
        if rows.any():
            return table[rows].head(1)
    known = ", ".join(dict.fromkeys(names.head(8)))
    raise ModelError(f"no run {wanted!r}", hint=f"newest: {known}{or_else}")


@dataclass(frozen=True)
class TrackedRun:
    """A run with its predictions.

    Attributes:
        run_id: Id of the run.
        name: Name of the run.
        when: Its start, ``YYYY-MM-DD hh:mm``, UTC.
        params: Parameters as logged.
        predictions: Columns :data:`COLUMNS`.
        rows: Number of predictions before sampling.
        noise: Median difference of repeated measurements by group (``all``, ``kind=…``,
            ``device=…``), as a fraction; empty if there were none.
    """

    run_id: str
    name: str
    when: str
    params: dict[str, str]
    predictions: pd.DataFrame
    rows: int
    noise: dict[str, float]


def read_runs(wanted: str, root: Path | None = None) -> list[TrackedRun]:
    """Runs with predictions, newest first.

    Args:
        wanted: Id of a run or its prefix, its name (the newest), or the name of the experiment for
            its newest runs; a run with child runs stands for these.
        root: Folder of the MLflow store.

    Raises:
        ModelError: There is no store, no such run, or it has no predictions.
    """
    table = runs(root)
    chosen = _chosen(table, wanted)
    mlflow = connect(root)
    tracked: list[TrackedRun] = []
    for record in chosen.to_dict("records"):
        if len(tracked) == _MOST:
            break
        if own := _read(mlflow, {str(k): v for k, v in record.items()}):
            tracked.append(own)
    if not tracked:
        raise ModelError(
            f"no predictions in {wanted!r}",
            hint=f"runs keep {FILE} since they are logged by opcast train and opcast report",
        )
    return tracked


def _chosen(table: pd.DataFrame, wanted: str) -> pd.DataFrame:
    if wanted == EXPERIMENT:
        return table
    own = find_run(table, wanted, f"; or {EXPERIMENT}")
    if PARENT in table:
        below = table[table[PARENT] == own["run_id"].iloc[0]]
        own = pd.concat([own, below])
    chosen: pd.DataFrame = own
    return chosen


def _read(mlflow: ModuleType, record: JsonMapping) -> TrackedRun | None:
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
