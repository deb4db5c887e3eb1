"""What a profile run leaves on disk, and how a stopped run is taken up again.

Finished programs are those named in the shards and in ``failures.jsonl``; both are written in a way
that a kill at any moment leaves whole. ``progress.json`` only informs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from ..features.dataset import Dataset, sample_frame, write_shard
from ..features.errors import DatasetError
from ..features.files import parse_json, replacing, write_text
from ..features.tables import read_table

logger = logging.getLogger(__name__)

FAILURES = "failures.jsonl"
PROGRESS = "progress.json"
_MERGED = "samples.parquet"


class Store:
    """The folder of a dataset that is being made.

    Args:
        folder: Where shards, records and failures go.
        run_id: The run that writes.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self._rows: list[dict[str, Any]] = []
        self._failures: list[dict[str, Any]] = []
        self._shards = 0
        self.samples = 0

    def add_rows(self, rows: Iterable[dict[str, Any]], device: str) -> None:
        """Keep the rows of one program until the next flush."""
        for row in rows:
            identity = (row["kernel_hash"], row["level"], row["program"], device, self.run_id)
            digest = hashlib.sha256("|".join(identity).encode()).hexdigest()[:16]
            self._rows.append(row | {"sample_id": digest, "device": device, "run_id": self.run_id})

    def add_failure(self, program: str, reason: str) -> None:
        """Keep a failed program until the next flush."""
        self._failures.append({"program": program, "reason": reason, "run_id": self.run_id})

    @property
    def pending(self) -> int:
        """Rows and failures that are not on disk yet."""
        return len(self._rows) + len(self._failures)

    def drop_rows(self, programs: Iterable[str]) -> None:
        """Forget rows not on disk yet, of programs that are to be measured again."""
        dropped = set(programs)
        self._rows = [row for row in self._rows if row["program"] not in dropped]

    def flush(self) -> None:
        """Write what was added since the last flush: a shard and lines of failures."""
        if self._rows:
            name = f"samples-{self.run_id}-{self._shards:05d}.parquet"
            write_shard(sample_frame(self._rows), self.folder / name)
            self._shards += 1
            self.samples += len(self._rows)
            self._rows = []
        if self._failures:
            lines = "".join(json.dumps(f, sort_keys=True) + "\n" for f in self._failures)
            append_lines(self.folder / FAILURES, lines)
            self._failures = []


def append_lines(path: Path, text: str) -> None:
    """Append whole lines; a half line left by a kill is closed first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def done_programs(folder: Path) -> set[str]:
    """Keys of the programs that were measured or failed."""
    done: set[str] = set()
    for shard in folder.glob("*.parquet"):
        done.update(read_table(shard, columns=["program"])["program"])
    return done | {failure["program"] for failure in read_failures(folder)}


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Failed programs with reasons; a line cut off by a kill is left out."""
    path = folder / FAILURES
    failures = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            failure = json.loads(line)
            failures.append({"program": str(failure["program"]), **failure})
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: a damaged line is left out", path)
    return failures


def run_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of the runs in a folder, by run id, oldest first.

    Raises:
        DatasetError: A file is no record, or of another run than its name says.
    """
    records = [_record(path) for path in sorted(folder.glob("run-*.json"))]
    records.sort(key=lambda record: str(record.get("date", "")))
    return {str(record["run_id"]): record for record in records}


def _record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        record["device"]["name"], record["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"not a run record: {error}", where=str(path)) from None
    if f"run-{record['run_id']}.json" != path.name:
        raise DatasetError(
            f"the record is of run {record['run_id']!r}", where=str(path), hint="name it after that"
        )
    return dict(record)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a run."""
    write_text_json(folder / f"run-{record['run_id']}.json", record)


def write_text_json(path: Path, data: dict[str, Any]) -> None:
    """Write plain data as JSON through a temporary file and a rename."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True))


def consolidate(folder: Path | str, *, max_bytes: float = 20e6) -> Path:
    """Merge the shards of a dataset into one ``samples.parquet``, compressed harder.

    The merged file is in place before the shards go, and loading a dataset drops doubles, so a kill
    in between loses nothing.

    Raises:
        DatasetError: There is no dataset, or the merged file would exceed ``max_bytes``.
    """
    root = Path(folder)
    frame = Dataset.load(root).frame
    target = root / _MERGED
    ordered = frame.sort_values(["kind", "kernel_ir", "program"], kind="stable")
    with replacing(target) as partial:
        _write_small(ordered, partial)
        size = partial.stat().st_size
        if size > max_bytes:
            raise DatasetError(
                f"{len(frame)} samples take {size / 1e6:.1f} MB, more than {max_bytes / 1e6:.1f} "
                "MB",
                where=str(root),
                hint="raise max_bytes, or keep the shards",
            )
    for shard in root.glob("samples-*.parquet"):
        shard.unlink()
    return target


def _write_small(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(
        path, index=False, compression="zstd", compression_level=19,
        write_page_checksum=True,
    )  # fmt: skip
