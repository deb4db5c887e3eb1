"""Learned effects: a factor for each class of cost, the sum of contributions of levels in logs.

A class of cost (products, attention, collectives between boxes …) has a prior value and one random
effect for each value of each level (framework, architecture …), normal around 0 with a deviation
that expresses how much the level is expected to matter. Unmeasured values have the effect 0, so
that an unknown framework is treated as an average one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import exp
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from ...common.files import own_data
from ...common.types import JsonMapping, typed

#: Value of a level, optionally with a strength that multiplies its effect. An empty value has no
#: effect; an empty value with a strength stands for an unknown one (effect 0, full deviation).
Value = str | tuple[str, float]
#: Level that is adapted to a user's own measurements: source and device.
CLUSTER = "cluster"
#: Class of the factor on a whole latency.
WHOLE = "whole"

E = TypeVar("E", bound="Effects")


class Context(Protocol):
    """Values of levels by name, such as a mapping."""

    def get(self, key: str, default: str, /) -> Value:
        """The value of a level, or ``default``."""


class Level(NamedTuple):
    """One kind of effect: a level on a class of cost.

    Attributes:
        cost: Class of cost.
        name: Key of a context, such as ``framework``.
        deviation: Prior standard deviation of the effects, in logarithms.
    """

    cost: str
    name: str
    deviation: float

    def key(self, value: str) -> str:
        """Key of the effect of one of its values."""
        return f"{self.cost}/{self.name}/{value}"


@dataclass(frozen=True)
class Levels:
    """All levels of a kind of measurement.

    Attributes:
        prior: Value of each class of cost before anything was learned.
        levels: The kinds of effects.
        factors: Additional classes of cost: factors on simulated times.
    """

    prior: dict[str, float]
    levels: tuple[Level, ...]
    factors: tuple[str, ...] = (WHOLE,)

    @classmethod
    def read(cls, name: str) -> Levels:
        """Read the levels from ``models/effects/{name}.yaml``."""
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
        """Every class of cost, factors last."""
        return (*self.prior, *self.factors)

    @cached_property
    def learned(self) -> tuple[str, ...]:
        """Classes of :attr:`prior` that have effects."""
        return tuple(c for c in self.prior if any(level.cost == c for level in self.levels))

    def of(self, context: Context, *, unnamed: bool = False) -> list[tuple[Level, str, float]]:
        """Levels that apply to a context, with the keys and strengths of their effects.

        Args:
            context: Context of a measurement.
            unnamed: Whether to include levels with an unknown value.
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
    """Learned effects by cost, level and value.

    Attributes:
        values: Logarithms, by ``cost/level/value``.
        deviations: Their posterior standard deviations, by the same keys. A missing key has the
            prior deviation of its level.
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
        """Standard deviations of the sums of :meth:`log_factors`, for independent effects."""
        squares = dict.fromkeys(self.levels.costs, 0.0)
        for level, key, strength in self.levels.of(context, unnamed=True):
            squares[level.cost] += (self.deviations.get(key, level.deviation) * strength) ** 2
        return {cost: square**0.5 for cost, square in squares.items()}

    def lessons(self, context: Context, cost: str) -> list[tuple[str, float]]:
        """Learned effects on a class of cost: level and value, and the factor."""
        return [
            (level.name if level.name == "all" else f"{level.name} {key.split('/', 2)[2]}",
             exp(self.values[key] * strength))
            for level, key, strength in self.levels.of(context)
            if level.cost == cost and key in self.values
        ]  # fmt: skip

    def knows(self, level: str, value: str) -> bool:
        """Whether an effect of a level's value was learned for any class of cost."""
        return any(
            own.name == level and own.key(value) in self.values for own in self.levels.levels
        )

    def joined(self: E, more: E) -> E:
        """These effects, with those of ``more`` taking precedence."""
        return type(self)(self.values | more.values, self.deviations | more.deviations)

    def to_dict(self, digits: int) -> dict[str, object]:
        """Convert to plain data for JSON, with deviations rounded to ``digits``."""
        return {
            "effects": {k: round(v, 5) for k, v in sorted(self.values.items())},
            "deviations": {k: round(v, digits) for k, v in sorted(self.deviations.items())},
        }

    @classmethod
    def from_dict(cls: type[E], data: JsonMapping) -> E:
        """Read the data of :meth:`to_dict`."""
        return cls(*(typed(dict[str, float], data[k], k) for k in ("effects", "deviations")))


def source_note(machines: str, known: Iterable[str], source: str, device: str) -> tuple[str, ...]:
    """A note that a named source has no effect, unless its device is among the ``known`` ones.

    Args:
        machines: Plural noun for the message.
        known: Clusters with learned effects, ``source|device``.
        source: Source of the runs that are predicted.
        device: Name of the device.
    """
    if f"{source}|{device}" in known:
        return ()
    others = sorted(name.partition("|")[0] for name in known if name.endswith(f"|{device}"))
    told = f"; known on it: {', '.join(others)}" if others else ""
    return (f"nothing was learned of {machines} of {source!r} with {device}{told}",)
