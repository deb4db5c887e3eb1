"""Learns which of several candidates is faster, and maps scores back to latencies.

The pairwise logistic objective (RankNet; Burges et al., ICML 2005, as XGBoost's ``rank:pairwise``)
learns an order without a scale. Two measures restore the scale: the trees start from
``log(roofline + floor)``, so that scores begin as log seconds, and a monotone map, fitted to rows
that the trees were not grown on, converts scores to log-latencies without changing the order within
a kind.

Rows are compared within a *query*: kernels of one model family (or all generated programs, or one
family of single ops) on one device, since a tuner chooses among those. A query larger than
:data:`QUERY_LIMIT` is split at random, which bounds the number of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import JsonMapping
from ..core.kernel_table import CELLS, KernelTable

if TYPE_CHECKING:
    from xgboost import Booster, QuantileDMatrix

#: Most rows of one query: the pairs of a query grow with the square of its rows.
QUERY_LIMIT = 512
#: Pairs drawn per row and round; the time is proportional. Engineering estimate.
PAIRS = 8
#: Pairs of held-back rows for early stopping: their error rate is known to ±0.7 % (two standard
#: errors of a rate of one half).
_STOP_PAIRS = 20_000
#: Fewest rows for a separate map of a cell, and rows per knot of a map, so that the medians of bins
#: are stable. Engineering estimates.
_CELL_ROWS, _KNOT_ROWS = 200, 20
#: Most knots of a map; linear interpolation between them has errors far below the model's.
_MAX_KNOTS = 64


def device_queries(table: KernelTable) -> np.ndarray:
    """Queries of rows without families: their devices, shape ``(n,)``."""
    columns = [i for i, name in enumerate(table.names) if name.startswith("device_")]
    if not columns:
        return np.zeros(len(table), np.int64)
    return np.asarray(np.unique(table.X[:, columns], axis=0, return_inverse=True)[1]).ravel()


def query_order(queries: np.ndarray, seed: int, limit: int = QUERY_LIMIT) -> tuple[np.ndarray, ...]:
    """Rows in the order that XGBoost requires, and the query of each.

    Args:
        queries: Names, shape ``(n,)``.
        seed: Seed of the random split of large queries.
        limit: Most rows of one query.

    Returns:
        Row positions, shape ``(n,)``, and their query numbers, ascending, shape ``(n,)``.
    """
    code = np.unique(queries.astype(str), return_inverse=True)[1]
    # Split at random: parts in the order of the table would consist of one program each.
    shuffled = np.random.default_rng(seed).permutation(len(code))
    order = np.lexsort((shuffled, code))
    ordered = code[order]
    place = np.arange(len(code)) - np.searchsorted(ordered, ordered)
    parts = -(-np.bincount(ordered)[ordered] // limit)  # in how many parts the query goes
    order = order[np.lexsort((place % parts, ordered))]
    part = np.sort(ordered * (len(code) + 1) + place % parts)
    return order, np.unique(part, return_inverse=True)[1]


def grow_pairwise(
    values: np.ndarray,
    table: KernelTable,
    target: np.ndarray,
    queries: np.ndarray,
    stop: np.ndarray | None,
    settings: JsonMapping,
    rounds: int,
    stop_rounds: int,
) -> Booster:
    """A booster whose raw output, added to ``log(roofline + floor)``, orders the latencies.

    Args:
        values: Features, shape ``(n, d)``.
        table: The same rows.
        target: Log-ratios, shape ``(n,)``.
        queries: Query of every row, shape ``(n,)``.
        stop: Mask of rows held back for early stopping; ``None`` grows all rounds on all rows.
        settings: Settings of XGBoost, with ``max_bin``, ``nthread`` and ``seed``.
        rounds: Most boosting rounds.
        stop_rounds: Rounds without improvement before stopping.
    """
    import xgboost as xgb

    start = np.log(table.base_s)
    label = start + target
    own = {
        **settings,
        "objective": "rank:pairwise",
        # All pairs of a query have equal weight; the default prefers those at the top of the list.
        "lambdarank_pair_method": "mean",
        "lambdarank_num_pair_per_sample": PAIRS,
        "disable_default_eval_metric": True,
    }
    options = {"max_bin": settings["max_bin"], "nthread": settings["nthread"]}
    growing = np.arange(len(target)) if stop is None else np.flatnonzero(~stop)
    order, query = query_order(queries[growing], settings["seed"])
    rows = growing[order]
    train = xgb.QuantileDMatrix(
        values[rows], label[rows], base_margin=start[rows], qid=query, **options
    )
    if stop is None:
        return grown(own, train, None, rounds, stop_rounds)
    held = xgb.QuantileDMatrix(
        values[stop], label[stop], base_margin=start[stop], ref=train, **options
    )
    metric = _Discordance(label[stop], queries[stop], settings["seed"])
    return grown(own, train, held, rounds, stop_rounds, custom_metric=metric)


def grown(
    settings: JsonMapping,
    train: QuantileDMatrix,
    held: QuantileDMatrix | None,
    rounds: int,
    stop_rounds: int,
    custom_metric: _Discordance | None = None,
) -> Booster:
    """Grow trees, up to the round with the least error on held-back rows if there are any."""
    import xgboost as xgb

    if held is None:
        return xgb.train(settings, train, rounds)
    booster = xgb.train(
        settings,
        train,
        rounds,
        evals=[(held, "stop")],
        early_stopping_rounds=stop_rounds,
        custom_metric=custom_metric,
        verbose_eval=False,
    )
    # Slicing drops the rounds after the best one, which predictions would use otherwise.
    return booster[: booster.best_iteration + 1]


class _Discordance:
    """Fraction of pairs within a query that scores put in the wrong order.

    Args:
        label: True log-latencies, shape ``(n,)``.
        queries: Query of every row, shape ``(n,)``.
        seed: Seed of the draw of pairs.
    """

    def __init__(self, label: np.ndarray, queries: np.ndarray, seed: int) -> None:
        code = np.unique(queries.astype(str), return_inverse=True)[1]
        order = np.argsort(code, kind="stable")
        ordered = code[order]
        first = np.searchsorted(ordered, ordered)
        size = np.bincount(ordered)[ordered]
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, len(code), _STOP_PAIRS)
        # The partner is drawn from the same query, which lies in one stretch of the sorted rows.
        other = first[drawn] + rng.integers(0, size[drawn])
        a, b = order[drawn], order[other]
        differs = label[a] != label[b]
        self.a, self.b = a[differs], b[differs]
        self.slower = label[self.a] > label[self.b]

    def __call__(self, scores: np.ndarray, _: object) -> tuple[str, float]:
        """Name and value of the metric."""
        if not len(self.a):
            return "discordance", 0.0
        return "discordance", float(np.mean((scores[self.a] > scores[self.b]) != self.slower))


@dataclass(frozen=True)
class ScoreMap:
    """Strictly increasing maps from scores to log-latencies: linear between knots.

    Attributes:
        score: Scores of the knots by cell, ascending, padded with nan, shape ``(cells, knots)``.
        value: Log-latencies of the knots, shape ``(cells, knots)``.
    """

    score: np.ndarray
    value: np.ndarray

    @classmethod
    def fit(cls, score: np.ndarray, log_latency: np.ndarray, cell: np.ndarray) -> ScoreMap:
        """Fit to rows that the scores were not learned from.

        Scores are split into bins of similar count; the medians of the bins are made increasing by
        isotonic regression (pool adjacent violators; Barlow et al., 1972), and equal neighbours are
        merged. A cell with few rows takes the map of all rows.

        Args:
            score: Shape ``(n,)``.
            log_latency: Shape ``(n,)``.
            cell: Shape ``(n,)``.
        """
        every = _knots(score, log_latency)
        maps = [every] * len(CELLS)
        for number in np.unique(cell):
            own = cell == number
            if own.sum() >= _CELL_ROWS:
                maps[number] = _knots(score[own], log_latency[own])
        width = max(len(knots) for knots, _ in maps)
        padded = np.full((2, len(CELLS), width), np.nan)
        for number, pair in enumerate(maps):
            padded[:, number, : len(pair[0])] = pair
        return cls(padded[0], padded[1])

    def log_latency(self, score: np.ndarray, cell: np.ndarray) -> np.ndarray:
        """Log-latencies, shape ``(n,)``; beyond the knots the slope is one."""
        latency = np.empty(len(score))
        for number in np.unique(cell):
            own = cell == number
            known = np.isfinite(self.score[number])
            x, y = self.score[number][known], self.value[number][known]
            inside = np.clip(score[own], x[0], x[-1])
            latency[own] = np.interp(inside, x, y) + (score[own] - inside)
        return latency


def _knots(score: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores and values of the knots, both strictly increasing."""
    from sklearn.isotonic import isotonic_regression

    bins = int(np.clip(len(score) // _KNOT_ROWS, 1, _MAX_KNOTS))
    parts = np.array_split(np.argsort(score, kind="stable"), bins)
    x = np.array([np.median(score[part]) for part in parts])
    y = np.array([np.median(value[part]) for part in parts])
    counts = np.array([len(part) for part in parts], np.float64)
    level = isotonic_regression(y, sample_weight=counts)
    # Isotonic regression has plateaus; merging each into one knot makes the map strictly
    # increasing.
    levels, block = np.unique(level, return_inverse=True)
    weight = np.bincount(block, counts)
    middle = np.bincount(block, counts * x) / weight
    keep = np.concatenate([[True], np.diff(middle) > 0])
    return middle[keep], levels[keep]
