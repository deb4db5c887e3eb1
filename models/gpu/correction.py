"""What kernels measured under XLA say over the predictions from published operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...features.errors import ModelError
from ..base import KernelPrediction
from ..registry import estimator_class, make_estimator
from ..tables import KernelTable
from ..tabular import TabularEstimator

#: Rows from which boosted trees learn the correction; a ridge regression does from fewer.
TREES_FROM = 500
FOLDS = 4


class Correction:
    """Learns ``log(measured / predicted)`` of XLA's kernels from the feature table.

    The estimator sees the published prediction in place of roofline and floor, so all that it has
    to learn is where XLA's kernels differ.

    Args:
        estimator: An estimator on the feature table.
        devices: Devices whose kernels it learned from.
    """

    def __init__(self, estimator: TabularEstimator, devices: Sequence[str]) -> None:
        self.estimator = estimator
        self.devices = tuple(devices)

    @classmethod
    def fit(
        cls, table: KernelTable, predicted_s: np.ndarray, latency_s: np.ndarray,
        groups: np.ndarray, devices: Sequence[str], **params: Any,
    ) -> Correction:  # fmt: skip
        """Learn from measured kernels, with intervals from groups that are held out.

        Args:
            table: Their features.
            predicted_s: Predicted from published operators, shape ``(n,)``.
            latency_s: Measured, shape ``(n,)``.
            groups: Group of each (a program, a family), held out whole.
            devices: Where they ran.
            params: Of the estimator.

        Raises:
            ModelError: A parameter is unknown.
        """
        shifted = _on(table, predicted_s)
        name = "xgboost" if len(table) >= TREES_FROM else "ridge"
        made = _make(name, params)
        held, scores = np.full(len(table), np.nan), np.full(len(table), np.nan)
        fold = np.unique(groups, return_inverse=True)[1] % FOLDS
        for number in range(FOLDS):
            test = fold == number
            if not test.any() or test.all():
                continue
            part = _make(name, params)
            part.fit_table(shifted.take(~test), latency_s[~test], groups[~test])
            held[test] = part.point(shifted.take(test))
            if part.domain is not None:
                scores[test] = part.domain.score(shifted.take(test))
        made.fit_table(shifted, latency_s, groups)
        done = np.isfinite(held)
        if done.any():
            made.calibrate(shifted.take(done), latency_s[done], held[done], scores[done])
        return cls(made, devices)

    def apply(self, found: KernelPrediction, table: KernelTable, device: str) -> KernelPrediction:
        """Correct predictions; on devices that it never saw intervals do not narrow."""
        own = self.estimator.predict_table(_on(table, found.latency))
        known = own.source == "learned"
        latency = np.where(known, own.latency, found.latency)
        moved = latency / found.latency
        lo, hi = np.where(known, own.lo, found.lo), np.where(known, own.hi, found.hi)
        if device not in self.devices:
            lo, hi = np.minimum(lo, found.lo * moved), np.maximum(hi, found.hi * moved)
        inside = np.where(known & (device in self.devices), own.in_domain, found.in_domain)
        source = np.where(known, "learned:xla", found.source)
        return KernelPrediction(latency, lo, hi, found.bound, source, inside)

    def save(self, path: Path) -> dict[str, Any]:
        """Write the estimator's folder; returns what the manifest has to hold."""
        self.estimator.save(path)
        return {"estimator": self.estimator.name, "devices": list(self.devices)}

    @classmethod
    def load(cls, path: Path, stored: Mapping[str, Any], schema: str | None = None) -> Correction:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: It is damaged, or of other features.
        """
        kind = cast(type[TabularEstimator], estimator_class(stored["estimator"]))
        return cls(kind.load(path, schema), stored["devices"])


def _make(name: str, params: Mapping[str, Any]) -> TabularEstimator:
    own = dict(params) if name == "xgboost" else {}
    made = make_estimator(name, **own)
    if not isinstance(made, TabularEstimator):
        raise ModelError(f"estimator {name!r} does not learn from a feature table")
    return made


def _on(table: KernelTable, base_s: np.ndarray) -> KernelTable:
    return replace(table, base_s=base_s)
