"""Learned effects: a factor for each class of cost, the sum of contributions of levels in logs.

A class of cost (products, attention, collectives between boxes …) has a prior value and one random
effect for each value of each level (framework, architecture …), normal around 0 with a deviation
that expresses how much the level is expected to matter. Unmeasured values have the effect 0, so
that an unknown framework is treated as an average one.

The logarithm of a simulated latency is nearly linear in the logarithms of its costs. Effects are
therefore fitted to measurements by iteratively reweighted ridge regression on the slopes at the
current effects: least absolute errors with shrinkage around a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import exp
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..common.files import own_data
from ..common.types import JsonMapping, typed
from .adapt.active import Errors

#: Value of a level, optionally with a strength that multiplies its effect. An empty value has no
#: effect; an empty value with a strength stands for an unknown one (effect 0, full deviation).
Value = str | tuple[str, float]
#: A level that applies to a context, with the key and strength of its effect.
Applied = tuple["Level", str, float]
#: Level that is adapted to a user's own measurements: source and device.
CLUSTER = "cluster"
#: Class of the factor on a whole latency.
WHOLE = "whole"

E = TypeVar("E", bound="Effects")
#: Errors below this count quadratically: the difference between repeated runs (2 to 3 %).
NOISE = 0.02
#: Change of the effects, in units of their deviations, below which they count as converged.
_SETTLED = 1e-3
#: Weight of errors relative to the prior; chosen with clusters, sources and chips of training steps
#: held out in turn, from 0.1 (more shrinkage: better for unseen sources) to 10 (less: better for
#: known ones).
ERROR = 0.15
#: Weight of a measurement of the user's own cluster: it is from the machines that are predicted,
#: and users have few. Engineering choice.
OWN_WEIGHT = 10.0


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
        """Read the levels from ``models/{name}/effects.yaml``."""
        data = own_data(f"models/{name}/effects.yaml")
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

    def of(self, context: Context, *, unnamed: bool = False) -> tuple[Applied, ...]:
        """Levels that apply to a context, with the keys and strengths of their effects.

        Args:
            context: Context of a measurement.
            unnamed: Whether to include levels with an unknown value.
        """
        return self._applied(tuple(context.get(name, "") for name in self._names), unnamed)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.name for level in self.levels))

    @cached_property
    def _applied(self) -> Callable[[tuple[Value, ...], bool], tuple[Applied, ...]]:
        """What applies to the values of all names, kept: a table repeats the same few."""

        @lru_cache(4096)
        def applied(values: tuple[Value, ...], unnamed: bool) -> tuple[Applied, ...]:
            given = dict(zip(self._names, values, strict=True))
            found = []
            for level in self.levels:
                value = given[level.name]
                name, strength = (value, float(value != "")) if isinstance(value, str) else value
                if strength and (name or unnamed):
                    found.append((level, level.key(name), strength))
            return tuple(found)

        return applied


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


@dataclass(frozen=True)
class Linear(Generic[E]):
    """Linear model of measured logarithms around given effects.

    Attributes:
        now: Effects around which the model is linearized.
        keys: ``cost/level/value`` of each column.
        deviations: Prior deviation of each column's effect.
        matrix: Derivative of a logarithm by each effect, shape ``(measurements, columns)``.
        target: Logarithms that the effects have to explain, shape ``(measurements,)``.
    """

    now: E
    keys: list[str]
    deviations: np.ndarray
    matrix: np.ndarray
    target: np.ndarray

    @classmethod
    def around(
        cls,
        now: E,
        contexts: Sequence[Context],
        slopes: Mapping[str, np.ndarray],
        measured: np.ndarray,
        simulated: np.ndarray,
    ) -> Linear[E]:
        """Linearize around the effects that measurements were simulated with.

        Args:
            now: The effects.
            contexts: Context of each measurement.
            slopes: Derivative of each logarithm by that of every class of cost.
            measured: Logarithms of the measurements.
            simulated: Logarithms of the simulation, under the effects.
        """
        columns: dict[str, tuple[Level, dict[int, float]]] = {}
        for row, context in enumerate(contexts):
            for level, key, strength in now.levels.of(context):
                slope = float(slopes[level.cost][row]) * strength
                if slope:
                    columns.setdefault(key, (level, {}))[1][row] = slope
        matrix = np.zeros((len(contexts), len(columns)))
        for column, (_, rows) in enumerate(columns.values()):
            matrix[list(rows), column] = list(rows.values())
        levels = [level for level, _ in columns.values()]
        applied = np.array([now.values.get(key, 0.0) for key in columns])
        # The residual without any effects, so that all effects are shrunk towards 0.
        target = measured - simulated + matrix @ applied
        deviations = np.array([level.deviation for level in levels])
        return cls(now, list(columns), deviations, matrix, target)

    def _of(self, part: int, name: str) -> np.ndarray:
        """Mask of the columns with a name in a part of their key: 0 class of cost, 1 level."""
        return np.array([key.split("/", 2)[part] == name for key in self.keys], dtype=np.bool_)

    def values(self, effects: Effects) -> np.ndarray:
        """Return the value of each column's effect, shape ``(columns,)``."""
        return np.array([effects.values.get(key, 0.0) for key in self.keys])

    def errors(self, effects: Effects) -> np.ndarray:
        """Logarithms of measured over predicted under given effects."""
        return np.asarray(self.target - self.matrix @ self.values(effects))

    def solve(self, learn: np.ndarray, weight: np.ndarray, without: str = "", last: str = "") -> E:
        """Find the effects that fit measurements best.

        Args:
            learn: Measurements to learn from, a mask of shape ``(measurements,)``.
            weight: Their weights, shape ``(learned,)``.
            without: Class of cost to leave without effects, to see the gain of these.
            last: Level that is fitted to the residuals of the others, so that shared effects are
                not attributed to it.
        """
        used = np.any(self.matrix[learn] != 0.0, axis=0) & ~self._of(0, without)
        late = self._of(1, last)
        found, left = type(self.now)(), self.target[learn]
        for columns in (np.flatnonzero(used & ~late), np.flatnonzero(used & late)):
            more = self._shrunk(learn, columns, left, weight)
            found = found.joined(more)
            left = left - self.matrix[np.ix_(learn, columns)] @ list(more.values.values())
        return found

    def adapted(self, learn: np.ndarray | None = None) -> E:
        """Return the effects with the cluster effects fitted to measurements alone.

        Args:
            learn: Mask of the measurements to learn from; ``None`` for all.
        """
        if learn is None:
            learn = np.ones(len(self.target), bool)
        own, stays = self._own()
        used = own[np.any(self.matrix[np.ix_(learn, own)] != 0.0, axis=0)]
        left = (self.target - self.matrix @ stays)[learn]
        weight = np.full(len(left), OWN_WEIGHT)
        return self.now.joined(self._shrunk(learn, used, left, weight))

    def left_out(self, rows: np.ndarray) -> np.ndarray:
        """Errors on each row's measurements of the effects adapted to all other rows.

        Args:
            rows: Row of each measurement, shape ``(measurements,)``.

        Returns:
            Logarithms of measured over predicted; NaN if there are no other rows.
        """
        found = np.full(len(rows), np.nan)
        for row in np.unique(rows):
            own = rows == row
            if not own.all():
                found[own] = self.errors(self.adapted(~own))[own]
        return found

    def unsure(self, learn: np.ndarray) -> Errors:
        """Error distribution of unmeasured rows, due to the effects of their clusters.

        Args:
            learn: Mask of the measured rows; the other rows may share their clusters.

        Returns:
            Errors of the other rows, in their order.
        """
        own, stays = self._own()
        sure = [self.now.deviations.get(self.keys[c], float(self.deviations[c])) for c in own]
        matrix = self.matrix[:, own] * np.array(sure)
        left = (self.target - self.matrix @ stays)[learn]
        _, precision = shrunk(matrix[learn], left, np.full(len(left), OWN_WEIGHT))
        rows = matrix[~learn]
        return Errors(rows @ np.linalg.inv(precision) @ rows.T, NOISE / (OWN_WEIGHT * ERROR))

    def _own(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of cluster effects, and the values of all other effects (0 for clusters)."""
        own = self._of(1, CLUSTER)
        return np.flatnonzero(own), np.where(own, 0.0, self.values(self.now))

    def _shrunk(
        self, learn: np.ndarray, columns: np.ndarray, left: np.ndarray, weight: np.ndarray
    ) -> E:
        deviations = self.deviations[columns]
        mean, precision = shrunk(self.matrix[np.ix_(learn, columns)] * deviations, left, weight)
        sure = np.sqrt(np.diag(np.linalg.inv(precision))) * deviations
        keys = [self.keys[c] for c in columns]
        return type(self.now)(
            dict(zip(keys, (mean * deviations).tolist(), strict=True)),
            dict(zip(keys, sure.tolist(), strict=True)),
        )


def shrunk(
    matrix: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit least absolute errors with a ridge of 1 by iteratively reweighted least squares.

    Returns:
        The coefficients, shape ``(k,)``, and the inverse of their covariance, shape ``(k, k)``.
    """
    # Imported here: SciPy comes with scikit-learn, which only training needs.
    from scipy.sparse import csr_array

    # Few effects apply to a row: sparse products take a tenth of the time.
    sparse = csr_array(matrix)
    effects = np.zeros(matrix.shape[1])
    normal = np.eye(len(effects))
    for _ in range(60):
        error = target - sparse @ effects
        robust = weight * ERROR / np.sqrt(error**2 + NOISE**2)
        weighted = sparse.multiply(robust[:, None]).tocsr()
        normal = (sparse.T @ weighted).toarray() + np.eye(len(effects))
        before, effects = effects, np.linalg.solve(normal, weighted.T @ target)
        if np.abs(effects - before).max(initial=0.0) < _SETTLED:
            break
    return effects, normal


def group_weights(groups: np.ndarray) -> np.ndarray:
    """Weights such that a group counts by the square root of its size, with mean 1."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    weight = counts[index] ** -0.5
    return np.asarray(weight / weight.mean())
