"""Matrix products and convolutions of XLA as published GEMMs and convolutions.

A product of any type is asked for as a bf16 product of the same bytes and the same arithmetic time:
``k`` is scaled with the width of an operand, and the device's rate with it (an f32 product at
default precision on an A100 is a bf16 product of twice the depth). Products of true f32 are those
of the tables timed eagerly, with the host's launch taken out; products of fp8 those of the tables
with the quantisation of the activations, a kernel of its own in XLA, taken out.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from .memory_passes import MemoryParams, Traffic, launch_seconds, pass_seconds, soft_maximum
from .operator_library import Operators, base_seconds, with_rate, without_memory
from .route_answer import Answer, spread

#: Whose GEMMs stand for XLA's: PyTorch calls the same library.
CUBLAS = {
    "graph/linear": {"backend": "vllm", "kernel": "torch.nn.functional.linear"},
    "graph/bmm": {"backend": "vllm", "kernel": "vllm_torch_bmm"},
}
#: Log half-widths added to the operator model's intervals: XLA runs another version of the library,
#: with other epilogues; products of another type or timing are moved over by physics; convolutions
#: are not products.
LIBRARY, MOVED, IMPLICIT = 0.1, 0.2, 0.35
#: A convolution on matrix units over the product that it is: gathering its input costs cycles. An
#: engineering estimate; no published row is a convolution on matrix units.
GATHERING = 1.25
#: Products of no more operations are mostly launch on every device (about 2 µs at 100 TFLOP/s).
SMALL_FLOPS = 2e8
#: An fp8 rate counts as a unit of its own from this factor over bf16 on.
_NARROW = 1.2
_FP8 = ("f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3b11fnuz")
#: Types that are computed in f32 where the device has nothing faster.
_BY_F32 = ("tf32", "bf16", "f16", *_FP8)
_DIMS = ("b", "m", "n", "k")


class Products:
    """Products on one device.

    Args:
        operators: Published families.
        device: Where they run.
        params: Constants of passes over memory, for what is read besides.
    """

    def __init__(self, operators: Operators, device: DeviceSpec, params: MemoryParams) -> None:
        self.operators, self.device, self.params = operators, device, params
        self.launch = launch_seconds(device, params)

    def gemms(self, rows: pd.DataFrame) -> Answer:
        """Latencies of products as :func:`~opcast.models.gpu.routes.products` gives them."""
        answer = self.products(rows)
        # Results wider than those of the bf16 product that was asked for count here.
        least = 0.9 * self._stream(rows["moved"].to_numpy(np.float64))
        extra = self._stream(rows["extra"].to_numpy(np.float64))
        times = rows["times"].to_numpy(np.float64)
        return _scaled(answer, np.maximum(answer.latency * times, least) + extra)

    def products(self, rows: pd.DataFrame) -> Answer:
        """Latencies of the products alone; never shorter than those of half their size."""
        slowest = Answer.empty(len(rows))
        way = self._ways(rows)
        for name in dict.fromkeys(way):
            at = np.flatnonzero(way == name)
            chains, owner = _chains(rows.iloc[at])
            code, first_of = _distinct(chains)
            answer = _taken(self._ask(name, chains.iloc[first_of]), code)
            highest = np.full(len(at), 0.0)
            np.maximum.at(highest, owner, answer.latency)
            first = np.searchsorted(owner, np.arange(len(at)))
            slowest.put(at, _scaled(_taken(answer, first), highest))
        return slowest

    def convs(self, rows: pd.DataFrame) -> Answer:
        """Latencies of convolutions as the products that they are, with their own traffic.

        What the operator model says of such a product, over its physics, is taken for the
        arithmetic; memory is that of the convolution, whose input is read once.
        """
        product = self.products(rows)
        ratio, tiles = self._tiles(rows, product.latency)
        streamed = self._stream(rows["moved"].to_numpy(np.float64))
        arithmetic = tiles * np.clip(ratio, 0.8, 3.0) * GATHERING
        latency = self.launch + soft_maximum(arithmetic, streamed)
        lower, upper = spread(product.latency, product.lo, product.hi, IMPLICIT)
        names = np.array([f"{s} (implicit)" for s in product.source], object)
        return Answer.around(
            latency * rows["times"].to_numpy(np.float64),
            lower,
            upper,
            names,
            np.zeros(len(rows), bool),
        )

    def _stream(self, moved: np.ndarray) -> np.ndarray:
        zero = np.zeros(len(moved))
        traffic = Traffic(moved, zero, zero, np.ones(len(moved)))
        return pass_seconds(traffic, self.device, self.params).memory

    def _ways(self, rows: pd.DataFrame) -> np.ndarray:
        """How each product is asked for: the matrix rate, and whether it is batched."""
        batched = np.where(rows["b"].to_numpy() > 1, "bmm", "linear").astype(object)
        rate = rows["rate"].map({r: self._rate(r) for r in rows["rate"].unique()})
        return np.asarray(rate.to_numpy(object) + "/" + batched)

    def _rate(self, name: str) -> str:
        """The rate that counts on this device: f32 for a type that has no unit of its own."""
        peak = self.device.matrix_peak
        return "f32" if name in _BY_F32 and peak(name) <= peak("f32") else name

    def _ask(self, way: str, rows: pd.DataFrame) -> Answer:
        rate, shape = way.split("/")
        eager = f"eager/{shape}"
        if rate == "f32" and self._eager(eager):
            return self._timed_eagerly(eager, rows)
        narrow = self.device.matrix_peak(rate) > _NARROW * self.device.matrix_peak("bf16")
        if rate in _FP8 and shape == "linear" and narrow:
            return self._quantised(rows)
        return self._as_bf16(f"graph/{shape}", rate, rows)

    def _eager(self, key: str) -> bool:
        """Whether true f32 products are asked of the tables timed eagerly."""
        return key in self.operators.families

    def _as_bf16(self, key: str, rate: str, rows: pd.DataFrame) -> Answer:
        asked, device = self._alike(key, rate, rows)
        prediction = self.operators.predict(key, asked, device)
        same = rate in ("bf16", "f16") and device is self.device
        lower, upper = spread(
            prediction.latency, prediction.lo, prediction.hi, LIBRARY if same else MOVED
        )
        return Answer.around(
            prediction.latency, lower, upper, f"learned:{key}", prediction.in_domain
        )

    def _alike(self, key: str, rate: str, rows: pd.DataFrame) -> tuple[pd.DataFrame, DeviceSpec]:
        """Rows and device of bf16 products with the same bytes and the same arithmetic time."""
        scale = rows["width"].to_numpy(np.float64) / 2
        deep = np.maximum(np.round(rows["k"].to_numpy(np.float64) * scale), 1).astype(np.int64)
        asked = rows[list(_DIMS)].assign(k=deep, dtype="bf16", **CUBLAS[key])
        factor = float(scale[0]) if len(scale) else 1.0
        return asked, with_rate(self.device, self.device.matrix_peak(rate) * factor)

    def _timed_eagerly(self, key: str, rows: pd.DataFrame) -> Answer:
        asked = rows[list(_DIMS)].assign(dtype="fp32")
        prediction = self.operators.predict(key, asked, self.device)
        base, host = base_seconds(key, asked, self.device)
        latency = prediction.latency * (base - host + self.launch) / base
        lower, upper = spread(prediction.latency, prediction.lo, prediction.hi, MOVED)
        return Answer.around(latency, lower, upper, f"learned:{key}", prediction.in_domain)

    def _quantised(self, rows: pd.DataFrame) -> Answer:
        asked = rows[list(_DIMS)].assign(dtype="fp8", backend="trtllm", kernel="torch_flow")
        prediction = self.operators.predict("graph/linear", asked, self.device)
        whole, _ = base_seconds("graph/linear", asked, self.device)
        # Kernel timing has the same physics without the quantisation.
        alone, _ = base_seconds("kernel/linear", asked, self.device)
        lower, upper = spread(prediction.latency, prediction.lo, prediction.hi, MOVED)
        latency = prediction.latency * alone / whole
        return Answer.around(latency, lower, upper, "learned:graph/linear", prediction.in_domain)

    def _tiles(self, rows: pd.DataFrame, latency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latency of products over their physics, and the arithmetic in that physics, seconds."""
        ratio, tiles = np.empty(len(rows)), np.empty(len(rows))
        way = self._ways(rows)
        for name in dict.fromkeys(way):
            at = np.flatnonzero(way == name)
            rate, shape = name.split("/")
            asked, device = self._alike(f"graph/{shape}", rate, rows.iloc[at])
            base, floor = base_seconds(f"graph/{shape}", asked, device)
            bare, bare_floor = base_seconds(f"graph/{shape}", asked, without_memory(device))
            ratio[at] = latency[at] / (base - floor + self.launch)
            tiles[at] = bare - bare_floor
        return ratio, tiles


def _chains(rows: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """Every product, followed by those that it becomes when its dimensions are halved.

    Small products, whose time is mostly launch, are halved in all dimensions at once; of larger
    ones each dimension by itself, since halving another one shortens them anyway.

    Returns:
        The rows, and the position of the product that each belongs to, ascending.
    """
    sizes = rows[list(_DIMS)].to_numpy(np.int64)
    chains: list[list[int]] = []
    owner: list[int] = []
    for place, size in enumerate(sizes.tolist()):
        axes = [
            _halved(value, 2 if axis == 0 and value > 1 else 1) for axis, value in enumerate(size)
        ]
        if 2 * prod(size) <= SMALL_FLOPS:
            chains += [list(combination) for combination in product(*axes)]
        else:
            chains.append(size)
            for axis, values in enumerate(axes):
                chains += [[*size[:axis], value, *size[axis + 1 :]] for value in values[1:]]
        owner += [place] * (len(chains) - len(owner))
    at = np.array(owner, np.int64)
    table = rows.iloc[at].reset_index(drop=True)
    table[list(_DIMS)] = np.array(chains, np.int64).reshape(-1, len(_DIMS))
    return table, at


def _halved(value: int, least: int) -> list[int]:
    """The value and its halves down to a least one."""
    halves = [value]
    while halves[-1] // 2 >= least:
        halves.append(halves[-1] // 2)
    return halves


def _distinct(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """For each row the number of its sizes, and the first row of each number."""
    sizes = rows[[*_DIMS, "width"]].to_numpy(np.float64)
    _, first, code = np.unique(sizes, axis=0, return_index=True, return_inverse=True)
    return code.reshape(-1), first


def _taken(answer: Answer, at: np.ndarray) -> Answer:
    return Answer(*(getattr(answer, name)[at] for name in Answer.__slots__))


def _scaled(answer: Answer, latency: np.ndarray) -> Answer:
    """The answer moved to other latencies, ends in proportion."""
    factor = latency / answer.latency
    return Answer(latency, answer.lo * factor, answer.hi * factor, answer.source, answer.in_domain)
