"""Predict folders of programs, or regions of programs, that have published times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError, OpcastError
from ..common.parquet import check_measured
from ..common.progress import counting, wrote
from ..common.tables_text import in_percent, print_frame
from ..features.devices.catalogue import in_catalogue
from ..features.lowering.options import LoweringOptions
from ..models.tracking.mlflow_store import RunLog, tidy
from ..predict.cluster.partitioned import PartitionedPrediction, predict_partitioned
from ..predict.program.predictor import (
    Prediction,
    Predictor,
    ProgramCase,
    load_for_programs,
)
from ..simulate.clusters.catalogue import find_cluster
from .judging import FIGURES, measured_rows, write_predictions
from .training import log_training

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import TableSettings

#: Required columns of a table of programs.
NEEDED = ("file", "device")
#: Required columns of a table of steps, whose partitioned programs the folder's script writes.
STEPS = ("device", "n_devices", "workload", "measured_ms")
#: Script of a folder of steps: ``python SCRIPT OUT SIZE --devices N`` writes
#: ``OUT/WORKLOAD-xN.mlir`` for a workload ``MODEL-SIZE``.
SCRIPT = "export_*.py"
#: Time limit of the script for a program in seconds; that of Llama takes a few seconds.
EXPORT_S = 600
#: Columns that errors are grouped by, if the table has them.
GROUPS = ("device", "trust", "mode", "kind")
#: Value of the column ``trust`` that marks unreliable times.
DOUBTFUL = "doubtful"


def read_table(folder: Path) -> pd.DataFrame:
    """Read the CSV of a folder that lists program files and devices, or steps on clusters.

    Steps become rows with a ``cluster``; their ``file`` is written when it is needed.

    Raises:
        DatasetError: There is no such table, or more than one.
    """
    tables = {path: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    fitting = [t for t in tables.values() if any(set(c) <= set(t.columns) for c in (NEEDED, STEPS))]
    if len(fitting) != 1:
        raise DatasetError(
            f"{len(fitting)} tables with the columns {', '.join(NEEDED)} or {', '.join(STEPS)}",
            where=str(folder),
            hint="the folder must contain one CSV that lists program files and devices",
        )
    table = fitting[0]
    check_measured(table, ["latency_us", "measured_ms"], str(folder))
    if not set(NEEDED) <= set(table.columns):
        count = table["n_devices"].astype(str)
        table["cluster"] = table["device"] + "-x" + count
        table["file"] = table["workload"] + "-x" + count + ".mlir"
        table["latency_us"] = 1e3 * table["measured_ms"]
        table.insert(0, "id", table["workload"] + " " + table["cluster"])
    if "id" not in table:
        table.insert(0, "id", [f"program{number}" for number in range(len(table))])
    return table


def exported(folder: Path, row: Mapping[Hashable, object], out: Path) -> Path:
    """Path of a step's partitioned program, written by the folder's script if it does not exist.

    Args:
        folder: The folder.
        row: A row of :func:`read_table`.
        out: Folder of the programs.

    Raises:
        DatasetError: The folder has no script, or the script fails.
    """
    path = out / str(row["file"])
    if path.is_file():
        return path
    scripts = sorted(folder.glob(SCRIPT))
    if len(scripts) != 1:
        raise DatasetError(
            f"{path} does not exist, and {len(scripts)} scripts {SCRIPT} could write it",
            where=str(folder),
            hint=f"write the program to {path}",
        )
    size = str(row["workload"]).rpartition("-")[2]
    command = [sys.executable, str(scripts[0]), str(out), size, "--devices", str(row["n_devices"])]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=EXPORT_S)
    except (OSError, subprocess.SubprocessError) as error:
        message = str(getattr(error, "stderr", "") or error).strip()
        reason = message.splitlines()[-1] if message else "no reason given"
        raise DatasetError(f"writing {path.name} failed: {reason}", where=str(scripts[0])) from None
    if not path.is_file():
        raise DatasetError(f"{scripts[0].name} did not write {path}", where=str(folder))
    return path


def predict_programs(
    folder: Path,
    predictor: Predictor,
    lowering: str,
    show: Callable[[int, int], None] = lambda done, of: None,
    *,
    programs: Path | None = None,
    on_stream: bool = False,
) -> pd.DataFrame:
    """Predict every program of a folder's table.

    Args:
        folder: The folder.
        predictor: Predictor of programs.
        lowering: Lowering, as for ``opcast predict``.
        show: Called with the number of finished rows and of all rows.
        programs: Folder for the programs of a table of steps; ``None`` for ``programs`` in
            ``folder``.
        on_stream: Whether the measured times exclude the launch by the host, as times between
            events on the device's stream do.

    Returns:
        A row per row of the table: ``id``, ``latency_us``, ``lo_us``, ``hi_us``,
        ``memory_bytes``, ``lowering``, ``measured_us``, the columns of :data:`GROUPS`, and the
        ``reason`` of a failure.
    """
    table = read_table(folder)
    answers: dict[tuple[str, str], dict[str, object]] = {}
    records = []
    for number, row in enumerate(table.to_dict("records")):
        key = (str(row["file"]), str(row["device"]))
        if key not in answers and "cluster" in table:
            written = programs or folder / "programs"
            answers[key] = _answer(partial(_step, folder, row, written, predictor, lowering))
        elif key not in answers:
            answers[key] = _answer(partial(_whole, folder, row, predictor, lowering, on_stream))
        measured = row.get("latency_us", np.nan)
        records.append({"id": row["id"], **answers[key], "measured_us": measured})
        show(number + 1, len(table))
    frame = pd.DataFrame(records)
    for name in (name for name in GROUPS if name in table):
        frame[name] = table[name].to_numpy()
    return frame


def _whole(
    folder: Path,
    row: Mapping[Hashable, object],
    predictor: Predictor,
    lowering: str,
    on_stream: bool,
) -> Prediction:
    """Predict a program as it runs on a single device, even if it is written for several."""
    if str(row["file"]) == "nan":
        raise DatasetError("the row has no file")
    device = str(row["device"])
    own = folder / f"{device}.yaml"
    known = device if in_catalogue(device) or not own.is_file() else own
    program, options = folder / str(row["file"]), LoweringOptions(lowering, known)
    return predictor.answer(ProgramCase(program, options, whole=True, on_stream=on_stream))


def _step(
    folder: Path, row: Mapping[Hashable, object], out: Path, predictor: Predictor, lowering: str
) -> PartitionedPrediction:
    path = exported(folder, row, out)
    cluster = find_cluster(str(row["cluster"]))
    return predict_partitioned(path, cluster, predictor, LoweringOptions(lowering=lowering))


def _answer(ask: Callable[[], Prediction | PartitionedPrediction]) -> dict[str, object]:
    try:
        found = ask()
    except OpcastError as error:
        empty = dict.fromkeys(("latency_us", "lo_us", "hi_us", "memory_bytes"))
        return empty | {"lowering": "", "reason": str(error)}
    return {
        "latency_us": found.latency_us,
        "lo_us": found.lo_us,
        "hi_us": found.hi_us,
        "memory_bytes": found.peak_memory_bytes,
        "lowering": found.lowering,
        "reason": "",
    }


def judge_programs(frame: pd.DataFrame) -> pd.DataFrame:
    """Compute errors of measured programs, grouped by the columns of :data:`GROUPS`."""
    own = measured_rows(frame)
    groups = own.groupby([name for name in GROUPS if name in own], dropna=False)
    return groups.agg(**FIGURES).reset_index()


def _sentence(which: str, own: pd.DataFrame) -> str:
    """Summarise the errors of some programs in a line."""
    error = own["error"]
    return (
        f"{which}: mean error {100 * error.mean():.1f} %, median {100 * error.median():.1f} %, "
        f"{100 * own['inside'].mean():.0f} % inside the 90 % interval"
    )


def run_evaluate_programs(console: Console, settings: TableSettings) -> pd.DataFrame:
    """Predict the programs of a folder, write the predictions, print and log the errors."""
    predictor = load_for_programs(settings.model)
    with counting("programs") as show:
        frame = predict_programs(
            settings.table,
            predictor,
            settings.lowering,
            show,
            programs=settings.out.parent / f"{settings.out.stem}-programs",
            on_stream=settings.on_stream,
        )
    write_predictions(console, frame, settings.out, "programs")
    figures = judge_programs(frame)
    if "cluster" in read_table(settings.table):
        own = measured_rows(frame)
        own["error"] = (100 * np.expm1(own["log"])).round(1)
        shown = own[["id", "measured_us", "latency_us", "lo_us", "hi_us", "error"]]
        print_frame(console, shown, "steps, errors in %")
    if len(figures):
        print_frame(console, in_percent(figures), "programs with a measured time, errors in %")
        own = measured_rows(frame)
        error, inside = own["error"], own["inside"].mean()
        console.print(_sentence(f"all {len(own)}", own))
        trusted = own[own["trust"] != DOUBTFUL] if "trust" in own else own
        if 0 < len(trusted) < len(own):
            console.print(_sentence(f"the {len(trusted)} that are not {DOUBTFUL}", trusted))
        if settings.track:
            metrics = {"mape": float(error.mean()), "coverage": float(inside)}
            predictions = tidy(
                own.assign(kind=own["device"], predicted_us=own["latency_us"]), level="program"
            )
            params = {"folder": str(settings.table), "lowering": settings.lowering}
            tables = {"by_group": figures}
            log = RunLog(
                "evaluate-programs", params, metrics, tables=tables, predictions=predictions
            )
            log_training(console, log, None)
    wrote(settings.out, f"{len(frame)} rows")
    return frame
