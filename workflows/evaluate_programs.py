"""Predict folders of programs, or of regions of programs, whose times were published."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError, OpcastError
from ..common.tables_text import in_percent, print_frame
from ..features.dataset import write_table
from ..features.devices.catalogue import in_catalogue
from ..models.tracking.mlflow_store import RunLog, tidy
from ..predict.program.predictor import Predictor, load_for_programs
from .steps import FIGURES, measured_rows, row_progress
from .training import log_training

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import ProgramSettings

#: Columns that a table of programs cannot do without.
NEEDED = ("file", "device")
#: Columns that errors are grouped by, those that the table has.
GROUPS = ("device", "trust", "mode", "kind")
#: Most bytes of an unpacked program: larger than any of the published ones by ten times.
MOST_BYTES = 2**30
_PARTITIONS = re.compile(r"\bnum_partitions=\d+")
_REPLICAS = re.compile(r"\breplica_count=\d+")


def read_table(folder: Path) -> pd.DataFrame:
    """The one CSV of a folder that lists program files and devices.

    Raises:
        DatasetError: There is no such table, or more than one.
    """
    tables = {path: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    fitting = [table for table in tables.values() if set(NEEDED) <= set(table.columns)]
    if len(fitting) != 1:
        raise DatasetError(
            f"{len(fitting)} tables with the columns {', '.join(NEEDED)}",
            where=str(folder),
            hint="a folder has one CSV that lists its program files and devices",
        )
    table = fitting[0]
    if "id" not in table:
        table.insert(0, "id", [f"program{number}" for number in range(len(table))])
    return table


def program_text(path: Path) -> bytes:
    """A program, unpacked, as one device runs it.

    A module for several devices that was measured unpartitioned runs whole on each of them.

    Raises:
        DatasetError: The file is missing, damaged or too large.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MOST_BYTES + 1)
        else:
            data = path.read_bytes()
    except (OSError, EOFError) as error:
        raise DatasetError(f"the program cannot be read: {error}", where=str(path)) from None
    if len(data) > MOST_BYTES:
        raise DatasetError(f"the program is larger than {MOST_BYTES} bytes", where=str(path))
    if not data.startswith(b"HloModule"):
        return data
    head, line, rest = data.partition(b"\n")
    text = _PARTITIONS.sub("num_partitions=1", head.decode())
    return _REPLICAS.sub("replica_count=1", text).encode() + line + rest


def predict_programs(
    folder: Path,
    predictor: Predictor,
    lowering: str,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> pd.DataFrame:
    """Predict every program of a folder's table.

    Returns:
        The table's rows: ``id``, ``latency_us``, ``lo_us``, ``hi_us``, ``memory_bytes``,
        ``lowering``, ``measured_us``, the columns of :data:`GROUPS`, and ``reason`` where one
        failed.
    """
    table = read_table(folder)
    answers: dict[tuple[str, str], dict[str, object]] = {}
    records = []
    for number, row in enumerate(table.to_dict("records")):
        key = (str(row["file"]), str(row["device"]))
        if key not in answers:
            answers[key] = _answer(folder, *key, predictor, lowering)
        measured = row.get("latency_us", np.nan)
        records.append({"id": row["id"], **answers[key], "measured_us": measured})
        show(number + 1, len(table))
    frame = pd.DataFrame(records)
    for name in (name for name in GROUPS if name in table):
        frame[name] = table[name].to_numpy()
    return frame


def _answer(
    folder: Path, file: str, device: str, predictor: Predictor, lowering: str
) -> dict[str, object]:
    empty: dict[str, object] = dict.fromkeys(("latency_us", "lo_us", "hi_us", "memory_bytes"))
    if file == "nan":
        return empty | {"lowering": "", "reason": "the row names no file"}
    try:
        own = folder / f"{device}.yaml"
        known = device if in_catalogue(device) or not own.is_file() else own
        said = predictor.predict(program_text(folder / file), device=known, lowering=lowering)
    except OpcastError as error:
        return empty | {"lowering": "", "reason": str(error)}
    return {
        "latency_us": said.latency_us,
        "lo_us": said.lo_us,
        "hi_us": said.hi_us,
        "memory_bytes": said.peak_memory_bytes,
        "lowering": said.lowering,
        "reason": "",
    }


def judge_programs(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors of programs with a measured time, by the columns of :data:`GROUPS`."""
    own = measured_rows(frame)
    groups = own.groupby([name for name in GROUPS if name in own], dropna=False)
    return groups.agg(**FIGURES).reset_index()


def run_evaluate_programs(console: Console, settings: ProgramSettings) -> pd.DataFrame:
    """Predict a folder's programs, write the predictions, print and log the errors."""
    predictor = load_for_programs(settings.model)
    with row_progress(len(read_table(settings.folder))) as show:
        frame = predict_programs(settings.folder, predictor, settings.lowering, show)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame, settings.out)
    for reason, count in frame.loc[frame["reason"] != "", "reason"].value_counts().items():
        console.print(f"{count} programs not predicted: {reason}", highlight=False)
    figures = judge_programs(frame)
    if len(figures):
        print_frame(console, in_percent(figures), "programs with a measured time, errors in %")
        own = measured_rows(frame)
        error, inside = own["error"], own["inside"].mean()
        console.print(
            f"all {len(own)}: mean error {100 * error.mean():.1f} %, median "
            f"{100 * error.median():.1f} %, {100 * inside:.0f} % inside the 90 % interval",
            highlight=False,
        )
        if settings.track:
            metrics = {"mape": float(error.mean()), "coverage": float(inside)}
            predictions = tidy(
                own.assign(kind=own["device"], predicted_us=own["latency_us"]), level="program"
            )
            params = {"folder": str(settings.folder), "lowering": settings.lowering}
            tables = {"by_group": figures}
            log = RunLog(
                "evaluate-programs", params, metrics, tables=tables, predictions=predictions
            )
            log_training(console, log, None)
    console.print(f"{settings.out}: {len(frame)} rows", highlight=False)
    return frame
