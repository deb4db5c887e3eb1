"""The physics alone: ``latency = roofline + floor``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..core.kernel_table import KernelTable
from .tabular import TabularEstimator


class RooflineEstimator(TabularEstimator):
    """Roofline plus the device's floor; predicts without fitting.

    Fitting learns nothing of the latency; it gives intervals and the domain, so that the baseline
    is reported with the same figures as the others.
    """

    name = "roofline"
    learned = False

    def __init__(self) -> None:
        super().__init__()

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        return

    def log_ratio(self, table: KernelTable) -> np.ndarray:
        """What the roofline is of the table's base, as a logarithm, for every cell."""
        return np.asarray(np.log(table.roofline_s / table.base_s))

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return self.log_ratio(table)

    def _weights(self) -> dict[str, bytes]:
        return {}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        return
