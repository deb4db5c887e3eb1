"""Energy of a program on one device: its kernels' utilisations by the law of power."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...common.interval import Interval
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from ...features.table.roofline import compute_seconds, main_bytes
from ...features.table.row import rows
from ...models.power.energy import energy
from ...models.power.law import Work


def program_energy(
    kernels: Sequence[Kernel], latency: np.ndarray, total: Interval, device: DeviceSpec
) -> Interval | None:
    """Joules of one run of a program; ``None`` where the device's power limit is not known.

    Args:
        kernels: Its kernels.
        latency: Seconds of one execution of each, shape ``(n,)``.
        total: Time of the program, with its interval.
        device: The device.
    """
    # Chips whose board power is not stated, TPUs and CPUs among them.
    if not device.power_w or not total.value:
        return None
    row = rows(kernels)
    count = np.array([k.multiplicity for k in kernels], float)
    seconds = np.maximum(latency, 1e-12)
    matrix, vector = compute_seconds(row, device)
    work = Work.of(
        matrix + vector,
        main_bytes(row, device),
        seconds,
        np.full(len(kernels), device.floor),
        1.0,
        device.bandwidth,
        np.zeros(len(kernels), bool),
    )
    own = latency * count
    return energy(device, work, own, float(own.sum()), total, 1)
