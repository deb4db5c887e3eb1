"""Rows to audit, from tables of any kind in one format, with their physical estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, DeviceError, OpcastError
from ...common.parquet import read_table
from ...datagen.published.block_tables import block_rows
from ...datagen.published.packs import (
    BLOCK_TABLES,
    PRODUCTS,
    conv_rows,
    doubted,
    kind_of,
    product_rows,
)
from ...features.cost.formats import TABLE_FORMATS
from ...features.dataset import Dataset
from ...features.devices.catalogue import find_described, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.operators import family_keys
from ...features.operators.columns import OpTable
from ...features.operators.conv import WINOGRAD_SAVING
from ...features.operators.features import op_features
from ...features.operators.query import with_defaults
from ...features.operators.schema import BLOCKS, FAMILIES, NAMES, families_hint, parameters_of
from ...models.collectives.links import Links
from ...models.collectives.measurements import NEEDED, xla_rows
from ...models.collectives.table import PLATFORMS
from ...models.operators import rows_of_dataset
from ...simulate.collectives.choose import collective_name

#: ``key`` of rows that are not library operators: kernels of a dataset, and collectives.
KERNEL, COLLECTIVE = "kernel", "collective"
#: Columns besides an operator's parameters that distinguish rows; they are kept as ``is_…``.
_TELLING = (
    *("source", "version", "method", "layout", "dtype_detail", "out_dtype", "bias", "dtype_lhs"),
    *("dtype_rhs", "dtype_out", "table_commit", "gemm_dtype", "score_mode", "phase", "model"),
    *("layer", "tp", "detail", "platform", "pattern", "kind", "n_devices", "total_devices"),
    *("devices_per_node", "n_groups", "column", "compress_ratio", "tile"),
)
#: File name patterns of tables.
_ENDS = ("*.parquet", "*.csv", "*.csv.gz")
#: Columns of an operator table.
_OPERATORS = frozenset(("op", "family", "dtype", "device", "source", "latency_us"))
#: Excess over a data sheet's value that is tolerated, since clocks and rates are rounded. The
#: published tables respect the peak within 2 % (tensor-core pack, known data problems).
SLACK = 1.02
#: Physical estimates of each row.
_FIGURES = ("flops", "peak", "moved", "cache", "bandwidth", "base")

Tables = list[tuple[pd.DataFrame, dict[str, DeviceSpec]]]


def read_audited(path: Path, described: Mapping[str, DeviceSpec]) -> tuple[Tables, list[str]]:
    """Read a table, a folder of tables, or a dataset.

    Args:
        path: What to read.
        described: The user's own devices, by name; they take precedence over a dataset's.

    Returns:
        For each table its rows and the devices that it describes, and notes on what is not checked.
        Rows have ``file``, ``row``, ``id``, ``key`` (:data:`KERNEL`, :data:`COLLECTIVE` or an
        operator family), ``device``, ``latency_us``, the family's parameters, columns that
        distinguish rows as ``is_…``, and ``marked`` (marked as wrong by the publisher).

    Raises:
        DatasetError: There is no such table, or one cannot be read.
    """
    if not path.exists():
        raise DatasetError("no such table or folder", where=str(path))
    if path.is_dir() and any(path.glob("run-*.json")):
        return [_dataset(path, described)], []
    files = [path] if path.is_file() else sorted(p for end in _ENDS for p in path.rglob(end))
    if not files:
        raise DatasetError("no table here", where=str(path), hint="expected .parquet or .csv files")
    tables: Tables = []
    notes = []
    for file in files:
        table = read_table(file)
        rows = _rows(table, file, described)
        if rows is None:
            if len(files) == 1:
                hint = (
                    "give columns of operators (op, family, dtype, device, source, latency_us), of "
                    f"XLA's tables, or of collectives ({', '.join(NEEDED)}); {families_hint()}"
                )
                raise DatasetError("the table cannot be checked", where=str(file), hint=hint)
            notes.append(f"{file.name}: not a table of operators or collectives; not checked")
            continue
        tables.append((rows, dict(described)))
    return tables, notes


def _rows(
    table: pd.DataFrame, path: Path, described: Mapping[str, DeviceSpec]
) -> pd.DataFrame | None:
    """Return the rows of a table, or ``None`` for a table of something else."""
    columns = set(table.columns)
    table = table.reset_index(drop=True)
    try:
        kind = kind_of(columns)
        if "latency_us" not in columns:
            return None
        if kind in (*PRODUCTS, "conv"):
            rows = conv_rows(table) if kind == "conv" else product_rows(table)
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
    told: dict[str, np.ndarray] = {"marked": doubted(table)}
    told |= {f"is_{c}": table[c].to_numpy() for c in _TELLING if c in columns}
    told |= {"origin": table["origin"].to_numpy()} if "origin" in columns else {}
    named = table["id"].astype(str).to_numpy() if "id" in columns else ""
    rows = rows.reset_index(drop=True).assign(**told, id=named)
    names = [n for n in rows["device"].unique() if n in described or in_catalogue(str(n))]
    devices = {n: find_described(str(n), described).name for n in names}
    known = rows["device"].map(devices).fillna(rows["device"])
    return rows.assign(file=path.name, row=np.arange(len(rows)), device=known)


def _collectives(rows: pd.DataFrame, described: Mapping[str, DeviceSpec]) -> pd.DataFrame:
    """Add the minimum bytes that each device must send, and the rates of its links."""
    if "device" not in rows:
        rows = rows.assign(device=rows["platform"].map(lambda p: PLATFORMS.get(p, (str(p),))[0]))
    # The tables have names such as "NVIDIA A40 (vidur a40)"; the catalogue has the first part.
    rows = rows.assign(device=rows["device"].astype(str).str.split(" (", regex=False).str[0])
    per_node = rows["devices_per_node"] if "devices_per_node" in rows else rows["world_size"]
    op = rows["op"].astype(str).map(collective_name)
    n = rows["world_size"].to_numpy(np.float64)
    # Even with in-switch reduction, a device sends everything except its own share once.
    share = np.where(op.isin(["send_recv", "collective_permute", "broadcast"]), 1.0, (n - 1) / n)
    wire = rows["bytes"].to_numpy(np.float64) * share
    across = (n > per_node.to_numpy(np.float64)) & (op != "send_recv").to_numpy()
    # Across nodes, the devices of a node may share the outgoing traffic.
    wire = np.where(across, wire / per_node.to_numpy(np.float64), wire)
    rate = _rates(rows, n, per_node.to_numpy(np.float64), described)
    figures: dict[str, np.ndarray | float] = {
        "_flops": 0.0,
        "_peak": 1.0,
        "_moved": wire,
        "_cache": 0.0,
        "_bandwidth": rate,
    }
    # Ten microseconds of latency: an engineering estimate that only ranks rows of one size.
    what = op
    for column in ("dtype", "backend", "kernel"):
        what = what + " " + (rows[column].astype(str) if column in rows else "")
    return rows.assign(key=COLLECTIVE, what=what, **figures, _base=wire / rate + 1e-5)


def _rates(
    rows: pd.DataFrame,
    world: np.ndarray,
    per_node: np.ndarray,
    described: Mapping[str, DeviceSpec],
) -> np.ndarray:
    """Return the bytes/s that each device can send over the links of a group."""
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
            # Without described links there is no bound on collectives.
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


#: Reasons in the order in which they are reported, and whether each is impossible.
REASONS = {
    "no time": True,
    "above the peak": True,
    "above the bandwidth": True,
    "another unit": True,
    "below a launch": True,
    "just above the peak": False,
    "far from physics": False,
    "group above the peak": False,
    "above an estimated bound": False,
    "slower than a larger one": False,
    "equal rows disagree": False,
    "times of other rows": False,
    "slow file": False,
}


@dataclass
class AuditPart:
    """Rows of one family with their physical estimates; arrays have shape ``(n,)``.

    ``slow`` marks rows of files that are slow as a whole; they are not compared with others.
    """

    key: str
    rows: pd.DataFrame
    seconds: np.ndarray
    flops: np.ndarray
    peak: np.ndarray
    moved: np.ndarray
    cache: np.ndarray
    bandwidth: np.ndarray
    base: np.ndarray
    identity: dict[str, np.ndarray]
    slow: np.ndarray
    found: list[pd.DataFrame] = field(default_factory=list)

    def over_peak(self) -> np.ndarray:
        """Return whether rows exceed the peak, bool."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.flops / self.peak / self.seconds > SLACK)

    def log_ratio(self) -> np.ndarray:
        """Return the binary log of measured over expected time; NaN without a positive time."""
        ratio = np.divide(
            self.seconds, self.base, out=np.full(len(self.base), np.nan), where=self.base > 0
        )
        sound = np.isfinite(ratio) & (ratio > 0)
        return np.asarray(np.log2(ratio, out=np.full(len(ratio), np.nan), where=sound))

    def group(self, *columns: str) -> np.ndarray:
        """Return the joined text of the available columns, object."""
        group = pd.Series("", index=self.rows.index)
        for column in columns:
            if column in self.rows:
                # A CSV file has empty cells where no library is named.
                named = self.rows[column].astype(object)
                group = group + " " + named.where(named.notna(), "").astype(str)
        return np.asarray(group.str.strip(), object)

    def flag(self, reason: str, at: np.ndarray, evidence: np.ndarray, text: list[str]) -> None:
        """Record the rows at positions ``at`` with their evidence and explanation."""
        if not len(at):
            return
        part = self.rows.iloc[at]
        kept = part[["file", "row", "id", "device", "latency_us"]].reset_index(drop=True)
        what = part.get("what", self.key)
        found = kept.assign(what=np.asarray(what), reason=reason, impossible=REASONS[reason])
        self.found.append(found.assign(evidence=evidence, explanation=text))


def audit_part(
    key: str, rows: pd.DataFrame, devices: Mapping[str, DeviceSpec], notes: list[str]
) -> AuditPart:
    """Add physical estimates to rows.

    Args:
        key: Family or kind of the rows.
        rows: Rows from :func:`read_audited`.
        devices: Descriptions by the names in ``device``.
        notes: Receives notes on what is not checked, and why.

    Raises:
        DatasetError: A column of the family's sizes is missing.
    """
    seconds = pd.to_numeric(rows["latency_us"], errors="coerce").to_numpy(np.float64) * 1e-6
    extra = [c for c in rows if str(c).startswith("is_")]
    if key in (KERNEL, COLLECTIVE):
        figures = {c: rows[f"_{c}"].to_numpy(np.float64) for c in _FIGURES}
        names = ["device", "what", *(c for c in ("bytes", "world_size") if c in rows), *extra]
    else:
        rows, seconds, figures = _operators(key, rows, seconds, devices, notes)
        names = ["device", *NAMES, *parameters_of(key), *extra]
    identity = {c: _hashes(rows[c], c) for c in map(str, names) if c in rows}
    slow = np.zeros(len(rows), bool)
    flops, peak, moved, cache, bandwidth, base = (figures[c] for c in _FIGURES)
    return AuditPart(key, rows, seconds, flops, peak, moved, cache, bandwidth, base, identity, slow)


def _operators(
    key: str,
    rows: pd.DataFrame,
    seconds: np.ndarray,
    devices: Mapping[str, DeviceSpec],
    notes: list[str],
) -> tuple[pd.DataFrame, np.ndarray, dict[str, np.ndarray]]:
    """Estimate operators; rows with invalid sizes are removed, with a note."""
    good = _describable(key, rows)
    if not good.all():
        notes.append(f"{int((~good).sum())} rows of {key} have no valid sizes; not checked")
        rows, seconds = rows[good].reset_index(drop=True), seconds[good]
    features = op_features(rows, key, devices)
    table = OpTable.of(rows, key, parameters_of(key), devices)
    machine, peak = table.machine(), table.matrix_peak()
    group, read = FAMILIES.get(key), np.ones(len(rows))
    if group in ("conv", "conv_nd"):
        # Fast algorithms save multiplications if a filter has several taps.
        taps = _product(rows, ("kd", "kh", "kw", "ksize"))
        peak = np.where(taps > 1, WINOGRAD_SAVING * peak, peak)
        # Strides larger than the filter skip inputs.
        steps = _product(rows, ("stride", "stride_d", "stride_h", "stride_w"))
        read = np.minimum(1.0, taps / steps)
    if "kv_dtype" in rows and rows["kv_dtype"].astype(str).str.contains("fp8").any():
        # Some libraries compute in the KV cache's format (tensor-core pack).
        narrow = rows["kv_dtype"].astype(str).str.contains("fp8").to_numpy()
        rate = TABLE_FORMATS["fp8"].rate
        fast = table.of_device(lambda device: device.matrix_peak(rate))
        peak = np.where(narrow, np.maximum(peak, fast), peak)
    figures = {
        "flops": features.flops,
        # Element-wise work may use the vector unit.
        "peak": np.maximum(peak, table.vector_peak()),
        "moved": features.moved * read,
        "cache": machine.cache,
        "bandwidth": machine.bandwidth,
        "base": features.base_s,
    }
    return rows, seconds, figures


def _product(rows: pd.DataFrame, names: tuple[str, ...]) -> np.ndarray:
    """Return the product of the available sizes; a size for both dimensions counts twice."""
    total: np.ndarray = np.ones(len(rows))
    for name in names:
        if name in rows:
            size = pd.to_numeric(rows[name]).to_numpy(np.float64)
            total = total * (size**2 if name in ("ksize", "stride") else size)
    return total


def _describable(key: str, rows: pd.DataFrame) -> np.ndarray:
    optional = {"n_in", "window", "causal", "channels_last", "trans_a", "trans_b"}
    optional |= {"preshuffled", "rotated"} | {c for c in parameters_of(key) if c.startswith("pad")}
    missing = [n for n in parameters_of(key) if n not in rows and n != "n_in"]
    if missing:
        raise DatasetError(
            f"{key} needs the columns {', '.join(missing)}",
            where=str(rows["file"].iloc[0]),
            hint="its columns are "
            + ", ".join(parameters_of(key))
            + "; those that are optional in "
            "opcast predict --op are optional here, too",
        )
    good = np.ones(len(rows), bool)
    for name in parameters_of(key):
        if name != "n_in":
            least = 0 if name in optional or key in BLOCKS else 1
            values = pd.to_numeric(rows[name], errors="coerce")
            good &= values.to_numpy(np.float64, na_value=np.nan) >= least
    return good


def _hashes(values: pd.Series, name: str) -> np.ndarray:
    code, distinct = pd.factorize(values.astype(object).where(values.notna(), ""))
    texts = np.array([f"{name}={v}" for v in distinct], object)
    return np.asarray(pd.util.hash_array(texts).astype(np.uint64)[code])
