"""Converts traces to a dataset: rows of kernels and programs, or of operators and collectives.

By default rows reveal nothing about the source program: names of instructions, functions, files and
lines are left out, and programs are named by digests. Kernels keep their shapes, types and, for
custom calls, the target that determines their cost.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import write_text
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import LoweredProgram
from ..dataset_folder import Row, RunWriter, latency_columns, sample_rows
from ..published.importer import samples
from .aten import TracedOperator, traced_operators
from .kineto import read_kineto
from .nsys import read_nsys, read_nsys_csv
from .trace import RunTime, Trace, TraceKernel, by_run, chosen, host_seconds, run_time, typical
from .xla import TracedProgram, anonymous, read_xplane, traced_programs

_XPLANE = ".xplane.pb"
_EXPECTED = (
    "expected xplane.pb (or the log directory) of jax.profiler, .json or .json.gz of "
    "torch.profiler, .sqlite or .csv of nsys"
)
#: Source of the samples, and of the rows of operators. It specifies no timing method, so the rows
#: are sums of kernels.
SOURCE = "trace"
#: Every fifth operator, in the order of its digest, is in the test split.
_FOLDS = 5


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Trace files under the given paths; of a ``jax.profiler`` directory the latest profile.

    Raises:
        DatasetError: A path does not exist, or a directory contains no profile.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        found = sorted(path.rglob(f"*{_XPLANE}")) if path.is_dir() else []
        if not found:
            what = "no profile in this directory" if path.is_dir() else "no such file"
            raise DatasetError(what, where=str(path), hint=_EXPECTED)
        # Sessions are folders named after the time; each host of one writes a file.
        latest = max(own.parent for own in found)
        files += [own for own in found if own.parent == latest]
    return files


def read_trace(path: Path, moved: Callable[[int, int], None] = lambda done, total: None) -> Trace:
    """Read a trace of any supported format.

    Args:
        path: The file.
        moved: Callback with the number of bytes read and the total, for long texts.

    Raises:
        DatasetError: Its format is unknown, it is truncated, or it contains no kernels.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DatasetError(f"cannot be read: {error}", where=str(path), hint=_EXPECTED) from None
    name = path.name.lower()
    if not head:
        raise DatasetError("the file is empty", where=str(path), hint=_EXPECTED)
    if head.startswith(b"SQLite format 3"):
        return read_nsys(path)
    if name.endswith((".nsys-rep", ".qdrep", ".qdstrm")):
        raise DatasetError(
            "a report in nsys' own format",
            where=str(path),
            hint=f"export it: nsys export --type sqlite {path.name}",
        )
    if name.endswith(".pb"):
        return read_xplane(path)
    if name.endswith(".csv"):
        return read_nsys_csv(path)
    if name.endswith((".json", ".json.gz")):
        return read_kineto(path, moved)
    raise DatasetError("a trace of no known format", where=str(path), hint=_EXPECTED)


@dataclass(frozen=True)
class ImportedTrace:
    """Outcome of importing a trace.

    Attributes:
        path: Its file.
        samples: Rows written; 0 if they were already there.
        kept: Whether an earlier import had written them.
        programs: Programs that ran, by digest or name, with their number of runs.
        matched: Fraction of the kernels' time that has a label.
        unmatched: Fraction of the time of unlabelled kernels by name, the largest first.
        collectives: Number of collectives with sizes, which are written separately.
        step: The run, or step, with the median span; ``None`` if start times are unknown.
        host_s: Seconds between two runs.
        notes: Information that the trace lacks.
    """

    path: str
    samples: int
    kept: bool
    programs: Mapping[str, int]
    matched: float
    unmatched: Sequence[tuple[str, float]]
    collectives: int = 0
    step: RunTime | None = None
    host_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    """Rows of a trace, and a description of it."""

    rows: list[Row] = field(default_factory=list)
    programs: dict[str, int] = field(default_factory=dict)
    matched: float = 0.0
    unmatched: dict[str, float] = field(default_factory=dict)
    runs: list[RunTime] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    collectives: list[TracedOperator] = field(default_factory=list)


def import_trace(
    trace: Trace,
    out: Path,
    device: DeviceSpec,
    *,
    given: Sequence[LoweredProgram] = (),
    index: int | None = None,
    keep_names: bool = False,
) -> ImportedTrace:
    """Write the samples of a trace into a dataset's folder.

    The run is named after the file's content: a trace that was imported before is kept as it is.

    Args:
        trace: The trace.
        out: The dataset's folder; created if missing.
        device: Device on which it was recorded.
        given: Programs that ran, if the trace does not contain them.
        index: Device of the trace; by default all of them, if they ran the same kernels.
        keep_names: Keep names of functions, instructions and operators in the run's record.

    Raises:
        DatasetError: Nothing in the trace could be labelled, or devices ran different kernels.
    """
    with Path(trace.path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    run_id = f"{SOURCE}-{digest}" + (f"-{index}" if index is not None else "")
    xla = trace.of_xla or bool(given)
    found = (
        _of_programs(trace, given, index, keep_names)
        if xla
        else _of_operators(trace, index, device, keep_names)
    )
    if not found.rows and not found.collectives:
        raise _nothing(trace, found)
    out.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(out, run_id)
    kept = any(out.glob(f"samples-{run_id}-*.parquet"))
    step = typical(found.runs) if found.runs else None
    total = found.matched + sum(found.unmatched.values()) or 1.0
    shares = sorted(((n, s / total) for n, s in found.unmatched.items()), key=lambda u: -u[1])
    writer.record |= {
        "device": asdict(device),
        "source": f"{SOURCE}:{trace.format}",
        "date": datetime.now(UTC).isoformat(),
        "steps": len(found.runs),
        "step_s": {} if step is None else asdict(step) | {"gaps": step.gaps},
        "host_s": host_seconds(found.runs),
        "matched": found.matched / total,
        # Names of unmatched kernels would reveal as much as names of matched ones.
        "unmatched": shares if keep_names else [s for _, s in shares],
        **({"names": found.names, "file": trace.path} if keep_names else {}),
    }
    if not kept:
        writer.add_rows(found.rows, device.name)
        writer.flush()
        writer.save_record()
        if found.collectives:
            text = _collectives_csv(found.collectives, device.name)
            write_text(out / f"collectives-{run_id}.csv", text)
    return ImportedTrace(
        path=trace.path,
        samples=0 if kept else len(found.rows),
        kept=kept,
        programs=found.programs,
        matched=found.matched / total,
        unmatched=shares,
        collectives=len(found.collectives),
        step=step,
        host_s=host_seconds(found.runs),
        notes=tuple(trace.notes),
    )


def _nothing(trace: Trace, found: _Found) -> DatasetError:
    names = sorted(found.unmatched, key=lambda n: -found.unmatched[n])[:3]
    return DatasetError(
        "no kernel could be labelled; most time went into " + ", ".join(names),
        where=trace.path,
        hint="for PyTorch record CPU and CUDA activities with record_shapes=True; for XLA give the "
        "module that ran with --program",
    )


def _of_programs(
    trace: Trace, given: Sequence[LoweredProgram], index: int | None, keep_names: bool
) -> _Found:
    found = _Found()
    for program in traced_programs(trace, given, index):
        lowered = program.lowered if keep_names else anonymous(program.lowered)
        name = _program_name(program, keep_names)
        walls = [run.span for run in program.runs]
        # The first run of a kernel includes loading its code.
        walls = walls[1:] if len(walls) > 2 else walls
        sources = (f"{SOURCE}:kernels", f"{SOURCE}:span")
        found.rows += sample_rows(
            lowered, program.durations, walls, family=name, program=name, sources=sources
        )
        found.programs[name] = len(program.runs)
        found.matched += program.seconds
        for what, seconds in program.unmatched.items():
            found.unmatched[what] = found.unmatched.get(what, 0.0) + seconds
        # The program with the largest total time comes first; its steps count.
        found.runs = found.runs or program.runs
        for kernel in program.lowered.kernels if keep_names else ():
            found.names.setdefault(kernel.hash, []).append(kernel.name)
    return found


def _program_name(program: TracedProgram, keep_names: bool) -> str:
    if keep_names and program.module:
        return program.module
    text = "\n".join(k.ir for k in program.lowered.kernels)
    return f"{SOURCE}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _of_operators(trace: Trace, index: int | None, device: DeviceSpec, keep_names: bool) -> _Found:
    found = _Found()
    devices = chosen(trace, index)
    events = [e for own in devices for e in own.executed.events]
    labelled: list[TracedOperator] = []
    for operator in traced_operators(events):
        if operator.row:
            labelled.append(operator)
            found.matched += operator.total
        elif operator.collective is not None and operator.collective.bytes:
            found.collectives.append(operator)
            found.matched += operator.total
        else:
            name = operator.name
            found.unmatched[name] = found.unmatched.get(name, 0.0) + operator.total
    if labelled:
        found.rows, names = operator_rows(labelled, device, keep_names)
        found.names = names if keep_names else {}
    if trace.ordered:
        for own in devices:
            runs = by_run(own.executed.events)
            found.runs += [run_time(run, is_collective, own.index) for run in runs]
    return found


def is_collective(event: object) -> bool:
    """Whether an event of a trace of operators is a collective."""
    return isinstance(event, TraceKernel) and event.collective is not None


def operator_rows(
    operators: Sequence[TracedOperator], device: DeviceSpec, keep_names: bool
) -> tuple[list[Row], dict[str, list[str]]]:
    """Convert operators to samples, in the same way as published tables."""
    frame = pd.DataFrame([o.row for o in operators])
    whole = [c for c in frame if pd.api.types.is_numeric_dtype(frame[c])]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    labels = pd.DataFrame([latency_columns(o.seconds) for o in operators])
    frame["source"], frame["device"] = SOURCE, device.name
    frame["latency_us"] = labels["latency_us_p50"]
    # Each row needs a name; it reveals no more than the row's position.
    digest = hashlib.sha256(frame.to_csv().encode()).hexdigest()[:8]
    frame["id"] = [f"{SOURCE}-{digest}-{i}" for i in range(len(frame))]
    made = samples(frame, {device.name: device}).assign(**labels)
    # Whole sizes are held out, selected by their content alone.
    fold = made["kernel_hash"].rank(method="dense").astype(int) % _FOLDS
    made["split"] = np.where(fold == 0, "test", "train")
    made["source"] = f"{SOURCE}:kernels"
    names = {
        str(digest): [operator.name, *sorted(operator.kernels)]
        for digest, operator in zip(made["kernel_hash"], operators, strict=True)
    }
    drop = ["sample_id", "device", "run_id"]
    records: list[Row] = made.drop(columns=drop).to_dict("records")  # type: ignore[assignment]
    return records, names


def _collectives_csv(operators: Sequence[TracedOperator], device: str) -> str:
    """Collectives in the format of ``opcast calibrate-collectives``."""
    text = io.StringIO()
    columns = ("op", "bytes", "world_size", "latency_us", "device", "backend", "source")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for operator in operators:
        own = operator.collective
        assert own is not None
        median = float(np.median(operator.seconds)) * 1e6
        writer.writerow([own.op, own.bytes, own.ranks, median, device, "nccl", SOURCE])
    return text.getvalue()
