"""The predictions of a model of one family of operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class FamilyPrediction:
    """Latencies in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        latency: Predicted latencies.
        lo: Lower ends.
        hi: Upper ends.
        roofline: Lower bounds from FLOPs and bytes.
        bound: Limiting term of the analytical estimate.
        scope: ``known``, ``calibrated``, ``sibling`` (another device with the same chip is known)
            or ``unseen``.
        in_domain: Whether training rows are near.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    roofline: np.ndarray
    bound: np.ndarray
    scope: np.ndarray
    in_domain: np.ndarray

    def take(self, rows: np.ndarray) -> FamilyPrediction:
        """The given rows, by position or mask."""
        return FamilyPrediction(*(getattr(self, name)[rows] for name in self.__slots__))


def joined(count: int, parts: Iterable[tuple[np.ndarray, FamilyPrediction]]) -> FamilyPrediction:
    """Put predictions of parts of ``count`` rows together.

    Args:
        count: Number of rows.
        parts: Positions of the rows of each part, and their predictions.
    """
    whole = FamilyPrediction(
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count, object),
        np.empty(count, object),
        np.empty(count, bool),
    )
    for at, part in parts:
        for name in FamilyPrediction.__slots__:
            getattr(whole, name)[at] = getattr(part, name)
    return whole
