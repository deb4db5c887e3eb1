"""The baseline of physics alone: ``latency = roofline + floor``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..core.kernel_table import KernelTable
from .tabular import TabularEstimator


class RooflineEstimator(TabularEstimator):
    """Predicts roofline plus the device's floor, without training.

    Fitting learns intervals and the domain only, so that the baseline is reported with the same
    figures as the others.
    """

    name = "roofline"
    learned = False

    def __init__(self) -> None:
        super().__init__()

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        return

    def log_ratio(self, table: KernelTable) -> np.ndarray:
        """Log-ratio of the roofline to the table's base, whatever cells were trained, ``(n,)``.

        It is 0 except on TPUs, whose base is not the roofline.
        """
        return np.asarray(np.log(table.roofline_s / table.base_s))

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return self.log_ratio(table)

    def _weights(self) -> dict[str, bytes]:
        return {}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        return
