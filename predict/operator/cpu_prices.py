"""Prices ATen operators on a CPU: oneDNN's and MKL's calls, and loops that a compiler generates.

    time = calls + arithmetic / (share · peak) + passes over weights + bytes of tensors + loops

A call of a library finds its operands' formats and its kernel anew each time. Unless they are
frozen, weights are packed in every run, those of filters with several taps after a copy that moves
their channels last. Constants are those of ``fitted.yaml``, section ``cpu``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.physics import fitted, resident_share
from .aten_prices import least_times
from .aten_traffic import NAMES, Stream, streams
from .aten_work import ATTENTION, CONVOLUTION, PRODUCT, AtenKernel

_FIT = fitted("cpu")
#: Words of operators by what their loops do.
_WORDS = NAMES["cpu"]
#: FLOP of a core in a clock where no clock is known: two units of eight lanes.
_USUAL = 32.0
#: Where kernels of CPUs come from.
SOURCE = "whole models"
#: Half-width of the interval of one kernel, as a factor either way: whole models were measured, not
#: their kernels. Engineering estimate.
_KERNEL_FACTOR = 2.0


class CpuPrices:
    """Seconds and ends of the interval of kernels on a CPU; as :class:`~.aten_prices.AtenPrices`.

    Args:
        spec: A CPU.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec
        cores, own = float(spec.core_count), float(spec.extra.get("efficient_cores", 0.0))
        # Libraries cut work in equal parts, so that the slowest core decides, unless the system
        # moves threads: the root of what all cores do together and of the slowest one's share.
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
        """Return seconds and ends of their intervals, shape ``(n, 3)``, and their sources.

        Args:
            found: ``n`` kernels, one after the other.
            kept: Memory that outlives them.
        """
        near = streams([w.uses for w in found], [w.bytes for w in found], kept)
        middle = [self._seconds(w, own) for w, own in zip(found, near, strict=True)]
        times = np.array(middle)[:, None] * [1.0, 1.0 / _KERNEL_FACTOR, _KERNEL_FACTOR]
        least = least_times(found, self._spec)
        return np.maximum(times, least[:, None]), [f"learned:{SOURCE}"] * len(found)

    def _seconds(self, work: AtenKernel, parts: Sequence[Stream]) -> float:
        library = work.kind in (PRODUCT, CONVOLUTION, ATTENTION)
        # Calls go at the pace of one core, as the shortest kernel does.
        calls = (_FIT.call + library * _FIT.library) * work.launches * self._spec.floor
        weights = _weights(work)
        share = max(1.0 - weights / max(work.bytes, 1.0), 0.0)
        # Attention goes over blocks of keys, whose exponentials count by the element.
        moved = 0.0 if work.kind == ATTENTION else share * self._moved(work, parts)
        packed = _FIT.pack_filters if work.kind == CONVOLUTION else _FIT.pack
        return (
            calls
            + self._arithmetic(work)
            + packed * weights / self._spec.bandwidth
            + moved
            + self._loops(work)
        )

    def _arithmetic(self, work: AtenKernel) -> float:
        """Multiply-adds at a share of the peak; lanes beyond the last channel do nothing."""
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
        """Bytes at the rates of the caches, or of main memory, by how far their last use lies."""
        cache = self._spec.cache_bytes
        near = 0.0
        for own in parts:
            held = resident_share(np.array(own.distance), np.array(max(cache, 1.0)), 1.1, 0.5)
            near += own.bytes * float(held)
        fast = max(level.bandwidth for level in self._spec.levels)
        far = work.bytes - near
        return near / (_FIT.cache * fast) + far / (_FIT.memory * self._spec.bandwidth)

    def _loops(self, work: AtenKernel) -> float:
        """Operations and cycles of loops, for each element that is read and written.

        Loops that gather take no less on 14 cores than on one.
        """
        elements = work.bytes / (2.0 * FORMATS[work.dtype].element_bytes)
        if work.kind == ATTENTION:
            return _FIT.attention * elements / self._cycles
        # Sizes of transposed filters are not kept: they have several taps.
        if work.kind == PRODUCT or (work.conv is not None and work.taps == 1):
            return 0.0
        if work.kind == CONVOLUTION:
            width = FORMATS[work.dtype].weight_bytes
            return _FIT.gather * _weights(work) / width / self._clock
        slow = (_WORDS["gathers"], _WORDS["reductions"])
        cycles = sum(any(word in work.name for word in words) for words in slow)
        # A "hardtanh" compares.
        names = [name for name in work.name.split("+") if "hard" not in name]
        vectors = any(word in name for word in _WORDS["functions"] for name in names)
        lanes = self._spec.vector_peak("f32") / 2.0 * self._balance
        return elements * (cycles * _FIT.gather / self._clock + vectors * _FIT.function / lanes)


def cpu_notes(
    spec: DeviceSpec, found: Sequence[AtenKernel], compiled: bool, known: Sequence[str]
) -> tuple[str, ...]:
    """What the figures of a program on a CPU mean, and their limits.

    Args:
        spec: The CPU.
        found: Its kernels.
        compiled: Whether ``torch.compile`` made them.
        known: CPUs whose whole models were learned from.
    """
    made = (
        "with loops that torch.compile's C++ fuses, and weights packed in every run, since they "
        "are not frozen"
        if compiled
        else "and PyTorch's operators one after the other"
    )
    notes = [
        f"products and convolutions by oneDNN and MKL on all physical cores, {made}; for the same "
        "program under XLA leave --framework out"
    ]
    if spec.name not in known:
        notes.append(
            f"whole models were measured on {', '.join(known)} alone: {spec.name} follows from its "
            "data sheet, and the interval allows for another clock under load, another memory and "
            "other libraries"
        )
    unlike = {
        "training": any(w.phase == "backward" for w in found),
        "eager PyTorch": not compiled,
        "numbers of 16 bits": any(w.dtype in ("f16", "bf16") for w in found),
    }
    if any(unlike.values()):
        what = ", ".join(name for name, own in unlike.items() if own)
        notes.append(f"{what} on a CPU was never measured: the interval is wider by a factor of 2")
    return tuple(notes)


def _weights(work: AtenKernel) -> float:
    """Bytes of the second operand of products and convolutions."""
    if work.kind not in (PRODUCT, CONVOLUTION):
        return 0.0
    batch, _, columns, depth = work.shape
    return min(batch * columns * depth * FORMATS[work.dtype].weight_bytes, work.bytes)
