"""Chooses the most informative operators or programs to measure next on a new device.

Measuring a kernel lowers the error variance of every kernel with correlated errors. The choice is
greedy: next is the candidate whose measurement is expected to lower the variance most, summed over
all kernels that may be queried (active learning of Cohn, Neural Networks 9, 1996, with the
covariance of :mod:`~opcast.models.adapt.gaussian_process`). The covariance was fitted to other
devices, so the gain is averaged over variants of it. No labels are needed: the whole order is known
before anything is measured. Samples are allocated to families by their shares of the time.

Measuring a program labels all its kernels at once. Its gain is the expected reduction of the error
variance at the targets, each weighted by its share of the time and the square of its interval,
relative to the cost of measuring it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .covariance import Sites, covariance, noise_variance, scaled_params

#: Factors on the amplitude of slopes, on the standard deviation of noise, and on length scales: a
#: new device's errors may be less correlated than those on the fitted devices. Chosen on other
#: devices held out of training in turn (docs/operator-new-device.md).
VARIANTS = ((1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (1.0, 2.5, 0.5), (0.3, 2.5, 0.5))


class Errors(NamedTuple):
    """Prior distribution of errors before further measurements, in log space.

    Attributes:
        covariance: Covariance of the errors of ``n`` runs, shape ``(n, n)``.
        noise: Variance of a measurement's noise.
    """

    covariance: np.ndarray
    noise: float

    def given(self, variance: float) -> Errors:
        """Scale the covariance such that the last run's error has a given variance."""
        own = float(self.covariance[-1, -1])
        return Errors(self.covariance * (variance / own if own > 0.0 else 0.0), self.noise)


def choose(sites: Sites, params: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank kernels for measurement.

    Args:
        sites: ``n`` candidates, which also represent the kernels to predict.
        params: Parameters of the covariance.
        count: Number of candidates to choose.

    Returns:
        Positions of the chosen candidates, most informative first, and the expected reduction of
        the mean variance (in log space) by each, shape ``(count,)`` each.
    """
    weight = np.full(len(sites), 1 / max(len(sites), 1))
    return in_order(errors_at(sites, params), weight, count, np.ones(len(sites)))


def choose_for(
    errors: Sequence[Errors], count: int, cost: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the runs that are most informative about a single target.

    Args:
        errors: Variants of the prior of the errors of the candidates and, last, of the target;
            shape ``(n + 1, n + 1)`` each.
        count: Number of candidates to choose.
        cost: Cost of each candidate, shape ``(n,)``, which divides gains; ``None`` for equal costs.

    Returns:
        Positions of the chosen candidates, most informative first, and the share of the target's
        variance that remains after each.
    """
    last = len(errors[0].covariance) - 1
    weight = np.zeros(last + 1)
    weight[last] = 1.0
    before = float(np.mean([own.covariance[last, last] for own in errors]))
    order, gains = in_order(errors, weight, count, np.ones(last) if cost is None else cost)
    return order, 1.0 - np.cumsum(gains) / (before or 1.0)


def errors_at(sites: Sites, params: np.ndarray, measured: Sites | None = None) -> list[Errors]:
    """Variants of the prior of kernels' errors on a new device.

    Args:
        sites: The kernels.
        params: Parameters of the covariance.
        measured: Kernels that already have a label.
    """
    found = []
    for factors in VARIANTS:
        own = scaled_params(params, *factors)
        known = RemainingVariance.of(sites, own, np.zeros(len(sites)), measured)
        found.append(Errors(known.posterior, known.noise))
    return found


def in_order(
    errors: Sequence[Errors], weight: np.ndarray, count: int, cost: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose runs greedily by the expected reduction of the weighted variance over variants.

    Args:
        errors: Variants of the prior of ``n`` errors.
        weight: Importance of each, shape ``(n,)``.
        count: Number of runs to choose.
        cost: Cost of the candidates, which are the first runs; it divides gains.

    Returns:
        Positions of the chosen runs in order, and the reduction by each.
    """
    posterior = [own.covariance.copy() for own in errors]
    chosen: list[int] = []
    gains: list[float] = []
    open_ = np.ones(len(cost), bool)
    for _ in range(min(count, len(cost))):
        # Measuring j lowers the variance at i by cov(i, j)² / (var(j) + noise), for all candidates.
        gain = np.mean(
            [
                (weight @ p**2) / (np.diag(p) + own.noise)
                for p, own in zip(posterior, errors, strict=True)
            ],
            axis=0,
        )[: len(cost)]
        best = int(np.argmax(np.where(open_, gain / cost, -1.0)))
        chosen.append(best)
        gains.append(float(gain[best]))
        open_[best] = False
        for p, own in zip(posterior, errors, strict=True):
            column = p[:, best].copy()
            # Rank-one update of the posterior covariance after measuring the chosen run. Its label
            # is not needed, since a Gaussian's variance does not depend on it.
            p -= np.outer(column, column / (column[best] + own.noise))
    return np.array(chosen, np.int64), np.array(gains)


def allocate(
    gains: Mapping[str, np.ndarray], shares: Mapping[str, float], total: int
) -> dict[str, int]:
    """Allocate samples to families: the next one goes where share × gain is largest.

    Args:
        gains: Gains of each family's samples in order, from :func:`choose`.
        shares: Share of the time by family.
        total: Number of samples of all families.

    Returns:
        Samples by family; fewer than ``total`` if the families run out of candidates.
    """
    counts = dict.fromkeys(gains, 0)
    worth = [
        (shares[name] * gain, name)
        for name, own in gains.items()
        # Within a family samples are taken in order, so an increasing gain must not overtake the
        # previous one.
        for gain in np.minimum.accumulate(own)
    ]
    for _, name in sorted(worth, key=lambda pair: -pair[0])[:total]:
        counts[name] += 1
    return counts


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of each family in the total time."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def spread_evenly(names: Sequence[str], total: int) -> dict[str, int]:
    """Give every family the same number of samples; the first ones get the remainder."""
    each, over = divmod(total, max(len(names), 1))
    return {name: each + (place < over) for place, name in enumerate(names)}


@dataclass
class RemainingVariance:
    """Remaining error variance after the measurements so far.

    Attributes:
        posterior: Covariance of all kernels' errors given the measurements, shape ``(n, n)``.
        noise: Variance of a label's noise, in log space.
        weight: Importance of each kernel, shape ``(n,)``; zero for those that are only candidates.
    """

    posterior: np.ndarray
    noise: float
    weight: np.ndarray

    @classmethod
    def of(
        cls, sites: Sites, params: np.ndarray, weight: np.ndarray, measured: Sites | None = None
    ) -> RemainingVariance:
        """Start from kernels and existing measurements.

        Args:
            sites: Kernels of the candidates and the targets.
            params: Parameters of the covariance.
            weight: Importance of each, shape ``(n,)``.
            measured: Kernels that already have a label.
        """
        posterior, noise = covariance(sites, sites, params), noise_variance(params)
        if measured is not None and len(measured):
            inner = covariance(measured, measured, params) + noise * np.eye(len(measured))
            cross = covariance(measured, sites, params)
            posterior -= cross.T @ np.linalg.solve(inner, cross)
        return cls(posterior, noise, weight)

    def gain(self, block: np.ndarray) -> float:
        """Expected reduction of the weighted variance by measuring the kernels ``block``."""
        cross = self.posterior[block]
        solved = np.linalg.solve(cross[:, block] + self.noise * np.eye(len(block)), cross)
        return float((cross * solved).sum(axis=0) @ self.weight)

    def measure(self, block: np.ndarray) -> None:
        """Update the posterior as if the kernels ``block`` had been measured."""
        cross = self.posterior[block]
        solved = np.linalg.solve(cross[:, block] + self.noise * np.eye(len(block)), cross)
        self.posterior = self.posterior - cross.T @ solved


def choose_programs(
    choice: RemainingVariance,
    blocks: Sequence[np.ndarray],
    seconds: Sequence[float],
    time_s: float,
    most: int,
) -> list[int]:
    """Choose programs to measure together, largest gain per second first.

    Args:
        choice: The state, which is updated as if the chosen programs were measured.
        blocks: Positions of each candidate's kernels.
        seconds: Expected time to measure each candidate.
        time_s: Total time budget.
        most: Most candidates to choose.

    Returns:
        Positions of the chosen candidates; empty if none fits into the time.
    """
    chosen: list[int] = []
    left = time_s
    while len(chosen) < most:
        open_ = [i for i in range(len(blocks)) if i not in chosen and seconds[i] <= left]
        if not open_:
            break
        # Greedy by gain per second. Updating the posterior after each choice devalues a second
        # program with the same kernels.
        best = max(open_, key=lambda i: choice.gain(blocks[i]) / seconds[i])
        chosen.append(best)
        left -= seconds[best]
        choice.measure(blocks[best])
    return chosen
