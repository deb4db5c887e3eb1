"""Learns effects from measurements: least absolute errors with shrinkage around a simulation.

The logarithm of a simulated latency is nearly linear in the logarithms of its costs. So effects are
solved for by iteratively reweighted ridge regression, on the slopes where they lie now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..adapt.active import Errors
from .effects import CLUSTER, Context, Effects, Level

#: Errors below this count by their square: the difference between repeated runs (2 to 3 %).
NOISE = 0.02
#: Change of the effects, in units of their deviations, at which they count as found.
_SETTLED = 1e-3
#: How much errors weigh against effects; chosen with clusters, sources and chips of training steps
#: left out in turn, of 0.1 (shrinks more: better for unheard-of sources) to 10 (less: better for
#: known ones).
ERROR = 0.15
#: Weight of a measurement of one's own cluster: it is of the very place that is asked about, and
#: its owner has a handful. Engineering choice.
OWN_WEIGHT = 10.0

E = TypeVar("E", bound=Effects)


@dataclass(frozen=True)
class Linear(Generic[E]):
    """The linear model of measured logarithms around effects.

    Attributes:
        now: Effects around which it is.
        keys: ``cost/level/value`` of each column.
        deviations: Of each column's effect.
        matrix: Change of a logarithm with each effect, shape ``(measurements, columns)``.
        target: Logarithms that all effects are to explain, shape ``(measurements,)``.
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
        """The model around effects that measurements were simulated with.

        Args:
            now: The effects.
            contexts: Of each measurement.
            slopes: Change of each logarithm with that of every class of cost.
            measured: Logarithms.
            simulated: The same, under the effects.
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
        # Without the effects at which the slopes were taken, so that all are shrunk towards 0.
        target = measured - simulated + matrix @ applied
        deviations = np.array([level.deviation for level in levels])
        return cls(now, list(columns), deviations, matrix, target)

    def _of(self, part: int, name: str) -> np.ndarray:
        """Which columns have a name in a part of their key: 0 the class of cost, 1 the level."""
        return np.array([key.split("/", 2)[part] == name for key in self.keys], dtype=np.bool_)

    def values(self, effects: Effects) -> np.ndarray:
        """Return the value of each column's effect, shape ``(columns,)``."""
        return np.array([effects.values.get(key, 0.0) for key in self.keys])

    def errors(self, effects: Effects) -> np.ndarray:
        """Logarithms of measured over predicted under other effects."""
        return np.asarray(self.target - self.matrix @ self.values(effects))

    def solve(self, learn: np.ndarray, weight: np.ndarray, without: str = "", last: str = "") -> E:
        """Effects that fit measurements best.

        Args:
            learn: Which measurements to learn from, shape ``(measurements,)``.
            weight: Of those, shape ``(learned,)``.
            without: A class of cost that gets no effects, to see what they gain.
            last: A level that is learned of what the others leave, so that what they share is not
                put down to it.
        """
        used = np.any(self.matrix[learn] != 0.0, axis=0) & ~self._of(0, without)
        late = self._of(1, last)
        found, left = type(self.now)(), self.target[learn]
        for columns in (np.flatnonzero(used & ~late), np.flatnonzero(used & late)):
            more = self._shrunk(learn, columns, left, weight)
            found = found.joined(more)
            left = left - self.matrix[np.ix_(learn, columns)] @ list(more.values.values())
        return found

    def adapted(self) -> E:
        """Return the effects with those of the measured clusters, learned from these rows alone."""
        own, stays = self._own()
        everything = np.ones(len(self.target), bool)
        left = self.target - self.matrix @ stays
        weight = np.full(len(left), OWN_WEIGHT)
        return self.now.joined(self._shrunk(everything, own, left, weight))

    def unsure(self, learn: np.ndarray) -> Errors:
        """What is known of other measurements' errors by the effects of their clusters.

        Args:
            learn: Which were measured; clusters of the others may be among theirs.

        Returns:
            Of the others, in their order.
        """
        own, stays = self._own()
        sure = [self.now.deviations.get(self.keys[c], float(self.deviations[c])) for c in own]
        matrix = self.matrix[:, own] * np.array(sure)
        left = (self.target - self.matrix @ stays)[learn]
        _, precision = shrunk(matrix[learn], left, np.full(len(left), OWN_WEIGHT))
        rows = matrix[~learn]
        return Errors(rows @ np.linalg.inv(precision) @ rows.T, NOISE / (OWN_WEIGHT * ERROR))

    def _own(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns of clusters, and the values of the others' effects, 0 for these."""
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
    """Least absolute errors with a ridge of 1, by iteratively reweighted least squares.

    Returns:
        The coefficients, shape ``(k,)``, and the inverse of their covariance, shape ``(k, k)``.
    """
    # SciPy comes with scikit-learn, which training needs anyway.
    from scipy.sparse import csr_array

    # Few effects apply to a row: products of sparse matrices take a tenth of the time.
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
    """Weights by which a group counts by the root of its size, 1 on average."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    weight = counts[index] ** -0.5
    return np.asarray(weight / weight.mean())
