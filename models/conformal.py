"""Split-conformal intervals on log-ratios, by cell (platform × kind) and size.

The score of a calibration sample is ``log(measured / predicted)``. An interval reaches from the
5 % to the 95 % quantile of the scores of its bin, with the finite-sample correction of Mondrian
split-conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): with ``n``
scores the ``ceil((n + 1) (1 - a))``-th smallest bounds a share ``1 - a`` of new samples. A bin with
too few scores falls back to its cell, a cell with too few to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tables import CELLS

#: Nominal coverage.
COVERAGE = 0.9
#: Bins and cells with fewer scores than this fall back; 19 is the least for two 5 % tails.
MIN_SCORES = 40
#: Half-width in log space without any calibration: a factor of 4 either way.
UNCALIBRATED = float(np.log(4.0))

Ends = tuple[float, float]


@dataclass
class Conformal:
    """Interval ends in log space for every cell and size bin.

    Attributes:
        edges: Ascending predicted latencies (s) between the size bins, shape ``(bins - 1,)``.
        lower: Lower ends, at most 0, shape ``(cells, bins)``.
        upper: Upper ends, at least 0, shape ``(cells, bins)``.
        count: Number of calibration scores in all.
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
        edges = np.unique(np.quantile(predicted, np.linspace(0, 1, bins + 1)[1:-1]))
        place = np.searchsorted(edges, predicted, side="right")
        every = ends(scores)
        lower = np.full((len(CELLS), len(edges) + 1), every[0])
        upper = np.full((len(CELLS), len(edges) + 1), every[1])
        for c in np.unique(cell):
            own = cell == c
            lower[c], upper[c] = ends(scores[own]) if own.sum() >= MIN_SCORES else every
            for b in range(len(edges) + 1):
                both = own & (place == b)
                if both.sum() >= MIN_SCORES:
                    lower[c, b], upper[c, b] = ends(scores[both])
        return cls(edges, np.minimum(lower, 0.0), np.maximum(upper, 0.0), len(scores))

    @classmethod
    def _wide(cls, scores: np.ndarray) -> Conformal:
        """Too few scores for a quantile: whatever was seen, and no less than the uncalibrated."""
        reach = max(UNCALIBRATED, float(np.abs(scores).max(initial=0.0)))
        shape = (len(CELLS), 1)
        return cls(np.zeros(0), np.full(shape, -reach), np.full(shape, reach), len(scores))

    def interval(self, predicted: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends in seconds, shape ``(n,)`` each; the prediction lies between."""
        place = np.searchsorted(self.edges, predicted, side="right")
        lo = predicted * np.exp(self.lower[cell, place])
        hi = predicted * np.exp(self.upper[cell, place])
        return np.minimum(lo, predicted), np.maximum(hi, predicted)

    def to_dict(self) -> dict[str, Any]:
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
    def from_dict(cls, data: Mapping[str, Any]) -> Conformal:
        """Read :meth:`to_dict`'s data; cells that it does not list get its widest ends."""
        stored = {name: index for index, name in enumerate(data["cells"])}
        low = np.asarray(data["lower_log"], np.float64)
        high = np.asarray(data["upper_log"], np.float64)
        lower = np.stack([low[stored[c]] if c in stored else low.min(axis=0) for c in CELLS])
        upper = np.stack([high[stored[c]] if c in stored else high.max(axis=0) for c in CELLS])
        return cls(np.asarray(data["edges_s"], np.float64), lower, upper, int(data["count"]))


def ends(scores: np.ndarray, level: float = COVERAGE) -> Ends:
    """Corrected quantiles that leave half of ``1 - level`` on each side.

    With too few scores for a tail (fewer than ``2 / (1 - level) - 1``) the extreme score bounds it.
    """
    ordered = np.sort(scores)
    n = len(ordered)
    rank = min(int(np.ceil((n + 1) * (1 + level) / 2 - 1e-9)), n)
    return float(ordered[n - rank]), float(ordered[rank - 1])
