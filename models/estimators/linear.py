"""A ridge regression of the log-ratio, robust to outliers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..core.kernel_table import CELLS, KernelTable
from ..core.robust_regression import huber_ridge
from ..core.store import pack, unpack
from .tabular import TabularEstimator

#: Standardised features are clipped here, so that one far value cannot rule a linear prediction.
CLIP = 4.0
_FILE = "ridge.npz"


class RidgeEstimator(TabularEstimator):
    """Linear in the standardised features, with an intercept for every cell.

    Args:
        alpha: Strength of the penalty per row, on standardised features.
        huber: Residuals beyond this many log units count linearly.
    """

    name = "ridge"

    def __init__(self, alpha: float = 1e-3, huber: float = 0.3) -> None:
        super().__init__(alpha=alpha, huber=huber)
        self._mean = np.zeros(0)
        self._scale = np.zeros(0)
        self._coef = np.zeros(0)

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        values = np.nan_to_num(table.X.astype(np.float64))
        self._mean, spread = values.mean(axis=0), values.std(axis=0)
        # A constant feature gets scale 0, and with it no effect.
        self._scale = np.where(spread > 1e-9, 1.0 / np.maximum(spread, 1e-9), 0.0)
        design = self._design(table)
        self._coef = huber_ridge(design, target, self.params["alpha"], self.params["huber"])

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return np.asarray(self._design(table) @ self._coef)

    def _design(self, table: KernelTable) -> np.ndarray:
        """Standardised features, one column a cell, and ones: shape ``(n, d + cells + 1)``."""
        values = np.nan_to_num(table.X.astype(np.float64))
        scaled = np.clip((values - self._mean) * self._scale, -CLIP, CLIP)
        cell = (table.cell[:, None] == np.arange(len(CELLS))[None, :]).astype(np.float64)
        return np.concatenate([scaled, cell, np.ones((len(table), 1))], axis=1)

    def _weights(self) -> dict[str, bytes]:
        arrays = {"mean": self._mean, "scale": self._scale, "coef": self._coef}
        return {_FILE: pack({**arrays, "cells": np.array(CELLS)})}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        arrays = unpack(files[_FILE])
        if [str(c) for c in arrays["cells"]] != list(CELLS):
            raise ValueError("cells of the saved model differ from this version's")
        self._mean, self._scale, self._coef = arrays["mean"], arrays["scale"], arrays["coef"]
