"""Combines several estimators in log space, with separate weights for every cell."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import numpy as np

from ...common.errors import ModelError
from ..core.base import Params
from ..core.kernel_table import CELLS, KernelTable, by_cell
from ..core.registry import estimator_class, make_estimator
from ..core.store import contents_of, pack, unpack
from ..training_data.splits import balanced_folds
from .tabular import TabularEstimator

#: Fewest rows for separate weights of a cell; fewer do not distinguish members reliably.
#: Engineering estimate; not fitted.
MIN_CELL_ROWS = 100
#: Residuals in log space are clipped below at this (2 %, far less than the labels' noise), so that
#: exact hits, whose weight would be unbounded, do not dominate the fit.
_SMALLEST_RESIDUAL = 0.02
#: Weight of the equation "the weights sum to one", which makes it nearly exact in an unconstrained
#: least-squares solver; the final division does the rest.
_SUM_TO_ONE = 1e4
#: Reweightings; the weights change little after a few.
_ROUNDS = 10
#: Default members: the two best of the cheap estimators on the CPU dataset (docs/models.md).
MEMBERS = ("forest", "xgboost")
_FILE = "weights.npz"
_FOLDER = "members"


def blend_weights(
    predictions: np.ndarray, target: np.ndarray, cell: np.ndarray, shrinkage: float
) -> np.ndarray:
    """Fit weights by cell, shape ``(cells, members)``.

    Args:
        predictions: Log-ratios by members fitted without the row, shape ``(n, members)``.
        target: True log-ratios, shape ``(n,)``.
        cell: Cell of every row, shape ``(n,)``.
        shrinkage: Weight of equal weights, in rows.
    """
    members = predictions.shape[1]
    if not len(target):
        return np.full((len(CELLS), members), 1.0 / members)
    weights = np.tile(simplex_weights(predictions, target, shrinkage), (len(CELLS), 1))
    for number in np.unique(cell):
        own = cell == number
        if own.sum() >= MIN_CELL_ROWS:
            weights[number] = simplex_weights(predictions[own], target[own], shrinkage)
    return weights


def simplex_weights(predictions: np.ndarray, target: np.ndarray, shrinkage: float) -> np.ndarray:
    """Fit weights with least absolute error, shape ``(members,)``.

    Least absolute deviations by iteratively reweighted least squares, each a non-negative least
    squares problem (Lawson & Hanson, Solving Least Squares Problems, 1974) with an equation for
    the sum. The penalty ``shrinkage · s · |w - 1/m|²``, where ``s`` is the weighted mean squared
    deviation of a row's predictions from their mean, acts like ``shrinkage`` additional rows whose
    target is the plain mean.

    Args:
        predictions: Shape ``(n, members)``.
        target: Shape ``(n,)``.
        shrinkage: Weight of equal weights, in rows; 0 for none.
    """
    from scipy.optimize import nnls

    members = predictions.shape[1]
    equal = np.full(members, 1.0 / members)
    spread = ((predictions - predictions.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    if not spread.any():  # members agree everywhere: nothing to choose by
        return equal
    weights = equal
    total = np.ones((1, members))
    for _ in range(_ROUNDS):
        # A weight of 1/|r| turns r² into |r|.
        row = 1.0 / np.maximum(np.abs(predictions @ weights - target), _SMALLEST_RESIDUAL)
        root = np.sqrt(row / row.mean())
        pull = np.sqrt(shrinkage * float((root**2 * spread).mean()))
        design = [predictions * root[:, None], pull * np.eye(members), _SUM_TO_ONE * total]
        right = [target * root, pull * equal, [_SUM_TO_ONE]]
        weights = nnls(np.concatenate(design), np.concatenate(right))[0]
        weights = weights / weights.sum()
    return np.asarray(weights)


@dataclass(frozen=True)
class EnsembleParams(Params):
    """Parameters of the ensemble.

    Attributes:
        members: Names of estimators on the feature table.
        member_params: Parameters by member.
        inner_folds: Folds for fitting the weights.
        shrinkage: Weight of equal weights, in rows.
        seed: Seed of the folds and of members that take one.
        n_jobs: Threads of members that take them.
    """

    members: Sequence[str] = MEMBERS
    member_params: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    inner_folds: int = 3
    shrinkage: float = 200.0
    seed: int = 0
    n_jobs: int = 1

    def __post_init__(self) -> None:
        # Comparable with a model folder's list.
        object.__setattr__(self, "members", tuple(self.members))


class EnsembleEstimator(TabularEstimator):
    """Weighted mean of the members' log-ratios (stacking; Wolpert, Neural Networks 5, 1992).

    The weights are non-negative and sum to one. They are fitted to predictions of held-out rows:
    the rows are split into folds by group, and rows that equal a held-out row in every feature are
    removed from the fold's training rows. A cell with few rows takes the weights of all cells.

    Args:
        params: Fields of :class:`EnsembleParams`.

    Raises:
        ModelError: Fewer than two members, or one that does not work on the feature table.
    """

    name = "ensemble"

    keywords = EnsembleParams
    params: EnsembleParams

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        _check(self.params)
        members = self.params.members
        self.members: dict[str, TabularEstimator] = {}
        self.weights = np.full((len(CELLS), len(members)), 1.0 / len(members))

    def member_params(self, name: str) -> dict[str, object]:
        """Parameters of a member: seed and threads if it takes them, and its own."""
        accepted = inspect.signature(_table_class(name)).parameters.keys()
        general = {k: v for k, v in self.settings.items() if k in accepted & {"seed", "n_jobs"}}
        return {**general, **self.params.member_params.get(name, {})}

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        held = self._held_out(table, target, groups)
        known = np.isfinite(held).all(axis=1)
        self.weights = blend_weights(
            held[known], target[known], table.cell[known], self.params.shrinkage
        )
        self.members = self._fitted(table, target, groups)

    def _fitted(
        self, table: KernelTable, target: np.ndarray, groups: np.ndarray
    ) -> dict[str, TabularEstimator]:
        """Members fitted to all rows of a table; only the ensemble has intervals and a domain."""
        latency = table.base_s * np.exp(target)
        made = {}
        for name in self.params.members:
            member = make_estimator(name, **self.member_params(name))
            made[name] = cast("TabularEstimator", member).fit_table(table, latency, groups)
            made[name].domain = None
        return made

    def _held_out(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Log-ratios by members fitted without the row, ``(n, members)``; NaN without any."""
        held = np.full((len(table), len(self.params.members)), np.nan)
        fold, same = (
            balanced_folds(groups, self.params.inner_folds, self.params.seed),
            _twins(table),
        )
        for number in np.unique(fold):
            test = fold == number
            # Equal kernels under different names would reveal the held-out label.
            train = ~test & ~np.isin(same, same[test])
            if not train.any():
                continue
            fitted = self._fitted(table.take(train), target[train], groups[train])
            held[test] = _ratios(fitted, table.take(test))
        return held

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return np.asarray((_ratios(self.members, table) * self.weights[table.cell]).sum(axis=1))

    def _manifest(self) -> dict[str, object]:
        shown = {
            cell: dict(zip(self.params.members, row.round(4).tolist(), strict=True))
            for cell, row, on in zip(CELLS, self.weights, self.trained, strict=True)
            if on
        }
        return {**super()._manifest(), "weights": shown}

    def _weights(self) -> dict[str, bytes]:
        def save_members(root: Path) -> None:
            for name, member in self.members.items():
                member.save(root / _FOLDER / name)

        blend = pack({"weights": self.weights, "cells": np.array(CELLS)})
        return {_FILE: blend, **contents_of(save_members)}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        arrays = unpack(files[_FILE])
        # Cells that an earlier version lacked take equal weights.
        equal = np.full(len(self.params.members), 1.0 / len(self.params.members))
        self.weights = by_cell(arrays["cells"], arrays["weights"], equal)

    @classmethod
    def _from_parts(
        cls, path: Path, manifest: Mapping[str, object], files: dict[str, bytes], schema: str | None
    ) -> Self:
        model = super()._from_parts(path, manifest, files, schema)
        for name in model.params.members:
            model.members[name] = _table_class(name).load(path / _FOLDER / name, schema)
        return model


def _check(params: EnsembleParams) -> None:
    members = params.members
    if len(set(members)) < 2 or len(set(members)) != len(members):
        raise ModelError(
            f"an ensemble needs two or more different members, not {', '.join(members) or 'none'}",
            hint="for example members=['forest', 'xgboost']",
        )
    for name in members:
        _table_class(name)
    stray = sorted(set(params.member_params) - set(members))
    if stray:
        raise ModelError(f"parameters for {stray[0]!r}, which is not a member of the ensemble")


def _table_class(name: str) -> type[TabularEstimator]:
    cls = estimator_class(name)
    if not issubclass(cls, TabularEstimator) or issubclass(cls, EnsembleEstimator):
        raise ModelError(
            f"{name!r} cannot be a member: it does not learn from the feature table",
            hint=f"members are estimators such as {', '.join(MEMBERS)}",
        )
    return cls


def _ratios(members: Mapping[str, TabularEstimator], table: KernelTable) -> np.ndarray:
    return np.stack([member.log_ratio(table) for member in members.values()], axis=1)


def _twins(table: KernelTable) -> np.ndarray:
    """A number for every row, equal for rows that agree in every feature, shape ``(n,)``."""
    # Comparing each row as one block of bytes is much faster than column by column.
    rows = np.ascontiguousarray(table.X)
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    return np.asarray(np.unique(whole, return_inverse=True)[1])
