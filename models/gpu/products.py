"""XLA's matrix products and convolutions, priced as published GEMMs.

Products within XLA's own tables are looked up there: they were autotuned like in a program, but
timed individually, so the cold start of each kernel is subtracted. Elsewhere, and on NVIDIA's chips
beyond the sizes of XLA's tables, a product of any type is looked up as a bf16 product with the same
bytes and arithmetic time: ``k`` is scaled with the operand width, and the device's rate with it (an
f32 product at default precision on an A100 is a bf16 product of twice the depth). A product that
widens its operands while reading them (int8 or int4 weights) is looked up with their bytes in
memory. True f32 products use the eagerly timed tables, minus the host's launch; fp8 products use
the fp8 tables minus the quantization of activations, which is a separate kernel in XLA.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...features.ir.program import DTYPE_BITS
from ..core.base import KernelPrediction
from .memory_passes import CLOCK, MemoryParams, Traffic, launch_seconds, pass_seconds, soft_maximum
from .operator_library import ENDLESS, Operators, physics_of, widened, with_memory, with_rate

#: The published GEMMs that stand in for XLA's: vLLM calls PyTorch's products here, which use cuBLAS
#: and cuBLASLt like XLA. bf16 GEMMs differ by only 1 to 5 % between backends (published-tensor-core
#: pack).
CUBLAS = {
    "linear": {"backend": "vllm", "kernel": "torch.nn.functional.linear"},
    "bmm": {"backend": "vllm", "kernel": "vllm_torch_bmm"},
}
#: Log half-widths added to the operator model's intervals: for another library version with other
#: epilogues (``LIBRARY``); for products of another type or timing method, which are converted by
#: physics (``MOVED``, again per halving of the bytes of widened operands, whose cost is in no
#: table); for convolutions as GEMMs (``IMPLICIT``). Estimates, not fitted.
LIBRARY, MOVED, IMPLICIT = 0.1, 0.2, 0.35
#: Ratio of a convolution's arithmetic time on matrix units to that of its implicit GEMM, which does
#: not gather the input. For NVIDIA from ResNet-50's regions (published-regions pack: 0.98 to 1.13
#: on A100, 1.11 to 1.17 on H100), elsewhere an engineering estimate.
GATHERING, GATHERING_ELSEWHERE = 1.1, 1.25
#: Bytes of a vector load. Convolutions with fewer bytes of channels, such as those of images,
#: gather their input element by element.
VECTOR = 16.0
#: Elements that such a convolution gathers per clock and core: 1.1 on A100 and 1.3 on H100, from
#: ResNet-50's stem (published-regions pack).
GATHERED = 1.2
#: Products with at most this many FLOPs are mostly launch on every device (2 µs at 100 TFLOP/s).
SMALL_FLOPS = 2e8
#: Smallest ratio of fp8 to bf16 rate of a device with fp8 units (usual data sheets: two); the
#: margin is for rounded or measured peaks.
_NARROW = 1.2
_FP8 = tuple(name for name in DTYPE_BITS if name.startswith(("f8e4", "f8e5")))
#: Types that are computed in f32 if the device has nothing faster (bf16 before Ampere, f16 and fp8
#: on chips without matrix units for them).
_BY_F32 = ("tf32", "bf16", "f16", *_FP8)
_DIMS = ("b", "m", "n", "k")
#: Longest side in XLA's table. Within it, its bf16 products on an H100 take 1.00 times (median; 10
#: to 90 %: 0.91 to 1.16) PyTorch's; extrapolated beyond, they would run at up to 95 % of the peak,
#: where PyTorch's measured ones, limited by power, reach 71 to 88 %.
_XLA_LONGEST = 4096
#: Sides of a product that reaches a chip's best rate. Engineering choice.
_LARGE = 8192
#: Formats of XLA's tables by matrix rate.
_XLA_FORMATS = {"bf16": "bf16", "f16": "fp16", "tf32": "tf32", **dict.fromkeys(_FP8, "fp8")}


class Products:
    """Predicts products and convolutions on one device.

    Args:
        operators: Published families.
        device: Device they run on.
        params: Constants of passes over memory, for operands read by fused epilogues.
    """

    def __init__(self, operators: Operators, device: DeviceSpec, params: MemoryParams) -> None:
        self.operators, self.device, self.params = operators, device, params
        self.launch = launch_seconds(device, params)

    def gemms(self, rows: pd.DataFrame) -> KernelPrediction:
        """Latencies of products, with the operands and results of fused epilogues.

        Args:
            rows: Dimensions as of :func:`~opcast.models.gpu.routes.products`.
        """
        answer = self._widening(rows)
        # A result wider than that of the bf16 product (f32 from bf16) has more traffic than the
        # table's: 90 % of the streaming time is a lower bound. The margin is an engineering
        # estimate, since a product in the cache may beat the fitted stream.
        least = 0.9 * self._stream(rows["moved"].to_numpy(np.float64))
        # Operands of a fused epilogue are read after the product, which does not hide them.
        extra = self._stream(rows["extra"].to_numpy(np.float64))
        times = rows["times"].to_numpy(np.float64)
        latency = np.maximum(answer.latency * times, least) + extra
        return answer.scaled(latency / answer.latency)

    def _widening(self, rows: pd.DataFrame) -> KernelPrediction:
        """Latencies of the products alone, with operands of the width they have in memory.

        A kernel that converts its operands reads them as stored. This equals a product of the
        arithmetic's type on a device with memory and caches faster and larger by the ratio of the
        bytes, which preserves both times.
        """
        answer = KernelPrediction.empty(len(rows))
        share = rows["stored"].to_numpy(np.float64)
        for own in np.unique(share).tolist():
            at = np.flatnonzero(share == own)
            if own == 1.0:
                answer.put(at, self.products(rows.iloc[at]))
                continue
            device = with_memory(self.device, 1.0 / own)
            other = Products(self.operators, device, self.params)
            found = other.products(rows.iloc[at])
            half = MOVED * -np.log2(own)
            answer.put(at, widened(found, found.latency, half, found.source, in_domain=False))
        return answer

    def products(self, rows: pd.DataFrame, *, grouped: bool = False) -> KernelPrediction:
        """Latencies of the products alone, each at least that of any product of half its size.

        Tree predictions are not monotone in the sizes, and XLA's table has half the time of
        products in two kernels, so the halves are predicted too and the maximum is taken
        (docs/gpu.md).

        Args:
            rows: Rows as for :meth:`gemms`.
            grouped: Whether batches are the groups of convolutions, which XLA does not autotune.
        """
        slowest = KernelPrediction.empty(len(rows))
        way = self._ways(rows, grouped=grouped)
        for name in dict.fromkeys(way):
            at = np.flatnonzero(way == name)
            chains, owner = _chains(rows.iloc[at])
            # The chains of a program's products overlap: each size is predicted once.
            code, first_of = _distinct(chains)
            answer = self._ask(name, chains.iloc[first_of], grouped=grouped).take(code)
            highest = np.full(len(at), 0.0)
            np.maximum.at(highest, owner, answer.latency)
            # A chain starts with the product itself, whose interval and source are kept.
            first = answer.take(np.searchsorted(owner, np.arange(len(at))))
            slowest.put(at, first.scaled(highest / first.latency))
        return slowest

    def convs(self, rows: pd.DataFrame) -> KernelPrediction:
        """Latencies of convolutions as implicit GEMMs with the memory traffic of convolutions.

        The ratio of the operator model's prediction to its physics for the GEMM is applied to the
        arithmetic; memory time is that of the convolution, which reads its input once instead of
        unfolding it to ``m × k``.
        """
        product = self.products(rows, grouped=True)
        ratio, tiles = self._tiles(rows, product.latency)
        streamed = self._stream(rows["moved"].to_numpy(np.float64))
        # The ratio of a launch-bound product does not describe its arithmetic, so it is clipped to
        # the range for large ones. Engineering estimate; not fitted. The regions show that cuDNN
        # skips the holes of dilated inputs; for MIOpen, steps on an MI350 are closer without that.
        if self.device.runs_cuda:
            tiles = tiles * rows["dense"].to_numpy(np.float64) * GATHERING
        else:
            tiles = tiles * GATHERING_ELSEWHERE
        arithmetic = np.maximum(tiles * np.clip(ratio, 0.8, 3.0), self._at_best(rows))
        latency = self.launch + soft_maximum(arithmetic, streamed, self._gathered(rows))
        names = np.array([f"{s} (implicit)" for s in product.source], object)
        latency = latency * rows["times"].to_numpy(np.float64)
        return widened(product, latency, IMPLICIT, names, in_domain=False)

    def _at_best(self, rows: pd.DataFrame) -> np.ndarray:
        """Seconds at the rate of a large product in XLA's table; 0 where it does not apply.

        On AMD's chips this table, not the one for convolutions, is used for products: without
        Winograd transforms, no convolution exceeds the operations per second of the best product.
        """
        asked = np.array([not self.device.runs_cuda and self._autotuned(r, "linear")
                          for r in rows["rate"].map(self._rate)], bool)  # fmt: skip
        if not asked.any():
            return np.zeros(len(rows))
        large = self.products(rows.assign(b=1, m=_LARGE, n=_LARGE, k=_LARGE)).latency
        work = rows[["b", "m", "n", "k"]].to_numpy(np.float64).prod(axis=1)
        return np.where(asked, work / _LARGE**3 * large, 0.0)

    def _gathered(self, rows: pd.DataFrame) -> np.ndarray:
        """Seconds for gathering inputs with short runs of channels; 0 for others."""
        b, m, k, run, width = (
            rows[name].to_numpy(np.float64) for name in ("b", "m", "k", "run", "width")
        )
        rate = GATHERED * max(self.device.core_count, 1) * (self.device.clock_hz or CLOCK)
        return np.where(run * width < VECTOR, b * m * k / rate, 0.0)

    def _stream(self, moved: np.ndarray) -> np.ndarray:
        return pass_seconds(Traffic.stream(moved), self.device, self.params).memory

    def _ways(self, rows: pd.DataFrame, *, grouped: bool) -> np.ndarray:
        """Look-up of each product: its matrix rate, and how its batch is looked up.

        ``rows`` are batched products, looked up as one product of all their rows; ``bmm`` are the
        groups of convolutions, each too narrow for that.
        """
        several = "bmm" if grouped else "rows"
        batched = np.where(rows["b"].to_numpy() > 1, several, "linear").astype(object)
        rate = rows["rate"].map({r: self._rate(r) for r in rows["rate"].unique()})
        return np.asarray(rate.to_numpy(object) + "/" + batched)

    def _rate(self, name: str) -> str:
        """The matrix rate on this device: f32 for types without a faster unit."""
        peak = self.device.matrix_peak
        return "f32" if name in _BY_F32 and peak(name) <= peak("f32") else name

    def _ask(self, way: str, rows: pd.DataFrame, *, grouped: bool) -> KernelPrediction:
        rate, shape = way.split("/")
        table = "linear" if shape == "linear" else "bmm"
        if not grouped and self._autotuned(rate, table):
            named = rows[list(_DIMS)].assign(op=table, dtype=_XLA_FORMATS[rate])
            answer = self._restarted(f"xla/{table}", named, LIBRARY)
            beyond = np.flatnonzero(rows[["m", "n", "k"]].max(axis=1) > _XLA_LONGEST)
            # On a chip that neither table has, PyTorch's was measured on more chips and at these
            # sizes. Other vendors use other libraries.
            own = rate in ("bf16", "f16") and self.device.runs_cuda
            if own and len(beyond):
                answer.put(beyond, self._as_bf16(shape, rate, rows.iloc[beyond]))
            return answer
        eager = f"eager/{table}"
        # True f32 products use the eagerly timed tables where the operator model has them.
        if rate == "f32" and eager in self.operators.families:
            named = rows[list(_DIMS)].assign(op=table, dtype="fp32")
            return self._restarted(eager, named, MOVED)
        # Batched fp8 products have no table that separates the quantization: they go by physics, as
        # do fp8 products on chips without fp8 units.
        narrow = self.device.matrix_peak(rate) > _NARROW * self.device.matrix_peak("bf16")
        if rate in _FP8 and shape == "linear" and narrow:
            return self._quantised(rows)
        return self._as_bf16(shape, rate, rows)

    def _autotuned(self, rate: str, shape: str) -> bool:
        """Whether XLA's own table of products is the closest for a type on this device."""
        key = f"xla/{shape}"
        if rate not in _XLA_FORMATS or key not in self.operators.families:
            return False
        # On AMD, a table only applies to the chip it was measured on: no other library's products
        # can stand in, and a sibling's table makes programs on MI350 worse (docs/gpu.md).
        if not self.device.runs_cuda:
            return self.operators.knows(key, self.device.name)
        if rate in _FP8:
            # XLA's fp8 rows on Hopper are unreliable (README of the XLA pack).
            return not self.operators.knows_architecture(f"graph/{shape}", self.device)
        # On a device measured with other libraries but not XLA, those are closer.
        measured = self.operators.knows(f"graph/{shape}", self.device.name)
        return not measured or self.operators.knows_chip(key, self.device)

    def _restarted(self, key: str, asked: pd.DataFrame, half: float) -> KernelPrediction:
        """Convert products that were timed individually, or from the host, to those in a program.

        A start from a replayed graph replaces the table's start (a cold one, or 26 to 47 µs of host
        time), and the ratio of prediction to physics is kept.
        """
        found = self.operators.predict(key, asked, self.device)
        physics = physics_of(key, asked, self.device)
        started = (physics.base_s - physics.floor_s + self.launch) / physics.base_s
        # The table has the mean over both kernels of a split reduction.
        latency = found.latency * started * physics.kernels
        return widened(found, latency, half, f"learned:{key}")

    def _as_bf16(self, shape: str, rate: str, rows: pd.DataFrame) -> KernelPrediction:
        key = "graph/bmm" if shape == "bmm" else "graph/linear"
        asked, device = self._alike(shape, rate, rows)
        prediction = self.operators.predict(key, asked, device)
        latency = prediction.latency
        if shape == "rows":
            # No tile has rows of two matrices, so that small ones take longer than one product.
            apart = physics_of("xla/bmm", asked.assign(b=rows["b"], m=rows["m"]), device)
            latency = latency * np.maximum(
                apart.base_s / physics_of(key, asked, device).base_s, 1.0
            )
        # f16 has the rate and bytes of bf16: the table's own product, up to the library version.
        same = rate in ("bf16", "f16") and device is self.device and shape != "rows"
        half = LIBRARY if same else MOVED
        return widened(prediction, latency, half, f"learned:{key}")

    def _alike(self, shape: str, rate: str, rows: pd.DataFrame) -> tuple[pd.DataFrame, DeviceSpec]:
        """Rows and device of bf16 products with the same bytes and the same arithmetic time.

        A batch becomes rows: under XLA, batched products take 0.97 to 1.00 of the time of one with
        as many rows (published-xla pack). The published batched ones are those of latent attention.
        """
        op = "bmm" if shape == "bmm" else "linear"
        # k in units of bf16's two bytes per element preserves the bytes of the operands.
        scale = rows["width"].to_numpy(np.float64) / 2
        deep = np.maximum(np.round(rows["k"].to_numpy(np.float64) * scale), 1).astype(np.int64)
        asked = rows[list(_DIMS)].assign(k=deep, dtype="bf16", **CUBLAS[op], **self._op(op))
        if shape == "rows":
            asked = asked.assign(b=1, m=asked["b"] * asked["m"])
        # A deeper product has more FLOPs by the same factor, so the rate rises with it to preserve
        # the time. All rows of one look-up have one matrix rate, and so one width.
        factor = float(scale[0]) if len(scale) else 1.0
        return asked, with_rate(self.device, self.device.matrix_peak(rate) * factor)

    def _op(self, name: str) -> dict[str, str]:
        """The column by which NVIDIA's libraries were learned on a chip; empty elsewhere.

        Other vendors' libraries differ, and without an op no ratio is transferred to them
        (docs/gpu.md).
        """
        return {"op": name} if self.device.runs_cuda else {}

    def _quantised(self, rows: pd.DataFrame) -> KernelPrediction:
        library = {"backend": "trtllm", "kernel": "torch_flow"}
        asked = rows[list(_DIMS)].assign(dtype="fp8", **library, **self._op("linear"))
        prediction = self.operators.predict("graph/linear", asked, self.device)
        # Published fp8 times include the quantization of activations (docs/operators.md), which XLA
        # compiles to a separate kernel, priced as a pass.
        whole = physics_of("graph/linear", asked, self.device).base_s
        # Kernel timing has the same physics without the quantization.
        alone = physics_of("kernel/linear", asked, self.device).base_s
        latency = prediction.latency * alone / whole
        return widened(prediction, latency, MOVED, "learned:graph/linear")

    def _tiles(self, rows: pd.DataFrame, latency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latency of products over their physics, and the arithmetic in that physics, seconds."""
        ratio, tiles = np.empty(len(rows)), np.empty(len(rows))
        way = self._ways(rows, grouped=True)
        for name in dict.fromkeys(way):
            at = np.flatnonzero(way == name)
            rate, shape = name.split("/")
            key = f"graph/{shape}"
            asked, device = self._alike(shape, rate, rows.iloc[at])
            physics = physics_of(key, asked, device)
            # With infinite bandwidth, only arithmetic and launch remain.
            bare = physics_of(key, asked, with_memory(device, ENDLESS))
            ratio[at] = latency[at] / (physics.base_s - physics.floor_s + self.launch)
            tiles[at] = bare.base_s - bare.floor_s
        return ratio, tiles


def _chains(rows: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """Each product, followed by the products obtained by halving its dimensions repeatedly.

    Small products, whose time is mostly launch, are halved in all dimensions at once; larger ones
    in one dimension at a time, since halving two is certain to shorten them.

    Returns:
        The rows, and the position of the product that each belongs to, ascending.
    """
    sizes = rows[list(_DIMS)].to_numpy(np.int64)
    chains: list[list[int]] = []
    owner: list[int] = []
    for place, size in enumerate(sizes.tolist()):
        # A batch stops at 2: with a batch of 1 the product would belong to another family.
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
    """The value and its repeated halves (rounded down), none below ``least``."""
    halves = [value]
    while halves[-1] // 2 >= least:
        halves.append(halves[-1] // 2)
    return halves


def _distinct(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Code of each row's sizes, and the first row that has each code."""
    sizes = rows[[*_DIMS, "width"]].to_numpy(np.float64)
    _, first, code = np.unique(sizes, axis=0, return_index=True, return_inverse=True)
    return code.reshape(-1), first
