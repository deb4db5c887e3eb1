"""Rows of the power table as utilizations and features, with times from operator models."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd

from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.catalogue import find_device
from ...features.devices.device import DeviceSpec
from ...features.operators import family_keys
from ...features.operators.columns import texts_of
from ...features.operators.features import op_features
from ..operators import OpModel
from .law import PowerLaw, Work

#: Parameters of operators and whole modules whose logarithms are features.
SHAPES = (
    "b", "m", "n", "k", "rows", "cols", "batch", "q_heads", "kv_heads", "head_dim", "v_head_dim",
    "q_len", "kv_len", "window", "tokens", "hidden", "inter", "topk", "experts", "tp", "ep",
    "num_heads", "kv_history", "compress_ratio", "seq_len", "num_tokens", "d_model", "d_conv",
    "d_state", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "n_groups", "chunk_size",
    "hc_mult",
)  # fmt: skip
#: Columns that name a class of kernels.
_CLASS = ("family", "op", "dtype", "kv_dtype", "kernel")
#: Initial time of an operator without a model, as the geometric mean of FLOPs and bytes: 100 µs on
#: the board of the table's rows, an H200. The trees learn the rest.
_START_WORK = 6.891385927e9


@dataclass
class PowerRows:
    """``n`` rows of operators.

    Attributes:
        name: Class of kernels of each row, object.
        device: Canonical device name of each row, object.
        seconds: Times by the operator model, or initial values without one.
        known: Mask of rows whose family the operator model has.
        flops: FLOPs; 0 if no family counts them.
        moved: Bytes.
        fixed: Seconds of fixed costs.
        base: Analytical estimate in seconds.
        roofline: Lower limit in seconds.
        peak: Dense FLOP/s of the row's dtype.
        bandwidth: Bytes/s of main memory.
        limit: Power limit in watts; NaN if the device's is unknown.
        shapes: Binary logarithms of the parameters, shape ``(n, len(SHAPES))``.
    """

    name: np.ndarray
    device: np.ndarray
    seconds: np.ndarray
    known: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    fixed: np.ndarray
    base: np.ndarray
    roofline: np.ndarray
    peak: np.ndarray
    bandwidth: np.ndarray
    limit: np.ndarray
    shapes: np.ndarray

    def take(self, at: np.ndarray) -> PowerRows:
        """Select rows by mask or position."""
        return PowerRows(**{part.name: getattr(self, part.name)[at] for part in fields(self)})

    def family(self) -> np.ndarray:
        """Family of each row, object."""
        return np.array([str(name).split("|")[0] for name in self.name], object)

    def boards(self) -> list[tuple[DeviceSpec, np.ndarray]]:
        """Boards with a known limit, and masks of their rows."""
        found = []
        for name in dict.fromkeys(self.device):
            own = self.device == name
            for limit in np.unique(self.limit[own]):
                if np.isfinite(limit):
                    board = replace(find_device(name), power_w=float(limit))
                    found.append((board, own & (self.limit == limit)))
        return found

    def share(self, law: PowerLaw, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Power by the law, and idle power, as fractions of the limit.

        Rows without counted work take an estimate that trees correct.
        """
        work = self.work(seconds)
        share, idle = np.full((2, len(seconds)), 0.5)
        for board, at in self.boards():
            own = law.on(board)
            middle = own.idle + own.uncounted
            share[at] = np.where(self.known[at], own.share(work.take(at)), middle)
            idle[at] = own.idle
        return share, idle

    def work(self, seconds: np.ndarray) -> Work:
        """Utilizations if the rows take ``seconds``."""
        attention = np.array(["attention" in str(name) for name in self.name])
        return Work.of(
            self.flops, self.moved, seconds, self.fixed, self.peak, self.bandwidth, attention
        )

    def features(
        self, seconds: np.ndarray, classes: list[str], devices: list[str], board: np.ndarray
    ) -> np.ndarray:
        """Columns for trees, float32: class, device, ratios to physical limits, parameters.

        Args:
            seconds: Time of each row.
            classes: Classes with a flag.
            devices: Devices with a flag.
            board: Device whose flag is set, object, shape ``(n,)``.
        """
        work = self.work(seconds)
        named = [self.name == c for c in classes] + [board == d for d in devices]
        flags = np.stack(named, axis=1)
        known = self.known
        ratios = np.stack(
            [
                np.where(known, np.log2(np.maximum(work.matrix, 1e-6)), 0.0),
                np.where(known, np.log2(np.maximum(work.memory, 1e-6)), 0.0),
                np.where(known, work.busy, 0.0),
                np.where(known, np.log2(self.roofline / seconds), 0.0),
                np.where(known, np.log2(self.base / seconds), 0.0),
                np.log2(seconds * 1e6),
            ],
            axis=1,
        )
        return np.concatenate([flags, ratios, self.shapes], axis=1).astype(np.float32)


def power_rows(table: pd.DataFrame, operators: OpModel) -> PowerRows:
    """Read rows of operators.

    Args:
        table: ``source``, ``device``, ``family`` and the columns of operators' parameters.
        operators: Model of operators, for the times.

    Raises:
        DeviceError: A device is not in the catalogue.
        DatasetError: A row lacks a parameter of its family.
    """
    specs = {str(name): find_device(str(name)) for name in table["device"].unique()}
    rows = table.reset_index(drop=True)
    rows = rows.assign(
        key=family_keys(rows), device=rows["device"].map({n: s.name for n, s in specs.items()})
    )
    devices = {spec.name: spec for spec in specs.values()}
    known = rows["key"].isin(list(operators.families)).to_numpy(bool)
    figures = {
        d: (s.bandwidth, s.power_w or np.nan, s.matrix_peak("bf16")) for d, s in devices.items()
    }
    bandwidth, limit, matrix = np.reshape([figures[d] for d in rows["device"]], (-1, 3)).T
    start = _START_WORK / np.sqrt(matrix * bandwidth)
    # One array per field: operators with a model are filled in below.
    start, base, roofline = (start.copy() for _ in range(3))
    flops, moved, fixed = np.zeros((3, len(rows)))
    peak = np.array(
        [_peak(devices[d], t) for d, t in zip(rows["device"], rows["dtype"], strict=True)]
    )
    if known.any():
        start[known] = operators.predict(rows[known].reset_index(drop=True)).latency
    for key in dict.fromkeys(rows["key"][known]):
        at = np.flatnonzero((rows["key"] == key).to_numpy())
        found = op_features(rows.iloc[at], str(key), devices)
        flops[at], moved[at], fixed[at] = found.flops, found.moved, found.floor_s
        base[at], roofline[at] = found.base_s, found.roofline_s
    return PowerRows(
        _names(rows), rows["device"].to_numpy(object), start, known, flops, moved, fixed, base,
        roofline, peak, bandwidth, limit, _shapes(rows),
    )  # fmt: skip


def _peak(spec: DeviceSpec, dtype: object) -> float:
    kind = TABLE_FORMATS.get(str(dtype), TABLE_FORMATS["bf16"])
    return spec.matrix_peak(kind.rate)


def _names(rows: pd.DataFrame) -> np.ndarray:
    parts = [texts_of(rows[c]) for c in _CLASS if c in rows]
    names = np.empty(len(rows), object)
    names[:] = ["|".join(map(str, values)) for values in zip(*parts, strict=True)]
    return names


def _shapes(rows: pd.DataFrame) -> np.ndarray:
    made = np.full((len(rows), len(SHAPES)), -1.0)
    for place, name in enumerate(SHAPES):
        if name in rows:
            values = pd.to_numeric(rows[name], errors="coerce").to_numpy(float, na_value=np.nan)
            # -1 if the family lacks the parameter: trees need a number.
            made[:, place] = np.where(values >= 0, np.log2(np.maximum(values, 0.0) + 1.0), -1.0)
    return made
