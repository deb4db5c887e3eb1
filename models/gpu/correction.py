"""Corrects predictions from published operators by measurements of kernels under XLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from ...common.types import JsonMapping
from ..core.base import KernelPrediction
from ..core.kernel_table import KernelTable
from ..core.registry import estimator_class, make_estimator
from ..estimators.tabular import TabularEstimator

#: Fewest rows for boosted trees to learn the correction; with fewer they would overfit, so ridge
#: regression is used. Engineering estimate; not fitted (docs/gpu.md).
TREES_FROM = 500
#: Folds for calibrating intervals, as in cross-fitting elsewhere
#: (:data:`~opcast.models.training_data.crossfit.DEFAULT_FOLDS`).
FOLDS = 4


class Correction:
    """Learns ``log(measured / predicted)`` of XLA's kernels from the feature table.

    The estimator's base is the published prediction instead of roofline plus floor, so that it only
    has to learn where XLA's kernels differ.

    Args:
        estimator: An estimator on the feature table.
        devices: Devices of its training kernels.
    """

    def __init__(self, estimator: TabularEstimator, devices: Sequence[str]) -> None:
        self.estimator = estimator
        self.devices = tuple(devices)

    @classmethod
    def fit(
        cls,
        table: KernelTable,
        predicted_s: np.ndarray,
        latency_s: np.ndarray,
        groups: np.ndarray,
        devices: Sequence[str],
        **params: object,
    ) -> Correction:
        """Learn from measured kernels, with intervals calibrated on held-out groups.

        Args:
            table: Features of ``n`` kernels.
            predicted_s: Seconds predicted from published operators, shape ``(n,)``.
            latency_s: Measured seconds, shape ``(n,)``.
            groups: Group of each kernel (a program, a family), held out whole, shape ``(n,)``.
            devices: Names of the devices they ran on.
            params: Parameters of the estimator.

        Raises:
            ModelError: A parameter is unknown.
        """
        shifted = replace(table, base_s=predicted_s)
        # The user's parameters are for the trees; ridge regression would reject them.
        name, own = ("xgboost", params) if len(table) >= TREES_FROM else ("ridge", {})
        made = cast("TabularEstimator", make_estimator(name, **own))
        held, scores = np.full(len(table), np.nan), np.full(len(table), np.nan)
        # Groups are numbered by name and assigned to folds in turn: reproducible without a seed.
        fold = np.unique(groups, return_inverse=True)[1] % FOLDS
        for number in range(FOLDS):
            test = fold == number
            # Fewer groups than folds leave folds empty; a single group leaves nothing to fit to.
            if not test.any() or test.all():
                continue
            part = cast("TabularEstimator", make_estimator(name, **own))
            part.fit_table(shifted.take(~test), latency_s[~test], groups[~test])
            held[test] = part.point(shifted.take(test))
            if part.domain is not None:
                scores[test] = part.domain.score(shifted.take(test))
        # The final estimator is fitted to all rows; only its intervals come from the folds.
        made.fit_table(shifted, latency_s, groups)
        done = np.isfinite(held)
        if done.any():
            made.calibrate(shifted.take(done), latency_s[done], held[done], scores[done])
        return cls(made, devices)

    def apply(
        self, prediction: KernelPrediction, table: KernelTable, device: str
    ) -> KernelPrediction:
        """Correct predictions of kernels on one device.

        On a device without measured kernels, intervals move with the latency but never narrow.
        """
        own = self.estimator.predict_table(replace(table, base_s=prediction.latency))
        # Kinds without enough measured kernels are returned as "roofline" and keep their
        # prediction.
        known = own.source == "learned"
        latency = np.where(known, own.latency, prediction.latency)
        moved = latency / prediction.latency
        lo, hi = np.where(known, own.lo, prediction.lo), np.where(known, own.hi, prediction.hi)
        # The errors behind the new bounds are from other devices and need not hold for this one.
        if device not in self.devices:
            lo, hi = np.minimum(lo, prediction.lo * moved), np.maximum(hi, prediction.hi * moved)
        inside = np.where(known & (device in self.devices), own.in_domain, prediction.in_domain)
        source = np.where(known, "learned:xla", prediction.source)
        return KernelPrediction(latency, lo, hi, prediction.bound, source, inside)

    def save(self, path: Path) -> None:
        """Write the estimator's folder."""
        self.estimator.save(path)

    def stored(self) -> dict[str, object]:
        """Entries for the manifest of the whole estimator."""
        return {"estimator": self.estimator.name, "devices": list(self.devices)}

    @classmethod
    def load(cls, path: Path, stored: JsonMapping, schema: str | None = None) -> Correction:
        """Read what :meth:`save` wrote.

        Args:
            path: The estimator's folder.
            stored: Result of :meth:`stored`.
            schema: Feature schema to expect; ``None`` takes the current one.

        Raises:
            ModelError: The folder is damaged, or was written for other features.
        """
        kind = cast(type[TabularEstimator], estimator_class(stored["estimator"]))
        return cls(kind.load(path, schema), stored["devices"])
