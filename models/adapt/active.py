"""Chooses which operators or programs to measure next on a new device: the most informative.

Measuring a kernel lowers the error variance of every kernel that errs like it. The choice is
greedy: next comes the candidate whose measurement is expected to lower the variance most, summed
over all kernels that may be queried (active learning of Cohn, Neural Networks 9, 1996, with the
covariance of :mod:`~opcast.models.adapt.gaussian_process`). The covariance was fitted to other
devices, so the gain is averaged over variants of it. No labels are needed: the whole order is known
before anything is measured. Families compete for samples by their share of the time.

Measuring a program gives labels of all its kernels at once. Its gain is the expected fall of the
error variance at the targets, each weighted by its share of the time and by the square of its
interval, and what it takes to measure counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .covariance import Sites, covariance, noise_variance, scaled_params

#: Factors on the amplitude of slopes, on the standard deviation of noise, and on length scales: a
#: new device's errors may have less in common than those of the devices that the covariance was
#: fitted to. Chosen on other devices left out of training in turn (docs/operator-new-device.md).
VARIANTS = ((1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (1.0, 2.5, 0.5), (0.3, 2.5, 0.5))


class Errors(NamedTuple):
    """What is known of errors before anything more is measured, in log space.

    Attributes:
        covariance: Of the errors of ``n`` runs, shape ``(n, n)``.
        noise: Variance of a measurement's noise.
    """

    covariance: np.ndarray
    noise: float

    def given(self, variance: float) -> Errors:
        """The same with amplitudes at which the last run's error has a variance."""
        own = float(self.covariance[-1, -1])
        return Errors(self.covariance * (variance / own if own > 0.0 else 0.0), self.noise)


def choose(sites: Sites, params: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the order in which to measure kernels.

    Args:
        sites: ``n`` candidates, which also stand for the kernels to be predicted.
        params: Parameters of the covariance.
        count: Number of candidates to choose.

    Returns:
        Positions of the chosen candidates, most informative first, and the expected fall of the
        mean variance (in log space) from each, shape ``(count,)`` each.
    """
    weight = np.full(len(sites), 1 / max(len(sites), 1))
    return in_order(errors_at(sites, params), weight, count, np.ones(len(sites)))


def choose_for(
    errors: Sequence[Errors], count: int, cost: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the runs that tell most of one question.

    Args:
        errors: Variants of what is known of the errors of the candidates and, last, of the
            question; shape ``(n + 1, n + 1)`` each.
        count: Number of candidates to choose.
        cost: Of the candidates, shape ``(n,)``; gains count by it. ``None`` for equal ones.

    Returns:
        Positions of the chosen candidates, most informative first, and the share of the question's
        variance that is left after each and those before it.
    """
    last = len(errors[0].covariance) - 1
    weight = np.zeros(last + 1)
    weight[last] = 1.0
    before = float(np.mean([own.covariance[last, last] for own in errors]))
    order, gains = in_order(errors, weight, count, np.ones(last) if cost is None else cost)
    return order, 1.0 - np.cumsum(gains) / (before or 1.0)


def errors_at(sites: Sites, params: np.ndarray, measured: Sites | None = None) -> list[Errors]:
    """Variants of what is known of kernels' errors on a new device.

    Args:
        sites: The kernels.
        params: Parameters of the covariance.
        measured: Kernels that have a label already.
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
    """Choose runs greedily by the expected fall of the weighted variance, over variants of it.

    Args:
        errors: Variants of what is known of ``n`` errors.
        weight: Importance of each, shape ``(n,)``.
        count: Number of runs to choose.
        cost: Of the first errors' runs, which are those that may be chosen; gains count by it.

    Returns:
        Positions of the chosen runs in their order, and the fall from each.
    """
    posterior = [own.covariance.copy() for own in errors]
    chosen: list[int] = []
    gains: list[float] = []
    open_ = np.ones(len(cost), bool)
    for _ in range(min(count, len(cost))):
        # Measuring j lowers the variance at i by cov(i, j)² / (var(j) + noise); all candidates at
        # once.
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
            # Rank-one update of the posterior covariance: what is left once the chosen one is
            # measured. Its label is not needed, since a Gaussian's variance does not depend on it.
            p -= np.outer(column, column / (column[best] + own.noise))
    return np.array(chosen, np.int64), np.array(gains)


def allocate(
    gains: Mapping[str, np.ndarray], shares: Mapping[str, float], total: int
) -> dict[str, int]:
    """Divide samples among families: the next one goes where share × gain is largest.

    Args:
        gains: Gains of each family's samples in their order, from :func:`choose`.
        shares: Share of the time by family.
        total: Samples of all families together.

    Returns:
        Samples by family; together fewer than ``total`` if no family has more to choose from.
    """
    counts = dict.fromkeys(gains, 0)
    worth = [
        (shares[name] * gain, name)
        for name, own in gains.items()
        # Within a family samples are taken in order, so a gain that rises must not overtake the one
        # before.
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
    """Error variance that remains after the measurements so far.

    Attributes:
        posterior: Covariance of the errors of all kernels given what was measured, shape
            ``(n, n)``.
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
        """Start from kernels, and from what was measured already.

        Args:
            sites: Kernels of the candidates and the targets.
            params: Parameters of the covariance.
            weight: Importance of each, shape ``(n,)``.
            measured: Kernels that have a label already.
        """
        posterior, noise = covariance(sites, sites, params), noise_variance(params)
        if measured is not None and len(measured):
            inner = covariance(measured, measured, params) + noise * np.eye(len(measured))
            cross = covariance(measured, sites, params)
            posterior -= cross.T @ np.linalg.solve(inner, cross)
        return cls(posterior, noise, weight)

    def gain(self, block: np.ndarray) -> float:
        """Expected fall of the weighted variance if the kernels ``block`` are measured."""
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
    """Programs to measure together, largest gain per second first.

    Args:
        choice: The state; it is moved on as if the chosen ones were measured.
        blocks: Positions of each candidate's kernels.
        seconds: Expected time to measure each candidate.
        time_s: Time for all of them together.
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
        # Greedy by gain per second. A posterior that is updated after each choice keeps a second
        # program with the same kernels from looking as good as the first.
        best = max(open_, key=lambda i: choice.gain(blocks[i]) / seconds[i])
        chosen.append(best)
        left -= seconds[best]
        choice.measure(blocks[best])
    return chosen
