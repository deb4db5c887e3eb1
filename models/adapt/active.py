"""Chooses which operators to measure next on a new device: those most informative of the others.

Measuring a kernel lowers the error variance of every kernel that errs like it. The choice is
greedy: next comes the candidate whose measurement is expected to lower the variance most, summed
over all kernels that may be queried (active learning of Cohn, Neural Networks 9, 1996, with the
covariance of :mod:`~opcast.models.adapt.gaussian_process`). The covariance was fitted to other
devices, so the gain is averaged over variants of it. No labels are needed: the whole order is known
before anything is measured. Families compete for samples by their share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .gaussian_process import Sites, covariance, noise_variance, scaled_params

#: Factors on the amplitude of slopes, on the standard deviation of noise, and on length scales: a
#: new device's errors may have less in common than those of the devices that the covariance was
#: fitted to. Chosen on other devices left out of training in turn (docs/operator-new-device.md).
VARIANTS = ((1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (1.0, 2.5, 0.5), (0.3, 2.5, 0.5))


def choose(
    sites: Sites, params: np.ndarray, count: int, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the order in which to measure kernels.

    Args:
        sites: ``n`` candidates, which also stand for the kernels to be predicted.
        params: Parameters of the covariance.
        count: Number of candidates to choose.
        weight: Importance of each, shape ``(n,)``, such as its share of time; equal by default.

    Returns:
        Positions of the chosen candidates, most informative first, and the expected fall of the
        weighted mean variance (in log space) from each, shape ``(count,)`` each.
    """
    weight = np.full(len(sites), 1 / max(len(sites), 1)) if weight is None else weight
    variants = [scaled_params(params, *factors) for factors in VARIANTS]
    noise = [noise_variance(own) for own in variants]
    posterior = [covariance(sites, sites, own) for own in variants]
    chosen: list[int] = []
    gains: list[float] = []
    open_ = np.ones(len(sites), bool)
    for _ in range(min(count, len(sites))):
        # Measuring j lowers the variance at i by cov(i, j)² / (var(j) + noise); all candidates at
        # once.
        gain = np.mean(
            [(weight @ p**2) / (np.diag(p) + v) for p, v in zip(posterior, noise, strict=True)],
            axis=0,
        )
        best = int(np.argmax(np.where(open_, gain, -1.0)))
        chosen.append(best)
        gains.append(float(gain[best]))
        open_[best] = False
        for own, variance in zip(posterior, noise, strict=True):
            column = own[:, best].copy()
            # Rank-one update of the posterior covariance: what is left once the chosen one is
            # measured. Its label is not needed, since a Gaussian's variance does not depend on it.
            own -= np.outer(column, column / (column[best] + variance))
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
