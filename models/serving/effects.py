"""Learned effects of serving: the factor of each class of cost, as what each level adds to its log.

A value that was never measured has the effect 0, so that an unknown framework is an average one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...simulate.serving.classes import CLASSES, REQUEST

#: Value of each class where nothing was learned: factors on seconds of operators and collectives;
#: seconds of a pass on the host, of each of its sequences, of a layer whose kernels the host
#: launches one by one, and of a request. Engineering estimates, which the effects correct.
PRIOR = {
    "stream": 1.0,
    "product": 1.1,
    "experts": 1.0,
    "grouped": 1.0,
    "prefill": 1.1,
    "decode": 1.0,
    "memory": 0.7,
    "network": 1.0,
    "host": 1e-3,
    "sequence": 5e-6,
    "launch": 20e-6,
    REQUEST: 10e-3,
}
#: Factors on what is asked about: every latency of a row, and its time to the first token.
WHOLE, FIRST = "whole", "first"


class ServingLevel(NamedTuple):
    """One kind of effect.

    Attributes:
        cost: A key of :data:`PRIOR`, :data:`WHOLE` or :data:`FIRST`.
        name: Key of a context.
        deviation: Of the effects, in logarithms.
    """

    cost: str
    name: str
    deviation: float


#: All effects; ``all`` is what chips of a platform share, ``any`` what hosts do. Deviations are
#: three quarters of those of training steps (:mod:`opcast.models.steps.effects`): a quarter for
#: what all share, less for chips and formats, more for what differs by factors between frameworks.
#: With model groups, frameworks, chips and generations left out, this was better than 0.6, 1, 1.5.
#: Engines before they were rewritten (``era``) share hosts in Python that took a hundred
#: microseconds a sequence, twenty times as long as today's, and are told apart by that first. How
#: a ``source`` measures (its clients, its servers' options) is the same on all of its chips.
LEVELS = (
    ServingLevel("stream", "all", 0.22),
    ServingLevel("stream", "architecture", 0.11),
    ServingLevel("stream", "format", 0.15),
    ServingLevel("stream", "engine", 0.15),
    ServingLevel("product", "all", 0.22),
    ServingLevel("product", "architecture", 0.11),
    ServingLevel("product", "format", 0.15),
    ServingLevel("product", "engine", 0.15),
    ServingLevel("experts", "all", 0.22),
    ServingLevel("experts", "expert_format", 0.22),
    ServingLevel("experts", "engine", 0.22),
    ServingLevel("experts", "engine_experts", 0.22),
    ServingLevel("grouped", "all", 0.22),
    ServingLevel("grouped", "expert_format", 0.22),
    ServingLevel("grouped", "engine", 0.22),
    ServingLevel("grouped", "engine_experts", 0.22),
    ServingLevel("prefill", "all", 0.22),
    ServingLevel("prefill", "engine", 0.15),
    ServingLevel("decode", "all", 0.22),
    ServingLevel("decode", "latent", 0.22),
    ServingLevel("decode", "engine", 0.22),
    ServingLevel("memory", "all", 0.3),
    ServingLevel("memory", "engine", 0.22),
    ServingLevel("network", "all", 0.3),
    ServingLevel("network", "engine", 0.3),
    ServingLevel("host", "any", 0.5),
    ServingLevel("host", "era", 1.0),
    ServingLevel("host", "source", 0.5),
    ServingLevel("host", "framework", 0.5),
    ServingLevel("host", "engine", 0.75),
    ServingLevel("host", "shape", 0.38),
    ServingLevel("sequence", "any", 0.5),
    ServingLevel("sequence", "era", 1.5),
    ServingLevel("sequence", "source", 0.5),
    ServingLevel("sequence", "framework", 0.5),
    ServingLevel("sequence", "engine", 0.75),
    ServingLevel("launch", "any", 0.5),
    ServingLevel("launch", "engine", 0.75),
    ServingLevel("launch", "shape", 0.75),
    ServingLevel(REQUEST, "any", 0.75),
    ServingLevel(REQUEST, "engine", 0.75),
    ServingLevel(REQUEST, "source", 0.75),
    ServingLevel(REQUEST, "handover", 1.5),
    ServingLevel(WHOLE, "engine", 0.08),
    ServingLevel(WHOLE, "source", 0.15),
    ServingLevel(WHOLE, "speculative", 0.3),
    ServingLevel(WHOLE, "spread", 0.15),
    ServingLevel(FIRST, "engine", 0.15),
    ServingLevel(FIRST, "spread", 0.38),
    ServingLevel(FIRST, "source", 0.15),
    ServingLevel(FIRST, "shape", 0.3),
    ServingLevel("host", "cluster", 0.5),
    ServingLevel(REQUEST, "cluster", 0.5),
    ServingLevel(WHOLE, "cluster", 0.15),
    ServingLevel(FIRST, "cluster", 0.2),
    ServingLevel(WHOLE, "known", 0.11),
    ServingLevel(FIRST, "known", 0.22),
)
#: Name of the level of a model group on an engine and a generation of chips. It is learned last, of
#: what the others leave, so that what they share is not put down to it.
KNOWN = "known"
#: Name of the level that a few measured runs of one's own adapt: whose machines, and which.
CLUSTER = "cluster"

#: Levels of a row by name; a missing or empty value has no effect.
Context = Mapping[str, str]
#: Costs in the order of weights, then the factors.
COSTS = (*CLASSES, REQUEST)


@dataclass
class ServingEffects:
    """Effects by cost, level and value.

    Attributes:
        values: Logarithms, by ``cost/level/value``.
    """

    values: dict[str, float] = field(default_factory=dict)

    def logs(self, context: Context) -> dict[str, float]:
        """Sum of the effects on each class of cost, and on what is asked about."""
        sums = dict.fromkeys((*COSTS, WHOLE, FIRST), 0.0)
        for level in LEVELS:
            value = context.get(level.name, "")
            sums[level.cost] += self.values.get(f"{level.cost}/{level.name}/{value}", 0.0)
        return sums

    def weights(self, context: Context) -> np.ndarray:
        """Seconds of a unit of each of :data:`COSTS`; what makes all slower is in each."""
        logs = self.logs(context)
        return np.array([PRIOR[cost] * np.exp(logs[cost] + logs[WHOLE]) for cost in COSTS])

    def first(self, context: Context) -> float:
        """Factor on times to the first token."""
        return float(np.exp(self.logs(context)[FIRST]))

    def knows(self, level: str, value: str) -> bool:
        """Whether any cost has an effect of a level's value."""
        return any(f"{known.cost}/{level}/{value}" in self.values for known in LEVELS)


class ServingDesign(NamedTuple):
    """Effects on a set of latencies as a linear model of their logarithms.

    Attributes:
        keys: ``cost/level/value`` of each column.
        deviations: Of each column's effect.
        matrix: Change of a logarithm with an effect, shape ``(latencies, columns)``.
    """

    keys: list[str]
    deviations: np.ndarray
    matrix: np.ndarray


def serving_design(
    contexts: Sequence[Context], shares: np.ndarray, first: np.ndarray
) -> ServingDesign:
    """Columns for every effect that a set of latencies can tell something of.

    Args:
        contexts: Of each latency.
        shares: Of :data:`COSTS` in each, shape ``(latencies, costs)``.
        first: Whether each is a time to the first token.
    """
    place = {cost: at for at, cost in enumerate(COSTS)}
    columns: dict[str, tuple[ServingLevel, dict[int, float]]] = {}
    for row, context in enumerate(contexts):
        for level in LEVELS:
            value = context.get(level.name, "")
            if not value:
                continue
            if level.cost == WHOLE:
                slope = 1.0
            elif level.cost == FIRST:
                slope = float(first[row])
            else:
                slope = float(shares[row, place[level.cost]])
            if slope:
                key = f"{level.cost}/{level.name}/{value}"
                columns.setdefault(key, (level, {}))[1][row] = slope
    matrix = np.zeros((len(contexts), len(columns)))
    for column, (_, rows) in enumerate(columns.values()):
        matrix[list(rows), column] = list(rows.values())
    levels = [level for level, _ in columns.values()]
    return ServingDesign(
        list(columns),
        np.array([level.deviation for level in levels]),
        matrix,
    )
