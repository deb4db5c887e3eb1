"""The predictions of one route, and how their intervals are widened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..trust.conformal import UNCALIBRATED

#: Source of a kernel that no published row resembles.
ROOFLINE = "roofline"


@dataclass(slots=True)
class Answer:
    """Latencies of ``n`` kernels of one route, seconds, shape ``(n,)`` each.

    Attributes:
        latency: Predicted latencies.
        lo: Lower ends of the 90 % intervals.
        hi: Upper ends.
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
        """Build an answer from latencies and the log distances of the ends, both at least 0."""
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
    latency: np.ndarray, lo: np.ndarray, hi: np.ndarray, extra: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log distances of interval ends, widened by another, independent error in quadrature.

    Args:
        latency: Predicted seconds, shape ``(n,)``.
        lo: Lower ends in seconds.
        hi: Upper ends in seconds.
        extra: Half-width of the other error in log space, one or ``n``.

    Returns:
        Distances of the lower and of the upper end, at least ``extra``, shape ``(n,)`` each.
    """
    lower = np.hypot(np.maximum(np.log(latency / lo), 0.0), extra)
    upper = np.hypot(np.maximum(np.log(hi / latency), 0.0), extra)
    return lower, upper


def unknown(latency: np.ndarray, above: float = 2 * UNCALIBRATED) -> Answer:
    """Roofline answers, whose intervals reach from a quarter of the latency to sixteen times it.

    A roofline is a lower bound, so the interval is twice as far upwards (docs/gpu.md).

    Args:
        latency: Roofline plus launch in seconds, shape ``(n,)``.
        above: Log distance of the upper end.
    """
    n = len(latency)
    return Answer.around(
        latency, np.full(n, UNCALIBRATED), np.full(n, above), ROOFLINE, np.zeros(n, bool)
    )
