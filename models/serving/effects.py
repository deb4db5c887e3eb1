"""Learned effects on serving (``models/effects/serving.yaml``), and how runs teach them.

Least absolute errors with shrinkage, relinearised around a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import hypot
from typing import NamedTuple

import numpy as np

from ...common.files import own_data
from ...simulate.serving.load import CLASSES, REQUEST
from ..effects.effects import WHOLE, Effects, Levels, Value
from ..effects.linear import Linear, group_weights

#: Factor on the time to the first token; that on every latency of a row is :data:`WHOLE`.
FIRST = "first"
#: Name of the level of a model group on an engine and a generation of chips. It is learned last, of
#: what the others leave, so that what they share is not put down to it.
KNOWN = "known"
#: Value of the level ``spread`` of prompts that run on workers of their own.
APART = "disaggregated"
#: Name of the level of whose servers hand requests over between workers of two kinds.
HANDOVER = "handover"
#: Levels that every row has a value of, even where nobody says which: it is one of all that could
#: be.
_HIDDEN = ("source", "cluster", "stack", "stack_experts", "framework", "engine")
#: Deviation of repeated runs of one configuration, in logarithms: they differ by 6 to 18 %.
REPEATS = 0.1
#: Levels of a row by name; a missing or empty value has no effect.
Context = Mapping[str, str]
#: Costs in the order of weights.
COSTS = (*CLASSES, REQUEST)


class ServingEffects(Effects):
    """Effects on serving."""

    levels = Levels.read("serving")

    def weights(self, context: Context) -> np.ndarray:
        """Seconds of a unit of each of :data:`COSTS`; what makes all slower is in each."""
        logs, prior = self.log_factors(context), prior_of(context)
        return np.array([prior[cost] * np.exp(logs[cost] + logs[WHOLE]) for cost in COSTS])

    def first(self, context: Context) -> float:
        """Factor on times to the first token."""
        return float(np.exp(self.log_factors(context)[FIRST]))

    def spread(self, context: Context, metric: str, shares: np.ndarray) -> float:
        """How sure a latency is: the deviation of its logarithm by those of the effects.

        Args:
            context: Of its row.
            metric: What it is; ``ttft`` for the time to the first token.
            shares: Of :data:`COSTS` in it, shape ``(costs,)``.
        """
        values: dict[str, Value] = dict(context)
        hidden = (*_HIDDEN, HANDOVER) if context.get("spread") == APART else _HIDDEN
        values |= {name: ("", 1.0) for name in hidden if not context.get(name)}
        sure = self.log_deviations(values)
        parts = [share * sure[cost] for cost, share in zip(COSTS, shares.tolist(), strict=True)]
        return hypot(REPEATS, sure[WHOLE], sure[FIRST] if metric == "ttft" else 0.0, *parts)


#: Value of each class of cost where nothing was learned.
PRIOR = ServingEffects.levels.prior
#: The same by what an engine's host runs, where that differs.
_PRIORS = {
    name: {**PRIOR, **own} for name, own in own_data("models/effects/serving.yaml")["hosts"].items()
}
#: Most times that the simulator is asked again where the effects then lie, and the least share by
#: which a round has to lower the error for another one.
ROUNDS, GAIN = 4, 0.01
#: Weight of a time to the first token against one of a further token: what queues before it depends
#: on arrivals that no column holds. Engineering choice.
FIRST_WEIGHT = 0.5


def prior_of(context: Context) -> Mapping[str, float]:
    """Value of each class of cost of a row where nothing was learned."""
    return _PRIORS.get(context.get("host", ""), PRIOR)


class Observed(NamedTuple):
    """Measured latencies beside simulated ones.

    Attributes:
        rows: Which row each is of.
        metrics: ``ttft``, ``tpot`` or ``per_token``.
        measured: Logarithms of seconds.
        simulated: The same, under the effects.
        shares: Of the classes of cost, shape ``(n, costs)``.
        queued: Share of the time to the first token of each one's row that is waiting.
    """

    rows: np.ndarray
    metrics: np.ndarray
    measured: np.ndarray
    simulated: np.ndarray
    shares: np.ndarray
    queued: np.ndarray


#: Latencies under effects.
Observe = Callable[[ServingEffects], Observed]


def solve_serving(
    linear: Linear[ServingEffects], seen: Observed, groups: np.ndarray, learn: np.ndarray
) -> ServingEffects:
    """Effects that fit latencies best, by the linear model around those they were simulated with.

    Args:
        linear: From :func:`linear_serving`.
        seen: Latencies.
        groups: Of the rows, shape ``(rows, 2)``: whose machines of which generation, and a group
            of rows among theirs; each of both counts by the root of its size.
        learn: Latencies to learn from.
    """
    weight = _weights(Observed(*(column[learn] for column in seen)), groups)
    return linear.solve(learn, weight, last=KNOWN)


def request_errors(
    seen: Observed, errors: np.ndarray, outputs: Sequence[float]
) -> dict[int, float]:
    """Errors of the times of whole requests, of rows that measured both of their parts.

    Args:
        seen: Latencies.
        errors: Logarithms of measured over predicted, shape ``(n,)``.
        outputs: Mean tokens of an output, of each row of a closed loop; 0 of others.

    Returns:
        Logarithms of measured over predicted, by the place of the row's ``tpot`` in ``seen``.
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
    """The linear model around the effects that latencies were simulated with."""
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
        contexts: Of the rows.
        groups: Of the rows, as of :func:`solve_serving`.
        tell: Told of progress.
        start: Effects that the first round simulates; ``None`` for none.

    Returns:
        The effects whose simulation errs least, of those of all rounds and the start, and the
        latencies simulated with them.
    """
    effects = start or ServingEffects()
    best: tuple[float, ServingEffects, Observed] | None = None
    for turn in range(ROUNDS + 1):
        tell(f"effects: simulating, round {turn} of at most {ROUNDS}")
        seen = observe(effects)
        error = simulated_error(seen, groups)
        tell(f"effects: mean absolute error of logarithms {error:.4f}")
        settled = best is not None and error > (1.0 - GAIN) * best[0]
        # The linear model may overshoot, so that a later round is not always a better one.
        if best is None or error < best[0]:
            best = error, effects, seen
        if settled:
            break
        every = np.ones(len(seen.rows), bool)
        effects = solve_serving(linear_serving(seen, contexts, effects), seen, groups, every)
    assert best is not None
    return best[1], best[2]


def simulated_error(seen: Observed, groups: np.ndarray) -> float:
    """Mean absolute error of logarithms of simulated latencies, weighted."""
    return float(np.average(np.abs(seen.measured - seen.simulated), weights=_weights(seen, groups)))


def _weights(seen: Observed, groups: np.ndarray) -> np.ndarray:
    """Weight of each latency; many rows of a group, or groups of an owner, tell little more."""
    first = seen.metrics == "ttft"
    # What waits for other requests says little of what anything costs.
    own = np.where(first, FIRST_WEIGHT * (1.0 - 0.8 * seen.queued), 1.0)
    owners, parts = groups[seen.rows].T
    own = own * group_weights(parts)
    _, index = np.unique(owners, return_inverse=True)
    nested = own * np.bincount(index, own)[index] ** -0.5
    return np.asarray(nested * own.mean() / nested.mean())
