"""Decides whether rows that were measured later still lie where a model's intervals promise.

The test is a game against the promise (Shafer, Journal of the Royal Statistical Society A 184,
2021; Waudby-Smith and Ramdas, Journal of the Royal Statistical Society B 86, 2024): a stake grows
when rows fall outside their intervals and shrinks when they do not, at odds that are fair if the
promise holds. It then exceeds ``1 / a`` at any time with a probability of at most ``a`` (Ville's
inequality), so that rows may be judged as they come in, like a control chart with a known rate of
false alarms.
"""

from __future__ import annotations

import numpy as np

from .conformal import COVERAGE

#: Share of rows outside their intervals from which a model counts as stale. Five in a hundred more
#: than promised: on layers that it never saw a model may err a little more often than on those that
#: its intervals come from. Engineering estimate.
TOLERATED = 1.0 - COVERAGE + 0.05
#: Shares of the stake that are bet, side by side, since the size of a drift is unknown before.
_BETS = np.array((0.02, 0.05, 0.1, 0.2, 0.4, 0.8))


def evidence(
    measured: np.ndarray, lo: np.ndarray, hi: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """The stake after each group of rows, starting from 1: evidence against the intervals.

    Args:
        measured: Measurements in the order in which they were made, shape ``(n,)``.
        lo: Lower ends of 90 % intervals.
        hi: Upper ends.
        groups: Rows that err together, such as rows of one layer, have the same name; they count
            once, because a mean of fair bets is fair, however they depend on each other.

    Returns:
        Mean stake of all bets (too slow, too fast, either), one a group, in the order in which
        groups first appear; at least ``1 / a`` is an alarm at the rate ``a``.
    """
    names, first, code = np.unique(groups.astype(str), return_index=True, return_inverse=True)
    count = np.bincount(code, minlength=len(names))
    above, below = measured > hi, measured < lo
    order = np.argsort(first)
    logs = []
    # Each side has half of what is tolerated.
    for outside, share in ((above, 0.5), (below, 0.5), (above | below, 1.0)):
        rate = np.bincount(code, outside, minlength=len(names))[order] / count[order]
        odds = rate / (share * TOLERATED) - 1.0
        logs.append(np.cumsum(np.log1p(np.outer(odds, _BETS)), axis=0))
    total = np.concatenate(logs, axis=1)
    top = total.max(axis=1, keepdims=True)
    # The logarithm of the mean, without overflow of single stakes.
    mean = top[:, 0] + np.log(np.exp(total - top).mean(axis=1))
    return np.asarray(np.exp(np.minimum(mean, 700.0)))


def alarm_after(stakes: np.ndarray, rate: float) -> int:
    """Number of groups after which the stakes raise an alarm; 0 if they never do.

    Args:
        stakes: From :func:`evidence`.
        rate: Probability of a false alarm.
    """
    over = np.flatnonzero(stakes >= 1.0 / rate)
    return int(over[0]) + 1 if len(over) else 0
