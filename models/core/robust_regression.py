"""Robust linear regression."""

from __future__ import annotations

import numpy as np


def huber_ridge(
    design: np.ndarray, target: np.ndarray, alpha: float, delta: float, *, rounds: int = 8
) -> np.ndarray:
    """Ridge regression with Huber's loss, by iteratively reweighted least squares.

    Minimises ``mean(huber(target - design @ w)) + alpha / 2 * |w[:-1]|²``; the last column of the
    design is the intercept and is not penalised (Huber, Robust Statistics, 1981, chapter 7).

    Args:
        design: Shape ``(n, d)``, the last column ones.
        target: Shape ``(n,)``.
        alpha: Penalty per row.
        delta: Residual at which the loss turns from quadratic to linear.
        rounds: Reweightings.

    Returns:
        Coefficients, shape ``(d,)``.
    """
    n, d = design.shape
    penalty = np.full(d, alpha * n)
    penalty[-1] = 1e-9 * n  # not zero, so that the system stays solvable
    # All rows count fully in the first round, which is plain ridge regression.
    weight = np.ones(n)
    coef = np.zeros(d)
    for _ in range(rounds):
        weighted = design * weight[:, None]
        coef = np.linalg.solve(weighted.T @ design + np.diag(penalty), weighted.T @ target)
        residual = np.abs(target - design @ coef)
        # Huber: weight 1 up to delta, beyond it in inverse proportion to the residual.
        weight = delta / np.maximum(residual, delta)
    return coef
