"""Datasets of measured latencies: parquet shards with a run record beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from ._device_figures import check_name
from .device import DeviceSpec
from .errors import DatasetError
from .files import parse_json, replacing, write_text
from .tables import read_table

#: Columns of a dataset, one row a sample; units in the names.
COLUMNS: dict[str, str] = {
    "sample_id": "str",
    "kernel_hash": "str",
    "kernel_ir": "str",
    "level": "str",
    "kind": "str",
    "dtype": "str",
    "device": "str",
    "latency_us_p10": "float64",
    "latency_us_p50": "float64",
    "latency_us_p90": "float64",
    "repeats": "int64",
    "flops": "float64",
    "bytes": "float64",
    "source": "str",
    "run_id": "str",
    "family": "str",
    "program": "str",
}
#: Columns that a dataset may have: ``split`` is the part that the publisher of a row put it in.
OPTIONAL = ("split",)
LEVELS = ("op", "kernel", "program")


@dataclass
class Dataset:
    """Samples and the records of the runs that made them.

    Attributes:
        frame: Columns as in :data:`COLUMNS`. ``level`` is ``op`` for a program of one op,
            ``kernel`` for a kernel of a larger program, ``program`` for whole-program wall time.
            A ``program`` row's ``kernel_ir`` is JSON (see :mod:`opcast.features.schedule`).
        runs: Run records by ``run_id``; each holds ``device`` (a :class:`DeviceSpec` as data).
    """

    frame: pd.DataFrame
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Device descriptions by name, from the run records (the last run of a device wins)."""
        specs = (DeviceSpec.from_dict(run["device"], where=rid) for rid, run in self.runs.items())
        return {spec.name: spec for spec in specs}

    @property
    def hash(self) -> str:
        """Digest of sample ids and labels, independent of row order."""
        ordered = self.frame.sort_values("sample_id", kind="stable")
        digest = hashlib.sha256("\n".join(ordered["sample_id"]).encode())
        digest.update(
            np.ascontiguousarray(ordered["latency_us_p50"].to_numpy(np.float64)).tobytes()
        )
        return digest.hexdigest()[:16]

    def select(self, mask: Sequence[bool] | np.ndarray | pd.Series) -> Dataset:
        """Rows where ``mask`` holds, with the same run records."""
        return Dataset(self.frame[np.asarray(mask)].reset_index(drop=True), self.runs)

    def at_level(self, *levels: str) -> Dataset:
        """Rows of the given levels."""
        return self.select(self.frame["level"].isin(levels))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.frame)

    @classmethod
    def load(cls, *paths: Path | str) -> Dataset:
        """Read every ``*.parquet`` shard and ``run-*.json`` record of the given folders.

        Raises:
            DatasetError: A folder holds no shard, a column is missing, or a run has no record.
        """
        frames: list[pd.DataFrame] = []
        runs: dict[str, dict[str, Any]] = {}
        for root in map(Path, paths):
            shards = sorted(root.glob("*.parquet")) if root.is_dir() else []
            if not shards:
                raise DatasetError(
                    "no dataset here: expected *.parquet and run-*.json",
                    where=str(root),
                    hint="make one with: opcast profile --out DIR",
                )
            frames += [_read_shard(shard) for shard in shards]
            for record in sorted(root.glob("run-*.json")):
                runs[record.stem.removeprefix("run-")] = _read_record(record)
        frame = pd.concat(frames, ignore_index=True).drop_duplicates("sample_id", keep="last")
        orphans = sorted(set(frame["run_id"]) - set(runs))
        if orphans:
            raise DatasetError(
                f"run record run-{orphans[0]}.json is missing", where=", ".join(map(str, paths))
            )
        return cls(frame.reset_index(drop=True), runs)

    def save(self, path: Path | str, shard: str = "samples.parquet") -> None:
        """Write one shard and the run records; a half-written file is never left behind."""
        root = Path(path)
        root.mkdir(parents=True, exist_ok=True)
        write_shard(self.frame, root / shard)
        for run_id, record in self.runs.items():
            write_text(root / f"run-{run_id}.json", json.dumps(record, indent=1, sort_keys=True))


def sample_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """A frame with exactly the dataset's columns and types.

    Raises:
        DatasetError: A column is missing.
    """
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return frame.astype({c: t for c, t in COLUMNS.items() if t != "str"})


def write_shard(frame: pd.DataFrame, path: Path) -> None:
    """Write a parquet shard through a temporary file and a rename."""
    write_table(frame[_columns(frame)], path, compression="zstd")


def write_table(
    frame: pd.DataFrame, path: Path, compression: Literal["snappy", "zstd"] = "snappy"
) -> None:
    """Write any table as parquet through a temporary file and a rename."""
    with replacing(path) as partial:
        frame.to_parquet(partial, index=False, compression=compression, write_page_checksum=True)


def _read_shard(path: Path) -> pd.DataFrame:
    frame = read_table(path)
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing:
        raise DatasetError(f"column {missing[0]!r} is missing", where=str(path))
    return frame[_columns(frame)]


def _columns(frame: pd.DataFrame) -> list[str]:
    return [*COLUMNS, *(c for c in OPTIONAL if c in frame.columns)]


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        check_name(record["device"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"not a run record: {error}", where=str(path)) from None
    return dict(record)
