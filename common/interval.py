"""A predicted figure with its 90 % interval, and its keys in plain data."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from .units import duration

#: Keys of a predicted time and both bounds of its 90 % interval, in microseconds.
LATENCY_KEYS = ("latency_us", "lo_us", "hi_us")

#: Least lower bound of an interval relative to its estimate. Half-widths combined from several
#: sources of error may exceed the estimate, but a time is positive; 5 % is a choice.
LEAST_SHARE = 0.05

Time = TypeVar("Time", float, np.ndarray)
_NORMAL = NormalDist()


class Interval(NamedTuple):
    """A predicted figure with its 90 % interval, mostly in seconds.

    Attributes:
        value: Estimate.
        lo: Lower bound.
        hi: Upper bound.
    """

    value: float
    lo: float
    hi: float

    @classmethod
    def around(cls, value: float, below: float, above: float) -> Interval:
        """Make an interval from an estimate and half-widths; the lower bound stays positive."""
        return cls(value, max(value - below, LEAST_SHARE * value), value + above)

    @classmethod
    def outer(cls, values: Sequence[float]) -> Interval:
        """Make an interval from an estimate, the first value, and the extremes of all values."""
        return cls(values[0], min(values), max(values))

    def times(self, factor: float) -> Interval:
        """The interval of a multiple of the figure, for a positive factor."""
        return Interval(self.value * factor, self.lo * factor, self.hi * factor)

    def chance_below(self, limit: float) -> float:
        """Probability that the true value is at most ``limit``.

        Logarithms are assumed normal on each side of the estimate, with 5 % beyond each bound.

        Args:
            limit: Limit in the unit of the interval; may be infinite.
        """
        if limit <= 0.0 or self.value <= 0.0:
            return float(self.value <= limit)
        end = self.hi if limit >= self.value else self.lo
        if limit == float("inf") or end <= 0.0 or end == self.value:
            return float(self.value <= limit)
        away = log(limit / self.value) / abs(log(end / self.value))
        return _NORMAL.cdf(_NORMAL.inv_cdf(0.95) * away)

    def quantile(self, chance: float) -> float:
        """Quantile of the true value at probability ``chance``, as in :meth:`chance_below`.

        Args:
            chance: Above 0 and below 1.
        """
        away = _NORMAL.inv_cdf(chance) / _NORMAL.inv_cdf(0.95)
        end = self.hi if away >= 0.0 else self.lo
        return self.value * exp(abs(log(end / self.value)) * away)


def combined_spread(ends: np.ndarray, rho: float) -> tuple[float, float]:
    """Return the half-widths of a sum whose terms have errors with pairwise correlation ``rho``.

    Args:
        ends: Half-widths of the terms downwards and upwards, shape ``(n, 2)``.
        rho: 0 for independent errors (root of the sum of squares), 1 for a common error (sum).

    Returns:
        ``sqrt((1 - rho) · sum of squares + rho · square of the sum)``, downwards and upwards.
    """
    # Variance of a sum of equicorrelated terms, sum_i s_i^2 + rho sum_{i != j} s_i s_j, rearranged.
    # Half-widths may replace standard deviations, since all have the same coverage.
    apart, together = (ends**2).sum(axis=0), ends.sum(axis=0) ** 2
    both = np.sqrt((1.0 - rho) * apart + rho * together)
    return float(both[0]), float(both[1])


class InSeconds:
    """Comparisons of a result with seconds, as in ``prediction < 5e-3``, and ``float()``.

    Mix-in for classes with ``latency_us``.
    """

    @property
    def seconds(self) -> float:
        """Estimate in seconds."""
        own: Any = self
        return float(own.latency_us) / 1e6

    def _said(self) -> str:
        """Time, interval and device as text."""
        own: Any = self
        lo, hi = duration(own.lo_us), duration(own.hi_us)
        return f"{duration(own.latency_us)} ({lo} to {hi}) on {own.device}"

    def __float__(self) -> float:
        return self.seconds

    def __lt__(self, other: object) -> bool:
        return self.seconds < _seconds(other)

    def __le__(self, other: object) -> bool:
        return self.seconds <= _seconds(other)

    def __gt__(self, other: object) -> bool:
        return self.seconds > _seconds(other)

    def __ge__(self, other: object) -> bool:
        return self.seconds >= _seconds(other)


def _seconds(other: object) -> float:
    if isinstance(other, InSeconds):
        return other.seconds
    if isinstance(other, int | float | np.number):
        return float(other)
    raise TypeError(f"a predicted time is compared with seconds, not with {type(other).__name__}")


class HasLatency(Protocol):
    """A result with its time and interval in microseconds."""

    @property
    def latency_us(self) -> float:
        """Estimate."""

    @property
    def lo_us(self) -> float:
        """Lower bound."""

    @property
    def hi_us(self) -> float:
        """Upper bound."""


def latency_fields(latency: Time, lo: Time, hi: Time) -> dict[str, Time]:
    """The three fields of a time in seconds.

    Args:
        latency: Estimate; a number or an array.
        lo: Lower bound of its 90 % interval.
        hi: Upper bound.
    """
    # Seconds inside, microseconds in files and APIs: this is the boundary.
    return dict(zip(LATENCY_KEYS, (latency * 1e6, lo * 1e6, hi * 1e6), strict=True))


def latency_of(result: HasLatency) -> dict[str, float]:
    """The three fields of a result that has them as attributes."""
    return {"latency_us": result.latency_us, "lo_us": result.lo_us, "hi_us": result.hi_us}


def end_fields(name: str, interval: Interval) -> dict[str, float]:
    """The fields of a figure and its bounds; a final colon of the name is dropped for bounds."""
    plain = name.removesuffix(":")
    return {name: interval.value, f"{plain}_lo": interval.lo, f"{plain}_hi": interval.hi}


def step_fields(interval: Interval) -> dict[str, float]:
    """The fields of a step's time: ``step_us`` repeats ``latency_us``."""
    return {"step_us": interval.value * 1e6, **latency_fields(*interval)}
