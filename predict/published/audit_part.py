"""Rows of one family that an audit checks, with what physics says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.columns import OpTable
from ...features.operators.conv import WINOGRAD_SAVING
from ...features.operators.features import op_features
from ...features.operators.schema import BLOCKS, FAMILIES, NAMES, parameters_of
from .audit_tables import COLLECTIVE, KERNEL

#: Excess over a data sheet's figure that is not counted: its clocks and rates are rounded.
#: The published tables respect the peak within 2 % (tensor-core pack, known data problems).
SLACK = 1.02
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
    """Rows of one family with what physics says of them; arrays are of shape ``(n,)``.

    ``slow`` marks rows of files that are off as a whole; they are not compared with others.
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
        """Whether rows do more than the peak, bool."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.flops / self.peak / self.seconds > SLACK)

    def log_ratio(self) -> np.ndarray:
        """Binary logarithm of measured over expected time; nan where a time is not positive."""
        ratio = np.divide(
            self.seconds, self.base, out=np.full(len(self.base), np.nan), where=self.base > 0
        )
        sound = np.isfinite(ratio) & (ratio > 0)
        return np.asarray(np.log2(ratio, out=np.full(len(ratio), np.nan), where=sound))

    def group(self, *columns: str) -> np.ndarray:
        """Texts of columns that are there, joined, object."""
        group = pd.Series("", index=self.rows.index)
        for column in columns:
            if column in self.rows:
                # A CSV file has nothing where a library is not named.
                named = self.rows[column].astype(object)
                group = group + " " + named.where(named.notna(), "").astype(str)
        return np.asarray(group.str.strip(), object)

    def flag(self, reason: str, at: np.ndarray, evidence: np.ndarray, text: list[str]) -> None:
        """Keep rows at positions ``at`` with their evidence and its figures."""
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
    """Add what physics says to rows.

    Args:
        key: Family of the rows, or what else they are.
        rows: As :func:`~.audit_tables.read_audited` gives them.
        devices: Descriptions by the names in ``device``.
        notes: Gets what is not checked, and why.

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


#: What physics gives of each row.
_FIGURES = ("flops", "peak", "moved", "cache", "bandwidth", "base")


def _operators(
    key: str,
    rows: pd.DataFrame,
    seconds: np.ndarray,
    devices: Mapping[str, DeviceSpec],
    notes: list[str],
) -> tuple[pd.DataFrame, np.ndarray, dict[str, np.ndarray]]:
    """Physics of operators; rows whose sizes describe none are left out with a note."""
    good = _describable(key, rows)
    if not good.all():
        notes.append(f"{int((~good).sum())} rows of {key} have no valid sizes; not checked")
        rows, seconds = rows[good].reset_index(drop=True), seconds[good]
    features = op_features(rows, key, devices)
    table = OpTable.of(rows, key, parameters_of(key), devices)
    machine, peak = table.machine(), table.matrix_peak()
    group, read = FAMILIES.get(key), np.ones(len(rows))
    if group in ("conv", "conv_nd"):
        # Fast algorithms save products where a filter has several taps.
        taps = _product(rows, ("kd", "kh", "kw", "ksize"))
        peak = np.where(taps > 1, WINOGRAD_SAVING * peak, peak)
        # Strides beyond the filter leave inputs unread.
        steps = _product(rows, ("stride", "stride_d", "stride_h", "stride_w"))
        read = np.minimum(1.0, taps / steps)
    if "kv_dtype" in rows and rows["kv_dtype"].astype(str).str.contains("fp8").any():
        # Some libraries compute in the format of the cache (tensor-core pack).
        narrow = rows["kv_dtype"].astype(str).str.contains("fp8").to_numpy()
        rate = TABLE_FORMATS["fp8"].rate
        fast = table.of_device(lambda device: device.matrix_peak(rate))
        peak = np.where(narrow, np.maximum(peak, fast), peak)
    figures = {
        "flops": features.flops,
        # Element-wise work may run on the vector unit.
        "peak": np.maximum(peak, table.vector_peak()),
        "moved": features.moved * read,
        "cache": machine.cache,
        "bandwidth": machine.bandwidth,
        "base": features.base_s,
    }
    return rows, seconds, figures


def _product(rows: pd.DataFrame, names: tuple[str, ...]) -> np.ndarray:
    """Product of the sizes that there are; one size of both dimensions counts twice."""
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
            hint="its columns are " + ", ".join(parameters_of(key)) + "; those that opcast predict "
            "--op may leave out, a table may, too",
        )
    good = np.ones(len(rows), bool)
    for name in parameters_of(key):
        if name != "n_in":
            values = pd.to_numeric(rows[name], errors="coerce").to_numpy(
                np.float64, na_value=np.nan
            )
            good &= values >= (0 if name in optional or key in BLOCKS else 1)
    return good


def _hashes(values: pd.Series, name: str) -> np.ndarray:
    code, distinct = pd.factorize(values.astype(object).where(values.notna(), ""))
    texts = pd.Series([f"{name}={v}" for v in distinct], dtype=object)
    found = pd.util.hash_array(texts.to_numpy(object)).astype(np.uint64)
    return np.asarray(found[code] if len(found) else np.zeros(0, np.uint64))
