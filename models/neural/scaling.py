"""Scaling of a network's inputs (standardised, clipped) and of its output (bounded)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

#: A column's range is at most this many standard units, so that a rare flag does not become a
#: value in the hundreds. Engineering estimate: a normal column spans about as much.
SPAN = 8.0
#: How far beyond the training range a value may go, in standard units: far outside a prediction
#: keeps its value at the edge (docs/models.md). Engineering estimate.
MARGIN = 0.5
#: Results have a multiple of this many columns, so that the folds of a dataset, in which other
#: columns vary, have the same number of them and share compiled functions.
ALIGN = 32
#: Share of the training targets left outside each bound before :data:`ROOM` is added: faulty labels
#: must not set the bounds.
TAIL = 0.0005
#: Room between those targets and the bounds, in log units (a factor of 1.65). Engineering estimate.
ROOM = 0.5


@dataclass(frozen=True, slots=True)
class Scaling:
    """Standardises the columns that vary, and holds new values near the training range.

    Attributes:
        columns: Columns that vary in training, int32, shape ``(c,)``; the others are dropped.
        centre: Their means, float32, shape ``(c,)``.
        scale: Their standard deviations, or an :data:`SPAN`-th of their range if that is more.
        low: Least value let through.
        high: Largest value let through.
    """

    columns: np.ndarray
    centre: np.ndarray
    scale: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> Self:
        """Learn from training values, shape ``(n, d)`` with ``n`` and ``d`` at least 1."""
        low, high = values.min(axis=0), values.max(axis=0)
        varying = low < high
        columns = np.flatnonzero(varying) if varying.any() else np.zeros(1, np.int64)
        own = values[:, columns].astype(np.float64)
        low, high = low[columns].astype(np.float64), high[columns].astype(np.float64)
        scale = np.maximum(own.std(axis=0), (high - low) / SPAN)
        low, high = low - MARGIN * scale, high + MARGIN * scale
        parts = own.mean(axis=0), np.where(scale > 0, scale, 1.0), low, high
        return cls(columns.astype(np.int32), *(part.astype(np.float32) for part in parts))

    @property
    def width(self) -> int:
        """Number of columns that come out: ``c``, rounded up."""
        return -(-len(self.columns) // ALIGN) * ALIGN

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Standardised values, float32, shape ``(n, width)``; the columns added hold zero.

        NaN counts as the mean.
        """
        own = np.take(values, self.columns, axis=1)
        scaled = (np.clip(own, self.low, self.high) - self.centre) / self.scale
        standardised = np.zeros((len(values), self.width), np.float32)
        standardised[:, : len(self.columns)] = np.nan_to_num(scaled, copy=False)
        return standardised

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """The fields as named arrays."""
        return {f"{prefix}/{name}": getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> Self:
        """Restore from the arrays of :meth:`to_arrays`.

        Raises:
            KeyError: An array is missing.
        """
        return cls(*(arrays[f"{prefix}/{name}"] for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Bound:
    """Keeps log-ratios between two bounds, and so the utilisation of the roofline.

    The utilisation ``base / latency = exp(-ratio)`` of a kernel is bounded, as NeuSight has it
    (Lee et al., ASPLOS 2025): above by what the roofline allows, with an allowance since caches
    beat the rooflines of kernels that come to their data warm, and below, so that nothing is
    predicted to take a thousand times its roofline. Both bounds are taken from the training
    labels. In between, with ``s`` the logistic function,

        ratio(u) = low + (high - low) · s(slope · u + shift)

    where slope and shift are such that ``ratio(0)`` is the training median and ``ratio'(0) = 1``.

    Attributes:
        low: Least log-ratio.
        high: Largest log-ratio.
        slope: Slope of the logistic function's argument.
        shift: Shift of the logistic function's argument.
    """

    low: float
    high: float
    slope: float
    shift: float

    @classmethod
    def fit(cls, target: np.ndarray) -> Self:
        """Learn from training targets, shape ``(n,)``."""
        below, middle, above = np.quantile(target, [TAIL, 0.5, 1 - TAIL]).tolist()
        low, high = below - ROOM, above + ROOM
        # The logistic function must take this value at u = 0; its slope there is share · (1 -
        # share) times that of its argument.
        share = (middle - low) / (high - low)
        slope = 1.0 / ((high - low) * share * (1.0 - share))
        return cls(low, high, slope, float(np.log(share / (1.0 - share))))

    def __call__(self, raw: Any, logistic: Callable[[Any], Any]) -> Any:
        """Log-ratios of a network's raw outputs.

        Args:
            raw: Array or tensor of any library.
            logistic: The logistic function of that library.
        """
        return self.low + (self.high - self.low) * logistic(self.slope * raw + self.shift)

    def to_array(self) -> np.ndarray:
        """The four numbers, float64."""
        return np.array([self.low, self.high, self.slope, self.shift])

    @classmethod
    def from_array(cls, array: np.ndarray) -> Self:
        """Restore from the array of :meth:`to_array`.

        Raises:
            TypeError: There are not four numbers.
        """
        return cls(*array.tolist())
