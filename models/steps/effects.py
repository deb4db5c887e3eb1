"""Learned effects: the factor of each class of cost, as what each level adds to its logarithm.

A class of cost (products, attention, collectives between boxes …) has a prior value and one effect
for each value of each level (framework, architecture …), a normal variable around 0 whose deviation
says how much the level is expected to matter. A value that was never measured has the effect 0, so
that an unknown framework is an average one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, hypot
from typing import NamedTuple

import numpy as np

from ...simulate.step.costs import StepEffects
from .context import StepContext

#: Value of each class where nothing was learned. Products and experts hold 90 % of the clock of the
#: short measurements that the operators' model learned from, attention, which keeps tensor cores
#: and exponentials busy at once, 80 %; collectives between boxes take 1.3 times the closed form;
#: a launch from Python takes 8 µs, a collective of activations 20 µs of its host. Engineering
#: estimates, which effects correct. Attention and passes over memory have no effects: those gained
#: nothing on steps that were left out.
PRIOR = {
    "product": 1 / 0.9,
    "attention": 1 / 0.8,
    "experts": 1 / 0.9,
    "memory": 1.0,
    "inside": 1.0,
    "between": 1.3,
    "launch": 8e-6,
    "collective": 20e-6,
    "hop": 200e-6,
}
#: Class of the factor on a whole step.
WHOLE = "whole"


class Level(NamedTuple):
    """One kind of effect.

    Attributes:
        name: For people, such as ``framework``.
        cost: A key of :data:`PRIOR`, or :data:`WHOLE`.
        of: Value of the level and how strongly it applies; ``None`` where it does not.
        deviation: Of the effects, in logarithms.
    """

    name: str
    cost: str
    of: Callable[[StepContext], tuple[str, float] | None]
    deviation: float


def _all(context: StepContext) -> tuple[str, float]:
    return context.platform, 1.0


def _architecture(context: StepContext) -> tuple[str, float]:
    return context.architecture, 1.0


def _bits(context: StepContext) -> tuple[str, float]:
    return (context.bits if context.platform == "gpu" else f"tpu-{context.bits}"), 1.0


def _headroom(context: StepContext) -> tuple[str, float] | None:
    return ("slope", context.headroom) if context.headroom else None


def _framework(context: StepContext) -> tuple[str, float] | None:
    return (context.framework, 1.0) if context.framework else None


#: Frameworks that share an engine: kernels, overlap and hand-overs are its own.
ENGINES = {
    "nemo": "megatron-core",
    "megatron-bridge": "megatron-core",
    "megatron-lm": "megatron-core",
    "llm-foundry": "torch-fsdp",
    "fms-fsdp": "torch-fsdp",
    "torchtitan": "torch-fsdp",
    "maxtext": "xla",
    "jax": "xla",
}


def _engine(context: StepContext) -> tuple[str, float] | None:
    engine = ENGINES.get(context.framework)
    return (engine, 1.0) if engine else None


def _cluster(context: StepContext) -> tuple[str, float] | None:
    return (context.cluster, 1.0) if context.cluster else None


#: All effects. Deviations are from how far sources disagree in general: a third for what all share,
#: a tenth to a fifth for chips of one class, more for host and network, which differ by factors
#: between frameworks. Halving or doubling all of a kind changes errors on left-out clusters by less
#: than one per cent.
LEVELS = (
    Level("all", "product", _all, 0.3),
    Level("architecture", "product", _architecture, 0.15),
    Level("bits", "product", _bits, 0.3),
    Level("headroom", "product", _headroom, 0.5),
    Level("all", "experts", _all, 0.3),
    Level("architecture", "experts", _architecture, 0.2),
    Level("bits", "experts", _bits, 0.2),
    Level("engine", "experts", _engine, 0.2),
    Level("framework", "experts", _framework, 0.2),
    Level("all", "inside", _all, 0.3),
    Level("architecture", "inside", _architecture, 0.3),
    Level("engine", "inside", _engine, 0.5),
    Level("framework", "inside", _framework, 0.5),
    Level("all", "between", _all, 0.3),
    Level("engine", "between", _engine, 0.3),
    Level("framework", "between", _framework, 0.3),
    Level("all", "launch", _all, 0.4),
    Level("engine", "launch", _engine, 0.7),
    Level("framework", "launch", _framework, 1.5),
    Level("framework", "collective", _framework, 1.5),
    Level("framework", "hop", _framework, 2.5),
    Level("engine", WHOLE, _engine, 0.1),
    Level("framework", WHOLE, _framework, 0.2),
    Level("architecture", WHOLE, _architecture, 0.1),
    Level("cluster", "between", _cluster, 0.3),
    Level("cluster", "launch", _cluster, 0.5),
    Level("cluster", WHOLE, _cluster, 0.2),
)
#: Classes of cost that have effects, without :data:`WHOLE`.
LEARNED = tuple(cost for cost in PRIOR if any(level.cost == cost for level in LEVELS))
#: Name of the level that a few measured steps of one's own adapt.
CLUSTER = "cluster"


@dataclass
class EffectTable:
    """Effects by cost, level and value.

    Attributes:
        values: Logarithms, by ``cost/level/value``.
        deviations: How sure they are, in logarithms, by the same keys. What has none is as unsure
            as its level was before anything was learned.
    """

    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)

    def log_factors(self, context: StepContext) -> dict[str, float]:
        """Sum of the effects on each class of cost."""
        sums = dict.fromkeys((*PRIOR, WHOLE), 0.0)
        for level in LEVELS:
            value = level.of(context)
            if value is not None:
                key = f"{level.cost}/{level.name}/{value[0]}"
                sums[level.cost] += self.values.get(key, 0.0) * value[1]
        return sums

    def effects(
        self, context: StepContext, shifts: Mapping[str, float] | None = None
    ) -> StepEffects:
        """Effects as the simulator takes them.

        Args:
            context: Of the step.
            shifts: Added to the logarithm of a class.
        """
        logs, more = self.log_factors(context), shifts or {}
        cost = {k: _prior(k, context) * exp(logs[k] + more.get(k, 0.0)) for k in PRIOR}
        host = float(context.launched)
        return StepEffects(
            product=cost["product"],
            attention=cost["attention"],
            experts=cost["experts"],
            memory=cost["memory"],
            inside=cost["inside"],
            between=cost["between"],
            launch_s=cost["launch"] * host,
            collective_s=cost["collective"] * host,
            hop_s=cost["hop"] * host,
        )

    def whole_effects(self, context: StepContext) -> StepEffects:
        """Effects with the factor on the whole step spread over all costs."""
        return self.effects(context, dict.fromkeys(PRIOR, self.log_factors(context)[WHOLE]))

    def log_deviations(self, context: StepContext) -> dict[str, float]:
        """How sure the sums of :meth:`log_factors` are: deviations of independent effects."""
        squares = dict.fromkeys((*PRIOR, WHOLE), 0.0)
        for level in LEVELS:
            value = level.of(context)
            if value is not None:
                key = f"{level.cost}/{level.name}/{value[0]}"
                own = self.deviations.get(key, level.deviation) * value[1]
            else:
                # A framework or cluster that is not named is one of all that could be.
                own = level.deviation if _is_unnamed(level.name, context) else 0.0
            squares[level.cost] += own**2
        return {cost: square**0.5 for cost, square in squares.items()}

    def spread(self, context: StepContext, slopes: Mapping[str, float]) -> float:
        """How sure a step is: the deviation of its logarithm by those of the effects.

        Args:
            context: Of the step.
            slopes: Change of the step's logarithm with that of each class of cost.
        """
        sure = self.log_deviations(context)
        parts = [slopes.get(cost, 0.0) * own for cost, own in sure.items() if cost != WHOLE]
        return hypot(sure[WHOLE], *parts)

    def lessons(self, context: StepContext, cost: str) -> list[tuple[str, float]]:
        """Effects that were learned of a class of cost: level and value, and the factor."""
        found = []
        for level in LEVELS:
            value = level.of(context)
            if level.cost != cost or value is None:
                continue
            effect = self.values.get(f"{cost}/{level.name}/{value[0]}")
            if effect is not None:
                name = "all" if level.name == "all" else f"{level.name} {value[0]}"
                found.append((name, exp(effect * value[1])))
        return found

    def knows(self, level: str, value: str) -> bool:
        """Whether any cost has an effect of a level's value."""
        return any(f"{known.cost}/{level}/{value}" in self.values for known in LEVELS)


def _prior(cost: str, context: StepContext) -> float:
    # A TPU's operators are its compiler's estimates, which hold no short bursts at a higher clock.
    burst = cost in ("product", "attention", "experts")
    return 1.0 if burst and context.platform == "tpu" else PRIOR[cost]


def _is_unnamed(level: str, context: StepContext) -> bool:
    if level == CLUSTER:
        return not context.cluster
    return level in ("framework", "engine") and not context.framework


class Design(NamedTuple):
    """Effects of a set of steps as a linear model of the logarithm of their times.

    Attributes:
        keys: ``cost/level/value`` of each column.
        deviations: Of each column's effect.
        costs: Class of each column.
        weights: How strongly each effect applies to each step, shape ``(steps, columns)``.
    """

    keys: list[str]
    deviations: np.ndarray
    costs: list[str]
    weights: np.ndarray


def design_of(contexts: Sequence[StepContext]) -> Design:
    """Columns for every effect that a set of steps can tell something of."""
    columns: dict[str, tuple[Level, dict[int, float]]] = {}
    for row, context in enumerate(contexts):
        for level in LEVELS:
            value = level.of(context)
            if value is not None:
                key = f"{level.cost}/{level.name}/{value[0]}"
                columns.setdefault(key, (level, {}))[1][row] = value[1]
    weights = np.zeros((len(contexts), len(columns)))
    for column, (_, rows) in enumerate(columns.values()):
        weights[list(rows), column] = list(rows.values())
    levels = [level for level, _ in columns.values()]
    deviations = np.array([level.deviation for level in levels])
    return Design(list(columns), deviations, [level.cost for level in levels], weights)
