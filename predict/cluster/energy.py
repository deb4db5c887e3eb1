"""Energy of a training step: operators by the law of power, and waiting for the rest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ...models.power.energy import energy
from ...simulate.step.calls import OpCall
from ..operator.step_operators import work_of


def step_energy(
    seconds: Mapping[OpCall, float],
    counts: Mapping[OpCall, float],
    computing: float,
    total: Interval,
    spec: DeviceSpec,
    devices: int,
    cap: float = 1.0,
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
        cap: Sustained power as a share of the limit.
    """
    calls = [call for call, value in seconds.items() if value > 0]
    own = np.array([seconds[call] for call in calls])
    each = own / np.array([counts[call] for call in calls])
    return energy(spec, work_of(calls, each, spec), own, computing, total, devices, cap)
