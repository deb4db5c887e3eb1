"""Energy of a program on one device, and its kernels under a power cap, by the law of power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.roofline import compute_seconds, main_bytes
from ...features.table.row import rows
from ...models.core.base import KernelPrediction
from ...models.power.energy import energy
from ...models.power.law import Work, capped, under_cap


def program_energy(
    kernels: Sequence[Kernel],
    latency: np.ndarray,
    total: Interval,
    device: DeviceSpec,
    cap: float = 1.0,
) -> Interval | None:
    """Joules of one run of a program; ``None`` where the device's power limit is unknown.

    Args:
        kernels: Its kernels.
        latency: Seconds of one execution of each, shape ``(n,)``.
        total: Time of the program, with its interval.
        device: The device.
        cap: Sustained power as a share of the limit.
    """
    # Chips whose board power is not stated, TPUs and CPUs among them.
    if not device.power_w or not total.value:
        return None
    own = latency * np.array([k.multiplicity for k in kernels], float)
    work = _work(kernels, latency, device)
    return energy(device, work, own, float(own.sum()), total, 1, cap)


def capped_kernels(
    found: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec, cap: float
) -> KernelPrediction:
    """Slow kernels down by what the clock falls under a power cap.

    Args:
        found: Times of the kernels without a cap.
        kernels: The kernels.
        device: The device.
        cap: Sustained power as a share of its limit; 1 changes nothing.
    """
    # Control kernels take no time, and so draw no power.
    at = np.flatnonzero(found.latency > 0)
    if cap >= 1.0 or not len(at):
        return found
    times = np.stack([found.latency, found.lo, found.hi], axis=1)
    work = _work([kernels[i] for i in at.tolist()], times[at, 0], device)
    times[at] = capped(times[at], work, cap)
    return replace(found, latency=times[:, 0], lo=times[:, 1], hi=times[:, 2])


def capped_total(total: Interval, cap: float) -> Interval:
    """Widen a program's interval by the law's error, which all its kernels have the same way."""
    if cap >= 1.0 or not total.value:
        return total
    low, high = under_cap(total.lo / total.value, total.hi / total.value, cap)
    return Interval(total.value, total.value * low, total.value * high)


def _work(kernels: Sequence[Kernel], latency: np.ndarray, device: DeviceSpec) -> Work:
    """How busy kernels keep a device's units."""
    row = rows(kernels)
    matrix, vector = compute_seconds(row, device)
    return Work.of(
        matrix + vector,
        main_bytes(row, device),
        np.maximum(latency, 1e-12),
        np.full(len(kernels), device.floor),
        1.0,
        device.bandwidth,
        np.zeros(len(kernels), bool),
    )
