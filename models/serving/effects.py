"""Learned effects on serving latencies (levels in ``models/serving/effects.yaml``) and their fit.

Effects minimize absolute errors with shrinkage, relinearized around the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from typing import NamedTuple

import numpy as np

from ...common.files import own_data
from ...simulate.serving.load import CLASSES, REQUEST
from ..effects import WHOLE, Effects, Levels, Linear, Value, group_weights

#: Factor on the time to the first token; :data:`WHOLE` is the factor on every latency of a row.
FIRST = "first"
#: Level for a model group with a given engine on a given chip generation. It is fitted last, to the
#: residuals of the other levels, so that shared effects are not attributed to it.
KNOWN = "known"
#: Value of the level ``spread`` where separate workers run the prompts.
APART = "disaggregated"
#: Level of servers that hand requests over from prefill workers to decode workers.
HANDOVER = "handover"
#: Levels that apply to every row. Where a row has no value for one, its effect counts as a random
#: draw: 0 with the deviation of the level.
_HIDDEN = ("source", "cluster", "stack", "stack_experts", "framework", "engine")
#: Deviation of repeated runs of one configuration, in logarithms: they differ by 6 to 18 %.
REPEATS = 0.1
#: Values of a row's levels by level name; a missing or empty value has no effect.
Context = Mapping[str, str]
#: Classes of cost in the order of :meth:`ServingEffects.weights`.
COSTS = (*CLASSES, REQUEST)


class ServingEffects(Effects):
    """Learned effects on serving latencies."""

    levels = Levels.read("serving")

    def weights(self, context: Context) -> np.ndarray:
        """Seconds per unit of each class in :data:`COSTS`, including the factor :data:`WHOLE`."""
        logs, prior = self.log_factors(context), prior_of(context)
        return np.array([prior[cost] * np.exp(logs[cost] + logs[WHOLE]) for cost in COSTS])

    def first(self, context: Context) -> float:
        """Factor on the time to the first token."""
        return float(np.exp(self.log_factors(context)[FIRST]))

    def spread(self, context: Context, metric: str, shares: np.ndarray) -> float:
        """Standard deviation of a latency's logarithm due to the uncertainty of the effects.

        Args:
            context: Levels of the row.
            metric: Metric of the latency; ``ttft`` for the time to the first token.
            shares: Share of each class in :data:`COSTS`, shape ``(costs,)``.
        """
        values: dict[str, Value] = dict(context)
        hidden = (*_HIDDEN, HANDOVER) if context.get("spread") == APART else _HIDDEN
        values |= {name: ("", 1.0) for name in hidden if not context.get(name)}
        sure = self.log_deviations(values)
        parts = [share * sure[cost] for cost, share in zip(COSTS, shares.tolist(), strict=True)]
        return hypot(REPEATS, sure[WHOLE], sure[FIRST] if metric == "ttft" else 0.0, *parts)


#: Value of each class of cost before anything was learned.
PRIOR = ServingEffects.levels.prior
#: The same for kinds of hosts (``host`` of a row) with values that differ.
_PRIORS = {
    name: {**PRIOR, **own} for name, own in own_data("models/serving/effects.yaml")["hosts"].items()
}
#: Most rounds of relinearization around a new simulation, and the smallest relative decrease of the
#: error after which another round follows.
ROUNDS, GAIN = 4, 0.01
#: Weight of a latency by metric, relative to others. Latencies of single tokens share more of their
#: errors with others of their source than throughputs do, and queues before the first token depend
#: on arrivals that no column records.
WEIGHTS = {"ttft": 0.1, "tpot": 0.2, "per_token": 1.0}
#: Mean weight. Errors of a source's runs are correlated: with devices held out, TPOT is 10.0 % off
#: with 0.6, 10.5 with 0.8 and 11.4 with 1, and 12.3 with weights of 0.5, 1 and 1 besides.
INDEPENDENT = 0.6


def prior_of(context: Context) -> Mapping[str, float]:
    """Value of each class of cost of a row before anything was learned."""
    return _PRIORS.get(context.get("host", ""), PRIOR)


class Observed(NamedTuple):
    """Measured and simulated latencies.

    Attributes:
        rows: Index of each latency's row.
        metrics: ``ttft``, ``tpot`` or ``per_token``.
        measured: Logarithms of measured seconds.
        simulated: Logarithms of simulated seconds, under the effects.
        shares: Share of each class of cost, shape ``(n, costs)``.
        queued: Share of the time to the first token that the row's requests wait.
    """

    rows: np.ndarray
    metrics: np.ndarray
    measured: np.ndarray
    simulated: np.ndarray
    shares: np.ndarray
    queued: np.ndarray


#: Simulates all measured latencies under given effects.
Observe = Callable[[ServingEffects], Observed]


def solve_serving(
    linear: Linear[ServingEffects], seen: Observed, groups: np.ndarray, learn: np.ndarray
) -> ServingEffects:
    """Find the effects that fit latencies best, by a linear model around simulated latencies.

    Args:
        linear: The model, from :func:`linear_serving`.
        seen: The latencies.
        groups: Owner and chip generation of each row's machines, and a group of rows within these,
            shape ``(rows, 2)``; each of both is weighted by the square root of its size.
        learn: Mask or indices of the latencies to learn from.
    """
    weight = _weights(Observed(*(column[learn] for column in seen)), groups)
    return linear.solve(learn, weight, last=KNOWN)


def request_errors(
    seen: Observed, errors: np.ndarray, outputs: Sequence[float]
) -> dict[int, float]:
    """Errors of whole request times, of rows with both a measured TTFT and a measured TPOT.

    Args:
        seen: The latencies.
        errors: Logarithms of measured over predicted, shape ``(n,)``.
        outputs: Mean output tokens of each row of a closed loop; 0 for other rows.

    Returns:
        Logarithms of measured over predicted, by the index of the row's ``tpot`` in ``seen``.
    """
    at = {(int(r), str(m)): i for i, (r, m) in enumerate(zip(seen.rows, seen.metrics, strict=True))}
    found = {}
    for (row, metric), later in at.items():
        first = at.get((row, "ttft"))
        if metric != "tpot" or first is None or outputs[row] < 2:
            continue
        steps = np.array([1.0, outputs[row] - 1.0])
        own = seen.measured[[first, later]]
        predicted = own - errors[[first, later]]
        found[later] = float(np.log(steps @ np.exp(own)) - np.log(steps @ np.exp(predicted)))
    return found


def linear_serving(
    seen: Observed, contexts: Sequence[Context], now: ServingEffects
) -> Linear[ServingEffects]:
    """Linear model around the effects that latencies were simulated with."""
    slopes = dict(zip(COSTS, seen.shares.T, strict=True))
    slopes |= {WHOLE: np.ones(len(seen.rows)), FIRST: (seen.metrics == "ttft").astype(float)}
    own = [contexts[row] for row in seen.rows]
    return Linear.around(now, own, slopes, seen.measured, seen.simulated)


def fit_serving(
    observe: Observe,
    contexts: Sequence[Context],
    groups: np.ndarray,
    tell: Callable[[str], None] = lambda _: None,
    start: ServingEffects | None = None,
) -> tuple[ServingEffects, Observed]:
    """Learn effects from measured latencies.

    Args:
        observe: The simulator.
        contexts: Levels of each row.
        groups: Groups of the rows, as for :func:`solve_serving`.
        tell: Receives progress messages.
        start: Effects that the first round simulates; ``None`` for no effects.

    Returns:
        The effects with the smallest error of all rounds, and the latencies simulated with them.
        The start, which may have been fitted with other weights, only serves the first round.
    """
    effects = start or ServingEffects()
    best: tuple[float, ServingEffects, Observed] | None = None
    for turn in range(ROUNDS + 1):
        tell(f"effects: simulating, round {turn} of at most {ROUNDS}")
        seen = observe(effects)
        error = simulated_error(seen, groups)
        tell(f"effects: mean absolute error of logarithms {error:.4f}")
        settled = best is not None and error > (1.0 - GAIN) * best[0]
        # The linear model may overshoot: a later round is not always better.
        if turn and (best is None or error < best[0]):
            best = error, effects, seen
        if settled:
            break
        every = np.ones(len(seen.rows), bool)
        effects = solve_serving(linear_serving(seen, contexts, effects), seen, groups, every)
    assert best is not None
    return best[1], best[2]


def simulated_error(seen: Observed, groups: np.ndarray) -> float:
    """Weighted mean absolute error of the logarithms of simulated latencies."""
    return float(np.average(np.abs(seen.measured - seen.simulated), weights=_weights(seen, groups)))


def _weights(seen: Observed, groups: np.ndarray) -> np.ndarray:
    """Weight of each latency; a group's or owner's total grows with the square root of its size."""
    own = np.array([WEIGHTS[metric] for metric in seen.metrics.tolist()])
    # Latencies dominated by queueing contain little information about costs.
    own = own * np.where(seen.metrics == "ttft", 1.0 - 0.8 * seen.queued, 1.0)
    owners, parts = groups[seen.rows].T
    own = own * group_weights(parts)
    _, index = np.unique(owners, return_inverse=True)
    nested = own * np.bincount(index, own)[index] ** -0.5
    return np.asarray(nested * INDEPENDENT / nested.mean())
