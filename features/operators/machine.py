"""Device figures that operator estimates need: rates of formats, of a power limit and of a core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost.formats import Format
from ..devices.device import DeviceSpec
from ..devices.rules import IDLE_W, rules_of

#: Voltage as the clock approaches zero, relative to that at the boost clock. With this value, chips
#: of one process agree on the energy of an operation: H100, whose power limit holds it at 0.74 of
#: its peak, and L4, at 0.28 (`f32_joules` in generations/architectures.yaml).
_LEAST_VOLTAGE = 0.5


def power_rate(spec: DeviceSpec) -> float:
    """Return the FP32 operations per second that a device's power limit sustains.

    An operation takes ``energy · voltage²``, and the voltage falls linearly with the clock. The
    sustained fraction ``s`` of the peak solves ``s · (v + (1 - v) · s)² = p``, where ``p`` is the
    available power over that of the peak at the boost clock. Infinite where the power limit or the
    energy of an operation on the chip's process is unknown.
    """
    energy = rules_of(spec.architecture, spec.platform).f32_joules
    if spec.power_w <= IDLE_W or not energy:
        return float("inf")
    peak = spec.matrix_peak("f32")
    fed = (spec.power_w - IDLE_W) / energy
    return peak * _clock_share(fed / peak) if fed < peak else fed


def _clock_share(power: float) -> float:
    """Return the fraction of the boost clock at a fraction of its power, by Newton's method."""
    least, share = _LEAST_VOLTAGE, 1.0
    # Power is convex in the clock, so no step from above passes the root; eight steps converge.
    for _ in range(8):
        voltage = least + (1.0 - least) * share
        slope = voltage * (voltage + 2.0 * (1.0 - least) * share)
        share -= (share * voltage**2 - power) / slope
    return share


def format_rate(kind: Format, device: DeviceSpec) -> str:
    """Return the HLO type at whose rate a device multiplies a format.

    Without units for 4-bit floats (absent types have the rate of the next wider one), libraries
    widen the weights to the 16 bits of the activations, as Marlin's kernels do.
    """
    narrow = "f4e2m1fn"
    lacks = device.matrix_peak(narrow) <= device.matrix_peak("f8e4m3fn")
    return "bf16" if kind.rate == narrow and lacks else kind.rate


#: 16-bit operations per clock of an H100 multiprocessor, and of the widest measured core
#: (data-centre Blackwell).
_MULTIPROCESSOR, WIDEST = 4096.0, 8192.0


def multiprocessors_of(device: DeviceSpec) -> float:
    """Return a device's cores; for systolic arrays, the number of equivalent H100 multiprocessors.

    The count does not depend on rates: waves of tiles are whole, and one per cent more clock must
    not change their number.
    """
    arrays = 2.0 * device.array_rows * device.array_columns * device.arrays_per_core
    return max(device.core_count, device.core_count * arrays / _MULTIPROCESSOR, 1.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Device figures, one per row: SMs, clock (Hz), last-level cache (bytes), rates (1/s).

    ``width`` is the width of a core's matrix unit relative to the widest measured one, at least 1:
    vendors widen the paths into and out of a core together with the unit.
    """

    cores: np.ndarray
    clock: np.ndarray
    cache: np.ndarray
    cache_bandwidth: np.ndarray
    bandwidth: np.ndarray
    vector: np.ndarray
    width: np.ndarray
