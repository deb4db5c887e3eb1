"""Learned effects: the factor of each class of cost, as what each level adds to its logarithm.

A class of cost (products, attention, collectives between boxes …) has a prior value and one effect
for each value of each level (framework, architecture …), a normal variable around 0 whose deviation
says how much the level is expected to matter. A value that was never measured has the effect 0, so
that an unknown framework is an average one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import exp
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from ...common.files import own_data

#: Value of a level, and how strongly it applies where that is not wholly. An empty value has no
#: effect; an empty one with a strength is one of all that could be.
Value = str | tuple[str, float]
#: Level that a few measurements of one's own adapt: whose machines, and which.
CLUSTER = "cluster"
#: Class of the factor on a whole latency.
WHOLE = "whole"

E = TypeVar("E", bound="Effects")


class Context(Protocol):
    """Values of levels of what is asked about, by name, such as a mapping."""

    def get(self, key: str, default: str, /) -> Value:
        """The value of a level, or ``default``."""


class Level(NamedTuple):
    """One kind of effect.

    Attributes:
        cost: Class of cost.
        name: Key of a context, such as ``framework``.
        deviation: Of the effects, in logarithms.
    """

    cost: str
    name: str
    deviation: float

    def key(self, value: str) -> str:
        """Name of the effect of one of its values."""
        return f"{self.cost}/{self.name}/{value}"


@dataclass(frozen=True)
class Levels:
    """All kinds of effects on a kind of measurement.

    Attributes:
        prior: Value of each class of cost where nothing was learned.
        levels: The kinds of effects.
        factors: Classes of cost besides: factors on what is simulated.
    """

    prior: dict[str, float]
    levels: tuple[Level, ...]
    factors: tuple[str, ...] = (WHOLE,)

    @classmethod
    def read(cls, name: str) -> Levels:
        """Read the levels of a file of this folder."""
        data = own_data(f"models/effects/{name}.yaml")
        levels = [
            Level(cost, level, float(deviation))
            for cost, own in data["levels"].items()
            for level, deviation in own.items()
        ]
        prior = {cost: float(value) for cost, value in data["prior"].items()}
        return cls(prior, tuple(levels), tuple(data["factors"]))

    @cached_property
    def costs(self) -> tuple[str, ...]:
        """Every class, the factors last."""
        return (*self.prior, *self.factors)

    @cached_property
    def learned(self) -> tuple[str, ...]:
        """Classes of :attr:`prior` that have effects."""
        return tuple(c for c in self.prior if any(level.cost == c for level in self.levels))

    def of(self, context: Context, *, unnamed: bool = False) -> list[tuple[Level, str, float]]:
        """The levels that apply to a context, with the key of the effect and how strongly.

        Args:
            context: Of a measurement.
            unnamed: Whether levels count whose value is one of all that could be.
        """
        found = []
        for level in self.levels:
            value = context.get(level.name, "")
            name, strength = (value, float(value != "")) if isinstance(value, str) else value
            if strength and (name or unnamed):
                found.append((level, level.key(name), strength))
        return found


@dataclass
class Effects:
    """Effects by cost, level and value.

    Attributes:
        values: Logarithms, by ``cost/level/value``.
        deviations: How sure they are, in logarithms, by the same keys. What has none is as unsure
            as its level was before anything was learned.
    """

    levels: ClassVar[Levels]

    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)

    def log_factors(self, context: Context) -> dict[str, float]:
        """Sum of the effects on each class of cost."""
        sums = dict.fromkeys(self.levels.costs, 0.0)
        for level, key, strength in self.levels.of(context):
            sums[level.cost] += self.values.get(key, 0.0) * strength
        return sums

    def log_deviations(self, context: Context) -> dict[str, float]:
        """How sure the sums of :meth:`log_factors` are: deviations of independent effects."""
        squares = dict.fromkeys(self.levels.costs, 0.0)
        for level, key, strength in self.levels.of(context, unnamed=True):
            squares[level.cost] += (self.deviations.get(key, level.deviation) * strength) ** 2
        return {cost: square**0.5 for cost, square in squares.items()}

    def lessons(self, context: Context, cost: str) -> list[tuple[str, float]]:
        """Effects that were learned of a class of cost: level and value, and the factor."""
        return [
            (level.name if level.name == "all" else f"{level.name} {key.split('/', 2)[2]}",
             exp(self.values[key] * strength))
            for level, key, strength in self.levels.of(context)
            if level.cost == cost and key in self.values
        ]  # fmt: skip

    def knows(self, level: str, value: str) -> bool:
        """Whether any cost has an effect of a level's value."""
        return any(
            own.name == level and own.key(value) in self.values for own in self.levels.levels
        )

    def joined(self: E, more: E) -> E:
        """These effects with others in place of their own, where there are some."""
        return type(self)(self.values | more.values, self.deviations | more.deviations)
