"""Gradient-boosted trees (XGBoost) of the log-ratio, the default estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonMapping
from ..core.base import Params
from ..core.kernel_table import CELLS, KernelTable, check_cells
from ..core.store import pack, unpack
from ..training_data.splits import stop_rows
from .ranking import ScoreMap, device_queries, grow_pairwise, grown
from .tabular import TabularEstimator
from .xgboost_trees import SUFFIX, BoostedTrees, compact, saved_trees

if TYPE_CHECKING:
    from xgboost import Booster

#: XGBoost's names of the objectives.
OBJECTIVES = {
    "absolute": "reg:absoluteerror",
    "squared": "reg:squarederror",
    "pairwise": "rank:pairwise",
}
#: Fewest rows to sort by their leaves of the first trees before all trees are evaluated:
#: neighbouring rows then share cached nodes, which makes large models 1.6 times faster.
MANY, FIRST_TREES = 512, 6
#: Trees that all rows are evaluated on before the next ones: XGBoost takes 64 rows through all
#: trees, which do not fit into a core's cache of a megabyte (700 trees of 1,100 nodes are 16 MB),
#: and reads them again for the next 64. Two to three times faster for such models; 20 to 50 trees
#: are equally fast.
SLICE = 32
#: File of the trees, whole or compact.
_TREES = {False: "joint.ubj", True: f"joint{SUFFIX}"}
_MAP_FILE = "score-map.npz"
_COLUMNS_FILE = "columns.npz"


@dataclass(frozen=True)
class BoostedParams(Params):
    """Parameters of boosted trees.

    Attributes:
        rounds: Most boosting rounds; early stopping may use fewer.
        max_depth: Depth of a tree.
        learning_rate: Shrinkage.
        min_child_weight: Least sum of weights in a leaf.
        subsample: Share of the rows drawn for each tree.
        colsample: Share of the features drawn for each tree.
        reg_lambda: L2 penalty on leaves.
        max_bin: Histogram bins.
        objective: ``absolute`` or ``squared`` error of the log-ratio, or ``pairwise``: learn which
            of two kernels is slower (:mod:`.ranking`), for choosing among candidates.
        stop_rounds: Rounds without improvement before stopping; 0 grows all rounds on all rows.
        seed: Random state.
        n_jobs: Threads. More threads than free cores are far slower than one.
        compact: Whether to save compressed, without data that only training and TreeSHAP need.
    """

    rounds: int = 600
    max_depth: int = 8
    learning_rate: float = 0.05
    min_child_weight: float = 8.0
    subsample: float = 0.8
    colsample: float = 0.4
    reg_lambda: float = 1.0
    max_bin: int = 64
    objective: str = "absolute"
    stop_rounds: int = 60
    seed: int = 0
    n_jobs: int = 1
    compact: bool = False


class XGBoostEstimator(TabularEstimator):
    """Histogram-grown boosted trees with a robust loss and early stopping.

    The default loss is the absolute error of the log-ratio: it is minimized by the median, which
    suits absolute percentage errors, and is robust to outliers among the labels (interrupts, other
    jobs on the machine).
    """

    name = "xgboost"

    keywords = BoostedParams
    retired: ClassVar[JsonMapping] = {"per_cell": False, "monotone": {}}
    params: BoostedParams

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self._trees: BoostedTrees | None = None
        self._columns = np.zeros(0, np.int32)
        self._score_map: ScoreMap | None = None
        self._covers = True

    @property
    def _fitted(self) -> BoostedTrees:
        assert self._trees is not None, "it was not fitted"
        return self._trees

    @property
    def ranks(self) -> bool:
        """Whether it learns an order within queries."""
        return self.params.objective == "pairwise"

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        # Constant columns (other devices, unused libraries) cost time and dilute the column draw.
        self._covers = True
        varying = table.X.min(axis=0) < table.X.max(axis=0)
        self._columns = np.flatnonzero(varying if varying.any() else ~varying).astype(np.int32)
        if self.ranks:
            self._fit_order(table, target, groups)
            return
        self._trees = BoostedTrees(self._grow(table, target, groups))

    def _fit_order(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        queries = device_queries(table) if self._queries is None else self._queries
        stop = self._held_back(groups)
        stopping = bool(stop.any())
        booster = grow_pairwise(
            np.take(table.X, self._columns, axis=1),
            table,
            target,
            queries,
            stop if stopping else None,
            self._settings(),
            self.params.rounds,
            self.params.stop_rounds,
        )
        self._trees = BoostedTrees(booster)
        # Scores on training rows are overfitted; the map needs held-out ones.
        held = np.flatnonzero(stop) if stopping else np.arange(len(target))
        part = table.take(held)
        latency = np.log(part.base_s) + target[held]
        self._score_map = ScoreMap.fit(self._scores(part), latency, part.cell)

    def _scores(self, table: KernelTable) -> np.ndarray:
        """Scores of the order, shape ``(n,)``: higher is slower."""
        values = np.take(table.X, self._columns, axis=1)
        # A base margin of zero removes the intercept, as in training, where it was
        # log(roofline + floor).
        start = np.zeros(len(table), np.float32)
        margin = self._fitted.booster.inplace_predict(
            values, validate_features=False, base_margin=start
        )
        return np.asarray(np.log(table.base_s) + margin)

    def _grow(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> Booster:
        import xgboost as xgb

        values = np.take(table.X, self._columns, axis=1)
        stop = self._held_back(groups)
        options = {"max_bin": self.params.max_bin, "nthread": self.params.n_jobs}
        train = xgb.QuantileDMatrix(values[~stop], target[~stop], **options)
        held = None
        if stop.any():
            held = xgb.QuantileDMatrix(values[stop], target[stop], ref=train, **options)
        limits = self.params.rounds, self.params.stop_rounds
        return grown(self._settings(), train, held, *limits)

    def _held_back(self, groups: np.ndarray) -> np.ndarray:
        """Rows for early stopping; none if it is off or there are too few."""
        if not self.params.stop_rounds:
            return np.zeros(len(groups), bool)
        return stop_rows(groups, self.params.seed)

    def _settings(self) -> dict[str, object]:
        p = self.params
        if p.objective not in OBJECTIVES:
            raise ModelError(
                f"no objective {p.objective!r}", hint=f"choose one of: {', '.join(OBJECTIVES)}"
            )
        return {
            "objective": OBJECTIVES[p.objective],
            # Early stopping uses the absolute error for any loss: it is what is reported.
            "eval_metric": "mae",
            "tree_method": "hist",
            "max_depth": p.max_depth,
            "learning_rate": p.learning_rate,
            "min_child_weight": p.min_child_weight,
            "subsample": p.subsample,
            "colsample_bytree": p.colsample,
            "lambda": p.reg_lambda,
            "max_bin": p.max_bin,
            "seed": p.seed,
            "nthread": self.params.n_jobs,
            "verbosity": 0,
        }

    def _ratio(self, table: KernelTable) -> np.ndarray:
        if self._score_map is not None:
            latency = self._score_map.log_latency(self._scores(table), table.cell)
            return np.asarray(latency - np.log(table.base_s))
        values = np.take(table.X, self._columns, axis=1)  # several times faster than X[:, columns]
        trees = self._fitted
        sums = trees.few(values) if len(values) else None
        return _predict(trees.booster, values) if sums is None else sums

    def leaves(self, table: KernelTable) -> np.ndarray:
        """Leaf of each tree that a row falls into, int32, shape ``(n, trees)``."""
        import xgboost as xgb

        booster = self._fitted.booster
        values = np.take(table.X, self._columns, axis=1)
        if not len(values):
            return np.zeros((0, booster.num_boosted_rounds()), np.int32)
        found = booster.predict(xgb.DMatrix(values), pred_leaf=True, validate_features=False)
        return np.asarray(found, np.int32).reshape(len(values), -1)

    def contributions(self, table: KernelTable) -> np.ndarray | None:
        """TreeSHAP values (Lundberg et al., Nature Machine Intelligence 2, 2020) by feature.

        ``None`` with ``pairwise``, whose trees sum to a score rather than the log-ratio, and for
        trees saved with ``compact``, which lack the covers.
        """
        if self.ranks or not self._covers:
            return None
        import xgboost as xgb

        matrix = xgb.DMatrix(np.take(table.X, self._columns, axis=1))
        columns = np.append(self._columns, table.X.shape[1])
        shap = np.zeros((len(table), table.X.shape[1] + 1))
        shap[:, columns] = self._fitted.booster.predict(
            matrix, pred_contribs=True, validate_features=False
        )
        return shap

    def _weights(self) -> dict[str, bytes]:
        booster = self._fitted.booster
        small = self.params.compact
        trees = compact(booster) if small else bytes(booster.save_raw("ubj"))
        files = {_TREES[small]: trees, _COLUMNS_FILE: pack({"columns": self._columns})}
        if self._score_map is not None:
            knots = {"score": self._score_map.score, "value": self._score_map.value}
            files[_MAP_FILE] = pack({**knots, "cells": np.array(CELLS)})
        return files

    def _restore(self, files: Mapping[str, bytes]) -> None:
        small = _TREES[True] in files
        self._trees = saved_trees(files[_TREES[small]], small=small, threads=self.params.n_jobs)
        self._covers = not small
        self._columns = unpack(files[_COLUMNS_FILE])["columns"]
        if self.ranks:
            arrays = unpack(files[_MAP_FILE])
            check_cells(arrays["cells"])
            self._score_map = ScoreMap(arrays["score"], arrays["value"])


def _predict(booster: Booster, values: np.ndarray) -> np.ndarray:
    if not len(values):
        return np.zeros(0)
    if len(values) < MANY:
        return np.asarray(booster.inplace_predict(values, validate_features=False), np.float64)
    order = _alike(booster, values)
    ordered, sums = values[order], np.empty(len(values))
    rounds, margin = booster.num_boosted_rounds(), None
    for first in range(0, rounds, SLICE):
        # Each slice starts from the sums of the previous ones, so that the additions have the order
        # of a single pass and the result is the same to the last bit.
        margin = booster.inplace_predict(
            ordered,
            validate_features=False,
            base_margin=margin,
            iteration_range=(first, min(first + SLICE, rounds)),
        )
    sums[order] = margin
    return sums


def _alike(booster: Booster, values: np.ndarray) -> np.ndarray:
    """Order of rows in which rows that share leaves of the first trees are adjacent."""
    import xgboost as xgb

    few = (0, min(FIRST_TREES, booster.num_boosted_rounds()))
    leaves = booster.predict(
        xgb.DMatrix(values), pred_leaf=True, validate_features=False, iteration_range=few
    )
    return np.lexsort(np.reshape(leaves, (len(values), -1)).T[::-1])
