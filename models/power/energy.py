"""Energy of programs and steps, by the law of power, and what device-hours cost."""

from __future__ import annotations

import math

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ..trust.calibrator import with_error
from .law import Work, held, shipped_law


def energy(
    spec: DeviceSpec,
    work: Work,
    seconds: np.ndarray,
    busy: float,
    total: Interval,
    devices: int,
    cap: float = 1.0,
) -> Interval | None:
    """Joules of devices that compute for a part of a time and wait for the rest.

    Args:
        spec: The device; its power limit scales the law.
        work: Utilisations of its kernels, one execution each.
        seconds: Time of all executions of each kernel, shape ``(n,)``: their weights.
        busy: Seconds of ``total`` in which a device computes.
        total: Time of the program or step, with its interval.
        devices: Number of devices.
        cap: Sustained power as a share of the limit.

    Returns:
        Joules with a 90 % interval, in which errors of power and of time count as independent;
        ``None`` where the power limit is unknown.
    """
    if not spec.power_w:
        return None
    law = shipped_law()
    weight = float(seconds.sum())
    waiting = min(law.waiting, cap)
    drawn = cap * held(law.demand(work) / cap)
    share = float((drawn * seconds).sum() / weight) if weight else waiting
    # Guard: rounding may put computation a little above the total.
    busy = min(busy, total.value)
    used = share * busy + waiting * (total.value - busy)
    joules = devices * spec.power_w * used
    low, high = (math.log(max(end, 1e-30) / total.value) for end in (total.lo, total.hi))
    below, above = with_error((low, high), law.ends)
    # A board never draws more than its limit, however long it takes.
    most = devices * cap * spec.power_w * total.hi
    return Interval(
        joules, joules * math.exp(below), max(joules, min(joules * math.exp(above), most))
    )


def energy_fields(joules: Interval | None) -> dict[str, float | None]:
    """Keys of an energy in plain data; ``None`` where it is unknown."""
    values = joules or (None, None, None)
    return dict(zip(("energy_j", "energy_lo_j", "energy_hi_j"), values, strict=True))


def cost_of(price: float, seconds: Interval, devices: int) -> Interval:
    """Cost of devices rented by the hour for a time: ``price · devices · seconds / 3600``."""
    low, middle, high = (
        price * devices * value / 3600.0 for value in (seconds.lo, seconds.value, seconds.hi)
    )
    return Interval(middle, low, high)


def cost_fields(price: float | None, seconds: Interval, devices: int) -> dict[str, float]:
    """Keys of a cost in plain data, in the price's currency; none without a price."""
    if price is None:
        return {}
    found = cost_of(price, seconds, devices)
    return {"cost": found.value, "cost_lo": found.lo, "cost_hi": found.hi}
