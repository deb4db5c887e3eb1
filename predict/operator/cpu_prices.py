"""Prices ATen operators on a CPU: oneDNN's and MKL's calls, and compiler-generated loops.

    time = calls + arithmetic / (share · peak) + passes over weights + bytes of tensors + loops

or, for loops on few threads (``aten_loops.py``), calls and their cycles or traffic.

A library call looks up its operands' formats and its kernel each time. Unless they are frozen,
weights are packed in every run; filters with several taps are first copied with their channels
last. Constants are in section ``cpu`` of ``fitted.yaml``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.physics import fitted
from .aten_prices import least_times
from .aten_streams import Stream, streams
from .aten_traffic import NAMES
from .aten_work import ATTENTION, CONVOLUTION, PRODUCT, AtenKernel

_FIT = fitted("cpu")
#: Substrings of operator names by what their loops do.
_WORDS = NAMES["cpu"]
#: FLOPs of a core per cycle if no clock is known: two units of eight lanes.
_USUAL = 32.0
#: Source of CPU kernel estimates.
SOURCE = "whole models"
#: Half-width of the interval of one kernel, as a factor either way: whole models were measured, not
#: their kernels. Engineering estimate.
_KERNEL_FACTOR = 2.0


class CpuPrices:
    """Seconds and interval bounds of kernels on a CPU; see :class:`~.aten_prices.AtenPrices`.

    Args:
        spec: A CPU.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec
        cores, own = float(spec.core_count), float(spec.extra.get("efficient_cores", 0.0))
        # Libraries split work evenly, so the slowest core decides, unless the system migrates
        # threads: the geometric mean of all cores' throughput and that at the slowest core's pace.
        slow = float(spec.extra.get("efficient_hz", 0.0)) if own else spec.clock_hz
        lanes = float(spec.extra.get("efficient_lanes_per_core", 0.0)) if own else 0.0
        cycles = (cores - own) * spec.clock_hz + own * slow
        peak = spec.vector_peak("f32")
        self._cycles = sqrt(cycles * cores * min(slow, spec.clock_hz)) or peak / _USUAL
        self._clock = spec.clock_hz or peak / _USUAL / cores
        self._balance = min(1.0, sqrt(2.0 * cores * lanes * slow / peak)) if own else 1.0

    def __call__(
        self, found: Sequence[AtenKernel], kept: Collection[int] = ()
    ) -> tuple[np.ndarray, list[str]]:
        """Return seconds with interval bounds, shape ``(n, 3)``, and their sources.

        Args:
            found: ``n`` kernels, in order.
            kept: Memory that outlives them.
        """
        near = streams([w.uses for w in found], [w.bytes for w in found], kept)
        middle = [self._seconds(w, own) for w, own in zip(found, near, strict=True)]
        times = np.array(middle)[:, None] * [1.0, 1.0 / _KERNEL_FACTOR, _KERNEL_FACTOR]
        least = least_times(found, self._spec)
        return np.maximum(times, least[:, None]), [f"learned:{SOURCE}"] * len(found)

    def _seconds(self, work: AtenKernel, parts: Sequence[Stream]) -> float:
        library = work.kind in (PRODUCT, CONVOLUTION, ATTENTION)
        # A call runs on one core, like the shortest kernel.
        calls = (_FIT.call + library * _FIT.library) * work.launches * self._spec.floor
        weights = _weights(work)
        share = max(1.0 - weights / max(work.bytes, 1.0), 0.0)
        # Attention works on blocks of keys, whose exponentials are counted per element.
        moved = 0.0 if work.kind == ATTENTION else share * self._moved(work, parts)
        packed = _FIT.pack_filters if work.kind == CONVOLUTION else _FIT.pack
        naive = self._naive(work)
        if naive:
            # Timed with their traffic.
            return calls + max(naive, moved)
        return (
            calls
            + self._arithmetic(work)
            + packed * weights / self._spec.bandwidth
            + moved
            + self._loops(work)
        )

    def _naive(self, work: AtenKernel) -> float:
        """Return seconds of a loop that is neither vectorised nor divided among all cores."""
        loop, spec = work.loop, self._spec
        if loop is None:
            return 0.0
        if loop.format and spec.matrix_peak(loop.format) > spec.matrix_peak("f32"):
            return 0.0
        share = min(loop.parts / spec.core_count, 1.0)
        return loop.cycles / max(self._clock, share * self._cycles)

    def _arithmetic(self, work: AtenKernel) -> float:
        """Return seconds of multiply-adds; SIMD lanes beyond the last channel are idle."""
        if not work.op.flops():
            return 0.0
        rate = work.op.format.peak_on(self._spec) * self._balance
        if work.is_depthwise:
            return work.op.flops() / (_FIT.depthwise * rate)
        vector = max(self._spec.lanes_per_core // 2, 1)
        columns = max(work.shape[2], 1) if work.kind == CONVOLUTION else vector
        filled = columns / (-(-columns // vector) * vector)
        return work.op.flops() / (_FIT.products * filled * rate)

    def _moved(self, work: AtenKernel, parts: Sequence[Stream]) -> float:
        """Return seconds of traffic, at cache or memory rates by the distance of the last use."""
        cache = float(self._spec.cache_bytes)
        near = sum(own.bytes * own.held(cache) for own in parts)
        fast = max(level.bandwidth for level in self._spec.levels)
        far = work.bytes + sum(own.bytes for own in parts if own.again) - near
        return near / (_FIT.cache * fast) + far / (_FIT.memory * self._spec.bandwidth)

    def _loops(self, work: AtenKernel) -> float:
        """Return seconds of loops per element that is read and written.

        Gather loops are no faster on 14 cores than on one.
        """
        elements = work.bytes / (2.0 * FORMATS[work.dtype].element_bytes)
        if work.kind == ATTENTION:
            return _FIT.attention * elements / self._cycles
        # Transposed filters, whose sizes are not recorded, are assumed to have several taps.
        if work.kind == PRODUCT or (work.conv is not None and work.taps == 1):
            return 0.0
        if work.kind == CONVOLUTION:
            width = FORMATS[work.dtype].weight_bytes
            return _FIT.gather * _weights(work) / width / self._clock
        slow = (_WORDS["gathers"], _WORDS["reductions"])
        cycles = sum(any(word in work.name for word in words) for words in slow)
        # "hardtanh" only compares, despite its name.
        names = [name for name in work.name.split("+") if "hard" not in name]
        vectors = any(word in name for word in _WORDS["functions"] for name in names)
        lanes = self._spec.vector_peak("f32") / 2.0 * self._balance
        return elements * (cycles * _FIT.gather / self._clock + vectors * _FIT.function / lanes)


def cpu_notes(
    spec: DeviceSpec, found: Sequence[AtenKernel], compiled: bool, known: Sequence[str]
) -> tuple[str, ...]:
    """Return notes on a program on a CPU.

    Args:
        spec: The CPU.
        found: Kernels of the program.
        compiled: Whether ``torch.compile`` generated them.
        known: CPUs with measured whole models in the training data.
        known: CPUs whose whole models were learned from.
    """
    made = (
        "with loops fused by torch.compile's C++ backend, and weights packed in every run, since "
        "they are not frozen"
        if compiled
        else "and PyTorch's operators run one after the other"
    )
    notes = [
        f"products and convolutions use oneDNN and MKL on all physical cores, {made}; for the same "
        "program under XLA omit --framework"
    ]
    if spec.name not in known:
        notes.append(
            f"whole models were measured only on {', '.join(known)}: {spec.name} is predicted from "
            "its data sheet, and the interval allows for another clock under load, another memory "
            "and other libraries"
        )
    unlike = {
        "training": any(w.phase == "backward" for w in found),
        "eager PyTorch": not compiled,
        "16-bit arithmetic": any(w.dtype in ("f16", "bf16") for w in found),
    }
    if any(unlike.values()):
        what = ", ".join(name for name, own in unlike.items() if own)
        notes.append(f"{what} on a CPU was never measured: the interval is wider by a factor of 2")
    return tuple(notes)


def _weights(work: AtenKernel) -> float:
    """Return the bytes of the second operand of products and convolutions."""
    if work.kind not in (PRODUCT, CONVOLUTION):
        return 0.0
    batch, _, columns, depth = work.shape
    return min(batch * columns * depth * FORMATS[work.dtype].weight_bytes, work.bytes)
