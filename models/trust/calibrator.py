"""Ends of intervals by key: what steps, serving and collectives calibrate."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from .conformal import COVERAGE, Ends, including_zero

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Calibrator(Generic[Key]):
    """Ends of 90 % intervals, in logarithms or in deviations, by key.

    Attributes:
        ends: Lower and upper end of each key.
    """

    ends: dict[Key, Ends] = field(default_factory=dict)

    def of(self, keys: Iterable[Key], default: Ends) -> Ends:
        """Ends of the first key that has some; keys come with the most special one first."""
        return next((self.ends[key] for key in keys if key in self.ends), default)

    def add(
        self,
        key: Key,
        scores: np.ndarray,
        weight: np.ndarray | None = None,
        wider: float = 1.0,
    ) -> None:
        """Take the ends of a key from weighted quantiles of scores, so that 0 lies inside.

        Args:
            key: The key.
            scores: Errors of what was left out, shape ``(n,)``.
            weight: Of each score; ``None`` for the same of all.
            wider: Factor on the ends, for what few scores do not show.
        """
        own = np.ones(len(scores)) if weight is None else weight
        low, high = (weighted_quantile(scores, own, (1 + side * COVERAGE) / 2) for side in (-1, 1))
        self.ends[key] = including_zero((wider * low, wider * high))

    def widen(self, key: Key, known: Key) -> None:
        """Make the ends of a key, of which less is known, no narrower than those of another one."""
        if known in self.ends:
            low, high = self.ends.get(key, self.ends[known])
            self.ends[key] = min(low, self.ends[known][0]), max(high, self.ends[known][1])


def weighted_quantile(values: np.ndarray, weight: np.ndarray, level: float) -> float:
    """Value below which a share ``level`` of the weight lies, between values interpolated."""
    order = np.argsort(values)
    share = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    return float(np.interp(level, share, values[order]))
