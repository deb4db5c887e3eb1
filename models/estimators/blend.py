"""Weights that combine the predictions of several models: non-negative, summing to one."""

from __future__ import annotations

import numpy as np

from ..core.kernel_table import CELLS

#: A cell gets its own weights from this many rows on; fewer do not separate members reliably.
#: Engineering estimate; not fitted.
MIN_CELL_ROWS = 100
#: Residuals in log space below this (2 %, far less than the labels' noise) count alike, so that
#: exact hits, whose weight would be unbounded, do not rule the fit.
_SMALLEST_RESIDUAL = 0.02
#: Weight of the equation "the weights sum to one" against all the others: makes it nearly exact in
#: a least-squares solver without constraints; the division at the end does the rest.
_SUM_TO_ONE = 1e4
#: Reweightings; the weights change little after a few.
_ROUNDS = 10


def blend_weights(
    predictions: np.ndarray, target: np.ndarray, cell: np.ndarray, shrinkage: float
) -> np.ndarray:
    """Fit weights by cell, shape ``(cells, members)``.

    Args:
        predictions: Log-ratios by members that did not see the row, shape ``(n, members)``.
        target: True log-ratios, shape ``(n,)``.
        cell: Cell of every row, shape ``(n,)``.
        shrinkage: Weight of the equal weights, in rows.
    """
    members = predictions.shape[1]
    if not len(target):
        return np.full((len(CELLS), members), 1.0 / members)
    weights = np.tile(simplex_weights(predictions, target, shrinkage), (len(CELLS), 1))
    for number in np.unique(cell):
        own = cell == number
        if own.sum() >= MIN_CELL_ROWS:
            weights[number] = simplex_weights(predictions[own], target[own], shrinkage)
    return weights


def simplex_weights(predictions: np.ndarray, target: np.ndarray, shrinkage: float) -> np.ndarray:
    """Fit weights of least absolute error, shape ``(members,)``.

    Least absolute deviations by iteratively reweighted least squares, each a non-negative least
    squares problem (Lawson & Hanson, Solving Least Squares Problems, 1974) with an equation for
    the sum. The penalty ``shrinkage · s · |w - 1/m|²``, where ``s`` is the weighted mean square by
    which a row's predictions differ from their mean, counts as that many further rows whose truth
    is the plain mean.

    Args:
        predictions: Shape ``(n, members)``.
        target: Shape ``(n,)``.
        shrinkage: Rows' worth of the equal weights; 0 fits freely.
    """
    from scipy.optimize import nnls

    members = predictions.shape[1]
    equal = np.full(members, 1.0 / members)
    spread = ((predictions - predictions.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    if not spread.any():  # members agree everywhere: nothing to choose by
        return equal
    weights = equal
    total = np.ones((1, members))
    for _ in range(_ROUNDS):
        # A weight of 1/|r| turns r² into |r|.
        row = 1.0 / np.maximum(np.abs(predictions @ weights - target), _SMALLEST_RESIDUAL)
        root = np.sqrt(row / row.mean())
        pull = np.sqrt(shrinkage * float((root**2 * spread).mean()))
        design = [predictions * root[:, None], pull * np.eye(members), _SUM_TO_ONE * total]
        right = [target * root, pull * equal, [_SUM_TO_ONE]]
        weights = nnls(np.concatenate(design), np.concatenate(right))[0]
        weights = weights / weights.sum()
    return np.asarray(weights)
