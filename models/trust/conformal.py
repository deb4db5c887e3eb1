"""Split-conformal intervals on log-ratios, by cell (platform × kind) and size.

The score of a calibration sample is ``log(measured / predicted)``. An interval reaches from the
5 % to the 95 % quantile of the scores of its bin, with the finite-sample correction of Mondrian
split-conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): with ``n``
scores the ``ceil((n + 1) (1 - a))``-th smallest bounds a share ``1 - a`` of new samples. A bin with
too few scores falls back to its cell, a cell with too few to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ...common.types import JsonMapping
from ..core.kernel_table import CELLS, by_cell

#: Nominal coverage of all intervals.
COVERAGE = 0.9
#: Bins and cells with fewer scores than this fall back. 19 is the least for two 5 % tails, where
#: the ends are the extremes and vary a lot between samples; twice that lets the second ones decide.
MIN_SCORES = 40
#: Half-width in log space without any calibration: a factor of 4 either way. Engineering estimate
#: of what a roofline with launch cost is rarely off by; not fitted.
UNCALIBRATED = float(np.log(4.0))

Ends = tuple[float, float]


@dataclass
class Conformal:
    """Interval ends in log space for every cell and size bin.

    Attributes:
        edges: Ascending predicted latencies (s) between the size bins, shape ``(bins - 1,)``.
        lower: Lower ends, at most 0, shape ``(cells, bins)``.
        upper: Upper ends, at least 0, shape ``(cells, bins)``.
        count: Total number of calibration scores.
    """

    edges: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lower: np.ndarray = field(default_factory=lambda: np.full((len(CELLS), 1), -UNCALIBRATED))
    upper: np.ndarray = field(default_factory=lambda: np.full((len(CELLS), 1), UNCALIBRATED))
    count: int = 0

    @classmethod
    def fit(
        cls, measured: np.ndarray, predicted: np.ndarray, cell: np.ndarray, bins: int = 5
    ) -> Conformal:
        """Calibrate on samples that the model was not fitted to.

        Args:
            measured: Latencies in seconds, shape ``(n,)``.
            predicted: In seconds, shape ``(n,)``.
            cell: Cell of each sample, shape ``(n,)``.
            bins: Size bins, of equal counts.
        """
        scores = np.log(measured / predicted)
        if len(scores) < MIN_SCORES:
            return cls._wide(scores)
        # Bins by predicted size, because the measured one is unknown when an interval is asked
        # for.
        edges, place = size_bins(predicted, bins)
        every = ends(scores)
        lower = np.full((len(CELLS), len(edges) + 1), every[0])
        upper = np.full((len(CELLS), len(edges) + 1), every[1])
        for c in np.unique(cell):
            own = cell == c
            of_cell = ends_or(scores[own], every)
            for b in range(len(edges) + 1):
                lower[c, b], upper[c, b] = ends_or(scores[own & (place == b)], of_cell)
        # A biased bin could have both ends on one side; the prediction itself must lie in its
        # interval.
        return cls(edges, np.minimum(lower, 0.0), np.maximum(upper, 0.0), len(scores))

    @classmethod
    def _wide(cls, scores: np.ndarray) -> Conformal:
        """Intervals from too few scores: the largest error, at least the uncalibrated width."""
        # Too few scores for a quantile: none of those that are known may lie outside.
        reach = max(UNCALIBRATED, float(np.abs(scores).max(initial=0.0)))
        shape = (len(CELLS), 1)
        return cls(np.zeros(0), np.full(shape, -reach), np.full(shape, reach), len(scores))

    def interval(self, predicted: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends in seconds, shape ``(n,)`` each; the prediction lies between."""
        place = np.searchsorted(self.edges, predicted, side="right")
        lo = predicted * np.exp(self.lower[cell, place])
        hi = predicted * np.exp(self.upper[cell, place])
        return np.minimum(lo, predicted), np.maximum(hi, predicted)

    def to_dict(self) -> dict[str, object]:
        """Plain data for the manifest."""
        return {
            "coverage": COVERAGE,
            "edges_s": self.edges.tolist(),
            "cells": list(CELLS),
            "lower_log": self.lower.tolist(),
            "upper_log": self.upper.tolist(),
            "count": self.count,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> Conformal:
        """Read :meth:`to_dict`'s data; cells that it does not list get its widest ends."""
        low = np.asarray(data["lower_log"], np.float64)
        high = np.asarray(data["upper_log"], np.float64)
        lower = by_cell(data["cells"], low, low.min(axis=0))
        upper = by_cell(data["cells"], high, high.max(axis=0))
        return cls(np.asarray(data["edges_s"], np.float64), lower, upper, int(data["count"]))


def ends(scores: np.ndarray, level: float = COVERAGE) -> Ends:
    """Split-conformal quantiles that leave half of ``1 - level`` on each side.

    The ``ceil((n + 1) (1 + level) / 2)``-th smallest score is the upper end, the same rank counted
    from the largest the lower one (Lei et al., Journal of the American Statistical Association
    113, 2018). With fewer than ``2 / (1 - level) - 1`` scores the extreme ones are the ends.

    Args:
        scores: Shape ``(n,)``, at least one.
        level: Share of new scores that lie between the ends.
    """
    ordered = np.sort(scores)
    n = len(ordered)
    # Without the 1e-9, (99 + 1) * 0.95 in floating point would round up to the 96th score.
    rank = min(int(np.ceil((n + 1) * (1 + level) / 2 - 1e-9)), n)
    return float(ordered[n - rank]), float(ordered[rank - 1])


def conformal_size(scores: np.ndarray, level: float = COVERAGE) -> float:
    """Split-conformal quantile of the sizes of scores, the ``ceil((n + 1) level)``-th smallest.

    For scores that are too few for :func:`ends` of both sides (Lei et al., 2018, as there).

    Args:
        scores: Shape ``(n,)``, at least one.
        level: Share of new scores that are not larger.
    """
    place = min(int(np.ceil((len(scores) + 1) * level)), len(scores))
    return float(np.sort(np.abs(scores))[place - 1])


def ends_or(scores: np.ndarray, fallback: Ends) -> Ends:
    """:func:`ends` of the scores, or ``fallback`` if there are fewer than :data:`MIN_SCORES`."""
    return ends(scores) if len(scores) >= MIN_SCORES else fallback


def including_zero(interval: Ends) -> Ends:
    """Ends widened so that the prediction itself (a log-ratio of 0) lies between them."""
    return min(interval[0], 0.0), max(interval[1], 0.0)


def widest(scores: Iterable[np.ndarray]) -> Ends | None:
    """Outermost ends over several sets of scores, such as those of devices left out in turn.

    Returns:
        ``None`` if no set has :data:`MIN_SCORES` scores.
    """
    each = [ends(values) for values in scores if len(values) >= MIN_SCORES]
    if not each:
        return None
    return including_zero((min(lo for lo, _ in each), max(hi for _, hi in each)))


def size_bins(size: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges between bins of equal counts, shape ``(bins - 1,)`` or fewer, and each value's bin."""
    edges = np.unique(np.quantile(size, np.linspace(0, 1, bins + 1)[1:-1]))
    return edges, np.searchsorted(edges, size, side="right")
