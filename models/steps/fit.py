"""Learns effects from measured steps.

The simulator is asked for the slopes, effects are solved for, and both are repeated where the
effects then lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ..effects.effects import WHOLE
from ..effects.linear import Linear, group_weights
from .context import StepContext
from .effects import LEARNED, EffectTable

#: Logarithms of simulated seconds: which steps, the effects, and shifts of classes of cost.
Simulate = Callable[[Sequence[int], EffectTable, Mapping[str, float]], np.ndarray]
#: Shift of a class by which its slope is measured.
_STEP = 0.2
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

    def linear(self, contexts: Sequence[StepContext], measured: np.ndarray) -> Linear[EffectTable]:
        """The linear model around the table.

        Args:
            contexts: Of the steps.
            measured: Logarithms of their seconds.
        """
        whole = np.array([self.table.log_factors(context)[WHOLE] for context in contexts])
        return Linear.around(self.table, contexts, self.slope, measured, self.level + whole)

    def part(self, which: np.ndarray) -> Slopes:
        """Slopes of some of the steps."""
        slope = {cost: values[which] for cost, values in self.slope.items()}
        return Slopes(self.table, self.level[which], slope)


def slopes_at(simulate: Simulate, table: EffectTable, count: int) -> Slopes:
    """Ask the simulator for levels and slopes of ``count`` steps."""
    rows = range(count)
    level = simulate(rows, table, {})
    slope = {cost: (simulate(rows, table, {cost: _STEP}) - level) / _STEP for cost in LEARNED}
    return Slopes(table, level, slope | {WHOLE: np.ones(count)})


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
    everything, weight = np.ones(len(contexts), bool), group_weights(groups)
    for turn in range(_ROUNDS):
        tell(f"effects: round {turn + 1} of {_ROUNDS}")
        slopes = slopes_at(simulate, table, len(contexts))
        table = slopes.linear(contexts, measured).solve(everything, weight)
    return table


def informative(
    slopes: Slopes,
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    others: Slopes,
    other_contexts: Sequence[StepContext],
) -> np.ndarray:
    """How much steps that were not measured would tell of clusters beyond those that were.

    Args:
        slopes: Of the measured steps.
        contexts: Of the measured steps.
        measured: Logarithms of their seconds.
        others: Of the other steps, taken at the same effects.
        other_contexts: Of the other steps.

    Returns:
        Information in nats, as :meth:`~opcast.models.effects.linear.Linear.information` gives it.
    """
    both = Slopes(
        slopes.table,
        np.concatenate([slopes.level, others.level]),
        {cost: np.concatenate([own, others.slope[cost]]) for cost, own in slopes.slope.items()},
    )
    # Nothing is known of the others but their slopes.
    times = np.concatenate([measured, others.level])
    learn = np.arange(len(times)) < len(measured)
    return both.linear([*contexts, *other_contexts], times).information(learn)


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
