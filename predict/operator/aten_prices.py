"""Prices of ATen operators on GPUs, from learned library kernels or else from the roofline."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import cached_property

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import CONV, MATMUL, RNN
from ...features.operators.op import Op, least_seconds
from ...features.operators.physics import fitted
from ...features.operators.query import TABLE_NAMES
from ...features.operators.schema import DTYPES
from ...models.operators import OpModel
from ...models.operators.prediction import FamilyPrediction
from ...models.power.energy import starved
from ...models.program.pytorch import is_older
from .aten_convolutions import cudnn_seconds, depthwise_times
from .aten_launches import STEPS
from .aten_streams import Rates, streams
from .aten_work import ATTENTION, CONVOLUTION, NORM, PASS, PRODUCT, SOFTMAX, AtenKernel, moving
from .prices import KERNEL_US, ROOFLINE, Row, eager_row, matrix_rate, price, work_of
from .step_operators import FAMILIES as STEP_FAMILIES
from .step_operators import TABLE_DTYPE, stand_in_factor, step_reach, step_row
from .torch_choices import attention_times

#: Families of calls timed alone, for f32.
_ALONE = ("eager/linear", "eager/bmm", "eager/elementwise", "eager/softmax", "eager/ln")
#: Families of convolutions: cuDNN's in f32, timed alone, and MIOpen's fastest.
_CONVOLUTIONS = ("eager/conv", "tuned/conv")
#: First PyTorch release with layer norms that are fast for any rows: models run up to twice as fast
#: on an RTX 3090 as with the release before (published-torch pack, timm).
_VECTORIZED = (1, 11)
#: Factor on the interval bounds of a weight gradient that is priced as the forward pass of the same
#: products, and of a TF32 product that is priced as one in bf16, although libraries use other
#: kernels. Engineering estimate. XLA's TF32 products on an H100 (published-xla pack), whose second
#: operand passes through registers, unlike a linear layer's, take 1.4 times as long (median).
_OTHER_KERNEL = 1.4
#: Maximum ratio of the step-by-step time of recurrent layers to that of persistent kernels (which
#: keep weights on the chip) and overlapping layers; lowers the lower bound. Engineering estimate.
_PERSISTENT = 3.0
#: Cycles of a load from main memory: 466 on A100, 479 on H100, 542 on RTX 4090 (Luo et al.,
#: arXiv:2402.13499, 2024, table of latencies); and factors of dependent loads in PyTorch's kernels,
#: which nobody measured: estimate, and bounds for loads served by a cache or hoisted by the
#: compiler, and for TLB misses. The factors are engineering estimates.
_LOAD_CYCLES, _LOADS = 480.0, (1.0, 0.25, 2.5)
#: Clock (Hz) of a GPU whose file has none. Engineering estimate.
_CLOCK = 1.5e9
#: Sizes of passes that probe the operator model: bytes of an empty pass (launch time); of a pass
#: served by the last cache, as a share of that cache; of a pass from main memory, in caches; and
#: minimum bytes of the latter two, for chips whose cache is small or unknown.
_EMPTY, _SMALL, _LARGE, _LEAST, _MOST = 6 * 8192.0, 0.4, 32.0, 2e6, 1e9
#: Bandwidth shares of large passes, and loads in flight of cuDNN's batch norms.
_STREAMS, _CUDNN = fitted("streams"), fitted("cudnn")
#: Key prefixes of families timed alone, not within whole steps.
ALONE = ("eager/", "tuned/")
#: Families of the operator model that prices need; the others need not be loaded.
FAMILIES = (*STEP_FAMILIES, *_ALONE, *_CONVOLUTIONS)


class AtenPrices:
    """Seconds with interval bounds of kernels, and the family that each was learned from."""

    def __init__(
        self,
        spec: DeviceSpec,
        bundle: OpModel | None,
        product: float,
        attention: float,
        release: str = "",
    ) -> None:
        self._spec, self._release = spec, release
        # Calls timed alone were measured on AMD GPUs too; all other rows are CUDA libraries.
        known = bundle is not None and (spec.runs_cuda or spec.name in bundle.devices)
        self._alone = bundle if known else None
        self._bundle = bundle
        self._factors = {"bmm": product, "attention": attention}
        self._rates: dict[bool, Rates] = {}

    def __call__(
        self, found: Sequence[AtenKernel], kept: Collection[int] = ()
    ) -> tuple[np.ndarray, list[str]]:
        """Return seconds with interval bounds, shape ``(n, 3)``, and their sources.

        Args:
            found: ``n`` kernels, in order.
            kept: Memory that outlives them.
        """
        # Models repeat their layers: kernels with the same isolated time are priced once.
        distinct = {_alike(work): work for work in found}
        place = {key: i for i, key in enumerate(distinct)}
        each, said = self._alone_each(list(distinct.values()))
        at = [place[_alike(work)] for work in found]
        times, sources = each[at], [said[i] for i in at]
        self._place(times, found, kept)
        few = np.array([_few_blocks(work, self._spec) for work in found])
        alone = np.array([self._row_by_row(work) for work in found])
        times *= ((np.maximum(times[:, 0], few) + alone) / times[:, 0])[:, None]
        chains = np.array([_chained(work, self._spec) for work in found])
        times = np.maximum(times, np.outer(chains, _LOADS))
        return raised(times, least_times(found, self._spec)), sources

    def _place(self, times: np.ndarray, found: Sequence[AtenKernel], kept: Collection[int]) -> None:
        """Adjust times of passes to what the caches hold in the program."""
        near = streams([w.uses for w in found], [w.bytes for w in found], kept)
        for f32 in (True, False):
            at = [
                i
                for i, w in enumerate(found)
                if near[i] and w.kind in (PASS, NORM, SOFTMAX) and (w.dtype == "f32") == f32
            ]
            if at:
                alone = self._moves([found[i].bytes for i in at], f32)
                rates = self._stream(f32)
                placed = np.array([rates.seconds(near[i], self._cache) for i in at])
                scale = np.array([found[i].op.scale for i in at])
                # The time of a norm beyond a pass of its traffic does not change.
                own = np.maximum(times[at, 0] / scale - alone + placed, placed) * scale
                times[at] *= (own / times[at, 0])[:, None]
                # Indices in order select what is still near.
                once = [[part for part in near[i] if not part.again] for i in at]
                times[at, 1] *= [rates.seconds(o, self._cache) for o in once] / placed

    def _row_by_row(self, work: AtenKernel) -> float:
        """Return extra seconds of layer norms of old releases, which grow with their rows."""
        spec = self._spec
        old = spec.runs_cuda and work.kind == NORM and is_older(self._release, _VECTORIZED)
        if not old:
            return 0.0
        cycles = work.shape[0] * work.op.scale * fitted("norms").row_cycles
        return float(cycles / (spec.core_count * (spec.clock_hz or _CLOCK)))

    @cached_property
    def _cache(self) -> float:
        return float(self._spec.cache_bytes)

    def _stream(self, f32: bool) -> Rates:
        """Return the rates of passes, from the operator model's small and large passes."""
        if f32 not in self._rates:
            small = max(_SMALL * self._cache, _LEAST)
            large = max(_LARGE * self._cache, _MOST)
            launch, near, far = self._moves([_EMPTY, small, large], f32)
            main = (far - launch) / large
            if self._spec.runs_cuda:
                share = 1.0 / (main * self._spec.bandwidth)
                # f32 passes were measured on older chips too, down to 0.74 (T4).
                share = min(max(share, 0.0 if f32 else _STREAMS.least), _STREAMS.most)
                main = 1.0 / (share * self._spec.bandwidth)
            # Small passes are mostly launches: no cache is faster than its data sheet.
            peak = max(level.bandwidth for level in self._spec.levels)
            cache = max((near - launch) / small, 1.0 / peak)
            self._rates[f32] = Rates(launch, min(cache, main), main)
        return self._rates[f32]

    def _moves(self, sizes: Sequence[float], f32: bool) -> np.ndarray:
        """Return the seconds of passes of some bytes, timed alone."""
        works = [moving("move", "f32" if f32 else "bf16", size) for size in sizes]
        return self._alone_each(works)[0][:, 0]

    def _alone_each(self, found: Sequence[AtenKernel]) -> tuple[np.ndarray, list[str]]:
        """Return times and sources as ``__call__``, for each kernel repeated alone."""
        rows = [None if self._calls_library(w) else self.row(w) for w in found]
        reaches = [step_reach(w.op, self._spec) for w in found]
        ops = [w.op for w in found]
        factors = np.array([stand_in_factor(op, self._spec) for op in ops])
        times, keys, _ = price(ops, rows, reaches, self._spec, self._bundle, factors)
        sources = [_source(w, key) for w, key in zip(found, keys, strict=True)]
        for i, work in enumerate(found):
            times[i] *= self._factor(work, keys[i])
            if keys[i] == ROOFLINE and work.is_depthwise:
                times[i] = depthwise_times(work, self._spec, self._release)
            elif keys[i] == ROOFLINE and self._multiplies_last(work):
                times[i] *= cudnn_seconds(work, self._spec, self._release) / times[i, 0]
            if work.name in STEPS:
                times[i] = np.maximum(times[i], KERNEL_US * 1e-6 * work.op.scale)
                times[i] *= [1.0, 1.0 / _PERSISTENT, 1.0]
            if _stands_in(rows[i], work):
                times[i] *= [1.0, 1.0 / _OTHER_KERNEL, _OTHER_KERNEL]
        at = [i for i, w in enumerate(found) if self._calls_library(w)]
        if at:
            own = [found[i] for i in at]
            times[at], known = attention_times(own, self, self._spec, self._release)
            for i, source in zip(at, known, strict=True):
                sources[i] = keys[i] = source
        self._starve(times, found, ops, keys)
        return times, sources

    def _starve(
        self, times: np.ndarray, found: Sequence[AtenKernel], ops: Sequence[Op], keys: Sequence[str]
    ) -> None:
        """Slow down products whose times come from chips with more power per core."""
        at = [
            i
            for i, w in enumerate(found)
            if _draws_power(w) and not self._measured_here(keys[i].removeprefix("learned:"))
        ]
        if at and self._spec.runs_cuda:
            work = work_of([ops[i] for i in at], times[at, 0], self._spec)
            times[at] *= starved(self._spec, work)[:, None]

    def _measured_here(self, key: str) -> bool:
        """Return whether the chip is in the training data of a family."""
        family = self._bundle.families.get(key) if self._bundle else None
        return family is not None and self._spec.name in family.devices

    def _factor(self, work: AtenKernel, key: str) -> float:
        """Return the factor learned from whole steps, for kernels priced like those of steps."""
        return (
            1.0
            if key.startswith(ALONE) or _several(work)
            else self._factors.get(work.op.family, 1.0)
        )

    def _multiplies_last(self, work: AtenKernel) -> bool:
        """Return whether cuDNN runs a convolution with the channels last."""
        narrow = work.dtype in ("f16", "bf16", "tf32")
        return narrow and self._spec.runs_cuda and work.conv is not None

    def _calls_library(self, work: AtenKernel) -> bool:
        """Return whether a kernel is fused attention with published times on NVIDIA GPUs."""
        known = self._bundle is not None and self._spec.runs_cuda
        return known and work.kind == ATTENTION and work.dtype in TABLE_DTYPE

    def predict(self, key: str, rows: pd.DataFrame, device: DeviceSpec) -> FamilyPrediction:
        """Predict the latencies of rows of one published family."""
        assert self._bundle is not None
        self._bundle.devices.setdefault(device.name, device)
        return self._bundle.predict(rows.assign(key=key, device=device.name))

    def row(self, work: AtenKernel) -> Row | None:
        """Return the row of a kernel for the operator model; ``None`` for the roofline."""
        if work.kind == CONVOLUTION:
            return self._conv_row(work)
        if self._alone is not None and work.dtype == "f32" and work.kind != ATTENTION:
            return eager_row(
                _stand_in(work) if work.shape[:1] == (1,) and work.kind == PRODUCT else work.op
            )
        several = work.kind == PRODUCT and work.shape[0] > 1
        if self._bundle is None or not self._spec.runs_cuda or several:
            return None
        return step_row(_stand_in(work), self._spec)

    def _conv_row(self, work: AtenKernel) -> Row | None:
        """Return the row of a convolution; ``None`` if no similar one was measured.

        AMD's were measured in all directions and types. cuDNN's were measured forward, in full f32
        and with 3 × 3 filters: what PyTorch runs where TF32 is absent or not allowed.
        """
        sizes, spec = work.conv, self._spec
        dtype = TABLE_NAMES.get(work.dtype)
        if self._alone is None or sizes is None or dtype not in DTYPES["conv_nd"]:
            return None
        if spec.vendor == "AMD":
            kind = {"key": "tuned/conv", "family": "conv", "dtype": dtype}
            return {**kind, **sizes}
        square = {"kh": 3, "kw": 3, "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1}
        plain = {**square, "ndim": 2, "dil_h": 1, "dil_w": 1, "groups": 1, "h": sizes["w"]}
        alike = all(sizes[name] == value for name, value in plain.items())
        if work.dtype != "f32" or not spec.runs_cuda or not alike:
            return None
        # The gradient of the image is a convolution with input and output channels swapped.
        ends = ("k", "c") if sizes["op"] == "bwd_data" else ("c", "k")
        own = {"batch": sizes["n"], "cin": sizes[ends[0]], "cout": sizes[ends[1]]}
        row = {"key": "eager/conv", "family": "conv", "dtype": "fp32", "op": "conv", **own}
        return {**row, "insize": sizes["h"], "ksize": 3, "stride": 1, "pad": 1}


def _alike(work: AtenKernel) -> Hashable:
    """Return all that the isolated time of a kernel depends on."""
    conv = tuple(work.conv.items()) if work.conv else ()
    return work.op, conv, work.masked, work.allowed, work.channels_last


def least_times(found: Sequence[AtenKernel], spec: DeviceSpec) -> np.ndarray:
    """Return minimum seconds of kernels, shape ``(n,)``; f32 products use the full f32 peak.

    Steps of recurrent layers find their weights in the cache if these fit.
    """
    times = np.array([w.op.scale if w.name in STEPS else 1.0 for w in found])
    each = [w.op._replace(scale=w.op.scale / n) for w, n in zip(found, times, strict=True)]
    full = [
        op.flops() / spec.matrix_peak("f32") if w.kind == PRODUCT and w.dtype == "f32" else 0.0
        for w, op in zip(found, each, strict=True)
    ]
    return np.asarray(times * np.maximum(full, least_seconds(each, spec)))


def raised(times: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Raise times with bounds, shape ``(n, 3)``, to minimum times, shape ``(n,)``.

    The upper bound keeps its ratio to an estimate that is raised.
    """
    factor = np.ones_like(times)
    factor[:, 2] = np.maximum(least / times[:, 0], 1.0)
    return np.asarray(np.maximum(times * factor, least[:, None]))


def _draws_power(work: AtenKernel) -> bool:
    """Return whether a kernel's multiplications draw power that its own physics does not model."""
    # The physics of f32 products includes power (`power_rate` of features/operators/columns.py).
    product = work.kind == PRODUCT and work.dtype != "f32"
    return product or work.kind == ATTENTION or (work.kind == CONVOLUTION and not work.is_depthwise)


def bound_of(work: AtenKernel, spec: DeviceSpec) -> str:
    """Return the bottleneck of a kernel's roofline: ``compute``, ``memory`` or ``latency``."""
    parts = {
        "compute": work.op.flops() / matrix_rate(work.op, spec),
        "memory": work.bytes / spec.bandwidth,
        "latency": spec.floor * work.launches + _chained(work, spec) + _few_blocks(work, spec),
    }
    return max(parts, key=parts.__getitem__)


def _chained(work: AtenKernel, spec: DeviceSpec) -> float:
    """Return the seconds of dependent loads, and of updates of one address on GPUs.

    A cache applies one update of an address per clock (NVIDIA, Kepler GK110 white paper, 2012).
    """
    turns = work.queued if spec.platform == "gpu" else 0.0
    return max(work.serial * _LOAD_CYCLES, turns) / (spec.clock_hz or _CLOCK)


def _few_blocks(work: AtenKernel, spec: DeviceSpec) -> float:
    """Return the seconds of the loads of few thread blocks, limited by their loads in flight."""
    if not work.blocks or not spec.runs_cuda:
        # Kernels that count and vote per element reach the rate of main memory at best.
        return work.swept / spec.bandwidth
    loads = work.blocks * _CUDNN.channel_threads * _CUDNN.channel_loads
    width = 4.0 if work.dtype == "f32" else 2.0
    return work.bytes / (loads * width) * _LOAD_CYCLES / (spec.clock_hz or _CLOCK)


def has_tf32(spec: DeviceSpec) -> bool:
    """Return whether TF32 products are faster than f32 products under PyTorch.

    MIOpen and AMD's BLAS compute in f32.
    """
    return spec.runs_cuda and spec.matrix_peak("tf32") > 1.5 * spec.matrix_peak("f32")


def as_set(work: AtenKernel, allowed: Collection[str], spec: DeviceSpec) -> AtenKernel:
    """Return a kernel in the format that it multiplies under PyTorch's settings for TF32.

    Args:
        work: The kernel; recurrent layers in f32 are in TF32.
        allowed: Operators that may round to TF32, as in a recording.
        spec: The device.
    """
    wide = work.dtype == "f32" and work.kind in (PRODUCT, CONVOLUTION) and not work.is_depthwise
    if not has_tf32(spec) or not (wide or work.dtype == "tf32"):
        return work
    layer = RNN if work.dtype == "tf32" else MATMUL if work.kind == PRODUCT else CONV
    return work.but(dtype="tf32" if layer in allowed else "f32")


def _stand_in(work: AtenKernel) -> Op:
    """Return the operator of a step that a kernel is priced as."""
    op = work.op
    if work.kind == PRODUCT and not _several(work):
        rows, columns, depth = op.shape[1:]
        if _is_rounded(work):
            # Half the rate and twice the operands of bf16: a product in bf16 of twice the depth.
            op, depth = op._replace(dtype="bf16"), 2 * depth
        return op._replace(family="linear", shape=(rows, columns, depth))
    if work.kind == SOFTMAX:
        return op._replace(family="move", shape=(max(1, round(work.bytes)),))
    return op


def _source(work: AtenKernel, key: str) -> str:
    if key == ROOFLINE:
        return key
    return f"learned:{key if key.startswith(ALONE) else _stand_in(work).family}"


def _several(work: AtenKernel) -> bool:
    """Return whether a kernel multiplies a batch of matrices."""
    return work.kind == PRODUCT and work.shape[0] > 1


def _is_rounded(work: AtenKernel) -> bool:
    """Return whether a kernel is a TF32 product, not one of recurrent layers."""
    return work.kind == PRODUCT and work.dtype == "tf32" and not work.name.startswith("cudnn_rnn")


def _stands_in(row: Row | None, work: AtenKernel) -> bool:
    """Return whether a row stands for another kernel: of a weight gradient, or in TF32."""
    filters = work.conv is not None and work.conv["op"] == "bwd_weights"
    return row is not None and ((row["op"] == "conv" and filters) or _is_rounded(work))
