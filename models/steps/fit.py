"""Learns effects from measured steps: least absolute errors with shrinkage, relinearised.

The logarithm of a simulated step is nearly linear in the logarithms of its costs. So the simulator
is asked for the slopes, effects are solved for by iteratively reweighted ridge regression, and both
are repeated where the effects then lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from .context import StepContext
from .effects import CLUSTER, LEARNED, WHOLE, Design, EffectTable, design_of

#: Logarithms of simulated seconds: which steps, the effects, and shifts of classes of cost.
Simulate = Callable[[Sequence[int], EffectTable, Mapping[str, float]], np.ndarray]
#: Shift of a class by which its slope is measured.
_STEP = 0.2
#: Errors below this count by their square: the difference between repeated runs (2 to 3 %).
_NOISE = 0.02
#: Change of the effects, in units of their deviations, at which they count as found.
_SETTLED = 1e-3
#: How much errors weigh against effects; chosen with clusters, sources and chips left out in turn,
#: of 0.1 (shrinks more: better for unheard-of sources) to 10 (less: better for known ones).
_ERROR = 0.15
#: Weight of a run of one's own cluster: it is of the very place that is asked about, and its owner
#: has a handful. Engineering choice.
_OWN_WEIGHT = 10.0
#: Factors on launches, collectives and hops that are tried before the first slopes are taken: where
#: the host hides behind the device, its cost has no slope.
_STARTS = {"launch": (1.0, 3.0), "collective": (1.0, 15.0), "hop": (1.0, 100.0)}
#: Steps of a framework that starts are tried on.
_TRIED = 40
_ROUNDS = 3


class Slopes(NamedTuple):
    """The simulator around a table of effects.

    Attributes:
        table: Where the slopes were taken.
        level: Logarithm of each step's simulated seconds without :data:`WHOLE`.
        slope: Change of it by class of cost.
    """

    table: EffectTable
    level: np.ndarray
    slope: dict[str, np.ndarray]


class Posterior(NamedTuple):
    """Effects in units of their deviations.

    Attributes:
        mean: Shape ``(k,)``.
        precision: Inverse of their covariance, shape ``(k, k)``.
    """

    mean: np.ndarray
    precision: np.ndarray

    def table(self, keys: Sequence[str], deviations: np.ndarray) -> EffectTable:
        """The effects with their deviations."""
        sure = np.sqrt(np.diag(np.linalg.inv(self.precision))) * deviations
        values = self.mean * deviations
        return EffectTable(
            dict(zip(keys, values.tolist(), strict=True)),
            dict(zip(keys, sure.tolist(), strict=True)),
        )


def slopes_at(simulate: Simulate, table: EffectTable, count: int) -> Slopes:
    """Ask the simulator for levels and slopes of ``count`` steps."""
    rows = range(count)
    level = simulate(rows, table, {})
    slope = {cost: (simulate(rows, table, {cost: _STEP}) - level) / _STEP for cost in LEARNED}
    return Slopes(table, level, slope | {WHOLE: np.ones(count)})


def solve(
    slopes: Slopes,
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    groups: np.ndarray,
    learn: np.ndarray,
    without: str = "",
) -> EffectTable:
    """Effects that fit the steps best, by the linear model.

    Args:
        slopes: Of all steps.
        contexts: Of all steps.
        measured: Logarithms of seconds.
        groups: Source and device of each step; a group counts by the root of its size, so that one
            with a thousand runs does not outvote the others.
        learn: Steps to learn from.
        without: A class of cost that gets no effects, to see what they gain.
    """
    design = design_of(contexts)
    slope = np.stack([slopes.slope[cost] for cost in design.costs], axis=1) * design.weights
    kept = np.array(design.costs) != without
    used = np.flatnonzero(np.any(slope[learn] != 0.0, axis=0) & kept)
    now = np.array([slopes.table.values.get(key, 0.0) for key in design.keys])
    weight = group_weights(groups[learn])
    matrix = (slope * design.deviations)[np.ix_(learn, used)]
    # Without the effects at which the slopes were taken, so that all are shrunk towards 0.
    target = (measured - slopes.level)[learn] + (slope @ _inner(now, design))[learn]
    found = shrunk(matrix, target, weight)
    return found.table([design.keys[c] for c in used], design.deviations[used])


def fit_effects(
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    groups: np.ndarray,
    simulate: Simulate,
    tell: Callable[[str], None] = lambda _: None,
) -> EffectTable:
    """Learn effects from steps.

    Args:
        contexts: Of the steps.
        measured: Logarithms of their seconds.
        groups: Source and device of each.
        simulate: The simulator.
        tell: Told of progress.
    """
    tell("effects: starting values")
    table = _start(contexts, measured, simulate)
    everything = np.ones(len(contexts), bool)
    for turn in range(_ROUNDS):
        tell(f"effects: round {turn + 1} of {_ROUNDS}")
        slopes = slopes_at(simulate, table, len(contexts))
        table = solve(slopes, contexts, measured, groups, everything)
    return table


def adapt(
    slopes: Slopes, contexts: Sequence[StepContext], measured: np.ndarray, known: EffectTable
) -> EffectTable:
    """Add effects of new clusters to known ones, from a few of their steps.

    Args:
        slopes: Of the steps, taken at ``known``.
        contexts: Of the steps, with their clusters.
        measured: Logarithms of their seconds.
        known: Effects that stay.
    """
    own = _Own.of(contexts)
    whole = np.array([known.log_factors(context)[WHOLE] for context in contexts])
    found = own.learn(slopes, measured - slopes.level - whole)
    added = found.table(own.keys, own.deviations)
    return EffectTable(known.values | added.values, known.deviations | added.deviations)


def informative(
    slopes: Slopes,
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    known: EffectTable,
    others: Slopes,
    other_contexts: Sequence[StepContext],
) -> np.ndarray:
    """How much steps that were not measured would tell of clusters beyond those that were.

    Args:
        slopes: Of the measured steps, taken at ``known``.
        contexts: Of the measured steps.
        measured: Logarithms of their seconds.
        known: Effects before them.
        others: Slopes of the other steps, taken at ``known`` too.
        other_contexts: Of the other steps; their clusters are among the measured steps'.

    Returns:
        Information in nats: half the logarithm of how much measuring a step would shrink what its
        cluster's effects may be (Lindley, Ann. Math. Statist. 1956; the D-optimal design).
    """
    own = _Own.of([*contexts, *other_contexts])
    learn, rest = own.part(slice(len(contexts))), own.part(slice(len(contexts), None))
    whole = np.array([known.log_factors(context)[WHOLE] for context in contexts])
    precision = learn.learn(slopes, measured - slopes.level - whole).precision
    rows = rest.matrix(others)
    spread = np.einsum("ij,ij->i", rows @ np.linalg.inv(precision), rows)
    return np.asarray(0.5 * np.log1p(_OWN_WEIGHT * _ERROR / _NOISE * spread))


class _Own(NamedTuple):
    """Effects of clusters alone, as columns; what a few of their steps can tell of them."""

    keys: list[str]
    deviations: np.ndarray
    costs: list[str]
    weights: np.ndarray

    @classmethod
    def of(cls, contexts: Sequence[StepContext]) -> _Own:
        design = design_of(contexts)
        own = [c for c, key in enumerate(design.keys) if key.split("/", 2)[1] == CLUSTER]
        return cls(
            [design.keys[c] for c in own],
            design.deviations[own],
            [design.costs[c] for c in own],
            design.weights[:, own],
        )

    def part(self, rows: slice) -> _Own:
        return self._replace(weights=self.weights[rows])

    def matrix(self, slopes: Slopes) -> np.ndarray:
        slope = np.stack([slopes.slope[cost] for cost in self.costs], axis=1)
        return np.asarray(slope * self.weights * self.deviations)

    def learn(self, slopes: Slopes, target: np.ndarray) -> Posterior:
        return shrunk(self.matrix(slopes), target, np.full(len(target), _OWN_WEIGHT))


def shrunk(matrix: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Posterior:
    """Least absolute errors with a ridge of 1, by iteratively reweighted least squares."""
    # SciPy comes with scikit-learn, which training needs anyway.
    from scipy.sparse import csr_array

    # Few effects apply to a row: products of sparse matrices take a tenth of the time.
    sparse = csr_array(matrix)
    effects = np.zeros(matrix.shape[1])
    normal = np.eye(len(effects))
    for _ in range(60):
        error = target - sparse @ effects
        robust = weight * _ERROR / np.sqrt(error**2 + _NOISE**2)
        weighted = sparse.multiply(robust[:, None]).tocsr()
        normal = (sparse.T @ weighted).toarray() + np.eye(len(effects))
        before, effects = effects, np.linalg.solve(normal, weighted.T @ target)
        if np.abs(effects - before).max(initial=0.0) < _SETTLED:
            break
    return Posterior(effects, normal)


def _inner(now: np.ndarray, design: Design) -> np.ndarray:
    """Effects that the simulator applied; the factor on whole steps is not its own."""
    return np.where(np.array(design.costs) == WHOLE, 0.0, now)


def group_weights(groups: np.ndarray) -> np.ndarray:
    """Weights by which a group counts by the root of its size, 1 on average."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    weight = counts[index] ** -0.5
    return np.asarray(weight / weight.mean())


def _start(
    contexts: Sequence[StepContext], measured: np.ndarray, simulate: Simulate
) -> EffectTable:
    """For each framework, the best of a few costs of its host."""
    table = EffectTable()
    frameworks = sorted({c.framework for c in contexts if c.launched and c.framework})
    for name in frameworks:
        rows = [i for i, c in enumerate(contexts) if c.launched and c.framework == name]
        rows = rows[:: max(1, len(rows) // _TRIED)]
        best, least = {}, np.inf
        for factors in product(*_STARTS.values()):
            shifts = dict(zip(_STARTS, np.log(factors), strict=True))
            error = np.abs(simulate(rows, table, shifts) - measured[rows]).mean()
            if error < least - 0.01:
                best, least = shifts, error
        table.values |= {f"{k}/framework/{name}": float(v) for k, v in best.items() if v}
    return table
