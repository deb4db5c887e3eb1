"""Residuals of the curves on measured machines: a table by size for every cell.

A cell is one fabric, operation, library, machine and number of devices. The logarithm of measured
over predicted is taken for a random walk that is drawn back to zero (an Ornstein–Uhlenbeck process;
Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, appendix B.2) over the
logarithm of the size, seen with noise: a measured interpolation that goes over into the curve where
nothing was measured.
"""

from __future__ import annotations

import numpy as np

from .table import CollectiveTable

#: Correlation length of residuals in octaves of size. Chosen by judgement.
LENGTH = 3.0
#: Standard deviation of residuals, and of what a repeated measurement would change.
SPREAD, NOISE = 0.15, 0.03
#: Most measurements in the fit of a cell, which costs O(n³), and most knots kept in the saved file.
MOST_ROWS, MOST_KNOTS = 240, 64

#: Knots in log2 bytes and the logarithms there, shape ``(n_knots,)`` each.
Table = tuple[np.ndarray, np.ndarray]


def cell_key(path: tuple[str, ...], world: float) -> str:
    """Name of a cell: the machine's path and the number of devices."""
    return "/".join((*path, f"{world:g}"))


def fit_residual(octaves: np.ndarray, logs: np.ndarray) -> Table:
    """Table of one cell.

    Args:
        octaves: log2 of the bytes, shape ``(n,)``.
        logs: log of measured over predicted, shape ``(n,)``.
    """
    order = np.argsort(octaves, kind="stable")
    some = order[np.unique(np.linspace(0, len(order) - 1, MOST_ROWS).astype(int))]
    x, y = octaves[some], np.clip(logs[some], -1.0, 1.0)
    weights = np.linalg.solve(_alike(x, x) + (NOISE / SPREAD) ** 2 * np.eye(len(x)), y)
    seen = np.unique(x)
    knots = seen[np.unique(np.linspace(0, len(seen) - 1, MOST_KNOTS).astype(int))]
    return knots, _alike(knots, x) @ weights


def read_residual(table: Table, octaves: np.ndarray) -> np.ndarray:
    """Logarithms at ``octaves``, shape ``(n,)``: linear between knots, fading beyond them."""
    knots, values = table
    beyond = np.maximum(knots[0] - octaves, octaves - knots[-1])
    fade = np.exp(-np.maximum(beyond, 0.0) / LENGTH)
    return np.asarray(np.interp(octaves, knots, values) * fade)


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.abs(a[:, None] - b[None]) / LENGTH))


def cells(table: CollectiveTable, rows: np.ndarray) -> dict[float, np.ndarray]:
    """Positions among ``rows`` by number of devices."""
    world = table.points.world[rows]
    return {float(n): rows[world == n] for n in np.unique(world)}
