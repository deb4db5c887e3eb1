"""Baselines of the fitted collectives: three parameters, and interpolation over twelve knots."""

from __future__ import annotations

import numpy as np

from .fit import groups
from .residual import cells
from .table import CollectiveTable

#: Knots of the interpolation: about one for every two octaves of the usual range of sizes.
KNOTS = 12
#: Start of the fit: launch and latency of a step in microseconds, share of the bandwidth. Plausible
#: for NCCL over NVLink; the bounds of e^-8 to e^4 around it exclude nothing realistic.
START = np.log([8.0, 1.0, 0.6])


def three_parameters(table: CollectiveTable, latency_us: np.ndarray) -> np.ndarray:
    """Fit ``launch + steps · latency + wire bytes / (efficiency · bandwidth)`` in logarithms.

    Returns:
        Launch and latency in microseconds, and efficiency, shape ``(3,)``.
    """
    from scipy.optimize import least_squares

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(three_parameter_us(np.exp(parameters), table) / latency_us))

    bounds = (START - 8.0, START + 4.0)
    # Linear beyond errors of 10 %, so that a change of protocol, which this form cannot follow,
    # does not rule the fit.
    solution = least_squares(residuals, START, loss="soft_l1", f_scale=0.1, bounds=bounds)
    return np.asarray(np.exp(solution.x))


def three_parameter_us(parameters: np.ndarray, table: CollectiveTable) -> np.ndarray:
    """Microseconds by the three parameters, shape ``(n,)``."""
    launch, latency, efficiency = parameters
    points = table.points
    moved = points.wire / (efficiency * points.bandwidth)
    return np.asarray(launch + points.steps * latency + moved)


def fit_three(table: CollectiveTable, latency_us: np.ndarray) -> dict[tuple[str, ...], np.ndarray]:
    """Three parameters of every machine's fabric, operation and library."""
    return {
        path: three_parameters(table.take(rows), latency_us[rows])
        for path, rows in groups(table, depth=4).items()
    }


def predict_three(fitted: dict[tuple[str, ...], np.ndarray], table: CollectiveTable) -> np.ndarray:
    """Microseconds by :func:`fit_three`, NaN where nothing was fitted; shape ``(n,)``."""
    result = np.full(len(table), np.nan)
    for path, rows in groups(table, depth=4).items():
        if path in fitted:
            result[rows] = three_parameter_us(fitted[path], table.take(rows))
    return result


def knots_us(table: CollectiveTable, latency_us: np.ndarray, others: CollectiveTable) -> np.ndarray:
    """Log-linear interpolation between :data:`KNOTS` knots fitted to each cell of ``table``.

    Returns:
        Microseconds of ``others``, NaN where a cell was not measured; shape ``(n_others,)``.
    """
    measured = groups(table, depth=4)
    result = np.full(len(others), np.nan)
    for path, rows in groups(others, depth=4).items():
        known = cells(table, measured[path]) if path in measured else {}
        for world, own in cells(others, rows).items():
            if world in known:
                here = known[world]
                x, y = np.log2(table.points.size[here]), np.log(latency_us[here])
                result[own] = np.exp(_hats(x, y, np.log2(others.points.size[own])))
    return result


def _hats(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Least squares over hat functions, with a weak penalty on second differences."""
    low, high = min(x.min(), at.min()), max(x.max(), at.max())
    # The knots cover the asked sizes, too; the offset keeps the last one inside the last interval.
    knots = np.linspace(low, high + 1e-9, KNOTS)
    basis = np.stack([np.interp(x, knots, row) for row in np.eye(KNOTS)], axis=1)
    # Weak against the data; it only determines knots that no measurement touches.
    smooth = 0.03 * np.diff(np.eye(KNOTS), 2, axis=0)
    matrix = np.concatenate([basis, smooth])
    values = np.linalg.lstsq(matrix, np.concatenate([y, np.zeros(KNOTS - 2)]), rcond=None)[0]
    return np.asarray(np.interp(at, knots, values))
