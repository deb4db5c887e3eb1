"""Interval bounds from held-out errors: conformal quantiles, by a hierarchy of keys.

The score of a sample is ``log(measured / predicted)`` by a model fitted without it. An interval
spans the 5 % to 95 % quantiles of the scores of its key, with the finite-sample correction of
Mondrian split-conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005):
with ``n`` scores the ``ceil((n + 1) (1 - a))``-th smallest bounds a fraction ``1 - a`` of new
samples. A key with too few scores falls back to a more general one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import numpy as np

from ...common.types import JsonMapping
from ..core.kernel_table import CELLS, by_cell

#: Nominal coverage of all intervals.
COVERAGE = 0.9
#: Half-width of the corresponding interval of a normal distribution, in standard deviations.
NORMAL_90 = 1.645
#: Fewest scores of a key. 19 is the least for two 5 % tails, where the bounds are the extremes and
#: vary a lot between samples; with twice that, they are the second-most extreme scores.
MIN_SCORES = 40
#: Fewest groups that bound a tail of a new group's errors: a fraction ``1 / (K + 1)`` is beyond all
#: ``K`` groups, which has to be at most 5 %.
LEAST_SETS = 19
#: Log half-width without any calibration: a factor of 4 either way. Engineering estimate of the
#: rarely exceeded error of a roofline with launch cost; not fitted.
UNCALIBRATED = float(np.log(4.0))
#: Bounds without any calibration: of a logarithm, and in standard deviations of a normal error.
UNKNOWN, STANDARD = (-UNCALIBRATED, UNCALIBRATED), (-NORMAL_90, NORMAL_90)

#: Lower and upper bound of an interval.
Ends = tuple[float, float]
Key = TypeVar("Key", bound=Hashable)
#: A logarithm, or one per prediction, shape ``(n,)``.
Logs = TypeVar("Logs", float, np.ndarray)


@dataclass
class Calibrator(Generic[Key]):
    """Bounds of 90 % intervals, in logarithms or in standard deviations, by key.

    Attributes:
        ends: Lower and upper bound of each key.
    """

    ends: dict[Key, Ends] = field(default_factory=dict)

    def of(self, keys: Iterable[Key], default: Ends) -> Ends:
        """Bounds of the first calibrated key; keys are ordered from specific to general."""
        return next((self.ends[key] for key in keys if key in self.ends), default)

    def pool(
        self,
        scores: np.ndarray,
        *levels: Iterable[Key],
        least: int = MIN_SCORES,
        group: np.ndarray | None = None,
    ) -> Self:
        """Calibrate bounds, including 0, for every key with enough scores.

        Args:
            scores: Held-out errors, shape ``(n,)``.
            levels: Keys of the ``n`` scores at each level of the hierarchy.
            least: Fewest scores of a key.
            group: Groups of the scores, shape ``(n,)``: the bounds are quantiles of groups with
                equal weights; ``None`` for conformal bounds.

        Returns:
            The calibrator itself.
        """
        for keys in levels:
            pools: dict[Key, list[int]] = {}
            for at, key in enumerate(keys):
                pools.setdefault(key, []).append(at)
            for key, own in pools.items():
                if len(own) < least:
                    continue
                if group is None:
                    self.ends[key] = including_zero(ends(scores[own]))
                else:
                    self.ends[key] = weighted_ends(scores[own], group_weight(group[own]))
        return self

    def widen(self, key: Key, known: Key) -> None:
        """Make the bounds of a less known key at least as wide as those of a known one."""
        if known in self.ends:
            low, high = self.ends.get(key, self.ends[known])
            self.ends[key] = min(low, self.ends[known][0]), max(high, self.ends[known][1])


def weighted_quantile(values: np.ndarray, weight: np.ndarray, level: float) -> float:
    """Weighted quantile at ``level``, interpolated between values."""
    order = np.argsort(values)
    share = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    return float(np.interp(level, share, values[order]))


def group_weight(group: np.ndarray, power: float = 0.0) -> np.ndarray:
    """Weight of each score such that a group's total is its size to a power, shape ``(n,)``."""
    _, index, counts = np.unique(group.astype(str), return_inverse=True, return_counts=True)
    return np.asarray(counts[index] ** (power - 1.0))


def weighted_ends(scores: np.ndarray, weight: np.ndarray, level: float = COVERAGE) -> Ends:
    """Weighted quantiles that leave half of ``1 - level`` on each side, including 0."""
    low, high = (weighted_quantile(scores, weight, (1 + side * level) / 2) for side in (-1, 1))
    return including_zero((low, high))


def ends(scores: np.ndarray, level: float = COVERAGE) -> Ends:
    """Split-conformal quantiles that leave half of ``1 - level`` on each side.

    The ``ceil((n + 1) (1 + level) / 2)``-th smallest score is the upper bound, the same rank from
    the largest the lower one (Lei et al., Journal of the American Statistical Association 113,
    2018). With fewer than ``2 / (1 - level) - 1`` scores, the extremes are the bounds.

    Args:
        scores: Shape ``(n,)``, at least one.
        level: Fraction of new scores between the bounds.
    """
    ordered = np.sort(scores)
    n = len(ordered)
    # Without the 1e-9, (99 + 1) * 0.95 in floating point would round up to the 96th score.
    rank = min(int(np.ceil((n + 1) * (1 + level) / 2 - 1e-9)), n)
    return float(ordered[n - rank]), float(ordered[rank - 1])


def few_or_ends(scores: np.ndarray, unit: float = 1.0) -> Ends:
    """:func:`ends` of scores in units of a half-width, including 0; at least 1 for few scores.

    With fewer than :data:`MIN_SCORES`, both bounds are the split-conformal quantile of absolute
    scores, the ``ceil((n + 1) level)``-th smallest (Lei et al., 2018, as for :func:`ends`).

    Args:
        scores: Errors over the half-width to scale, shape ``(n,)``, at least one.
        unit: Scores per half-width.
    """
    if len(scores) >= MIN_SCORES:
        low, high = including_zero(ends(scores))
        return low / unit, high / unit
    place = min(int(np.ceil((len(scores) + 1) * COVERAGE)), len(scores))
    size = max(1.0, float(np.sort(np.abs(scores))[place - 1]) / unit)
    return -size, size


def including_zero(interval: Ends) -> Ends:
    """Bounds widened to include the prediction itself (a log-ratio of 0)."""
    return min(interval[0], 0.0), max(interval[1], 0.0)


def with_error(first: tuple[Logs, Logs], other: tuple[Logs, Logs]) -> tuple[Logs, Logs]:
    """Bounds of an error, in logarithms, with an independent one added in quadrature."""
    below, above = (np.hypot(one, two) for one, two in zip(first, other, strict=True))
    return -below, above


def widest(scores: Iterable[np.ndarray]) -> Ends | None:
    """Outermost bounds over several sets of scores, such as those of devices held out in turn.

    Returns:
        ``None`` if no set has :data:`MIN_SCORES` scores.
    """
    each = [ends(values) for values in scores if len(values) >= MIN_SCORES]
    if not each:
        return None
    return including_zero((min(lo for lo, _ in each), max(hi for _, hi in each)))


def grouped_ends(scores: np.ndarray, group: np.ndarray) -> Ends | None:
    """Bounds for a row of a new group, from rows of held-out groups.

    Hierarchical conformal prediction (Lee, Barber and Willett, Distribution-free inference with
    hierarchical data, 2023): each of ``K`` groups has the weight ``1 / (K + 1)``, shared by its
    rows, and the new one may be beyond all of them. With fewer than :data:`LEAST_SETS` groups, for
    which no such quantile exists, the :func:`widest` bounds are used.

    Args:
        scores: Scores of rows by models fitted without their group, shape ``(n,)``.
        group: Names of their groups, shape ``(n,)``.
    """
    _, code, counts = np.unique(group.astype(str), return_inverse=True, return_counts=True)
    if len(counts) < LEAST_SETS:
        return widest(scores[code == place] for place in range(len(counts)))
    order = np.argsort(scores)
    ordered, weight = scores[order], (1 / counts[code] / (len(counts) + 1))[order]
    level = (1 + COVERAGE) / 2 - 1e-9
    above = ordered[np.searchsorted(np.cumsum(weight), level)]
    below = ordered[::-1][np.searchsorted(np.cumsum(weight[::-1]), level)]
    return including_zero((float(below), float(above)))


def size_bins(size: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges of bins with equal counts, shape ``(bins - 1,)`` or fewer, and each value's bin."""
    edges = np.unique(np.quantile(size, np.linspace(0, 1, bins + 1)[1:-1]))
    return edges, np.searchsorted(edges, size, side="right")


@dataclass
class Conformal:
    """Interval bounds in log space by cell (platform × kind) and size bin.

    Attributes:
        edges: Ascending predicted latencies (s) between the size bins, shape ``(bins - 1,)``.
        lower: Lower bounds, at most 0, shape ``(cells, bins)``.
        upper: Upper bounds, at least 0, shape ``(cells, bins)``.
        count: Total number of calibration scores.
    """

    edges: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lower: np.ndarray = field(default_factory=lambda: np.full((len(CELLS), 1), -UNCALIBRATED))
    upper: np.ndarray = field(default_factory=lambda: np.full((len(CELLS), 1), UNCALIBRATED))
    count: int = 0

    @classmethod
    def fit(
        cls, measured: np.ndarray, predicted: np.ndarray, cell: np.ndarray, bins: int = 5
    ) -> Self:
        """Calibrate on samples that the model was not fitted to.

        Args:
            measured: Latencies in seconds, shape ``(n,)``.
            predicted: Predictions in seconds, shape ``(n,)``.
            cell: Cell of each sample, shape ``(n,)``.
            bins: Number of size bins, of equal counts.
        """
        scores = np.log(measured / predicted)
        # By predicted size, because the measured one is not available when predicting.
        edges, place = size_bins(predicted, bins) if len(scores) else (np.zeros(0), scores)
        # With too few scores for a quantile, include all known scores.
        reach = max(UNCALIBRATED, float(np.abs(scores).max(initial=0.0)))
        where = list(zip(cell.tolist(), place.tolist(), strict=True))
        found = Calibrator[tuple[int, ...]]()
        found.pool(scores, where, [key[:1] for key in where], [()] * len(where))
        dense = [
            [found.of(((c, b), (c,), ()), (-reach, reach)) for b in range(len(edges) + 1)]
            for c in range(len(CELLS))
        ]
        lower, upper = np.moveaxis(np.array(dense), -1, 0)
        return cls(edges, lower, upper, len(scores))

    def interval(self, predicted: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds in seconds, shape ``(n,)`` each; they include the prediction."""
        place = np.searchsorted(self.edges, predicted, side="right")
        lo = predicted * np.exp(self.lower[cell, place])
        hi = predicted * np.exp(self.upper[cell, place])
        return np.minimum(lo, predicted), np.maximum(hi, predicted)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest."""
        return {
            "coverage": COVERAGE,
            "edges_s": self.edges.tolist(),
            "cells": list(CELLS),
            "lower_log": self.lower.tolist(),
            "upper_log": self.upper.tolist(),
            "count": self.count,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> Self:
        """Read :meth:`to_dict`'s data; missing cells get the widest bounds."""
        low = np.asarray(data["lower_log"], np.float64)
        high = np.asarray(data["upper_log"], np.float64)
        lower = by_cell(data["cells"], low, low.min(axis=0))
        upper = by_cell(data["cells"], high, high.max(axis=0))
        return cls(np.asarray(data["edges_s"], np.float64), lower, upper, int(data["count"]))
