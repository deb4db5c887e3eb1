"""A predicted time with its 90 % interval, and its three keys in plain data."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from .units import duration

#: Predicted time and both ends of its 90 % interval, in microseconds.
LATENCY_KEYS = ("latency_us", "lo_us", "hi_us")

#: Least lower end of an interval as a share of its estimate. Half-widths that are combined from
#: several sources of error may exceed the estimate, but a time is positive; 5 % is a choice.
LEAST_SHARE = 0.05

Time = TypeVar("Time", float, np.ndarray)


class Interval(NamedTuple):
    """A predicted figure with its 90 % interval: mostly seconds, else the unit of the figure.

    Attributes:
        value: Estimate.
        lo: Lower end.
        hi: Upper end.
    """

    value: float
    lo: float
    hi: float

    @classmethod
    def around(cls, value: float, below: float, above: float) -> Interval:
        """Make the interval of an estimate from its half-widths; the lower end stays positive."""
        return cls(value, max(value - below, LEAST_SHARE * value), value + above)

    @classmethod
    def outer(cls, values: Sequence[float]) -> Interval:
        """Make the interval of an estimate, which comes first, from the outer ones of all."""
        return cls(values[0], min(values), max(values))

    def times(self, factor: float) -> Interval:
        """The interval of a multiple of the figure; the factor is above 0."""
        return Interval(self.value * factor, self.lo * factor, self.hi * factor)

    def chance_below(self, limit: float) -> float:
        """How likely the true value is at most a limit.

        Logarithms are taken for normal on each side of the estimate, with 5 % beyond each end.

        Args:
            limit: In the unit of the interval; may be infinite.
        """
        if limit <= 0.0 or self.value <= 0.0:
            return float(self.value <= limit)
        end = self.hi if limit >= self.value else self.lo
        if limit == float("inf") or end <= 0.0 or end == self.value:
            return float(self.value <= limit)
        away = log(limit / self.value) / abs(log(end / self.value))
        return _NORMAL.cdf(_NORMAL.inv_cdf(0.95) * away)

    def quantile(self, chance: float) -> float:
        """What the true value is at most with a probability; as of :meth:`chance_below`.

        Args:
            chance: Above 0 and below 1.
        """
        away = _NORMAL.inv_cdf(chance) / _NORMAL.inv_cdf(0.95)
        end = self.hi if away >= 0.0 else self.lo
        return self.value * exp(abs(log(end / self.value)) * away)


_NORMAL = NormalDist()


class InSeconds:
    """Comparisons of a result with seconds: ``assert prediction < 5e-3``; ``float`` gives them.

    A class that has ``latency_us`` inherits it.
    """

    @property
    def seconds(self) -> float:
        """Estimate in seconds."""
        own: Any = self
        return float(own.latency_us) / 1e6

    def _said(self) -> str:
        """Time, interval and device in words."""
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
    """A result that holds its time and interval in microseconds."""

    @property
    def latency_us(self) -> float:
        """Estimate."""

    @property
    def lo_us(self) -> float:
        """Lower end."""

    @property
    def hi_us(self) -> float:
        """Upper end."""


def latency_fields(latency: Time, lo: Time, hi: Time) -> dict[str, Time]:
    """Give the three keys of a time in seconds.

    Args:
        latency: Estimate; a number, or an array of them.
        lo: Lower end of its 90 % interval.
        hi: Upper end.
    """
    # Seconds inside, microseconds in files and APIs: this is where they meet.
    return dict(zip(LATENCY_KEYS, (latency * 1e6, lo * 1e6, hi * 1e6), strict=True))


def latency_of(result: HasLatency) -> dict[str, float]:
    """Give the three keys of a result that has them as attributes."""
    return {"latency_us": result.latency_us, "lo_us": result.lo_us, "hi_us": result.hi_us}


def end_fields(name: str, interval: Interval) -> dict[str, float]:
    """Give the keys of a figure and of its ends, which leave out a colon that ends the name."""
    plain = name.removesuffix(":")
    return {name: interval.value, f"{plain}_lo": interval.lo, f"{plain}_hi": interval.hi}


def step_fields(interval: Interval) -> dict[str, float]:
    """Give the keys of a step's time: ``step_us`` repeats ``latency_us``."""
    return {"step_us": interval.value * 1e6, **latency_fields(*interval)}
