"""Gradient-boosted trees (XGBoost) of the log-ratio, the default estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import ModelError
from ..core.base import Params
from ..core.kernel_table import CELLS, KernelTable, check_cells
from ..core.store import pack, unpack
from ..training_data.splits import stop_rows
from .ranking import ScoreMap, device_queries, grow_pairwise, grown
from .tabular import TabularEstimator
from .xgboost_trees import SUFFIX, BoostedTrees, compact, saved_trees

if TYPE_CHECKING:
    from xgboost import Booster

#: A cell gets its own trees from this many rows on, if ``per_cell`` is set: deep trees on fewer
#: rows overfit, and the joint model serves such a cell better. Engineering estimate; not fitted.
MIN_CELL_ROWS = 1000

#: Objectives by our names, as XGBoost calls them.
OBJECTIVES = {
    "absolute": "reg:absoluteerror",
    "squared": "reg:squarederror",
    "pairwise": "rank:pairwise",
}
#: Least rows that are sorted by their leaves of some trees before all trees are walked:
#: the nodes that neighbours pass are then in the cache, which makes large models 1.6 times faster.
MANY, FIRST_TREES = 512, 6
#: Trees that all rows walk before the next ones: XGBoost takes 64 rows through all trees, which do
#: not fit into a core's cache of a megabyte (700 trees of 1,100 nodes are 16 MB), and reads them
#: again for the next 64. Two to three times faster for such models; 20 to 50 trees are alike.
SLICE = 32
_MAP_FILE = "score-map.npz"
_COLUMNS_FILE = "columns.npz"


@dataclass(frozen=True)
class BoostedParams(Params):
    """Parameters of boosted trees.

    Attributes:
        rounds: Most boosting rounds; early stopping ends sooner.
        max_depth: Depth of a tree.
        learning_rate: Shrinkage.
        min_child_weight: Least sum of weights in a leaf.
        subsample: Share of the rows drawn for each tree.
        colsample: Share of the features drawn for each tree.
        reg_lambda: L2 penalty on leaves.
        max_bin: Histogram bins.
        objective: ``absolute`` or ``squared`` error of the log-ratio, or ``pairwise``: learn which
            of two kernels is slower (:mod:`.ranking`), for choosing among candidates.
        per_cell: Trees of their own for every (platform × kind) with enough rows; not with
            ``pairwise``.
        monotone: Sign by feature name: +1 or -1 forces the ratio to rise or fall with it. The
            target is a ratio to the roofline, so "more work takes longer" is no constraint on it
            (the ratio of a GEMM falls as it grows); use it for features with a known
            sign of the ratio itself. Only with ``squared``: the absolute error sets leaves to
            medians after the tree is grown, which breaks the constraint.
        stop_rounds: Rounds without improvement before stopping; 0 grows all rounds on all rows.
        seed: Random state.
        n_jobs: Threads. More threads than free cores are far slower than one.
        compact: Whether to save compressed, without what only training and TreeSHAP need.
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
    per_cell: bool = False
    monotone: Mapping[str, int] = field(default_factory=dict)
    stop_rounds: int = 60
    seed: int = 0
    n_jobs: int = 1
    compact: bool = False


class XGBoostEstimator(TabularEstimator):
    """Histogram-grown boosted trees with a robust loss and early stopping.

    The default loss is the absolute error of the log-ratio: its minimiser is the median, which
    suits absolute percentage errors, and outliers among the labels (interrupts, other jobs on the
    machine) do not pull it.
    """

    name = "xgboost"

    keywords = BoostedParams
    params: BoostedParams

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self._trees: dict[str, BoostedTrees] = {}
        self._columns = np.zeros(0, np.int32)
        self._score_map: ScoreMap | None = None
        self._covers = True

    @property
    def ranks(self) -> bool:
        """Whether it learns an order, within queries."""
        return bool(self.params.objective == "pairwise")

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        # Constant columns (other devices, unused libraries) would only cost time and dilute the
        # draw of columns.
        self._covers = True
        varying = table.X.min(axis=0) < table.X.max(axis=0)
        self._columns = np.flatnonzero(varying if varying.any() else ~varying).astype(np.int32)
        if self.ranks:
            self._fit_order(table, target, groups)
            return
        self._trees = {"joint": BoostedTrees(self._grow(table, target, groups))}
        if not self.params.per_cell:
            return
        for cell in np.unique(table.cell):
            own = table.cell == cell
            if own.sum() >= MIN_CELL_ROWS:
                booster = self._grow(table.take(own), target[own], groups[own])
                self._trees[_file_stem(int(cell))] = BoostedTrees(booster)

    def _fit_order(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        if self.params.per_cell:
            raise ModelError("per_cell does not go with objective='pairwise'")
        queries = device_queries(table) if self._queries is None else self._queries
        stop = self._held_back(groups)
        stopping = bool(stop.any())
        booster = grow_pairwise(
            np.take(table.X, self._columns, axis=1),
            table,
            target,
            queries,
            stop if stopping else None,
            self._settings(table),
            self.params.rounds,
            self.params.stop_rounds,
        )
        self._trees = {"joint": BoostedTrees(booster)}
        # Scores of rows that the trees were grown on are too good; the map needs honest ones.
        held = np.flatnonzero(stop) if stopping else np.arange(len(target))
        part = table.take(held)
        latency = np.log(part.base_s) + target[held]
        self._score_map = ScoreMap.fit(self._scores(part), latency, part.cell)

    def _scores(self, table: KernelTable) -> np.ndarray:
        """Scores of the order, shape ``(n,)``: higher is slower."""
        values = np.take(table.X, self._columns, axis=1)
        # A base margin of zero takes the intercept out, as in training, where it was log(roofline +
        # floor).
        start = np.zeros(len(table), np.float32)
        margin = self._trees["joint"].booster.inplace_predict(
            values, validate_features=False, base_margin=start
        )
        return np.asarray(np.log(table.base_s) + margin)

    def _grow(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> Booster:
        import xgboost as xgb

        values = np.take(table.X, self._columns, axis=1)
        stop = self._held_back(groups)
        options = {"max_bin": self.params.max_bin, "nthread": self._n_jobs}
        train = xgb.QuantileDMatrix(values[~stop], target[~stop], **options)
        held = None
        if stop.any():
            held = xgb.QuantileDMatrix(values[stop], target[stop], ref=train, **options)
        limits = self.params.rounds, self.params.stop_rounds
        return grown(self._settings(table), train, held, *limits)

    def _held_back(self, groups: np.ndarray) -> np.ndarray:
        """Rows for early stopping; none if it is off or there are too few."""
        if not self.params.stop_rounds:
            return np.zeros(len(groups), bool)
        return stop_rows(groups, self.params.seed)

    def _settings(self, table: KernelTable) -> dict[str, object]:
        p = self.params
        if p.objective not in OBJECTIVES:
            raise ModelError(
                f"no objective {p.objective!r}", hint=f"choose one of: {', '.join(OBJECTIVES)}"
            )
        if p.monotone and p.objective != "squared":
            raise ModelError("monotone constraints need objective='squared'")
        names = [table.names[column] for column in self._columns]
        # In the order of the kept columns, since XGBoost sees no names.
        constraint = tuple(int(p.monotone.get(name, 0)) for name in names)
        return {
            "objective": OBJECTIVES[p.objective],
            **({"monotone_constraints": constraint} if any(constraint) else {}),
            # Early stopping looks at the absolute error whatever the loss: it is what is reported.
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
            "nthread": self._n_jobs,
            "verbosity": 0,
        }

    @property
    def _n_jobs(self) -> int:
        return int(self.params.n_jobs)

    def _ratio(self, table: KernelTable) -> np.ndarray:
        if self._score_map is not None:
            latency = self._score_map.log_latency(self._scores(table), table.cell)
            return np.asarray(latency - np.log(table.base_s))
        values = np.take(table.X, self._columns, axis=1)  # several times faster than X[:, columns]
        ratio = self._sums("joint", values)
        if len(self._trees) == 1:
            return ratio
        for cell in np.unique(table.cell):
            if _file_stem(int(cell)) in self._trees:
                own = table.cell == cell
                ratio[own] = self._sums(_file_stem(int(cell)), values[own])
        return ratio

    def _sums(self, stem: str, values: np.ndarray) -> np.ndarray:
        """Log-ratios by one of the boosters, shape ``(n,)``."""
        trees = self._trees[stem]
        sums = trees.few(values) if len(values) else None
        return _predict(trees.booster, values) if sums is None else sums

    def leaves(self, table: KernelTable) -> np.ndarray:
        """Leaf of each tree that a row ends in, int32, shape ``(n, trees)``."""
        import xgboost as xgb

        booster = self._trees["joint"].booster
        values = np.take(table.X, self._columns, axis=1)
        if not len(values):
            return np.zeros((0, booster.num_boosted_rounds()), np.int32)
        found = booster.predict(xgb.DMatrix(values), pred_leaf=True, validate_features=False)
        return np.asarray(found, np.int32).reshape(len(values), -1)

    def contributions(self, table: KernelTable) -> np.ndarray | None:
        """TreeSHAP values (Lundberg et al., Nature Machine Intelligence 2, 2020) by feature.

        ``None`` with ``pairwise``, whose trees add up to a score, not to the log-ratio, and for
        trees that were saved with ``compact``, which have no covers.
        """
        if self.ranks or not self._covers:
            return None
        values = np.take(table.X, self._columns, axis=1)
        columns = np.append(self._columns, table.X.shape[1])
        shap = np.zeros((len(table), table.X.shape[1] + 1))
        shap[:, columns] = _contributions(self._trees["joint"].booster, values)
        for cell in np.unique(table.cell):
            trees = self._trees.get(_file_stem(int(cell)))
            if trees is not None:
                own = np.flatnonzero(table.cell == cell)
                shap[np.ix_(own, columns)] = _contributions(trees.booster, values[own])
        return shap

    def _weights(self) -> dict[str, bytes]:
        if self.params.compact:
            trees = {f"{k}{SUFFIX}": compact(t.booster) for k, t in self._trees.items()}
        else:
            trees = {f"{k}.ubj": bytes(t.booster.save_raw("ubj")) for k, t in self._trees.items()}
        files = {**trees, _COLUMNS_FILE: pack({"columns": self._columns})}
        if self._score_map is not None:
            knots = {"score": self._score_map.score, "value": self._score_map.value}
            files[_MAP_FILE] = pack({**knots, "cells": np.array(CELLS)})
        return files

    def _restore(self, files: Mapping[str, bytes]) -> None:
        self._trees = {}
        for small, suffix in ((False, ".ubj"), (True, SUFFIX)):
            for name, data in files.items():
                if name.endswith(suffix):
                    trees = saved_trees(data, small=small, threads=self._n_jobs)
                    self._trees[name.removesuffix(suffix)] = trees
        self._covers = not any(name.endswith(SUFFIX) for name in files)
        self._columns = unpack(files[_COLUMNS_FILE])["columns"]
        if self.ranks:
            arrays = unpack(files[_MAP_FILE])
            check_cells(arrays["cells"])
            self._score_map = ScoreMap(arrays["score"], arrays["value"])
        if "joint" not in self._trees:
            raise KeyError("joint.ubj")


def _predict(booster: Booster, values: np.ndarray) -> np.ndarray:
    if not len(values):
        return np.zeros(0)
    if len(values) < MANY:
        return np.asarray(booster.inplace_predict(values, validate_features=False), np.float64)
    order = _alike(booster, values)
    ordered, sums = values[order], np.empty(len(values))
    rounds, margin = booster.num_boosted_rounds(), None
    for first in range(0, rounds, SLICE):
        # Trees go on from the sums of those before, so that they add up in the order of all at
        # once, to the last bit.
        margin = booster.inplace_predict(
            ordered,
            validate_features=False,
            base_margin=margin,
            iteration_range=(first, min(first + SLICE, rounds)),
        )
    sums[order] = margin
    return sums


def _alike(booster: Booster, values: np.ndarray) -> np.ndarray:
    """Order of rows in which rows that share leaves of the first trees are neighbours."""
    import xgboost as xgb

    few = (0, min(FIRST_TREES, booster.num_boosted_rounds()))
    leaves = booster.predict(
        xgb.DMatrix(values), pred_leaf=True, validate_features=False, iteration_range=few
    )
    return np.lexsort(np.reshape(leaves, (len(values), -1)).T[::-1])


def _contributions(booster: Booster, values: np.ndarray) -> np.ndarray:
    import xgboost as xgb

    shap = booster.predict(xgb.DMatrix(values), pred_contribs=True, validate_features=False)
    return np.asarray(shap, np.float64)


def _file_stem(cell: int) -> str:
    return CELLS[cell].replace("/", "-")
