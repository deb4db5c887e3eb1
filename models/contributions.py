"""Splits a learned log-ratio into contributions of groups of features.

Features are sorted into groups with readable names; three methods split a log-ratio among the
groups, such that ``baseline + Σ contributions = log-ratio``:

* :func:`treeshap`: exact, from the estimator's TreeSHAP values by feature;
* :func:`ablation`: reduction of the log-ratio when one group's features are set to the median;
* :func:`shapley`: exact Shapley values over all coalitions of groups, against a background.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np

from ..common.files import own_data
from .core.kernel_table import KernelTable
from .estimators.tabular import TabularEstimator

#: Remainders: interactions that ablations of single groups leave, and the effect of the estimator's
#: limit on log-ratios.
INTERACTIONS, LIMIT = "interactions", "limit"
#: Contribution of the calibration to samples of the device.
CALIBRATION = "calibration"
#: Contribution of a power cap, which lowers clocks.
POWER_CAP = "power cap"
#: Groups of features without a rule: of kernels, and of library operators.
OTHER, SIZES = "other", "sizes"
#: Largest difference of single-precision TreeSHAP sums from the log-ratio due to rounding.
_FLOAT32 = 1e-4
_RULES = own_data("models/contributions.yaml")


@dataclass(frozen=True)
class Contribution:
    """Contribution of a group of features to the log-ratio; its ``exp`` is a factor on latency."""

    group: str
    log_ratio: float


@dataclass(frozen=True)
class Split:
    """Log-ratios of ``n`` kernels taken apart.

    Attributes:
        baseline: Log-ratio before any group, shape ``(n,)``.
        parts: Contribution of each group, shape ``(n,)`` each.
    """

    baseline: np.ndarray
    parts: Mapping[str, np.ndarray]


class FeatureGroups:
    """Groups of features by name.

    Args:
        rules: Groups, and regular expressions that match the start of their features' names; the
            first match counts.
        other: Group of features without a match.
    """

    def __init__(self, rules: Iterable[tuple[str, str]], other: str) -> None:
        self._patterns = tuple((group, re.compile(pattern)) for group, pattern in rules)
        self._other = other
        self.names = (*(group for group, _ in self._patterns), other)

    def of(self, name: str) -> str:
        """The group of a feature."""
        return next(
            (group for group, pattern in self._patterns if pattern.match(name)), self._other
        )

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of every non-empty group, in the order of the rules."""
        columns: dict[str, list[int]] = {}
        for column, name in enumerate(names):
            columns.setdefault(self.of(name), []).append(column)
        return {group: np.array(columns[group]) for group in self.names if group in columns}


#: Groups of the features of compiled kernels, and of those of library operators.
KERNEL_GROUPS = FeatureGroups(_RULES["kernels"].items(), OTHER)
OPERATOR_GROUPS = FeatureGroups(_RULES["operators"].items(), SIZES)


def treeshap(
    estimator: TabularEstimator, table: KernelTable, ratio: np.ndarray, groups: FeatureGroups
) -> Split | None:
    """Sums of the estimator's exact contributions by feature.

    Args:
        estimator: A fitted estimator.
        table: Features of ``n`` kernels.
        ratio: Their log-ratios, shape ``(n,)``.
        groups: Groups of the features.

    Returns:
        The split; ``None`` for an estimator that has no exact contributions.
    """
    exact = estimator.contributions(table)
    if exact is None:
        return None
    columns = groups.columns(table.names)
    parts = {group: exact[:, own].sum(axis=1) for group, own in columns.items()}
    return Split(exact[:, -1], _with_rest(parts, ratio - exact[:, -1], LIMIT, _FLOAT32))


def ablation(
    estimator: TabularEstimator,
    table: KernelTable,
    ratio: np.ndarray,
    groups: FeatureGroups,
    medians: np.ndarray,
) -> Split:
    """Reduction of the log-ratio when a group's features take other values.

    Args:
        estimator: A fitted estimator.
        table: Features of ``n`` kernels.
        ratio: Their log-ratios, shape ``(n,)``.
        groups: Groups of the features.
        medians: Values that replace the features, shape ``(n, d)``.
    """
    parts = {
        group: ratio - estimator.log_ratio(_replaced(table, columns, medians))
        for group, columns in groups.columns(table.names).items()
    }
    baseline = estimator.log_ratio(_replaced(table, np.arange(table.X.shape[1]), medians))
    return Split(baseline, _with_rest(parts, ratio - baseline, INTERACTIONS))


class Regressor(Protocol):
    """Anything that predicts log-ratios of a table."""

    def log_ratio(self, table: KernelTable) -> np.ndarray:
        """Log-ratios, shape ``(n,)``."""


def shapley(
    model: Regressor, table: KernelTable, background: KernelTable, groups: FeatureGroups
) -> tuple[float, dict[str, float]]:
    """Shapley values of groups of features, exact over all coalitions.

    Shapley, *A value for n-person games*, 1953; Lundberg and Lee, NeurIPS 2017. The number of
    evaluations doubles with every group, which is affordable for half a dozen groups.

    Args:
        model: The regressor.
        table: One kernel.
        background: Kernels to compare with: a group outside a coalition takes the values of each of
            them in turn, and the mean is used.
        groups: Groups of the features.

    Returns:
        Mean log-ratio of the background, and the contribution of each group.
    """
    columns = groups.columns(table.names)
    # In the order of the table's columns: floating-point sums depend on their order.
    players = [
        group
        for group, own in sorted(columns.items(), key=lambda item: int(item[1][0]))
        # A group that is equal in the whole background contributes exactly 0; excluding it halves
        # the coalitions.
        if (background.X[:, own] != table.X[:, own]).any()
    ]
    value: dict[frozenset[str], float] = {}
    for count in range(len(players) + 1):
        for coalition in combinations(players, count):
            mixed = background.take(np.arange(len(background)))
            for own in (columns[g] for g in coalition):
                mixed.X[:, own] = table.X[:, own]
            value[frozenset(coalition)] = float(model.log_ratio(mixed).mean())
    if players:  # features that no group holds are the same in both
        value[frozenset(players)] = float(model.log_ratio(table)[0])
    n = len(players)
    values = {}
    for group in players:
        rest = [g for g in players if g != group]
        values[group] = sum(
            # Shapley's weight of a coalition of this size: the fraction of orders in which exactly
            # this coalition precedes.
            math.factorial(count)
            * math.factorial(n - count - 1)
            / math.factorial(n)
            * (value[frozenset((*coalition, group))] - value[frozenset(coalition)])
            for count in range(n)
            for coalition in combinations(rest, count)
        )
    return value[frozenset()], values


def ranked(parts: Mapping[str, float], least: float) -> tuple[Contribution, ...]:
    """Contributions above ``least`` in absolute value, largest first."""
    own = [Contribution(group, value) for group, value in parts.items() if abs(value) > least]
    return tuple(sorted(own, key=lambda c: -abs(c.log_ratio)))


def _with_rest(
    parts: dict[str, np.ndarray], total: np.ndarray, name: str, least: float = 0.0
) -> dict[str, np.ndarray]:
    """The parts, and under ``name`` the remainder of the total where it exceeds ``least``."""
    rest = total - np.sum(list(parts.values()), axis=0)
    return {**parts, name: np.where(np.abs(rest) > least, rest, 0.0)}


def _replaced(table: KernelTable, columns: np.ndarray, medians: np.ndarray) -> KernelTable:
    replaced = table.take(np.arange(len(table)))
    replaced.X[:, columns] = medians[:, columns]
    return replaced
