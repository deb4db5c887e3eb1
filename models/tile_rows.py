"""Rows of the table of tile configurations, with physical estimates and features."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..features.devices.catalogue import find_device
from ..features.operators.columns import texts_of

#: Required columns.
NEEDED = ("device", "op", "implementation", "args")
#: Sizes whose logarithms are features, and flags.
SIZES = (
    "batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "v_head_dim", "m", "n", "k",
    "groups", "rows", "cols",
)  # fmt: skip
FLAGS = ("causal", "masked", "biased", "residuals")
#: An array in the arguments, such as ``"bf16[1,128,4,32]"``.
_ARRAY = re.compile(r'"([a-z]+\d*\w*)\[([\d,]*)\]"')
#: Ratio of backward to forward work: five products to two in attention (Dao, FlashAttention-2,
#: 2023, section 3.1), and three to one elsewhere, with recomputation.
_BACKWARD_ATTENTION, _BACKWARD = 2.5, 3.0
#: Vector operations of an exponential with its range reduction; engineering estimate.
_EXPONENTIAL = 10.0
#: Passes over the scores in main memory by unfused attention: written and read twice.
_SCORE_PASSES = 4.0
#: Shortest kernel, in seconds; engineering estimate, as for ``launch_floor_us``.
_FLOOR_S = 2e-6
#: Least rows of a tensor core instruction, for chips without a systolic array.
_MMA_ROWS = 16.0
#: Implementations of attention that write scores to memory and compute masked ones: XLA's, by
#: chunks of queries or whole, takes 13 to 16 bytes of bandwidth per score on TPU v5p and v6e, with
#: or without a causal mask (kernel pack, ``tpu`` table).
_UNFUSED = ("xla", "xla_chunked", "jax_nn")
#: Added to shares before their logarithm becomes a feature.
_LEAST = 1e-4


@dataclass
class TileRows:
    """``n`` rows of kernels with tile configurations.

    Attributes:
        device: Canonical name of each row's device, object.
        subject: Text shared by equal problems on equal devices: device, op and arguments, object.
        base_s: Least time by peak, bandwidth and vector unit plus the floor, shape ``(n,)``.
        ceiling_s: Physical lower limit by peak and bandwidth alone.
        names: ``op`` and ``implementation``, object, shape ``(n, 2)``.
        ratios: Ratios to the device's limits, shape ``(n, d)``, independent of its identity.
        sizes: Logarithms of least times, of FLOPs per byte and of sizes, shape ``(n, d)``.
        config: Configurations by key.
        platform: Platform of each row's device, object.
    """

    device: np.ndarray
    subject: np.ndarray
    base_s: np.ndarray
    ceiling_s: np.ndarray
    names: np.ndarray
    ratios: np.ndarray
    sizes: np.ndarray
    config: list[dict[str, object]]
    platform: np.ndarray

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.base_s)

    @property
    def candidate(self) -> np.ndarray:
        """Text of each row's implementation and configuration, object."""
        made = zip(self.names[:, 1], self.config, strict=True)
        return np.array([f"{n}|{json.dumps(c, sort_keys=True)}" for n, c in made], object)

    @cached_property
    def labels(self) -> np.ndarray:
        """Op and implementation of each row, object."""
        return np.array([f"{op}|{made}" for op, made in self.names], object)

    def general(self, names: list[str], keys: list[str]) -> np.ndarray:
        """Features that transfer to other devices, including configurations, float32."""
        config = np.array([[_figure(c, key) for key in keys] for c in self.config]).reshape(
            len(self), len(keys)
        )
        parts = [self._flags(names), self.ratios, config]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def known(self, names: list[str], keys: list[str], devices: list[str]) -> np.ndarray:
        """All features, including sizes and flags of known devices."""
        on = np.stack([self.device == d for d in devices], axis=1)
        parts = [self.general(names, keys), self.sizes, on]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _flags(self, names: list[str]) -> np.ndarray:
        return np.stack([(self.names == name).any(axis=1) for name in names], axis=1)


def tile_rows(table: pd.DataFrame) -> TileRows:
    """Read rows of kernels with tile configurations.

    Args:
        table: :data:`NEEDED`, ``config`` (JSON; empty for an implementation without tiles),
            :data:`SIZES` and :data:`FLAGS`, missing if an op lacks the size.

    Raises:
        DatasetError: A column is missing, or a configuration is not a JSON object.
        DeviceError: A device is not in the catalogue.
    """
    for column in NEEDED:
        if column not in table:
            raise DatasetError(f"column {column!r} of the table of tiles is missing")
    specs = {str(name): find_device(str(name)) for name in table["device"].unique()}
    spec = [specs[str(name)] for name in table["device"]]
    size = {name: _numbers(table, name) for name in (*SIZES, *FLAGS)}
    op, made = texts_of(table["op"]).astype(str), texts_of(table["implementation"]).astype(str)
    attention = np.char.startswith(op, "attention")
    backward = np.char.endswith(op, "_vjp")
    # Only fused kernels skip masked scores.
    skips = (size["causal"] > 0) & ~np.isin(made, _UNFUSED)
    causal = np.where(skips, 0.5, 1.0)
    scores = np.nan_to_num(size["batch"] * size["q_heads"] * size["q_len"] * size["kv_len"])
    products = np.nan_to_num(size["m"] * size["n"] * size["k"])
    # A gated linear unit has two weights side by side.
    flops = 2.0 * products * np.where(op == "glu", 2.0, 1.0)
    flops = np.where(
        attention, 4.0 * scores * np.nan_to_num(size["head_dim"]) * causal, flops
    ) * np.where(backward, np.where(attention, _BACKWARD_ATTENTION, _BACKWARD), 1.0)
    moved = np.array([_bytes(text) for text in table["args"].astype(str)])
    softmax = np.char.startswith(op, "softmax")
    exps = np.where(softmax, np.nan_to_num(size["m"] * size["n"]), scores * causal)
    figures = [
        (s.matrix_peak("bf16"), s.bandwidth, s.vector_peak("f32"), s.array_rows or _MMA_ROWS)
        for s in spec
    ]
    peak, bandwidth, vector, height = np.array(figures, float).reshape(-1, 4).T
    tpu = np.array([s.platform == "tpu" for s in spec], float)
    # Products fill only as many rows of a systolic array as they reduce over.
    depth = np.where(attention, size["head_dim"], size["k"])
    filled = np.minimum(1.0, np.nan_to_num(depth, nan=np.inf) / height)
    compute, memory = flops / peak / filled, moved / bandwidth
    vectors = exps * _EXPONENTIAL / vector
    written = scores * 4.0 / bandwidth  # of f32
    base = np.maximum(np.maximum(compute, memory), vectors) + _FLOOR_S
    base = base + np.where(attention & np.isin(made, _UNFUSED), _SCORE_PASSES * written, 0.0)
    shares = [flops / peak / base, memory / base, vectors / base, written / base]
    shares += [_FLOOR_S / base, filled]
    flags = [np.nan_to_num(size[name], nan=-1.0) for name in FLAGS]
    ratios = np.stack([*(np.log2(s + _LEAST) for s in shares), *flags, tpu], axis=1)
    times = (flops / peak, memory, base)
    absolute = [np.log2(t * 1e6 + 1e-3) for t in times]
    absolute.append(np.log2((flops + 1.0) / np.maximum(moved, 1.0)))
    device = np.array([s.name for s in spec], object)
    subject = np.array(
        [f"{d}|{o}|{a}" for d, o, a in zip(device, op, table["args"], strict=True)], object
    )
    return TileRows(
        device,
        subject,
        base,
        np.maximum(np.maximum(flops / peak, memory), 1e-9),
        np.stack([op, made], axis=1).astype(object),
        ratios,
        np.stack([*absolute, *(np.log2(np.nan_to_num(size[n], nan=-0.5) + 1.0) for n in SIZES)], 1),
        _configs(table),
        np.array([s.platform for s in spec], object),
    )


def _numbers(table: pd.DataFrame, column: str) -> np.ndarray:
    if column not in table:
        return np.full(len(table), np.nan)
    values = pd.to_numeric(table[column], errors="coerce")
    return np.asarray(values.to_numpy(float, na_value=np.nan))


def _bytes(args: str) -> float:
    """Bytes of the arrays in the arguments; outputs are of equal size or far smaller."""
    total = 0.0
    for dtype, sides in _ARRAY.findall(args):
        digits = re.search(r"\d+", dtype)
        # ``bool`` and ``pred`` have no digits and take a byte.
        width = int(digits.group()) / 8 if digits else 1.0
        total += width * float(np.prod([float(s) for s in sides.split(",") if s]))
    return total


def _configs(table: pd.DataFrame) -> list[dict[str, object]]:
    if "config" not in table:
        return [{} for _ in range(len(table))]
    found: list[dict[str, object]] = []
    for place, text in enumerate(texts_of(table["config"])):
        try:
            value = json.loads(str(text) or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise DatasetError(
                f"config {str(text)[:60]!r} is not a JSON object", where=f"row {place} of the tiles"
            )
        found.append(value)
    return found


def _figure(config: dict[str, object], key: str) -> float:
    """A setting as a number: binary logarithm of sizes, -1 for null, -2 if missing."""
    if key not in config:
        return -2.0
    value = config[key]
    if value is None:
        return -1.0
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return float(np.log2(max(float(value), 0.0) + 1.0))
    # Names of layouts: any number that is the same for equal names.
    return float(sum(str(value).encode()) % 97)


def keys_of(rows: TileRows) -> list[str]:
    """Keys of all configurations, sorted."""
    return sorted({key for config in rows.config for key in config})
