"""Predicts operators on devices that were learned from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...features.operators import OpFeatures
from ..adapt.covariance import time_shares
from ..core.kernel_table import KernelTable
from ..estimators.tabular import TabularEstimator
from .device_effects import DeviceEffects
from .family_tables import FamilySettings, known_table, learn, new_regressor, sized


@dataclass(slots=True)
class KnownModel:
    """The model of known devices: effects of the devices, and a regressor of what those leave.

    Attributes:
        family: Key of the family.
        devices: Names of the devices that it was fitted to, in order.
        regressor: Regressor of the log-ratios that the effects leave.
        effects: Linear part of the log-ratios.
    """

    family: str
    devices: tuple[str, ...]
    regressor: TabularEstimator
    effects: DeviceEffects

    @classmethod
    def fit(
        cls,
        family: str,
        devices: tuple[str, ...],
        settings: FamilySettings,
        features: OpFeatures,
        device: np.ndarray,
        library: np.ndarray,
        ratio: np.ndarray,
        fitting: np.ndarray,
    ) -> KnownModel:
        """Fit to rows.

        Args:
            family: Key of the family.
            devices: Names of the devices.
            settings: Settings of the regressor.
            features: Features of ``n`` rows.
            device: Device of each, shape ``(n,)``.
            library: Library that runs each, shape ``(n,)``.
            ratio: Log-ratios of measured latency to the estimate, shape ``(n,)``.
            fitting: Positions of the rows to learn from.
        """
        effects = DeviceEffects()
        share = time_shares(features)
        effects.fit(share[fitting], ratio[fitting], device[fitting], library[fitting])
        # The trees learn what the linear part leaves, so that beyond their sizes they add a
        # constant to it.
        linear = effects.predict(share, device, library)
        regressor = new_regressor(settings, sized(settings.known, len(fitting)))
        learn(regressor, known_table(family, features, device, devices), ratio - linear, fitting)
        return cls(family, devices, regressor, effects)

    def table(self, features: OpFeatures, device: np.ndarray) -> KernelTable:
        """What the regressor reads of rows on the devices ``device``, shape ``(n,)``."""
        return known_table(self.family, features, device, self.devices)

    def latency_s(
        self, features: OpFeatures, table: KernelTable, device: np.ndarray, library: np.ndarray
    ) -> np.ndarray:
        """Latencies in seconds, shape ``(n,)``.

        Args:
            features: Features of ``n`` rows.
            table: From :meth:`table`.
            device: Known device of each row, shape ``(n,)``.
            library: Library that runs each row, shape ``(n,)``.
        """
        linear = self.effects.predict(time_shares(features), device, library)
        return np.asarray(self.regressor.point(table) * np.exp(linear))
