"""The physics alone: ``latency = roofline + floor``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .tables import KernelTable
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

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return np.zeros(len(table))

    def _weights(self) -> dict[str, bytes]:
        return {}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        return
