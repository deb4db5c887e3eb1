"""The simplest estimators: physics alone, and a ridge regression robust to outliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..core.base import Params
from ..core.kernel_table import CELLS, KernelTable, check_cells
from ..core.store import pack, unpack
from .tabular import TabularEstimator

#: Standardized features are clipped here, so that an outlier cannot dominate a linear prediction.
CLIP = 4.0
_FILE = "ridge.npz"


def huber_ridge(
    design: np.ndarray, target: np.ndarray, alpha: float, delta: float, *, rounds: int = 8
) -> np.ndarray:
    """Ridge regression with Huber's loss, by iteratively reweighted least squares.

    Minimizes ``mean(huber(target - design @ w)) + alpha / 2 * |w[:-1]|²``; the last column of the
    design is the intercept and is not penalized (Huber, Robust Statistics, 1981, chapter 7).

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
    # With equal weights the first round is plain ridge regression.
    weight = np.ones(n)
    coef = np.zeros(d)
    for _ in range(rounds):
        weighted = design * weight[:, None]
        coef = np.linalg.solve(weighted.T @ design + np.diag(penalty), weighted.T @ target)
        residual = np.abs(target - design @ coef)
        # Huber: weight 1 up to delta, inversely proportional to the residual beyond it.
        weight = delta / np.maximum(residual, delta)
    return coef


class RooflineEstimator(TabularEstimator):
    """Predicts roofline plus the device's floor, without training.

    Fitting only learns intervals and the domain, so that the baseline is reported with the same
    figures as other estimators.
    """

    name = "roofline"
    learned = False

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        return

    def log_ratio(self, table: KernelTable) -> np.ndarray:
        """Log-ratio of the roofline to the table's base for all cells, shape ``(n,)``.

        It is 0 except on TPUs, whose base is not the roofline.
        """
        return np.asarray(np.log(table.roofline_s / table.base_s))

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return self.log_ratio(table)

    def _weights(self) -> dict[str, bytes]:
        return {}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        return


@dataclass(frozen=True)
class RidgeParams(Params):
    """Parameters of the ridge regression.

    Attributes:
        alpha: Strength of the penalty per row, on standardized features.
        huber: Residuals beyond this many log units count linearly.
    """

    alpha: float = 1e-3
    huber: float = 0.3


class RidgeEstimator(TabularEstimator):
    """Linear in the standardized features, with an intercept per cell."""

    name = "ridge"
    keywords = RidgeParams
    params: RidgeParams

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self._mean = np.zeros(0)
        self._scale = np.zeros(0)
        self._coef = np.zeros(0)

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        values = np.nan_to_num(table.X.astype(np.float64))
        self._mean, spread = values.mean(axis=0), values.std(axis=0)
        # A constant feature gets scale 0, and with it no effect.
        self._scale = np.where(spread > 1e-9, 1.0 / np.maximum(spread, 1e-9), 0.0)
        design = self._design(table)
        self._coef = huber_ridge(design, target, self.params.alpha, self.params.huber)

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return np.asarray(self._design(table) @ self._coef)

    def _design(self, table: KernelTable) -> np.ndarray:
        """Standardized features, one column per cell, and ones: shape ``(n, d + cells + 1)``."""
        values = np.nan_to_num(table.X.astype(np.float64))
        scaled = np.clip((values - self._mean) * self._scale, -CLIP, CLIP)
        cell = (table.cell[:, None] == np.arange(len(CELLS))[None, :]).astype(np.float64)
        return np.concatenate([scaled, cell, np.ones((len(table), 1))], axis=1)

    def _weights(self) -> dict[str, bytes]:
        arrays = {"mean": self._mean, "scale": self._scale, "coef": self._coef}
        return {_FILE: pack({**arrays, "cells": np.array(CELLS)})}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        arrays = unpack(files[_FILE])
        check_cells(arrays["cells"])
        self._mean, self._scale, self._coef = arrays["mean"], arrays["scale"], arrays["coef"]
