"""Residuals of the curves on measured machines: a table by size for every cell.

A cell is one fabric, operation, library, machine and number of devices. The logarithm of measured
over predicted is modelled as an Ornstein–Uhlenbeck process (Rasmussen and Williams, *Gaussian
Processes for Machine Learning*, 2006, appendix B.2) over the logarithm of the size, observed with
noise. It interpolates between measured sizes and decays to the bare curve beyond them.
"""

from __future__ import annotations

import numpy as np

from .table import CollectiveTable

#: Correlation length of residuals in octaves of size: a protocol spans several octaves. Engineering
#: estimate; not fitted.
LENGTH = 3.0
#: Standard deviation of residuals and of the noise of a measurement, in log units. Only their ratio
#: matters: it sets how far the table smooths. Engineering estimates; not fitted.
SPREAD, NOISE = 0.15, 0.03
#: Standard deviation of normal errors over the median of their absolute second differences, whose
#: variance is six times as large: 1 / (0.6745 √6).
_OF_DIFFERENCES = 0.605
#: Differences around a measurement that its noise is read off: few enough to lie in one protocol,
#: enough that a step counts for one of them. Engineering estimate; not fitted.
_AROUND = 6
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
    # A residual beyond a factor e is taken for a fault of the measurement, not of the curve.
    x, y = octaves[some], np.clip(logs[some], -1.0, 1.0)
    # Posterior mean in units of SPREAD² (Rasmussen and Williams, equation 2.25).
    noise = np.maximum(NOISE, _scatter(y)) / SPREAD
    weights = np.linalg.solve(_alike(x, x) + np.diag(noise**2), y)
    seen = np.unique(x)
    # The table is read by linear interpolation, for which 64 knots over some 20 octaves are enough.
    knots = seen[np.unique(np.linspace(0, len(seen) - 1, MOST_KNOTS).astype(int))]
    return knots, _alike(knots, x) @ weights


def read_residual(table: Table, octaves: np.ndarray) -> np.ndarray:
    """Read a table at ``octaves`` of size, shape ``(n,)``: linear between knots, fading beyond.

    Returns:
        Log-ratios of measured to predicted, shape ``(n,)``.
    """
    knots, values = table
    beyond = np.maximum(knots[0] - octaves, octaves - knots[-1])
    # The process's own decay from its last known value.
    fade = np.exp(-np.maximum(beyond, 0.0) / LENGTH)
    return np.asarray(np.interp(octaves, knots, values) * fade)


def _scatter(logs: np.ndarray) -> np.ndarray:
    """Noise of measurements in order of size, from second differences around each.

    Neighbours that differ at random are not followed; slopes and a single step of a protocol are.

    Returns:
        Standard deviations, shape ``(n,)``.
    """
    steps = np.abs(np.diff(logs, 2))
    if len(steps) < _AROUND:
        return np.zeros(len(logs))
    first = np.clip(np.arange(len(logs)) - _AROUND // 2, 0, len(steps) - _AROUND)
    windows = steps[first[:, None] + np.arange(_AROUND)]
    seen = _OF_DIFFERENCES * np.median(windows, axis=1)
    # What the process itself varies by from octave to octave is no noise.
    own = 2.0 * SPREAD**2 * (1.0 - np.exp(-1.0 / LENGTH)) / 3.0
    return np.asarray(np.sqrt(np.maximum(seen**2 - own, 0.0)))


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.abs(a[:, None] - b[None]) / LENGTH))


def cells(table: CollectiveTable, rows: np.ndarray) -> dict[float, np.ndarray]:
    """Split ``rows`` (positions in the table) by number of devices."""
    world = table.points.world[rows]
    return {float(n): rows[world == n] for n in np.unique(world)}
