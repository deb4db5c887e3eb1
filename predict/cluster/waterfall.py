"""Breakdown of a step into terms, with the uncertainty of each and what was learned about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, hypot, log
from typing import NamedTuple

import numpy as np

from ...common.interval import combined_spread
from ...features.operators.op import Op
from ...models.effects import WHOLE
from ...models.steps.effects import FIELDS, PRIOR, EffectTable, StepContext
from ...models.trust.calibrator import NORMAL_90
from ...simulate.step.compose import StepTime, step_time
from ...simulate.step.costs import Costs, StepEffects
from ...simulate.step.plan import Plan
from ...simulate.step.workload import Workload
from .spread import RHO

#: Names of the terms; the first four are the operator classes.
NAMES = {
    "product": "matrix products",
    "attention": "attention",
    "experts": "experts",
    "memory": "memory-bound kernels",
    "hop": "pipeline sends and receives",
    "launch": "launch overhead",
    "inside": "scale-up collectives",
    "between": "scale-out collectives",
    "bubble": "pipeline bubble",
}
_OPERATORS = ("product", "attention", "experts", "memory")


class Term(NamedTuple):
    """One term of a step.

    Attributes:
        name: One of the values of :data:`NAMES`.
        seconds: Contribution to the step.
        lo: Seconds of the whole step at the lower bound of this term's 90 % interval.
        hi: The same at the upper bound.
        lessons: Learned effects: level and value (``framework nanotron``), and the factor on the
            cost class; empty without any.
    """

    name: str
    seconds: float
    lo: float
    hi: float
    lessons: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data; times in microseconds."""
        return {
            "name": self.name,
            "us": self.seconds * 1e6,
            "step_lo_us": self.lo * 1e6,
            "step_hi_us": self.hi * 1e6,
            "learned": dict(self.lessons),
        }


@dataclass(frozen=True)
class Waterfall:
    """Breakdown of a step into terms.

    Attributes:
        workload: Model that is trained.
        plan: The resolved plan.
        costs: Costs with the learned effects applied.
        counts: Executions of each operator on the busiest stage.
        step: The step.
        table: Learned effects.
        context: Context of the step.
    """

    workload: Workload
    plan: Plan
    costs: Costs
    counts: Mapping[Op, float]
    step: StepTime
    table: EffectTable
    context: StepContext

    def terms(self) -> list[Term]:
        """Return the terms in order of decreasing time; their seconds add up to the step's.

        Collectives, launches and pipeline sends count by how much faster the step is when they are
        removed, one after the other, so only exposed time counts. Operators are those of the
        busiest stage; the rest is the bubble.
        """
        seconds = dict[str, float]()
        left, effects = self.step.total, self.costs.effects
        away = {
            # Launches first: without collectives, waiting for the host would take longer.
            "launch": {"launch_s": 0.0, "collective_s": 0.0},
            "hop": {"hop_s": 0.0},
            "between": {"between": 0.0},
            "inside": {"inside": 0.0},
        }
        for name, without in away.items():
            effects = replace(effects, **without)
            rest = self._total(effects)
            seconds[name], left = left - rest, rest
        for call, count in self.counts.items():
            own = float(self.costs.ops[call][0]) * self.costs.effects.of(call) * count
            seconds[call.kind] = seconds.get(call.kind, 0.0) + own
        seconds["bubble"] = max(0.0, left - sum(seconds.get(kind, 0.0) for kind in _OPERATORS))
        sure = self.table.log_deviations(self.context)
        found = []
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            if value <= 1e-9 * self.step.total:
                continue
            low, high = self._ends(name, sure)
            lessons = [] if name == "bubble" else self.table.lessons(self.context, name)
            found.append(Term(NAMES[name], value, low, high, tuple(lessons)))
        return found

    def whole(self) -> tuple[tuple[str, float], ...]:
        """Return the learned effects on the whole step, beyond its terms."""
        return tuple(self.table.lessons(self.context, WHOLE))

    def _total(self, effects: StepEffects) -> float:
        costs = self.costs.with_effects(effects, self.costs.box)
        return step_time(self.workload, self.plan, costs).total

    def _ends(self, name: str, sure: Mapping[str, float]) -> tuple[float, float]:
        """Return the seconds of the step with a cost class at both bounds of its interval."""
        if name not in PRIOR:
            return self.step.total, self.step.total
        field = FIELDS.get(name, name)
        now = float(getattr(self.costs.effects, field))
        found = []
        for side, sign in enumerate((-1.0, 1.0)):
            width = hypot(NORMAL_90 * sure[name], self._measured(name, side))
            found.append(
                self._total(replace(self.costs.effects, **{field: now * exp(sign * width)}))
            )
        return found[0], found[1]

    def _measured(self, name: str, side: int) -> float:
        """Return the half-width of operators or collectives on one side, as a logarithm."""
        if name in _OPERATORS:
            own = [(self.costs.ops[c], n) for c, n in self.counts.items() if c.kind == name]
            times = np.array([time * n for time, n in own])
            ends = np.stack([times[:, 0] - times[:, 1], times[:, 2] - times[:, 0]], axis=1)
            reach = combined_spread(ends, RHO)[side] / max(float(times[:, 0].sum()), 1e-12)
        elif name in ("inside", "between"):
            links = [
                estimate
                for (_, _, group), estimate in self.costs.links.items()
                if self.costs.leaves_box(group) == (name == "between")
            ]
            middle = max(sum(link.value for link in links), 1e-12)
            reach = abs(sum(link[1 + side] for link in links) / middle - 1.0)
        else:
            return 0.0
        return log(1.0 + reach) if side else -log(max(1.0 - reach, 0.05))


def by_name(seconds: Mapping[Op, float]) -> dict[str, float]:
    """Return the seconds of operators by name, the longest first."""
    totals: dict[str, float] = {}
    for call, value in seconds.items():
        totals[call.name] = totals.get(call.name, 0.0) + value
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
