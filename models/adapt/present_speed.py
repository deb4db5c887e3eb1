"""Scales predictions to the speed at which a measured device runs now, by class of work.

A virtual machine shares its host: it may run at half the speed of the hour before, steadily. The
anchors show by how much for arithmetic on all cores, for one core and for main memory; a kernel is
scaled by the class that limits it.

Only slower speeds move an estimate. A probe keeps the best of its readings as ceilings, but its
anchors are what was typical at the time: where they are faster now, the probe was disturbed, and
not the ceilings from which is predicted. Intervals hold both speeds in either case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...features.devices.identity import Comparison
from ...features.kernels.kernel import Kernel
from ...features.table.columns import INDEX
from ...features.table.row import rows
from ..core.base import KernelPrediction
from ..program.program_model import ProgramPrediction

#: Kinds whose kernels on a CPU run on all cores whatever the compiler states: their libraries
#: divide the work themselves.
_PARALLEL = ("gemm", "conv")


def at_present_speed(
    prediction: KernelPrediction, kernels: Sequence[Kernel], speed: Comparison
) -> KernelPrediction:
    """Scale the latencies of kernels that are slower now; intervals hold both speeds.

    Args:
        prediction: Of ``n`` kernels, at the speed of the device's measurement.
        kernels: The kernels.
        speed: Present speed relative to then, by class; empty changes nothing.
    """
    if not speed.ratios or not kernels:
        return prediction
    factor = 1.0 / kernel_speeds(prediction.bound, kernels, speed.ratios)
    slower = np.maximum(factor, 1.0)
    return replace(
        prediction,
        latency=prediction.latency * slower,
        # What was learned at the other speed may hold for part of a kernel: both are possible.
        lo=prediction.lo * np.minimum(factor, 1.0),
        hi=prediction.hi * slower,
        unclamped=None if prediction.unclamped is None else prediction.unclamped * slower,
    )


def at_higher_speed(
    prediction: KernelPrediction, kernels: Sequence[Kernel], speed: Comparison
) -> KernelPrediction:
    """Scale the latencies of kernels whose class is faster now, for the lower end of a program."""
    factor = 1.0 / kernel_speeds(prediction.bound, kernels, speed.ratios)
    return replace(prediction, latency=prediction.latency * np.minimum(factor, 1.0))


def program_at_present_speed(
    now: ProgramPrediction, others: Sequence[ProgramPrediction]
) -> ProgramPrediction:
    """Widen the interval of a program at the present speed to hold those at other speeds."""
    every = [now, *others]
    return now._replace(lo=min(p.lo for p in every), hi=max(p.hi for p in every))


def kernel_speeds(
    bound: np.ndarray, kernels: Sequence[Kernel], ratios: Mapping[str, float]
) -> np.ndarray:
    """Return the speed of each kernel relative to the device's measurement, shape ``(n,)``.

    Args:
        bound: What limits each, of :class:`~opcast.features.table.roofline.Roofline`.
        kernels: The kernels.
        ratios: Speed by class; a missing class runs as it did.
    """
    row = rows(kernels)
    # XLA states into how many parts it divides a loop, and nothing for one that stays on one core.
    divided = row[:, INDEX["partitions"]] > 1
    library = row[:, INDEX["library"]] > 0
    parallel = divided | library | np.isin([k.kind for k in kernels], _PARALLEL)
    arithmetic, single, memory = (
        ratios.get(name, 1.0) for name in ("arithmetic", "single-thread", "bandwidth")
    )
    by_core = np.where(parallel, arithmetic, single)
    # A latency holds for one core, whatever the kernel would be divided into.
    return np.asarray(np.select([bound == "memory", bound == "latency"], [memory, single], by_core))
