"""Nsight Systems reports: the SQLite export, and the tables that ``nsys stats`` writes as CSV.

Schema: https://docs.nvidia.com/nsight-systems/UserGuide/index.html, "SQLite Schema Reference".
Tables exist only if they have rows, and columns differ between versions, so both are looked up.
Times are nanoseconds. XLA's modules and instructions come from its NVTX ranges, ``XlaModule:#…#``
and nested ``Thunk:#hlo_op=…#``, around the call of each kernel; PyTorch's operators from those of
``torch.autograd.profiler.emit_nvtx(record_shapes=True)``.
"""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import DatasetError
from ..profile.executions import Event
from .kineto import collective_of
from .trace import Nested, Operator, Trace, TraceKernel

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
#: Whole replays of graphs, nsys' default; the kernel table then lacks their kernels.
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME, _STRINGS, _NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "NVTX_EVENTS"
_HINT = "record with nsys profile --trace=cuda,nvtx, then nsys export --type sqlite"
#: Patterns in the text of ranges: of XLA, of PyTorch, and of steps that programs mark.
_HLO_OP = re.compile(r"Thunk:#(?:.*,)?hlo_op=([^,#]+)")
_HLO_MODULE = re.compile(r"XlaModule:#(?:.*,)?hlo_module=([^,#]+)")
_PROGRAM_ID = re.compile(r"program_id=(\d+)")
_ATEN = re.compile(r"(aten::\w+)(?:,.*?sizes = (\[.*\]))?")
_STEP = re.compile(r"\b(?:ProfilerStep|step|iteration|iter)\W*\d+", re.IGNORECASE)
#: Element types by patterns in the names of library kernels; the first match counts.
_TYPES = (
    (re.compile(r"bf16|bfloat16", re.IGNORECASE), "c10::BFloat16"),
    (re.compile(r"f16f16|_f16|hgemm|half|_h_|fp16", re.IGNORECASE), "c10::Half"),
    (re.compile(r"e4m3", re.IGNORECASE), "c10::Float8_e4m3fn"),
    (re.compile(r"sgemm|tf32|f32|float|_s_", re.IGNORECASE), "float"),
)
#: Nanoseconds of each unit.
_UNITS = {"ns": 1.0, "us": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}


@dataclass(frozen=True, slots=True)
class _Range:
    """An NVTX range of a thread."""

    text: str
    number: int


def read_nsys(path: Path) -> Trace:
    """Read an SQLite export.

    Raises:
        DatasetError: It is not an export of Nsight Systems, is damaged, or contains no kernels.
    """
    try:
        # Read-only, so that no journal is left beside the user's file.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            return _read(path, base)
    except sqlite3.Error as error:
        raise DatasetError(
            f"the database is cut off or damaged: {error}", where=str(path), hint=_HINT
        ) from None


def _read(path: Path, base: sqlite3.Connection) -> Trace:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if not tables & {_STRINGS, _KERNELS, _RUNTIME, _NVTX}:
        raise DatasetError("no export of Nsight Systems", where=str(path), hint=_HINT)
    if _KERNELS not in tables:
        raise DatasetError(
            "the report holds no kernels, only events of the host",
            where=str(path),
            hint=_HINT + "; CUDA graphs need --cuda-graph-trace=node",
        )
    strings: dict[int, str] = (
        dict(base.execute(f"SELECT id, value FROM {_STRINGS}")) if _STRINGS in tables else {}
    )
    ranges, steps = _ranges(base, strings) if _NVTX in tables else ({}, Nested(()))
    launches: dict[tuple[int, int], tuple[int, int]] = {}
    if _RUNTIME in tables:
        for row in _rows(base, _RUNTIME, ("correlationId", "start", "globalTid")):
            launches[_process(row["globalTid"]), row["correlationId"]] = (
                row["start"], row["globalTid"]
            )  # fmt: skip
    devices: dict[int, list[Event]] = defaultdict(list)
    wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
    names = ("demangledName", "shortName", "name")
    for row in _rows(base, _KERNELS, (*wanted, *names)):
        name = next((strings.get(row[n], "") for n in names if row[n] in strings), "kernel")
        devices[row["deviceId"]].append(_kernel(row, name, launches, ranges, steps))
    for table in _COPIES:
        for row in _rows(base, table, wanted) if table in tables else ():
            copy = _kernel(row, table.rpartition("_")[2].lower(), launches, ranges, steps)
            copy.copy = True
            devices[row["deviceId"]].append(copy)
    gpus = _rows(base, "TARGET_INFO_GPU", ("name",)) if "TARGET_INFO_GPU" in tables else []
    replays = len(_rows(base, _GRAPHS, ("start",))) if _GRAPHS in tables else 0
    hidden = (
        f"{replays} replays of CUDA graphs are recorded whole, without their kernels: record with "
        "--cuda-graph-trace=node"
    )
    names_of = [str(row["name"]) for row in gpus]
    return Trace.of_gpus(path, "nsys", devices, names_of, notes=[hidden] if replays else [])


def _rows(base: sqlite3.Connection, table: str, columns: Sequence[str]) -> list[dict[str, int]]:
    """Rows of a table; missing columns are 0."""
    there = {row[1] for row in base.execute(f"PRAGMA table_info({table})")}
    asked = ", ".join(f'"{c}"' if c in there else "0" for c in columns)
    return [
        dict(zip(columns, row, strict=True)) for row in base.execute(f"SELECT {asked} FROM {table}")
    ]


def _process(identity: int) -> int:
    """Process of a global thread or process id, whose lowest 24 bits are the thread's."""
    return (identity or 0) >> 24


def _ranges(
    base: sqlite3.Connection, strings: Mapping[int, str]
) -> tuple[dict[int, Nested[_Range]], Nested[int]]:
    """Closed NVTX ranges by thread, and the numbers of those that mark steps."""
    threads: dict[int, list[tuple[float, float, _Range]]] = defaultdict(list)
    steps: list[tuple[float, float, int]] = []
    rows = _rows(base, _NVTX, ("start", "end", "text", "textId", "globalTid"))
    for number, row in enumerate(rows):
        if (row["end"] or -1) < row["start"]:
            continue  # a mark, or a range that was never closed
        text = str(row["text"] or "") or strings.get(row["textId"], "")
        threads[row["globalTid"]].append((row["start"], row["end"], _Range(text, number)))
        if _STEP.search(text):
            steps.append((row["start"], row["end"], number))
    return {thread: Nested(own) for thread, own in threads.items()}, Nested(steps)


def _kernel(
    row: Mapping[str, int],
    name: str,
    launches: Mapping[tuple[int, int], tuple[int, int]],
    ranges: Mapping[int, Nested[_Range]],
    steps: Nested[int],
) -> TraceKernel:
    launch = launches.get((_process(row["globalPid"]), row["correlationId"]))
    launch = launch or launches.get((0, row["correlationId"]))
    kernel = TraceKernel.of(
        name,
        float(row["start"]),
        float(row["end"]),
        stream=str(row["streamId"]),
        collective=collective_of(name, {}),
    )
    if launch is None:
        return kernel
    at, thread = launch
    kernel.launched = float(at)
    around = ranges[thread].around(at) if thread in ranges else []
    kernel.run = next(iter(steps.around(at)), None)
    for own in around:
        if not kernel.op and (op := _HLO_OP.search(own.text)):
            kernel.op = op[1]
        if module := _HLO_MODULE.search(own.text):
            identity = _PROGRAM_ID.search(own.text)
            kernel.module = f"{module[1]}({identity[1]})" if identity else module[1]
            kernel.run = own.number
    kernel.operators = tuple(o for r in around if (o := _operator(r, name)) is not None)
    return kernel


def _operator(own: _Range, kernel: str) -> Operator | None:
    """The operator of a PyTorch range, with element types from the kernel's name."""
    found = _ATEN.match(own.text)
    if found is None:
        return None
    try:
        shapes = [
            tuple(int(n) for n in shape if not isinstance(n, list))
            for shape in json.loads(found[2] or "[]")
        ]
    except (ValueError, TypeError):
        shapes = []
    dtype = next((name for pattern, name in _TYPES if pattern.search(kernel)), "")
    types = tuple(dtype if shape else "" for shape in shapes)
    return Operator(found[1], tuple(shapes), types, (), own.number)


def read_nsys_csv(path: Path) -> Trace:
    """Read the CSV of ``nsys stats --report cuda_gpu_trace`` or ``cuda_gpu_kern_sum``.

    A summary has no start times: its kernels count with their median, and gaps are unknown.

    Raises:
        DatasetError: It is neither, or contains no kernels.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        # Lines before the header are nsys's messages.
        lines = [line for line in file if "," in line]
    rows = csv.DictReader(lines)
    header = {_plain(c): c for c in rows.fieldnames or ()}
    try:
        if {"start", "duration", "name"} <= header.keys():
            return _listed(path, rows, header)
        if {"instances", "med", "name"} <= header.keys():
            return _summed(path, rows, header)
    except (ValueError, TypeError, KeyError) as error:
        raise DatasetError(
            f"line {rows.line_num} cannot be read: {error}", where=str(path), hint=_HINT
        ) from None
    raise DatasetError(
        "no table of kernels: its columns are " + ", ".join(rows.fieldnames or ["none"])[:200],
        where=str(path),
        hint="write it with nsys stats --report cuda_gpu_trace --format csv",
    )


def _plain(column: str) -> str:
    """Column name without its unit, such as ``duration`` for ``Duration (ns)``."""
    return re.sub(r"\s*\(.*\)", "", column).strip().lower()


def _scale(column: str) -> float:
    """Nanoseconds per unit in a column's name."""
    unit = re.search(r"\((\w+)\)", column)
    return _UNITS[unit[1]] if unit else 1.0


def _listed(path: Path, rows: Iterable[Mapping[str, str]], header: Mapping[str, str]) -> Trace:
    devices: dict[str, list[Event]] = defaultdict(list)
    any_kernel = False
    begin, length = _scale(header["start"]), _scale(header["duration"])
    for row in rows:
        start = float(row[header["start"]]) * begin
        name = row[header["name"]]
        copy = name.startswith("[CUDA mem")
        kernel = TraceKernel.of(
            name,
            start,
            start + float(row[header["duration"]]) * length,
            stream=row.get(header.get("strm", ""), ""),
            collective=collective_of(name, {}),
            copy=copy,
        )
        any_kernel = any_kernel or not copy
        devices[row.get(header.get("device", ""), "")].append(kernel)
    if not any_kernel:
        raise DatasetError("the table holds no kernels", where=str(path), hint=_HINT)
    # A device is given as its name followed by its number.
    numbered = re.compile(r"\s*\((\d+)\)$")
    by_number = {
        int(found[1]) if (found := numbered.search(device)) else place: own
        for place, (device, own) in enumerate(sorted(devices.items()))
    }
    return Trace.of_gpus(path, "nsys", by_number, [numbered.sub("", device) for device in devices])


def _summed(path: Path, rows: Iterable[Mapping[str, str]], header: Mapping[str, str]) -> Trace:
    events: list[Event] = []
    scale = _scale(header["med"])
    for row in rows:
        name, length = row[header["name"]], float(row[header["med"]]) * scale
        for _ in range(int(row[header["instances"]])):
            events.append(TraceKernel.of(name, 0.0, length, collective=collective_of(name, {})))
    if not events:
        raise DatasetError("the table holds no kernels", where=str(path), hint=_HINT)
    note = "a summary has no times of start: runs, gaps and overlap are not known"
    return Trace.of_gpus(path, "nsys", {0: events}, ordered=False, notes=[note])
