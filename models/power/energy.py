"""Energy of programs and steps, kernels under a power cap, and the cost of device-hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...common.interval import Interval, end_fields
from ...features.devices.catalogue import device_names, find_device
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.roofline import compute_seconds, main_bytes
from ...features.table.row import rows
from ..core.base import KernelPrediction
from ..trust.calibrator import with_error
from .caps import capped, under_cap
from .law import Work, board_law, held, made_like, shipped_law, slower


def energy(
    spec: DeviceSpec,
    work: Work,
    seconds: np.ndarray,
    busy: float,
    total: Interval,
    devices: int,
    cap: float = 1.0,
    idle: float = 0.0,
) -> Interval | None:
    """Energy of devices that compute for part of a time and wait for the rest, in joules.

    Args:
        spec: The device; its power limit scales the law.
        work: Utilizations of its kernels, one execution each.
        seconds: Total time of each kernel's executions, shape ``(n,)``, used as weights.
        busy: Seconds of ``total`` in which a device computes.
        total: Time of the program or step, with its interval.
        devices: Number of devices.
        cap: Sustained power as a fraction of the limit.
        idle: Seconds of ``total`` in which nothing runs; in the rest kernels wait for others.

    Returns:
        Joules with a 90 % interval from independent errors of power and time; ``None`` if the power
        limit is unknown.
    """
    if not spec.power_w:
        return None
    law = board_law(spec)
    weight = float(seconds.sum())
    waiting = min(law.waiting, cap)
    drawn = cap * held(law.demand(work) / cap)
    share = float((drawn * seconds).sum() / weight) if weight else waiting
    # Rounding may make computation slightly longer than the total.
    busy = min(busy, total.value)
    idle = min(idle, total.value - busy)
    used = share * busy + waiting * (total.value - busy - idle) + min(law.idle, cap) * idle
    joules = devices * spec.power_w * used
    low, high = (math.log(max(end, 1e-30) / total.value) for end in (total.lo, total.hi))
    below, above = with_error((low, high), law.ends)
    # A board never exceeds its limit.
    most = devices * cap * spec.power_w * total.hi
    return Interval(
        joules, joules * math.exp(below), max(joules, min(joules * math.exp(above), most))
    )


def program_energy(
    kernels: Sequence[Kernel],
    latency: np.ndarray,
    total: Interval,
    device: DeviceSpec,
    cap: float = 1.0,
) -> Interval | None:
    """Energy of one run of a program in joules; ``None`` if the power limit is unknown.

    Args:
        kernels: Its kernels.
        latency: Seconds of one execution of each, shape ``(n,)``.
        total: Time of the program, with its interval.
        device: The device.
        cap: Sustained power as a fraction of the limit.
    """
    # Chips without a stated board power, such as TPUs and CPUs.
    if not device.power_w or not total.value:
        return None
    own = latency * np.array([k.multiplicity for k in kernels], float)
    work = _work(kernels, latency, device)
    return energy(device, work, own, float(own.sum()), total, 1, cap)


def capped_kernels(
    found: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec, cap: float
) -> KernelPrediction:
    """Slow kernels down by the reduction of the clock under a power cap.

    Args:
        found: Times of the kernels without a cap.
        kernels: The kernels.
        device: The device.
        cap: Sustained power as a fraction of its limit; 1 changes nothing.
    """
    # Control kernels take no time, and so draw no power.
    at = np.flatnonzero(found.latency > 0)
    if cap >= 1.0 or not len(at):
        return found
    times = np.stack([found.latency, found.lo, found.hi], axis=1)
    work = _work([kernels[i] for i in at.tolist()], times[at, 0], device)
    times[at] = capped(times[at], work, cap, board_law(device))
    return replace(found, latency=times[:, 0], lo=times[:, 1], hi=times[:, 2])


def capped_total(total: Interval, device: DeviceSpec, cap: float, least: float) -> Interval:
    """Widen a program's interval by the law's error, which kernels share; at least ``least``."""
    if cap >= 1.0 or not total.value:
        return total
    low, high = under_cap(total.lo / total.value, total.hi / total.value, cap, board_law(device))
    return Interval(total.value, max(total.value * low, least), total.value * high)


def _work(kernels: Sequence[Kernel], latency: np.ndarray, device: DeviceSpec) -> Work:
    """Utilizations of a device's units by kernels."""
    row = rows(kernels)
    busy, like = (np.add(*compute_seconds(row, on)) for on in (device, made_like(device)))
    return Work.of(
        busy,
        main_bytes(row, device),
        np.maximum(latency, 1e-12),
        np.full(len(kernels), device.floor),
        1.0,
        device.bandwidth,
        np.zeros(len(kernels), bool),
        np.divide(like, busy, out=np.ones(len(kernels)), where=busy > 0.0),
    )


def energy_fields(joules: Interval | None) -> dict[str, float | None]:
    """Fields of an energy in plain data; ``None`` values if it is unknown."""
    values = joules or (None, None, None)
    return dict(zip(("energy_j", "energy_lo_j", "energy_hi_j"), values, strict=True))


def cost_of(price: float, seconds: Interval, devices: int) -> Interval:
    """Cost of devices rented by the hour for a time: ``price · devices · seconds / 3600``."""
    low, middle, high = (
        price * devices * value / 3600.0 for value in (seconds.lo, seconds.value, seconds.hi)
    )
    return Interval(middle, low, high)


def cost_fields(price: float | None, seconds: Interval, devices: int) -> dict[str, float]:
    """Fields of a cost in plain data, in the price's currency; empty without a price."""
    if price is None:
        return {}
    found = cost_of(price, seconds, devices)
    return end_fields("cost", found)


def starved(spec: DeviceSpec, work: Work) -> np.ndarray:
    """Slowdown of a board with less power per core than the best of its line.

    Cores of one line draw the same power at the same clock. A board whose limit provides
    less power per core and cycle has a lower clock under the same load, so that times derived from
    other boards' rates are too short.

    Args:
        spec: The device.
        work: Utilizations at its full clock, shape ``(n,)``.

    Returns:
        At least 1, shape ``(n,)``; 1 if the device's architecture or limit is unknown.
    """
    base = _best_fed(spec.line) if spec.line else None
    if base is None or not spec.power_w or not spec.clock_hz or _fed(base) <= _fed(spec):
        return np.ones(len(work.matrix))
    law, less = board_law(base), _fed(base) / _fed(spec)
    active, matrix = ((less * one, less * two) for one, two in (law.active, law.matrix))
    own = replace(law, active=active, matrix=matrix)
    return slower(work, np.minimum(own.clock(work) / law.clock(work), 1.0))


def _fed(spec: DeviceSpec) -> float:
    """Power limit per core and clock cycle, in joules."""
    return spec.power_w / (spec.core_count * spec.clock_hz)


@lru_cache
def _best_fed(line: str) -> DeviceSpec | None:
    """The measured chip of a line, else the one with the most power per core."""
    own = shipped_law().silicon.get(line)
    if own:
        return find_device(own.device)
    chips = [d for d in map(find_device, device_names()) if d.line == line]
    return max((d for d in chips if d.power_w and d.clock_hz), key=_fed, default=None)
