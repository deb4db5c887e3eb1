"""Overheads of a program beyond its kernels, for platforms without measured programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from .schedule_cost import ScheduleCost


@dataclass(frozen=True)
class Overhead:
    """Overheads of a platform from physics alone, and how errors of kernels add up.

    Attributes:
        gap_low: Least share of the device's gap between kernels that each kernel waits on top of
            what its own time already includes (kernels replayed as a graph).
        gap: Expected share.
        gap_high: Largest share (every kernel launched on its own).
        correlation: Correlation of the log errors of two kernels of a program.
        overlap: Share of the overlap that the schedule allows: 1 where asynchronous kernels run
            beside the others.
    """

    # Without measured programs, half of the gap is expected: between kernels replayed as a graph
    # (no gap) and launched one by one (all of it).
    gap_low: float = 0.0
    gap: float = 0.5
    gap_high: float = 1.0
    correlation: float = 1.0
    overlap: float = 0.0

    def wall(self, cost: ScheduleCost) -> float:
        """Expected wall time in seconds."""
        return self._busy(cost) + self.gap * cost.gaps + cost.dispatch

    def _busy(self, cost: ScheduleCost) -> float:
        return (1.0 - self.overlap) * cost.total + self.overlap * cost.makespan

    def ends(
        self, cost: ScheduleCost, low: ScheduleCost, high: ScheduleCost
    ) -> tuple[float, float]:
        """Interval ends of the wall time, seconds.

        With errors of correlation ``ρ`` and shares ``w`` of the time, the error of the sum is
        ``sqrt(ρ + (1 - ρ) Σ w²)`` of what it would be if all kernels erred together.

        Args:
            cost: Cost of the predicted latencies.
            low: Cost of the lower ends of the kernels' intervals.
            high: Cost of the upper ends.
        """
        # Var(Σ e) of errors with equal correlation: ρ (Σ σ)² + (1 - ρ) Σ σ², over (Σ σ)².
        rho = self.correlation
        together = float(np.sqrt(rho + (1.0 - rho) * cost.concentration))
        wall = self.wall(cost)
        # Errors of the gaps come on top of the kernels' errors: both ends of the gap are possible
        # at once.
        below = (
            together * max(self._busy(cost) - self._busy(low), 0.0)
            + (self.gap - self.gap_low) * cost.gaps
        )
        above = together * max(self._busy(high) - self._busy(cost), 0.0)
        return wall - below, wall + above + (self.gap_high - self.gap) * cost.gaps

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Overhead:
        """Read :meth:`to_dict`'s data."""
        return cls(**data)


#: Overheads of platforms without measured programs: on a TPU asynchronous copies run beside the
#: other kernels, and kernels are not launched from the host (docs/tpu.md).
UNMEASURED: Mapping[str, Overhead] = {
    "tpu": Overhead(gap_low=0.0, gap=0.0, gap_high=0.0, overlap=1.0)
}
