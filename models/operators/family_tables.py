"""Building blocks of family models: settings, tables, targets, draws of rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import ModelError
from ...common.files import own_data
from ...common.parquet import check_measured
from ...features.operators import FAMILIES, OpFeatures
from ...features.operators.columns import distinct
from ...features.operators.features import ops_schema_hash
from ...features.operators.schema import KERNEL_KINDS
from ..adapt.covariance import time_shares
from ..core.kernel_table import CELLS, KernelGraphs, KernelTable
from ..core.registry import estimator_class, make_estimator
from ..estimators.tabular import TabularEstimator
from .devices import DeviceEffects

if TYPE_CHECKING:
    import pandas as pd

#: Measured latencies are clipped below at this (seconds): smaller ones are under the resolution of
#: the timers (CUDA events: about 0.5 µs), and their logarithms would dominate a fit.
LEAST_S = 1e-7
#: Most rows for each leave-one-chip-out fit of the model of unseen devices: these fits compare
#: strategies, for which fewer rows suffice. Engineering estimate that bounds the training time.
FOLD_ROWS = 40_000

Params = Mapping[str, Any]


def constants() -> Any:
    """Constants that were chosen on data, from ``constants.yaml``."""
    return own_data("models/operators/constants.yaml")


@dataclass(frozen=True)
class FamilySettings:
    """Settings of the regressors of a family.

    Attributes:
        estimator: Name of an estimator that works on a feature table.
        known: Its parameters for the model of known devices.
        general: Its parameters for the model of unseen devices.
        max_rows: Most rows that a regressor learns from.
        seed: Seed of draws and regressors.
        n_jobs: Threads.
        fold_rows: Most rows that a model without one of the chips learns from.
    """

    estimator: str = "xgboost"
    known: Params = field(default_factory=dict)
    general: Params = field(default_factory=dict)
    max_rows: int = 1_000_000
    seed: int = 0
    n_jobs: int = 1
    fold_rows: int = FOLD_ROWS


def new_regressor(settings: FamilySettings, params: Params) -> TabularEstimator:
    """An unfitted regressor.

    Raises:
        ModelError: The estimator is unknown, or does not learn from a feature table.
    """
    accepted = inspect.signature(estimator_class(settings.estimator)).parameters
    own: dict[str, object] = {"seed": settings.seed, "n_jobs": settings.n_jobs}
    own = {k: v for k, v in own.items() if k in accepted} | dict(params)
    regressor = make_estimator(settings.estimator, **own)
    if not isinstance(regressor, TabularEstimator):
        raise ModelError(f"estimator {settings.estimator!r} does not learn from a feature table")
    return regressor


def learn(
    model: TabularEstimator, table: KernelTable, target: np.ndarray, rows: np.ndarray
) -> None:
    """Fit a regressor to the log-ratios ``target`` of some rows of a table."""
    part = table.take(rows)
    model.fit_table(part, part.base_s * np.exp(target[rows]))


def known_table(
    family: str, features: OpFeatures, device: np.ndarray, devices: tuple[str, ...]
) -> KernelTable:
    """Table of all features and one flag for each of the known ``devices``."""
    place = {name: at for at, name in enumerate(devices)}
    code, own = distinct(device)
    n, width = features.X.shape
    X = np.zeros((n, width + len(devices)), np.float32)
    X[:, :width] = features.X
    # Other devices have no flag set.
    at = np.array([place.get(str(name), -1) for name in own], np.int64)[code]
    known = np.flatnonzero(at >= 0)
    X[known, width + at[known]] = 1.0
    return _table(family, features, X, (*features.names, *(f"on_{name}" for name in devices)))


def general_table(family: str, features: OpFeatures) -> KernelTable:
    """Table of the features that do not identify a device."""
    names = tuple(n for n, g in zip(features.names, features.general, strict=True) if g)
    return _table(family, features, features.X[:, features.general], names)


def _table(family: str, features: OpFeatures, X: np.ndarray, names: tuple[str, ...]) -> KernelTable:
    # A family has a single cell; it only appears in manifests.
    kind = KERNEL_KINDS[FAMILIES[family]] if family in FAMILIES else "custom_call"
    cell = CELLS.index(f"gpu/{kind}")
    return KernelTable(
        np.ascontiguousarray(X),
        names,
        features.base_s,
        features.bound,
        np.full(len(X), cell, np.int16),
        ops_schema_hash(family),
        _graphs(features),
    )


def sized(params: Params, rows: int) -> Params:
    """Limit tree depth by the number of rows.

    A tree of depth ``d`` has up to ``2^d`` leaves: deep trees would memorize few rows. The limits
    are engineering estimates; not fitted.
    """
    if "max_depth" not in params:
        return params
    depth = 6 if rows < 20_000 else 8 if rows < 100_000 else 20
    return {**params, "max_depth": min(params["max_depth"], depth)}


def _graphs(features: OpFeatures) -> KernelGraphs | None:
    if features.irs is None:
        return None
    hashes = [hashlib.sha256(ir.encode()).hexdigest()[:16] for ir in features.irs]
    return KernelGraphs.of(hashes, list(features.irs))


def target_of(rows: pd.DataFrame, features: OpFeatures) -> np.ndarray:
    """Log-ratio of the measured latency to the analytical estimate, shape ``(n,)``."""
    return np.asarray(np.log(latency_s(rows) / features.base_s))


def latency_s(rows: pd.DataFrame) -> np.ndarray:
    """Measured latencies in seconds.

    Raises:
        DatasetError: A row has no positive latency.
    """
    check_measured(rows, ["latency_us"], "operators", needed=True)
    return np.maximum(rows["latency_us"].to_numpy(np.float64) * 1e-6, LEAST_S)


def balanced_weights(group: np.ndarray) -> np.ndarray:
    """Weights of a draw that weight groups by the square root of their number of rows.

    Args:
        group: Device or chip design of each row, shape ``(n,)``.

    Returns:
        Shape ``(n,)``, not normalized.
    """
    # A compromise between equal weight of rows, where one chip dominates, and equal weight of
    # chips, where the noise of a chip with few rows would be repeated.
    code, names = distinct(group)
    return np.asarray(1 / np.sqrt(np.bincount(code, minlength=len(names))[code]))


def draw_rows(
    rng: np.random.Generator, rows: np.ndarray, weights: np.ndarray, count: int
) -> np.ndarray:
    """At most ``count`` of the rows, drawn without repetition by weight."""
    if len(rows) <= count:
        return rows
    return rng.choice(rows, count, replace=False, p=weights / weights.sum())


@dataclass(slots=True)
class GeneralFit:
    """Rows for models of unseen devices, fitted with or without device effects.

    Attributes:
        family: Key of the family.
        settings: Settings of the regressors.
        features: Features of ``n`` rows.
        target: Log-ratios of measured latency to the estimate, shape ``(n,)``.
        device: Names of devices, shape ``(n,)``.
        library: Op, dtype and backend of each row, shape ``(n,)``.
    """

    family: str
    settings: FamilySettings
    features: OpFeatures
    target: np.ndarray
    device: np.ndarray
    library: np.ndarray

    def fit(self, rows: np.ndarray, within: bool) -> tuple[TabularEstimator, DeviceEffects]:
        """Fit to rows.

        Args:
            rows: Positions of the rows.
            within: Whether to fit to the residuals of the device effects instead of the log-ratios
                themselves.

        Returns:
            The regressor, and the effects (empty unless ``within``).
        """
        part = self.features.take(rows)
        share, effects, rest = time_shares(part), DeviceEffects(), self.target[rows]
        if within:
            effects.fit(share, rest, self.device[rows], self.library[rows])
            rest = rest - effects.predict(share, self.device[rows], self.library[rows])
        regressor = new_regressor(self.settings, self.settings.general)
        learn(regressor, general_table(self.family, part), rest, np.arange(len(rows)))
        return regressor, effects

    def left_out(self, learn: np.ndarray, own: np.ndarray, within: bool) -> np.ndarray:
        """Log-ratios at rows ``own`` by a fit to rows ``learn``, shape ``(len(own),)``."""
        regressor, effects = self.fit(learn, within)
        part = self.features.take(own)
        table = general_table(self.family, part)
        ratio = np.log(regressor.point(table)) - np.log(table.base_s)
        return np.asarray(ratio + effects.unseen(time_shares(part), self.library[own]))
