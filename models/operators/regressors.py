"""Regressors of a family: one for known devices, one for unseen devices.

The latter is fitted by the strategy that transfers best to held-out chips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.operators import OpFeatures
from ...features.operators.columns import OpRows, distinct
from ..adapt.covariance import time_shares
from ..core.kernel_table import KernelTable
from ..estimators.tabular import TabularEstimator
from ..trust.calibrator import Ends
from .devices import DeviceEffects, KnownDevices, twins
from .family_tables import (
    FamilySettings,
    GeneralFit,
    balanced_weights,
    constants,
    draw_rows,
    general_table,
    known_table,
    learn,
    new_regressor,
    sized,
)
from .rows import dispatch, libraries

#: Most rows that the model of unseen devices learns from, and that each leave-one-chip-out fit is
#: tested on. Engineering estimates that bound the training time.
GENERAL_ROWS, JUDGE_ROWS = 120_000, 4000
#: Candidate powers of the shrinkage; 0 keeps ratios, 12 nearly removes them (a factor of 0.28 for
#: libraries seen on three chips). The choice is made per family (``way`` in the manifest of
#: gpu-operators).
SHRINKING = (0.0, 1.0, 2.0, 3.0, 6.0, 12.0)
#: Least share of libraries that ran on more than one chip for held-out chips to select the power:
#: with fewer, they would not represent the libraries of single chips, whose ratios are shrunk with
#: power 1. Engineering estimate.
LEAST_SHARED = 0.25
#: By group of held-out devices, positions of their rows and the rows' log-ratios by a model of the
#: same strategy fitted without them.
Folds = Mapping[tuple[str, ...], tuple[np.ndarray, np.ndarray]]


class Strategy(NamedTuple):
    """Strategy of a fit; saved manifests use the same field names.

    Attributes:
        within: Whether to learn the residual within each device rather than the ratio itself.
        shrunk: Power of :func:`shrinkage` to apply to ratios; 0 keeps them.
        alien: Whether to learn from other vendors' chips, too.
    """

    within: bool
    shrunk: float
    alien: bool


@dataclass(slots=True)
class KnownModel:
    """Model of known devices: device effects, and a regressor of their residuals.

    Attributes:
        family: Key of the family.
        devices: Names of the devices that it was fitted to, in order.
        regressor: Regressor of the residuals of the log-ratios.
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
        # The trees learn the residual of the linear part, so that beyond the sizes in the training
        # data they add a constant to it.
        linear = effects.predict(share, device, library)
        regressor = new_regressor(settings, sized(settings.known, len(fitting)))
        learn(regressor, known_table(family, features, device, devices), ratio - linear, fitting)
        return cls(family, devices, regressor, effects)

    def table(self, features: OpFeatures, device: np.ndarray) -> KernelTable:
        """Input of the regressor for rows on the devices ``device``, shape ``(n,)``."""
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

    def held_out(
        self, features: OpFeatures, device: np.ndarray, library: np.ndarray, ratio: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predict rows held out of the fit.

        Args:
            features: Features of ``n`` rows.
            device: Device of each, shape ``(n,)``.
            library: Library that runs each, shape ``(n,)``.
            ratio: Log-ratios of measured latency to the estimate, shape ``(n,)``.

        Returns:
            ``log(measured / predicted)``, predictions in seconds, and scores of the domain (1 if
            the regressor has none), shape ``(n,)`` each.
        """
        table = self.table(features, device)
        predicted = self.latency_s(features, table, device, library)
        domain = self.regressor.domain
        near = domain.score(table) if domain is not None else np.ones(len(ratio))
        return np.log(features.base_s) + ratio - np.log(predicted), predicted, near


@dataclass(slots=True)
class UnseenModel:
    """Model of unseen devices.

    Attributes:
        family: Key of the family.
        regressor: Regressor of the log-ratios.
        effects: Effects of the devices in the training data.
        strategy: Strategy of the fit.
        seen: Number of chips on which each library was seen.
        vendors: Vendors to whose devices the ratios apply; empty for all.
    """

    family: str
    regressor: TabularEstimator
    effects: DeviceEffects
    strategy: Strategy
    seen: dict[str, int]
    vendors: frozenset[str] = frozenset()

    def table(self, features: OpFeatures) -> KernelTable:
        """Input of the regressor for rows."""
        return general_table(self.family, features)

    def log_ratio(
        self,
        rows: OpRows,
        features: OpFeatures,
        table: KernelTable,
        devices: Mapping[str, DeviceSpec],
    ) -> np.ndarray:
        """Log-ratios of latency to the estimate on an unseen device, shape ``(n,)``.

        Args:
            rows: ``n`` rows of the family.
            features: Their features.
            table: From :meth:`table`.
            devices: Descriptions by name.
        """
        linear = self.effects.unseen(time_shares(features), dispatch(rows))
        ratio = np.log(self.regressor.point(table) / features.base_s) + linear
        return np.asarray(self.kept(rows, devices) * ratio)

    def kept(self, rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
        """Fraction of the learned log-ratio that is kept, shape ``(n,)``.

        It depends on the library of each row; 0 on devices of vendors outside :attr:`vendors`,
        where the analytical estimate is used.
        """
        # Power 0 gives 1: ratios are kept.
        share = shrinkage(libraries(rows), self.seen) ** self.strategy.shrunk
        if not self.vendors:
            return share
        native = rows.where("device", lambda name: devices[name].vendor in self.vendors)
        return np.asarray(share * native)


@dataclass(slots=True)
class UnseenFit:
    """Fits the model of unseen devices.

    Attributes:
        job: Rows and settings of the fits.
        known_devices: Chips and vendors of the devices.
        library: Library that runs each row, shape ``(n,)``.
        transferable: Rows that are informative about other devices, bool, shape ``(n,)``.
        rng: Generator of all draws.
    """

    job: GeneralFit
    known_devices: KnownDevices
    library: np.ndarray
    transferable: np.ndarray
    rng: np.random.Generator

    def make(self, fitting: np.ndarray) -> tuple[UnseenModel, Folds]:
        """Fit to rows.

        Args:
            fitting: Positions of the rows to learn from.
        """
        family = self.job.family
        fitting = fitting[self.transferable[fitting]]
        groups = twins(list(self.known_devices.chips), self.known_devices.chips)
        # A single chip cannot select a strategy; ratios are used as learned.
        if len(groups) < 2:
            general, effects = self.job.fit(self._drawn(fitting, GENERAL_ROWS), within=False)
            plain = Strategy(False, 0.0, True)
            return UnseenModel(family, general, effects, plain, self._seen(fitting)), {}
        folds = {group: self._left_out(fitting, group) for group in groups}
        strategy = self._best(folds, SHRINKING if self._shares_libraries(fitting) else (1.0,))
        pool = self._pool(fitting, strategy.alien)
        general, effects = self.job.fit(self._drawn(pool, GENERAL_ROWS), strategy.within)
        own = {group: (rows, ratios[strategy]) for group, (rows, ratios) in folds.items()}
        return UnseenModel(family, general, effects, strategy, self._seen(pool)), own

    def _left_out(
        self, fitting: np.ndarray, group: Sequence[str]
    ) -> tuple[np.ndarray, dict[Strategy, np.ndarray]]:
        """Rows of a group of devices, and their log-ratios by models fitted without them."""
        own = np.flatnonzero(np.isin(self.job.device, group) & self.transferable)
        own = self.rng.choice(own, min(len(own), JUDGE_ROWS), replace=False)
        # Without another vendor's chips, both pools are the same.
        mixed = not self.known_devices.native(self.job.device).all()
        ratios: dict[Strategy, np.ndarray] = {}
        for alien in (False, True) if mixed else (False,):
            pool = self._pool(fitting, alien)
            pool = pool[~np.isin(self.job.device[pool], group)]
            learn = self._drawn(pool, self.job.settings.fold_rows)
            factor = shrinkage(self.library[own], self._seen(pool))
            for within in (False, True):
                plain = self.job.left_out(learn, own, within=within)
                for power in SHRINKING:
                    ratios[Strategy(within, power, alien)] = factor**power * plain
        return own, ratios

    def _shares_libraries(self, fitting: np.ndarray) -> bool:
        """Whether enough libraries ran on several chips to estimate how ratios transfer."""
        chips = list(self._seen(fitting).values())
        return bool(np.mean(np.array(chips) > 1) >= LEAST_SHARED)

    def _best(
        self,
        folds: dict[tuple[str, ...], tuple[np.ndarray, dict[Strategy, np.ndarray]]],
        powers: Sequence[float],
    ) -> Strategy:
        """The strategy with the least mean error over held-out chips of the most common vendor."""
        # An unseen device of a minority vendor is predicted as that vendor's known one
        # (devices.py), not by this model.
        judges = [g for g in folds if g[0] not in self.known_devices.foreign] or list(folds)
        strategies = [Strategy(*p) for p in product((False, True), powers, (False, True))]
        strategies = [
            strategy for strategy in strategies if all(strategy in folds[g][1] for g in judges)
        ]
        return min(
            strategies,
            key=lambda strategy: np.mean([self._ape(folds[g], strategy) for g in judges]),
        )

    def _ape(
        self, fold: tuple[np.ndarray, dict[Strategy, np.ndarray]], strategy: Strategy
    ) -> float:
        rows, ratios = fold
        return mean_ape(self.job.target[rows] - ratios[strategy])

    def _pool(self, fitting: np.ndarray, alien: bool) -> np.ndarray:
        return fitting if alien else fitting[self.known_devices.native(self.job.device)[fitting]]

    def _drawn(self, pool: np.ndarray, count: int) -> np.ndarray:
        weights = balanced_weights(self.known_devices.chip_names(self.job.device[pool]))
        return draw_rows(self.rng, pool, weights, min(count, self.job.settings.max_rows))

    def _seen(self, pool: np.ndarray) -> dict[str, int]:
        return chips_by_library(
            self.library[pool], self.known_devices.chip_names(self.job.device[pool])
        )


def mean_ape(errors: np.ndarray) -> float:
    """Mean absolute percentage error of errors ``log(measured / predicted)``, as a fraction."""
    return float(np.abs(np.exp(-errors) - 1).mean())


def error_figures(errors: np.ndarray, ends: Ends) -> dict[str, float]:
    """Figures of errors ``log(measured / predicted)``.

    Args:
        errors: Errors on a held-out chip, shape ``(n,)``.
        ends: Interval bounds calibrated on the other chips, as logarithms.

    Returns:
        Mean (``mape``) and ``median`` absolute percentage error and ``coverage`` as fractions, the
        ``width`` of the interval (upper over lower bound), and the number of ``rows``.
    """
    inside = (errors >= ends[0]) & (errors <= ends[1])
    return {
        "mape": mean_ape(errors),
        "median": float(np.median(np.abs(np.exp(-errors) - 1))),
        "coverage": float(inside.mean()),
        "width": float(np.exp(ends[1] - ends[0])),
        "rows": float(len(errors)),
    }


def chips_by_library(library: np.ndarray, chip: np.ndarray) -> dict[str, int]:
    """Number of chips on which each library was seen.

    Args:
        library: Library that runs each row, shape ``(n,)``.
        chip: Name of the chip of each row, shape ``(n,)``.
    """
    import pandas as pd

    counts = pd.Series(chip).groupby(pd.Series(library)).nunique()
    return {str(name): int(count) for name, count in counts.items()}


def shrinkage(library: np.ndarray, chips: Mapping[str, int]) -> np.ndarray:
    """Factor on learned log-ratios, shape ``(n,)``.

    A regressor cannot separate a library's behaviour on all chips from that on the only chip where
    it was seen. The analytical estimate is the better guess then, so the ratio to it is shrunk.

    Args:
        library: Library that runs each row, shape ``(n,)``.
        chips: Number of chips by library, from :func:`chips_by_library`.
    """
    code, names = distinct(library)
    by_chips = constants()["shrinkage"]
    factors = np.array([by_chips[min(chips.get(str(n), 0), len(by_chips) - 1)] for n in names])
    return factors[code] if len(names) else np.ones(len(library))
