"""Datasets of measured latencies: parquet shards with run records."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..common.errors import DatasetError
from ..common.files import parse_json, write_text
from ..common.parquet import read_table, write_table
from ..common.types import JsonObject
from .devices.device import DeviceSpec, check_name
from .devices.identity import base_name, distinct_runs

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

#: Columns of a dataset, one row per sample; units are part of the names.
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
#: Optional columns: ``split`` is the split to which a row's publisher assigned it, ``version`` the
#: version of the library that ran it.
OPTIONAL = ("split", "version")
#: Columns that identify a sample of a simulator or a publisher, by the first part of ``source``;
#: their joined values are hashed. They differ for historical reasons, because ids of existing
#: datasets must not change.
IDENTITY: dict[str, tuple[str, ...]] = {
    "simulator": ("kernel_hash", "program", "device", "run_id"),
    "published": ("kernel_hash", "run_id", "program"),
}
#: The same for all other samples: a kernel may be measured alone and as a whole program.
DEFAULT_IDENTITY = ("kernel_hash", "level", "program", "device", "run_id")
#: Key that only run records of imported tables have: the publisher's name of the device.
PUBLISHED_NAME = "published_name"


@dataclass
class Dataset:
    """Samples and the records of the runs that produced them.

    Attributes:
        frame: Columns as in :data:`COLUMNS`. ``level`` is ``operator`` for a library call, ``op``
            for a program of one op, ``kernel`` for a kernel of a larger program, and ``program``
            for whole-program wall time. A ``program`` row's ``kernel_ir`` is JSON (see
            :mod:`opcast.features.kernels.program_json`).
        runs: Run records by ``run_id``; each contains ``device`` (a :class:`DeviceSpec` as data).
    """

    frame: pd.DataFrame
    runs: dict[str, JsonObject] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Device descriptions by name, from the run records (the last run of a device wins)."""
        specs = (DeviceSpec.from_dict(run["device"], where=rid) for rid, run in self.runs.items())
        return {spec.name: spec for spec in specs}

    @property
    def hash(self) -> str:
        """Digest of sample ids and labels, independent of row order."""
        # Sorted, so that merged and re-saved datasets keep their digest.
        ordered = self.frame.sort_values("sample_id", kind="stable")
        digest = hashlib.sha256("\n".join(ordered["sample_id"]).encode())
        digest.update(
            np.ascontiguousarray(ordered["latency_us_p50"].to_numpy(np.float64)).tobytes()
        )
        return digest.hexdigest()[:16]

    @property
    def of_operators(self) -> bool:
        """Whether its rows are library operators rather than kernels and programs.

        Raises:
            DatasetError: There are both, which no model learns from together.
        """
        operators = (self.frame["level"] == "operator").to_numpy()
        if operators.any() and not operators.all():
            raise DatasetError(
                f"{operators.sum()} rows are of library operators, {(~operators).sum()} of kernels "
                "and programs",
                hint="give datasets of one kind",
            )
        return bool(operators.any())

    def select(self, mask: Sequence[bool] | np.ndarray | pd.Series) -> Dataset:
        """Select the rows where ``mask`` holds, with the same run records."""
        return Dataset(self.frame[np.asarray(mask)].reset_index(drop=True), self.runs)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.frame)

    @classmethod
    def load(cls, *paths: Path | str) -> Dataset:
        """Read every ``*.parquet`` shard and ``run-*.json`` record of the given folders.

        Runs on machines that share a name but measure differently count as different devices: all
        except those similar to the oldest one are renamed (:mod:`.devices.identity`).

        Raises:
            DatasetError: A folder contains no shard, a column is missing, or a run has no record.
        """
        import pandas as pd

        frames: list[pd.DataFrame] = []
        runs: dict[str, JsonObject] = {}
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
                runs[record.stem.removeprefix("run-")] = read_record(record)
        # The last of equal ids wins: re-measured samples are appended in later shards.
        frame = pd.concat(frames, ignore_index=True).drop_duplicates("sample_id", keep="last")
        # Without its record a row has no device description and so no features.
        missing = sorted(set(frame["run_id"]) - set(runs))
        if missing:
            raise DatasetError(
                f"run record run-{missing[0]}.json is missing", where=", ".join(map(str, paths))
            )
        # Tables imported by earlier versions have the level of single-op programs.
        imported = [run_id for run_id, record in runs.items() if PUBLISHED_NAME in record]
        if imported:
            old = frame["run_id"].isin(imported) & (frame["level"] == "op")
            frame = frame.assign(level=frame["level"].mask(old, "operator"))
        return cls(*_renamed_devices(frame.reset_index(drop=True), runs))

    def save(self, path: Path | str, shard: str = "samples.parquet") -> None:
        """Write one shard and the run records atomically."""
        root = Path(path)
        root.mkdir(parents=True, exist_ok=True)
        write_shard(self.frame, root / shard)
        for run_id, record in self.runs.items():
            write_record(root, run_id, record)


def _renamed_devices(
    frame: pd.DataFrame, runs: dict[str, JsonObject]
) -> tuple[pd.DataFrame, dict[str, dict[str, object]]]:
    """Rename devices where runs of several devices share a name."""
    names = distinct_runs(runs)
    runs = dict(runs)
    for run_id, name in names.items():
        # Run by run, since rows of one folder may come from several machines.
        own = frame["run_id"] == run_id
        frame.loc[own & (frame["device"].map(base_name) == base_name(name)), "device"] = name
        device = runs[run_id]["device"]
        if device["name"] != name:
            logger.warning(
                "run %s was made on a machine that measures differently from the %s of earlier "
                "runs: its device is called %s",
                run_id,
                device["name"],
                name,
            )
            runs[run_id] = {**runs[run_id], "device": {**device, "name": name}}
    return frame, runs


def sample_frame(rows: Iterable[dict[str, object]]) -> pd.DataFrame:
    """Build a frame with the dataset's columns and types, and the optional ones that rows have.

    Raises:
        DatasetError: A column is missing.
    """
    import pandas as pd

    listed = list(rows)
    extra = [c for c in OPTIONAL if any(c in row for row in listed)]
    frame = pd.DataFrame(listed, columns=[*COLUMNS, *extra])
    return frame.astype({c: t for c, t in COLUMNS.items() if t != "str"})


def write_shard(frame: pd.DataFrame, path: Path) -> None:
    """Write a parquet shard through a temporary file and a rename."""
    write_table(frame[_columns(frame)], path, compression="zstd")


def _read_shard(path: Path) -> pd.DataFrame:
    frame = read_table(path)
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing:
        raise DatasetError(f"column {missing[0]!r} is missing", where=str(path))
    return frame[_columns(frame)]


def _columns(frame: pd.DataFrame) -> list[str]:
    return [*COLUMNS, *(c for c in OPTIONAL if c in frame.columns)]


def sample_ids(frame: pd.DataFrame) -> list[str]:
    """Compute the digests that identify samples (:data:`IDENTITY`, :data:`DEFAULT_IDENTITY`).

    Args:
        frame: Rows with the dataset's columns except ``sample_id``.
    """
    sources = frame["source"].str.split(":").str[0].tolist()
    values = {c: frame[c].tolist() for c in {*DEFAULT_IDENTITY, *sum(IDENTITY.values(), ())}}
    identities = (
        "|".join(values[c][i] for c in IDENTITY.get(source, DEFAULT_IDENTITY))
        for i, source in enumerate(sources)
    )
    # 64 bits: among ten million samples the probability of a collision is about 3e-6.
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in identities]


def record_path(folder: Path, run_id: str) -> Path:
    """Return the path of a run's record."""
    return folder / f"run-{run_id}.json"


def write_record(folder: Path, run_id: str, record: Mapping[str, object]) -> None:
    """Write the record of a run atomically."""
    text = json.dumps(record, indent=1, sort_keys=True)
    write_text(record_path(folder, run_id), text)


def read_record(path: Path) -> dict[str, object]:
    """Read the record of a run.

    Raises:
        DatasetError: It cannot be read, or does not name its device.
    """
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        check_name(record["device"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"not a run record: {error}", where=str(path)) from None
    return dict(record)
