"""Reads tables of any kind that an audit checks into one form of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, DeviceError, OpcastError
from ...common.parquet import read_table
from ...datagen.published.block_tables import block_rows
from ...datagen.published.packs import BLOCK_TABLES, PRODUCTS, conv_rows, kind_of, product_rows
from ...features.dataset import Dataset
from ...features.devices.catalogue import find_described, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.operators import family_keys
from ...features.operators.query import with_defaults
from ...features.operators.schema import families_told
from ...models.collectives.links import Links
from ...models.collectives.measurements import NEEDED, xla_rows
from ...models.collectives.table import PLATFORMS
from ...models.operators import rows_of_dataset
from ...simulate.collectives.choose import collective_name

#: ``key`` of rows that are no library operators: kernels of a dataset, and collectives.
KERNEL, COLLECTIVE = "kernel", "collective"
#: Columns beside an operator's parameters that tell rows apart; they are kept as ``is_…``.
_TELLING = (
    *("source", "version", "method", "layout", "dtype_detail", "out_dtype", "bias", "dtype_lhs"),
    *("dtype_rhs", "dtype_out", "table_commit", "gemm_dtype", "score_mode", "phase", "model"),
    *("layer", "tp", "detail", "platform", "pattern", "kind", "n_devices", "total_devices"),
    *("devices_per_node", "n_groups", "column", "compress_ratio", "tile"),
)
#: Columns of an operator table.
_OPERATORS = frozenset(("op", "family", "dtype", "device", "source", "latency_us"))

Tables = list[tuple[pd.DataFrame, dict[str, DeviceSpec]]]


def read_audited(path: Path, described: Mapping[str, DeviceSpec]) -> tuple[Tables, list[str]]:
    """Read a table, a folder of tables, or a dataset.

    Args:
        path: What to read.
        described: Devices of one's own, by name; a dataset's own descriptions give way to them.

    Returns:
        For each table its rows and the devices that it describes itself, and notes on what is not
        checked. Rows have ``file``, ``row``, ``id``, ``key`` (:data:`KERNEL`, :data:`COLLECTIVE` or
        a family of operators), ``device``, ``latency_us``, what the family needs, the columns that
        tell rows apart as ``is_…``, and ``marked``, whether their publisher marks them as wrong.

    Raises:
        DatasetError: There is no such table, or one cannot be read.
    """
    if not path.exists():
        raise DatasetError("no such table or folder", where=str(path))
    if path.is_dir() and any(path.glob("run-*.json")):
        return [_dataset(path, described)], []
    files = _files(path)
    tables: Tables = []
    notes = []
    for file in files:
        table = read_table(file)
        rows = _rows(table, file, described)
        if rows is None:
            if len(files) == 1:
                raise DatasetError(
                    "is no table that can be checked",
                    where=str(file),
                    hint="columns of operators (op, family, dtype, device, source, latency_us), of "
                    "XLA's tables, or of collectives ("
                    + ", ".join(NEEDED)
                    + "); "
                    + families_told(),
                )
            notes.append(f"{file.name}: no table of operators or collectives; not checked")
            continue
        tables.append((rows, dict(described)))
    return tables, notes


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [*path.rglob("*.parquet"), *path.rglob("*.csv"), *path.rglob("*.csv.gz")]
    if not files:
        raise DatasetError("no table here", where=str(path), hint="expected .parquet or .csv files")
    return sorted(files)


def _rows(
    table: pd.DataFrame, path: Path, described: Mapping[str, DeviceSpec]
) -> pd.DataFrame | None:
    """Rows of a table, or ``None`` for a table of something else."""
    columns = set(table.columns)
    table = table.reset_index(drop=True)
    try:
        if "latency_us" not in columns:
            return None
        kind = kind_of(columns)
        if kind in PRODUCTS:
            rows = product_rows(table)
            rows["key"] = family_keys(rows)
        elif kind == "conv":
            rows = conv_rows(table)
            rows["key"] = family_keys(rows)
        elif kind in BLOCK_TABLES:
            rows = block_rows(table)
        elif kind == "xla_collectives":
            rows = _collectives(xla_rows(table), described)
        elif columns >= set(NEEDED):
            rows = _collectives(table, described)
        elif columns >= _OPERATORS:
            keys = family_keys(table)
            rows = with_defaults(table.assign(key=keys), keys)
        else:
            return None
    except KeyError as error:
        raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
    except OpcastError as error:
        raise DatasetError(f"a row cannot be read: {error}", where=str(path)) from None
    told: dict[str, np.ndarray] = {"marked": _marked(table)}
    told |= {f"is_{c}": table[c].to_numpy() for c in _TELLING if c in columns}
    extra = {"origin": table["origin"].to_numpy()} if "origin" in columns else {}
    named = table["id"].astype(str).to_numpy() if "id" in columns else ""
    rows = rows.reset_index(drop=True).assign(**told, **extra, id=named)
    names = [n for n in rows["device"].unique() if n in described or in_catalogue(str(n))]
    devices = {n: find_described(str(n), described).name for n in names}
    known = rows["device"].map(devices).fillna(rows["device"])
    return rows.assign(file=path.name, row=np.arange(len(rows)), device=known)


def _marked(table: pd.DataFrame) -> np.ndarray:
    """Rows that their publisher marks as wrong, bool, shape ``(n,)``."""
    marked = np.zeros(len(table), bool)
    if "suspect" in table:
        marked |= (table["suspect"].fillna("").astype(str) != "").to_numpy()
    if "above_peak" in table:
        marked |= (pd.to_numeric(table["above_peak"], errors="coerce") == 1).to_numpy()
    return marked


def _collectives(rows: pd.DataFrame, described: Mapping[str, DeviceSpec]) -> pd.DataFrame:
    """Collectives with the least bytes that each device must send, and the links they cross."""
    if "device" not in rows:
        rows = rows.assign(device=rows["platform"].map(lambda p: PLATFORMS.get(p, (str(p),))[0]))
    # The tables write "NVIDIA A40 (vidur a40)"; the catalogue knows the part before.
    rows = rows.assign(device=rows["device"].astype(str).str.split(" (", regex=False).str[0])
    per_node = rows["devices_per_node"] if "devices_per_node" in rows else rows["world_size"]
    op = rows["op"].astype(str).map(collective_name)
    n = rows["world_size"].to_numpy(np.float64)
    # Even where a switch adds up, a device sends what is not its own share once.
    share = np.where(op.isin(["send_recv", "collective_permute", "broadcast"]), 1.0, (n - 1) / n)
    wire = rows["bytes"].to_numpy(np.float64) * share
    across = (n > per_node.to_numpy(np.float64)) & (op != "send_recv").to_numpy()
    # Across nodes, a node's devices may share what has to leave it.
    wire = np.where(across, wire / per_node.to_numpy(np.float64), wire)
    rate = _rates(rows, n, per_node.to_numpy(np.float64), described)
    backend = rows["backend"].astype(str) if "backend" in rows else ""
    kernel = rows["kernel"].astype(str) if "kernel" in rows else ""
    dtype = rows["dtype"].astype(str) if "dtype" in rows else ""
    figures: dict[str, np.ndarray | float] = {
        "_flops": 0.0,
        "_peak": 1.0,
        "_moved": wire,
        "_cache": 0.0,
        "_bandwidth": rate,
    }
    # Ten microseconds to start: an engineering estimate that only orders rows of one size.
    what = op + " " + dtype + " " + backend + " " + kernel
    return rows.assign(key=COLLECTIVE, what=what, **figures, _base=wire / rate + 1e-5)


def _rates(
    rows: pd.DataFrame,
    world: np.ndarray,
    per_node: np.ndarray,
    described: Mapping[str, DeviceSpec],
) -> np.ndarray:
    """Bytes/s that each device can send over the links that a group crosses."""
    rates = np.full(len(rows), np.inf)
    platform = rows["platform"].astype(str) if "platform" in rows else rows["device"]
    names = rows["device"].astype(str) + "\n" + platform.astype(str)
    for both, at in rows.groupby(names).indices.items():
        name, place = str(both).split("\n")
        if name not in described and not in_catalogue(name):
            continue
        try:
            links = Links.from_spec(
                find_described(name, described), **PLATFORMS.get(str(place), ("", {}))[1]
            )
        except DeviceError:
            # No links are described: nothing bounds its collectives.
            continue
        for i in at:
            fabric = links.fabric(int(world[i]), int(per_node[i]))
            rates[i] = links.bandwidth(fabric, int(world[i]))
    return rates


def _dataset(
    path: Path, described: Mapping[str, DeviceSpec]
) -> tuple[pd.DataFrame, dict[str, DeviceSpec]]:
    data = Dataset.load(path)
    devices = {**data.devices, **described}
    if data.of_operators:
        rows = rows_of_dataset(data)
    else:
        frame = data.frame
        rows = frame[["device", "kernel_hash"]].copy()
        rows["latency_us"], rows["key"] = frame["latency_us_p50"], KERNEL
        rows["what"] = frame["level"] + " " + frame["kind"] + " " + frame["kernel_hash"]
        specs = [devices[name] for name in frame["device"]]
        kinds = zip(specs, frame["dtype"], strict=True)
        rows["_peak"] = [max(s.matrix_peak(t), s.vector_peak(t)) for s, t in kinds]
        rows["_flops"], rows["_moved"] = frame["flops"], frame["bytes"]
        rows["_cache"] = [s.cache_bytes for s in specs]
        rows["_bandwidth"] = [s.bandwidth for s in specs]
        rows["_base"] = np.maximum(
            rows["_flops"] / rows["_peak"], rows["_moved"] / rows["_bandwidth"]
        ) + [s.floor for s in specs]
        rows["id"] = frame["sample_id"]
    kept = rows.reset_index(drop=True)
    return kept.assign(file=path.name, row=np.arange(len(kept)), marked=False), devices
