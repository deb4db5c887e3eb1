"""The folder of a dataset under construction: rows in shards, failures and run records.

Every sample belongs to a run, and every run has a record. The finished programs of a device are
those of its runs in the shards and in ``failures.jsonl``. A kill at any moment leaves both
readable, so a stopped run can be resumed from the folder alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.files import append_lines, replacing
from ..common.parquet import read_table
from ..common.types import JsonObject
from ..features.dataset import (
    read_record,
    record_path,
    sample_frame,
    sample_ids,
    write_record,
    write_shard,
)
from ..features.kernels.kernel import Kernel, LoweredProgram
from ..features.kernels.program_json import schedule_to_json

logger = logging.getLogger(__name__)

Row = dict[str, object]

#: JSON lines, because a line can be appended without rewriting the file.
FAILURES = "failures.jsonl"
_MERGED = "samples.parquet"
_SHARDS = "samples-*.parquet"


class RunWriter:
    """Writes the samples, failures and record of one run.

    Args:
        folder: The dataset's folder, which exists.
        run_id: The run, which is resumed if the folder has its record.

    Attributes:
        record: The run record; :meth:`save_record` writes it.
        resumed: Whether the folder had a record of the run.
        samples: Number of rows written by this writer.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.samples = 0
        self._folder = folder
        self._rows: list[Row] = []
        self._failures: list[dict[str, str]] = []
        self._shards = 0
        path = record_path(folder, run_id)
        self.resumed = path.is_file()
        self.record: JsonObject = _own_record(path) if self.resumed else {"run_id": run_id}

    def add_rows(self, rows: Iterable[Mapping[str, object]], device: str) -> None:
        """Buffer rows, without ``sample_id``, ``device`` and ``run_id``, until the next flush."""
        self._rows += [{**row, "device": device, "run_id": self.run_id} for row in rows]

    def add_failure(self, program: str, reason: str) -> None:
        """Buffer a failed program, with its reason, until the next flush."""
        self._failures.append({"program": program, "reason": reason, "run_id": self.run_id})

    def drop_rows(self, programs: Iterable[str]) -> None:
        """Drop buffered rows of programs that are to be measured again."""
        dropped = set(programs)
        self._rows = [row for row in self._rows if row["program"] not in dropped]

    def flush(self, part: str | None = None) -> None:
        """Write a shard of the rows added since the last flush, and append the failures.

        Args:
            part: Suffix of the shard's name; by default the number of shards that this writer has
                written.
        """
        if self._rows:
            if not record_path(self._folder, self.run_id).is_file():
                # Record before rows: a dataset with rows of an unknown run does not load, so a kill
                # between the two must not leave such rows.
                self.save_record()
            frame = sample_frame(self._rows)
            name = f"samples-{self.run_id}-{part or f'{self._shards:05d}'}.parquet"
            write_shard(frame.assign(sample_id=sample_ids(frame)), self._folder / name)
            self._shards += 1
            self.samples += len(self._rows)
            self._rows = []
        add_failures(self._folder, self._failures)
        self._failures = []

    def save_record(self) -> None:
        """Write the record."""
        write_record(self._folder, self.run_id, self.record)


def add_failures(folder: Path, failures: Iterable[Mapping[str, str]]) -> None:
    """Append failed programs, with their reasons and runs, to a folder's list."""
    lines = "".join(json.dumps(f, sort_keys=True) + "\n" for f in failures)
    if lines:
        append_lines(folder / FAILURES, lines)


def done_programs(folder: Path, runs: Container[str] | None = None) -> set[str]:
    """Keys of the programs that were measured or failed.

    Args:
        folder: The dataset's folder.
        runs: Runs that count, such as those of one device; all by default.
    """
    done: set[str] = set()
    for shard in folder.glob("*.parquet"):
        rows = read_table(shard, columns=["program", "run_id"]).drop_duplicates()
        pairs = zip(rows["program"], rows["run_id"], strict=True)
        done.update(program for program, run in pairs if runs is None or run in runs)
    failures = read_failures(folder)
    return done | {f["program"] for f in failures if runs is None or f.get("run_id") in runs}


def read_failures(folder: Path) -> list[dict[str, str]]:
    """Read the failed programs with their reasons; a line truncated by a kill is skipped."""
    path = folder / FAILURES
    failures = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            failure = json.loads(line)
            failures.append({"program": str(failure["program"]), **failure})
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: a damaged line is left out", path)
    return failures


def run_records(folder: Path) -> dict[str, JsonObject]:
    """Read the records of the runs in a folder, by run id, oldest first.

    Raises:
        DatasetError: A file is not a run record, or is not named after its run.
    """
    records = [_own_record(path) for path in sorted(folder.glob("run-*.json"))]
    # ISO 8601 dates sort as text.
    records.sort(key=lambda record: str(record.get("date", "")))
    return {str(record["run_id"]): record for record in records}


def _own_record(path: Path) -> JsonObject:
    record = read_record(path)
    if "run_id" not in record:
        raise DatasetError("not a run record: 'run_id' is missing", where=str(path))
    if f"run-{record['run_id']}.json" != path.name:
        raise DatasetError(
            f"the record is of run {record['run_id']!r}", where=str(path), hint="name it after that"
        )
    return record


def replace_shards(folder: Path, frame: pd.DataFrame, *, max_bytes: float = 20e6) -> Path:
    """Replace a dataset's shards by one well compressed ``samples.parquet``.

    The new file is in place before the shards are removed, and loading a dataset drops duplicates,
    so a kill in between loses nothing.

    Args:
        folder: The dataset's folder.
        frame: Its rows.
        max_bytes: Maximum file size; the default is acceptable in a git repository.

    Raises:
        DatasetError: The file would exceed ``max_bytes``; the shards are kept.
    """
    target = folder / _MERGED
    shards = list(folder.glob(_SHARDS))
    # Equal texts next to each other compress well.
    ordered = frame.sort_values(["kind", "kernel_ir", "program"], kind="stable")
    # zstd's highest regular level: the file is written once and read often. Checksums turn damage
    # into an error rather than wrong labels.
    with replacing(target) as partial:
        ordered.to_parquet(
            partial, index=False, compression="zstd", compression_level=19, write_page_checksum=True
        )
        size = partial.stat().st_size
        if size > max_bytes:
            raise DatasetError(
                f"{len(frame)} samples take {size / 1e6:.1f} MB, more than {max_bytes / 1e6:.1f} "
                "MB",
                where=str(folder),
                hint="raise max_bytes, or keep the shards",
            )
    for shard in shards:
        shard.unlink()
    return target


def sample_rows(
    lowered: LoweredProgram,
    durations: Mapping[str, Sequence[float]],
    wall: Sequence[float],
    *,
    family: str,
    program: str,
    sources: tuple[str, str] = ("measured:trace", "measured:wall"),
) -> list[Row]:
    """Make one row per distinct kernel with a duration, and one for the program.

    Args:
        lowered: The program; kernels that take no time have no row.
        durations: Seconds of every execution, by kernel name.
        wall: Seconds of whole executions; without any, or without kernels, the program has no row.
        family: Family of the program; ``op:…`` for a single op.
        program: Value of the column ``program``.
        sources: Source of the labels of kernels, and of the program.

    Returns:
        Rows without ``sample_id``, ``device`` and ``run_id``.
        Rows without ``sample_id``, ``device`` and ``run_id``.
    """
    kernels = [k for k in lowered.kernels if k.takes_time]
    # If XLA split an op into several kernels, none of them alone labels the op.
    single = family.startswith("op:") and len(kernels) == 1
    # Equal kernels of a program are one sample with more executions.
    pooled: dict[str, list[float]] = defaultdict(list)
    for name, kernel in {k.name: k for k in kernels}.items():
        pooled[kernel.hash] += durations.get(name, [])
    by_hash = {k.hash: k for k in kernels}
    level = "op" if single else "kernel"
    common = {"family": family, "program": program}
    rows = [
        kernel_row(by_hash[h], s) | common | {"level": level, "source": sources[0]}
        for h, s in pooled.items()
        if s
    ]
    if len(wall) and rows:
        known = {str(row["kernel_hash"]) for row in rows}
        rows.append(_program_row(lowered, wall, known) | common | {"source": sources[1]})
    return rows


def kernel_row(kernel: Kernel, seconds: Sequence[float]) -> Row:
    """Columns of a kernel with the seconds of its executions."""
    return latency_columns(seconds) | {
        "kernel_hash": kernel.hash,
        "kernel_ir": kernel.ir,
        "kind": kernel.kind,
        "dtype": kernel.dtype,
        "flops": float(kernel.flops),
        "bytes": float(kernel.bytes),
    }


def _program_row(lowered: LoweredProgram, wall: Sequence[float], known: set[str]) -> Row:
    kernels = lowered.kernels
    text = schedule_to_json(lowered, known)
    # The program's dtype is that of its heaviest kernel.
    dtypes = [k.dtype for k in sorted(kernels, key=lambda k: k.flops + k.bytes)]
    return latency_columns(wall) | {
        "kernel_hash": hashlib.sha256(text.encode()).hexdigest()[: len(kernels[0].hash)],
        "kernel_ir": text,
        "level": "program",
        "kind": "program",
        "dtype": dtypes[-1],
        "flops": float(sum(k.flops * k.multiplicity for k in kernels)),
        "bytes": float(sum(k.bytes * k.multiplicity for k in kernels)),
    }


def latency_columns(seconds: Sequence[float]) -> Row:
    """Quantiles in microseconds, and the number of executions."""
    # Quantiles, not minima: sums of minima over kernels under-predict programs.
    p10, p50, p90 = np.quantile(np.asarray(seconds, float), [0.1, 0.5, 0.9]) * 1e6
    return {
        "latency_us_p10": float(p10),
        "latency_us_p50": float(p50),
        "latency_us_p90": float(p90),
        "repeats": len(seconds),
    }
