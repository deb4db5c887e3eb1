"""Which operators to measure next on a new device: those that say most about all the others.

Measuring a kernel lowers the variance of the error of every kernel that errs like it. The choice is
greedy: the candidate whose measurement is expected to lower the variance most, summed over what the
device is to be asked (active learning of Cohn, Neural Networks 9, 1996, with the covariance of
:mod:`~opcast.models.adapt.gaussian_process`). The covariance was fitted to other devices, so the
gain is taken over variants of it: what serves only one of them is not chosen. No labels are
needed: the whole order is known before anything is measured. Families compete for samples by their
share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .gaussian_process import Sites, covariance, noise_variance, scaled_params

#: Factors on the amplitude of slopes, on the deviation of noise, and on length scales: errors of a
#: device may be less of one piece than those of the devices that the covariance was fitted to.
VARIANTS = ((1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (1.0, 2.5, 0.5), (0.3, 2.5, 0.5))


def choose(
    sites: Sites, params: np.ndarray, count: int, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Order in which to measure kernels.

    Args:
        sites: ``n`` candidates, which also stand for the kernels to be predicted.
        params: Of the covariance.
        count: How many to choose.
        weight: Importance of each, shape ``(n,)``, such as its share of time; equal by default.

    Returns:
        Positions of the chosen ones, most telling first, and by how much each is expected to lower
        the mean variance (in log space) of what is left, shape ``(count,)`` each.
    """
    weight = np.full(len(sites), 1 / max(len(sites), 1)) if weight is None else weight
    variants = [scaled_params(params, *factors) for factors in VARIANTS]
    noise = [noise_variance(own) for own in variants]
    posterior = [covariance(sites, sites, own) for own in variants]
    chosen: list[int] = []
    gains: list[float] = []
    open_ = np.ones(len(sites), bool)
    for _ in range(min(count, len(sites))):
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
            own -= np.outer(column, column / (column[best] + variance))
    return np.array(chosen, np.int64), np.array(gains)


def allocate(
    gains: Mapping[str, np.ndarray], shares: Mapping[str, float], total: int
) -> dict[str, int]:
    """How many samples each family gets: the next one goes where share × gain is largest.

    Args:
        gains: By family, of its samples in their order, from :func:`choose`.
        shares: Share of the time by family.
        total: Samples of all families together.

    Returns:
        Samples by family; together fewer than ``total`` if no family has more to choose from.
    """
    counts = dict.fromkeys(gains, 0)
    worth = [
        (shares[name] * gain, name)
        for name, own in gains.items()
        for gain in np.minimum.accumulate(own)
    ]
    for _, name in sorted(worth, key=lambda pair: -pair[0])[:total]:
        counts[name] += 1
    return counts


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of each family in the time of all of them."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def spread_evenly(names: Sequence[str], total: int) -> dict[str, int]:
    """The same number of samples for every family; the first ones get what is left over."""
    each, over = divmod(total, max(len(names), 1))
    return {name: each + (place < over) for place, name in enumerate(names)}
