"""Energy of a training step: operators by the law of power, and waiting for the rest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ...models.power.energy import energy
from ...models.power.law import Work
from ...simulate.step.calls import OpCall
from ...simulate.step.workload import PRODUCT_DTYPE, PRODUCT_WIDTH


def step_energy(
    seconds: Mapping[OpCall, float],
    counts: Mapping[OpCall, float],
    computing: float,
    total: Interval,
    spec: DeviceSpec,
    devices: int,
) -> Interval | None:
    """Joules of a step over all its devices; ``None`` where the power limit is not known.

    The busiest device stands for all, which overstates energy where stages are unequal.

    Args:
        seconds: Time of all executions of each operator on the busiest device.
        counts: Executions of each.
        computing: Seconds of the step in which a device computes.
        total: Time of the step, with its interval.
        spec: The device.
        devices: Number of devices.
    """
    calls = [call for call, value in seconds.items() if value > 0]
    own = np.array([seconds[call] for call in calls])
    each = own / np.array([counts[call] for call in calls])
    work = Work.of(
        np.array([call.flops() for call in calls]),
        np.array([call.moved(PRODUCT_WIDTH.get(call.dtype, 2)) for call in calls]),
        each,
        np.full(len(calls), spec.floor),
        np.array([spec.matrix_peak(PRODUCT_DTYPE.get(c.dtype, c.dtype)) for c in calls]),
        spec.bandwidth,
        np.array([call.kind == "attention" for call in calls], bool),
    )
    return energy(spec, work, own, computing, total, devices)
