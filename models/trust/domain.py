"""Decides whether a kernel is within a model's training domain.

For every cell (platform × kind) and every pair of a few key features, a coarse 2-D grid marks the
squares of training kernels (and their neighbours). The score of a kernel is the fraction of pairs
that put it on an occupied square; squares outside the trained range are never occupied. It is in
the domain if its score reaches a threshold that 95 % of held-out samples reach. Pairs detect
combinations that ranges miss, and cost one table look-up each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from ...common.units import plain
from ..core.kernel_table import CELLS, KernelTable, by_cell

#: Squares per axis inside the trained range; one more on each side is outside. Finer grids leave
#: holes between training kernels, coarser ones accept everything. Engineering estimate.
GRID = 16
#: Most key features: the number of pairs, and so the table, grows with the square.
MAX_KEYS = 8
#: Fraction of held-out samples called out of domain: the false-alarm rate of the check.
OUTSIDE_SHARE = 0.05
#: Preferred key features, most informative first: time and its limit, size, layout and device.
#: Engineering choice.
PREFERRED = (
    "log_roofline_floor",
    "compute_over_memory",
    "log_n_ops",
    "log_out_elements_count",
    "log_out_minor",
    "log_n_inputs",
    "device_balance_f32",
    "device_cores",
)


@dataclass
class Domain:
    """Occupied squares of the training rows.

    Attributes:
        keys: Columns of the key features, shape ``(k,)``.
        low: Lower end of each key feature's range, shape ``(k,)``.
        step: Width of a square, shape ``(k,)``.
        occupied: Bool, shape ``(cells, pairs, (GRID + 2) ** 2)``.
        threshold: Least score inside the domain.
    """

    keys: np.ndarray
    low: np.ndarray
    step: np.ndarray
    occupied: np.ndarray
    threshold: float = 1.0

    @classmethod
    def fit(cls, table: KernelTable) -> Domain:
        """Mark the squares of a table's rows, and those around them, as occupied."""
        keys = key_columns(table)
        values = table.X[:, keys].astype(np.float64)
        low, high = values.min(axis=0), values.max(axis=0)
        # A feature without spread gets one narrow square, which no other value falls into.
        step = np.where(high > low, (high - low) / GRID, 1e-6 + 1e-6 * np.abs(low))
        # A single key makes one pair with itself.
        pairs = max(1, len(keys) * (len(keys) - 1) // 2)
        grid = np.zeros((len(CELLS), pairs, GRID + 2, GRID + 2), bool)
        domain = cls(keys, low, step, grid.reshape(len(CELLS), pairs, -1))
        square = domain._squares(table)
        cell = table.cell.astype(np.int64)
        flat = grid.reshape(len(CELLS), pairs, -1)
        for pair in range(pairs):
            flat[cell, pair, square[:, pair]] = True
        domain.occupied = _grown(grid).reshape(len(CELLS), pairs, -1)
        return domain

    def score(self, table: KernelTable) -> np.ndarray:
        """Fraction of feature pairs on an occupied square, shape ``(n,)``."""
        return np.asarray(self.occupancy(table).mean(axis=1))

    def occupancy(self, table: KernelTable) -> np.ndarray:
        """Whether each pair of key features puts a kernel on an occupied square.

        Returns:
            Bool, shape ``(n, pairs)``, in the order of :attr:`pairs`.
        """
        square = self._squares(table)
        cell = table.cell.astype(np.int64)[:, None]
        return np.asarray(self.occupied[cell, np.arange(square.shape[1])[None, :], square])

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of key features, as positions in :attr:`keys`."""
        return list(combinations(range(len(self.keys)), 2)) or [(0, 0)]

    @property
    def high(self) -> np.ndarray:
        """Upper end of each key feature's trained range, shape ``(k,)``."""
        return np.asarray(self.low + GRID * self.step)

    def contains(self, table: KernelTable) -> np.ndarray:
        """Whether each kernel is in the domain, bool, shape ``(n,)``."""
        # The score is a ratio of small integers: rounding must not decide a tie.
        return np.asarray(self.score(table) >= self.threshold - 1e-12)

    def reasons(self, table: KernelTable) -> list[str]:
        """Reasons why the first row of a table is outside the domain.

        Returns:
            One text per feature out of its trained range, then one per pair of features in range
            that no training row combines.
        """
        names = [table.names[column] for column in self.keys]
        value = table.X[0, self.keys].astype(np.float64)
        reasons, odd = [], set()
        for place, name in enumerate(names):
            # Tolerances for values stored in 32 bits.
            if not self.low[place] <= value[place] <= self.high[place] * (1 + 1e-6) + 1e-12:
                odd.add(place)
                reasons.append(
                    f"{name} is {plain(value[place])}, trained from {plain(self.low[place])} to "
                    f"{plain(self.high[place])}"
                )
        for (first, second), seen in zip(self.pairs, self.occupancy(table)[0], strict=True):
            if not seen and not odd & {first, second}:
                reasons.append(f"{names[first]} with {names[second]} as here was not seen")
        return reasons

    def calibrate(self, scores: np.ndarray) -> None:
        """Set the threshold from the scores of held-out samples."""
        if len(scores):
            # Above zero: a kernel without any supported pair is never in the domain.
            self.threshold = max(float(np.quantile(scores, OUTSIDE_SHARE)), 1e-6)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save, with squares packed into bits."""
        return {
            "domain_keys": self.keys,
            "domain_low": self.low,
            "domain_step": self.step,
            "domain_occupied": np.packbits(self.occupied, axis=-1),
            "domain_cells": np.array(CELLS),
            "domain_threshold": np.array([self.threshold]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Domain:
        """Read :meth:`to_arrays`'s arrays; missing cells stay empty."""
        packed = np.unpackbits(arrays["domain_occupied"], axis=-1, count=(GRID + 2) ** 2)
        nowhere = np.zeros(packed.shape[1:], packed.dtype)
        occupied = by_cell(arrays["domain_cells"], packed, nowhere).astype(bool)
        return cls(
            arrays["domain_keys"],
            arrays["domain_low"],
            arrays["domain_step"],
            occupied,
            float(arrays["domain_threshold"][0]),
        )

    def _squares(self, table: KernelTable) -> np.ndarray:
        """Index of each row's square for every pair, int32, shape ``(n, pairs)``."""
        values = (table.X[:, self.keys] - self.low) / self.step
        # The upper end of the range belongs to the last inner square.
        inner = np.where((values >= GRID) & (values <= GRID * (1 + 1e-6)), GRID - 1, values)
        axis = np.clip(np.floor(inner), -1, GRID).astype(np.int32) + 1
        if len(self.keys) < 2:
            return axis * (GRID + 2) + axis
        first, second = _sides(len(self.keys))
        return np.asarray(axis[:, first] * (GRID + 2) + axis[:, second])


def key_columns(table: KernelTable) -> np.ndarray:
    """Columns of the key features: the preferred ones, else those with the largest variance."""
    named = [table.names.index(name) for name in PREFERRED if name in table.names][:MAX_KEYS]
    if len(named) >= 2:
        return np.array(named)
    spread = np.nanstd(table.X.astype(np.float64), axis=0)
    widest = np.argsort(-spread, kind="stable")[:MAX_KEYS]
    return np.sort(widest[spread[widest] > 0]) if (spread > 0).any() else np.array([0])


@cache
def _sides(count: int) -> tuple[np.ndarray, np.ndarray]:
    """First and second members of all pairs of ``count`` numbers."""
    return np.triu_indices(count, 1)


def _grown(grid: np.ndarray) -> np.ndarray:
    """Inner squares that are occupied or touch an occupied one; outer squares stay empty."""
    # Dilation by a 3 × 3 square; the outer ring, outside the range, stays empty.
    around = np.zeros_like(grid)
    size = grid.shape[-1]
    for i in (0, 1, 2):
        for j in (0, 1, 2):
            around[..., 1:-1, 1:-1] |= grid[..., i : size - 2 + i, j : size - 2 + j]
    return around
