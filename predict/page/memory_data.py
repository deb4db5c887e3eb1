"""Memory in use over the predicted time of a program."""

from __future__ import annotations

import numpy as np

from ...features.ir.hlo_reader import parse_hlo
from ...features.kernels.kernel import LoweredProgram
from ...features.kernels.memory import memory_over_time
from ..program.predictor import Prediction
from .assemble import rounded, short
from .kernel_data import Schedule

#: Most points of the curve, about what a screen can show; of more, the largest in each slot.
MOST_POINTS = 3000
_EXTRAPOLATED = "layers were compiled once and extrapolated, so there is no course over time"
_NO_MODULE = "there is no lowered module to take lifetimes from"


def memory_data(
    prediction: Prediction, lowered: LoweredProgram, schedule: Schedule
) -> dict[str, object]:
    """Peak, capacity, and the bytes in use over time from the lifetimes of buffers.

    Returns:
        ``peak_bytes``, ``source``, ``device_bytes``, ``fits``, ``resident_bytes`` (arguments and
        results), ``us`` and ``bytes`` of the curve, and ``why_not`` if there is none.
    """
    data: dict[str, object] = {
        "peak_bytes": short(prediction.peak_memory_bytes),
        "source": prediction.memory_source,
        "device_bytes": short(prediction.device_memory_bytes),
        "fits": prediction.fits,
        "why_not": "",
    }
    # Kernels that run several times outside of any loop stand for repeated layers, whose buffers
    # are not in the module.
    if any(k.multiplicity != 1 and not k.scope for k in lowered.kernels):
        return {**data, "why_not": _EXTRAPOLATED}
    module = lowered.module or (parse_hlo(lowered.hlo) if lowered.hlo else None)
    if module is None:
        return {**data, "why_not": _NO_MODULE}
    profile = memory_over_time(module)
    starts = _starts(lowered, schedule)
    known = [starts.get(name, 0.0) for name in profile.names]
    # Buffers are in schedule order; ops that take no time get the time of the last kernel.
    us = np.maximum.accumulate(np.array(known, np.float64)) if known else np.zeros(0)
    us, used = _thinned(us, np.array(profile.bytes, np.float64))
    return {
        **data,
        "resident_bytes": short(profile.resident),
        "us": rounded(us.tolist(), 7),
        "bytes": rounded(used.tolist()),
    }


def _starts(lowered: LoweredProgram, schedule: Schedule) -> dict[str, float]:
    """Start time of each kernel by name; a loop starts with its first kernel."""
    starts: dict[str, float] = {}
    for kernel, start, busy in zip(
        lowered.kernels, schedule.start.tolist(), schedule.busy.tolist(), strict=True
    ):
        if busy > 0:
            starts.setdefault(kernel.scope[0] if kernel.scope else kernel.name, start)
    return starts


def _thinned(us: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thin a curve to the largest value of each slot, at most :data:`MOST_POINTS` of them."""
    if not len(us):
        return us, used
    width = us[-1] / MOST_POINTS if len(us) > MOST_POINTS else 0.0
    slot = np.floor(us / width) if width > 0 else us
    first = np.flatnonzero(np.diff(slot, prepend=-1.0) != 0)
    # The largest of each slot, so that thinning cannot hide the peak.
    return us[first], np.maximum.reduceat(used, first)
