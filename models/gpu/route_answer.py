"""Predictions of one route, and how their intervals are widened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trust.conformal import UNCALIBRATED

#: Source of a kernel that nothing was learned about.
ROOFLINE = "roofline"


@dataclass(slots=True)
class Answer:
    """Latencies of ``n`` kernels of one route, seconds, shape ``(n,)`` each.

    Attributes:
        latency: Predicted.
        lo: Lower end of the 90 % interval.
        hi: Upper end.
        source: ``learned:<family>`` or ``roofline``.
        in_domain: Whether published rows lie near.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    source: np.ndarray
    in_domain: np.ndarray

    @classmethod
    def around(
        cls,
        latency: np.ndarray,
        lower: np.ndarray,
        upper: np.ndarray,
        source: str | np.ndarray,
        in_domain: np.ndarray,
    ) -> Answer:
        """An answer from latencies and log distances of the ends, both at least 0."""
        named = np.full(len(latency), source, object) if isinstance(source, str) else source
        return cls(latency, latency * np.exp(-lower), latency * np.exp(upper), named, in_domain)

    @classmethod
    def empty(cls, n: int) -> Answer:
        """Room for ``n`` answers."""
        return cls(np.empty(n), np.empty(n), np.empty(n), np.empty(n, object), np.zeros(n, bool))

    def put(self, at: np.ndarray, other: Answer) -> None:
        """Enter the answers of some positions."""
        for name in self.__slots__:
            getattr(self, name)[at] = getattr(other, name)


def spread(
    latency: np.ndarray, lo: np.ndarray, hi: np.ndarray, extra: float
) -> tuple[np.ndarray, np.ndarray]:
    """Log distances of interval ends with another, independent error added.

    Args:
        latency: Predicted, shape ``(n,)``.
        lo: Lower ends.
        hi: Upper ends.
        extra: Half-width of the other error in log space.
    """
    lower = np.hypot(np.maximum(np.log(latency / lo), 0.0), extra)
    upper = np.hypot(np.maximum(np.log(hi / latency), 0.0), extra)
    return lower, upper


def unknown(latency: np.ndarray, above: float = 2 * UNCALIBRATED) -> Answer:
    """Roofline answers: nothing was learned, so they may be far too low.

    Args:
        latency: Roofline and launch.
        above: Log distance of the upper end.
    """
    n = len(latency)
    return Answer.around(
        latency, np.full(n, UNCALIBRATED), np.full(n, above), ROOFLINE, np.zeros(n, bool)
    )
