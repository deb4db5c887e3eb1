"""Measured collectives from files: nccl-tests output, published tables, a user's CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.catalogue import find_device
from ...features.operators.schema import sources
from ...simulate.collectives.choose import collective_name
from .links import Links
from .model import FindLinks
from .table import PLATFORMS, RING_PERMUTE, XLA, device_rows

#: Columns that a CSV must have, besides ``device`` or ``platform``.
NEEDED = ("op", "bytes", "world_size", "latency_us")
#: Names of operations in the fitted tables that differ from opcast's.
_TABLE_NAMES = {"all_to_all": "alltoall"}
#: Columns that identify a table of XLA's collectives (README of the XLA pack).
XLA_COLUMNS = frozenset(("device", "kind", "pattern", "n_devices", "total_devices", "bytes"))
# Output of nccl-tests (common.cu): "#  Rank  0 Group  0 Pid … on HOST device  0 [0x…] NVIDIA …",
# and rows of size, count, type, redop, root, then time, algbw and busbw out of place.
_RANK = re.compile(r"^#\s+Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_TEST = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast)(?:_perf)?")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\S+)\s+(-?\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)")


def read_collectives(
    paths: Sequence[Path], device: str = "", op: str = ""
) -> tuple[pd.DataFrame, FindLinks]:
    """Read measurements, and find the links of their devices.

    Args:
        paths: Files of nccl-tests output; tables of XLA's collectives; CSV files (also
            ``.csv.gz``) with the columns :data:`NEEDED` and ``device`` or ``platform``, and
            optionally ``backend``, ``devices_per_node``, ``dtype``, ``kernel``, ``split``,
            ``source``; or folders with ``collectives*.csv*`` and device tables ``devices*.csv``.
        device: Device of rows that name none; overrides the device in nccl-tests output.
        op: Operation, if the output of nccl-tests does not name it.

    Returns:
        Rows with ``split`` and ``source``, and links by device: from device tables next to the
        rows, else from the catalogue.

    Raises:
        DatasetError: A file is missing, of another format, or lacks columns.
    """
    frames, tables = [], []
    for path in paths:
        for file in _files(path):
            frames.append(_read(file, device, op))
        folder = path if path.is_dir() else path.parent
        tables += [pd.read_csv(t) for t in sorted(folder.glob("devices*.csv"))]
    rows = pd.concat(frames, ignore_index=True)
    return rows, _find(tables)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DatasetError("no such file or folder", where=str(path))
    files = sorted(path.glob("collectives*.csv*")) if path.is_dir() else [path]
    if not files:
        raise DatasetError("no collectives*.csv in this folder", where=str(path))
    return files


def _read(path: Path, device: str, op: str) -> pd.DataFrame:
    if path.name.endswith((".csv", ".csv.gz")):
        rows = _read_csv(path)
        if device and "device" not in rows and "platform" not in rows:
            rows["device"] = device
    else:
        rows = parse_nccl_tests(path.read_text(errors="replace"), str(path), device, op)
    for column, value in (("split", "train"), ("source", path.name.split(".")[0])):
        if column not in rows:
            rows[column] = value
    return rows


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot be read as CSV: {error}", where=str(path)) from None
    if set(rows.columns) >= XLA_COLUMNS:
        rows = xla_rows(rows)
        return rows[(rows["world_size"] > 1) & ~rows["suspect"]].reset_index(drop=True)
    missing = [c for c in NEEDED if c not in rows]
    if missing:
        hint = f"needed: {', '.join(NEEDED)}, and device or platform"
        raise DatasetError(f"columns {missing} are missing", where=str(path), hint=hint)
    plain = {name: collective_name(name) for name in set(rows["op"].astype(str))}
    return rows.assign(op=rows["op"].map(lambda o: _TABLE_NAMES.get(plain[o], plain[o])))


def xla_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Bring XLA's table of collectives into the form of measured rows.

    Args:
        table: One collective per row, over ``n_devices`` of a domain of ``total_devices``.

    Returns:
        ``id`` (the row number if the table has none), ``op``, ``bytes``, ``world_size``,
        ``devices_per_node`` (the domain), ``device``, ``backend``, ``group`` (devices measured as
        one), ``dtype``, ``source``, and ``split`` and ``latency_us`` if given; ``suspect`` marks
        rows of an older generator whose byte count is unknown.
    """
    device = table["device"].astype(str)
    rows = pd.DataFrame({"device": device, "bytes": table["bytes"], "source": "xla"})
    rows["id"] = table["id"].astype(str) if "id" in table else np.arange(len(table)).astype(str)
    rows["op"] = [_xla_op(*names) for names in zip(table["kind"], table["pattern"], strict=True)]
    # A permute is a transfer between two devices, however many run at once.
    pairs = rows["op"].isin(["send_recv", RING_PERMUTE]) & (table["n_devices"] > 1)
    rows["world_size"] = table["n_devices"].where(~pairs, 2)
    rows["devices_per_node"] = table["total_devices"]
    rows["backend"], rows["group"] = XLA, device.replace(dict(sources()[XLA].as_one))
    for column in ("dtype", "split", "latency_us"):
        if column in table:
            rows[column] = table[column]
    rows["suspect"] = table["current"].eq(0) if "current" in table else False
    return rows


def _xla_op(kind: object, pattern: object) -> str:
    name = collective_name(str(kind))
    # Pairwise or one way, each device has one peer; a ring shifts from each to the next.
    if name == RING_PERMUTE and pattern != "ring":
        return "send_recv"
    return _TABLE_NAMES.get(name, name)


def parse_nccl_tests(
    text: str, where: str = "nccl-tests", device: str = "", op: str = ""
) -> pd.DataFrame:
    """Read rows from the output of ``all_reduce_perf`` etc.: bytes and out-of-place times.

    A text may contain several outputs. The operation is the name of the program, which newer
    versions print, or which the text or ``where`` contains; device and numbers of devices and nodes
    come from the list of ranks.

    Raises:
        DatasetError: There is no row of results, or operation, ranks or device are unknown.
    """
    rows: list[dict[str, object]] = []
    hosts: dict[int, str] = {}
    kind, named_device = op, device
    for line in text.splitlines():
        if rank := _RANK.match(line):
            # Rank 0 starts the list of another run.
            hosts = {} if rank[1] == "0" else hosts
            hosts[int(rank[1])] = rank[2]
            named_device = device or rank[3]
        elif (named := _TEST.search(line)) and not op:
            kind = named[1]
        # Rows of size 0 or without a time hold no measurement.
        elif (row := _ROW.match(line)) and float(row[6]) > 0 and int(row[1]) > 0:
            if not kind and (named := _TEST.search(Path(where).name)):
                kind = named[1]
            rows.append(_nccl_row(row, kind, named_device, hosts, where))
    if not rows:
        raise DatasetError("no results of nccl-tests", where=where, hint="give its whole output")
    return pd.DataFrame(rows)


def _nccl_row(
    row: re.Match[str], kind: str, device: str, hosts: dict[int, str], where: str
) -> dict[str, object]:
    for value, what, hint in (
        (kind, "the operation is missing", "name it with --op"),
        (hosts, "the list of ranks is missing", "give the whole output of nccl-tests"),
        (device, "the device is missing", "name it with --device"),
    ):
        if not value:
            raise DatasetError(what, where=where, hint=hint)
    name = collective_name(kind)
    return {
        "op": _TABLE_NAMES.get(name, name),
        "bytes": int(row[1]),
        "dtype": row[3],
        "world_size": len(hosts),
        "devices_per_node": len(hosts) // len(set(hosts.values())),
        "device": device,
        "backend": "nccl",
        "latency_us": float(row[6]),
    }


def _find(tables: list[pd.DataFrame]) -> FindLinks:
    listed = {str(d) for table in tables for d in table["device"]}
    from_tables = device_rows(*tables)

    def find(name: str) -> Links:
        if name in listed:
            return from_tables(name)
        # The tables write "NVIDIA A40 (vidur a40)"; the catalogue has the part before " (".
        plain = name.split(" (")[0] if name in {d for d, _ in PLATFORMS.values()} else name
        return Links.from_spec(find_device(plain))

    return find


def size_bins(size: np.ndarray) -> np.ndarray:
    """Names of the size ranges in reports, shape ``(n,)``."""
    names = np.array(["up to 32 KiB", "32 KiB to 1 MiB", "1 to 16 MiB", "above 16 MiB"])
    # The + 1 puts a size equal to an edge below it ("up to").
    return np.asarray(names[np.digitize(size, [2**15 + 1, 2**20 + 1, 2**24 + 1])])
