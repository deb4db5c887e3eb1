"""Power caps: times under less power than a board's own limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...common.errors import DeviceError
from ...features.devices.catalogue import base_of
from ...features.devices.device import DeviceSpec
from ...features.devices.rules import IDLE_W
from ..trust.calibrator import with_error
from .law import PowerLaw, Work

#: Least cap as a fraction of the limit: drivers allow 100 of an A100's 400 W and 200 of an H100's
#: 700 W (from memory).
LEAST_CAP = 0.25
#: Rounding of a limit that a file's rule scales.
_ROUNDING = 1e-6


def cap_share(watts: float | None, spec: DeviceSpec) -> float:
    """A power cap as a fraction of a device's limit; 1 without a cap.

    Raises:
        DeviceError: The limit is unknown, or the cap is outside the allowed range.
    """
    if watts is None:
        return 1.0
    if not spec.power_w:
        raise DeviceError(
            "a power cap needs the device's power limit",
            where=spec.name,
            hint="give power_w in a device file",
        )
    least = LEAST_CAP * spec.power_w
    if not least <= watts <= spec.power_w:
        raise DeviceError(
            f"a power cap of {watts:g} W is outside {least:g} to {spec.power_w:g} W",
            where=spec.name,
            hint="its limit, and a quarter of it",
        )
    return watts / spec.power_w


def fed(watts: float | None, spec: DeviceSpec) -> tuple[DeviceSpec, float]:
    """A device with the limit that its units are made for, and its power as a fraction of that.

    A design whose file gives less power than its base has for the same cores, clock and matrix
    units is the chip with the power that these need under a cap.

    Args:
        watts: A cap in watts; ``None`` for the device's own limit.
        spec: The device.

    Raises:
        DeviceError: See :func:`cap_share`.
    """
    cap, base = cap_share(watts, spec), base_of(spec)
    if not spec.power_w or base is None or base.name != spec.base:
        return spec, cap
    grown = spec.matrix_peak("f32") / base.matrix_peak("f32")
    if spec.clock_hz and base.clock_hz:
        cores = spec.core_count * spec.clock_hz / (base.core_count * base.clock_hz)
        # Cores may have wider units, which a file without a limit feeds as well.
        grown = min(grown, cores)
    # Matrix units that grow alone take as many joules an operation as before.
    grown = max(grown, spec.matrix_peak("bf16") / base.matrix_peak("bf16"))
    full = base.power_w + (grown - 1.0) * max(base.power_w - IDLE_W, 0.0)
    if spec.power_w > (1.0 - _ROUNDING) * full:
        return spec, cap
    return replace(spec, power_w=full), cap * spec.power_w / full


def capped(times: np.ndarray, work: Work, cap: float, law: PowerLaw) -> np.ndarray:
    """Times with interval bounds under a cap, shape ``(n, 3)``.

    The error of the law widens intervals where the clock is reduced (:meth:`PowerLaw.error`).

    Args:
        times: Seconds with both bounds without a cap, shape ``(n, 3)``.
        work: Utilizations.
        cap: Fraction of the limit.
        law: The law of the device.
    """
    slower = law.slowdown(work, cap)
    made = times * slower[:, None]
    ratios = made[:, 1:] / made[:, :1]
    wide = np.stack([under_cap(low, high, cap, law) for low, high in ratios])
    made[:, 1:] = made[:, :1] * np.where(slower[:, None] > 1.0, wide, ratios)
    # A cap makes nothing faster: lower bounds are at least those without it.
    made[:, 1] = np.maximum(made[:, 1], times[:, 1])
    return np.asarray(made)


def under_cap(low: float, high: float, cap: float, law: PowerLaw) -> tuple[float, float]:
    """Interval bounds relative to the middle, with the law's error under a cap added."""
    below, above = with_error((np.log(low), np.log(high)), law.error(cap))
    return float(np.exp(below)), float(np.exp(above))
