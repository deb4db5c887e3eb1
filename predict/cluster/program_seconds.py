"""Kernel times that, without collectives, add up to the predicted time of the program.

The single-device model predicts each kernel and the whole program; the time between kernels is
spread over their executions. A partitioned program therefore costs each device what the same
kernels cost without partitioning, and its collectives come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import LoweredProgram
from ...models.cost_model import CostModel
from ...models.estimators.tpu import by_compiler
from ...models.program.fused_error import lowering_note
from ..program.prediction import check_known


@dataclass(frozen=True)
class ProgramSeconds:
    """Times of a program without its collectives.

    Attributes:
        kernels: Seconds of one execution of each, shape ``(n,)``; 0 for collectives and control.
        low: Lower bound of the 90 % interval of the whole program, as a factor of at most 1.
        high: Upper bound, as a factor of at least 1.
        sources: Share of the time by source of the estimate.
        notes: Notes on the error of the lowering.
    """

    kernels: np.ndarray
    low: float
    high: float
    sources: dict[str, float]
    notes: tuple[str, ...] = ()


def program_seconds(
    lowered: LoweredProgram, device: DeviceSpec, model: CostModel, load: np.ndarray | float = 1.0
) -> ProgramSeconds:
    """Predict a program's kernels such that they add up to the program's own prediction.

    Args:
        lowered: The program of one device.
        device: Device that the program runs on.
        model: Model for programs of one device.
        load: Factor on each kernel, but not on the gaps between them, shape ``(n,)``.

    Raises:
        UnknownCallError: A kernel runs an unknown custom call.
    """
    kernels = lowered.kernels
    apart = np.array([k.kind == "collective" for k in kernels], bool)
    # The program model must not see the collectives: their time depends on the cluster, and the
    # stream simulation adds it, overlapped, later.
    found = model.predict_kernels(kernels, device)
    alone = by_compiler(found, kernels, device, model.predict_kernels, model.base_of(device))
    check_known(kernels, alone.source)
    placed, wall = model.predict_in_program(lowered, device, alone.without(apart))
    busy = np.array([k.takes_time for k in kernels], bool) & ~apart
    counts = np.array([k.multiplicity for k in kernels]) * busy
    seconds = np.where(busy, placed.latency, 0.0)
    total, executions = float((seconds * counts).sum()), float(counts.sum())
    if total <= 0.0 or not executions:
        return ProgramSeconds(np.zeros(len(kernels)), 1.0, 1.0, {})
    # Longer than its kernels: launch gaps, equal after every execution. Shorter: kernels that
    # overlap on one device (a CPU's workers, asynchronous copies), so all shrink by one factor.
    if wall.latency >= total:
        spread = seconds * load + busy * (wall.latency - total) / executions
    else:
        spread = seconds * load * wall.latency / total
    return ProgramSeconds(
        spread,
        # Guard: the factors must enclose 1 even where an interval does not enclose its estimate.
        min(wall.lo / wall.latency, 1.0),
        max(wall.hi / wall.latency, 1.0),
        _shares(spread * counts, placed.source),
        lowering_note(lowered, placed.latency, device),
    )


def _shares(seconds: np.ndarray, source: np.ndarray) -> dict[str, float]:
    total = float(seconds.sum()) or 1.0
    return {
        str(name): share
        for name in np.unique(source.astype(str))
        if (share := float(seconds[source == name].sum()) / total) > 0.0
    }
