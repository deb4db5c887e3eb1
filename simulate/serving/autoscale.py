"""Fleets over days: pools of replicas that autoscale, start, get interrupted, and share devices.

A fluid model: in every time step the replicas of a model serve the requests that arrived or waited,
up to their capacity. The behaviour of a replica at a given utilisation comes from simulated runs
(:class:`Curve`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from .pools import PLACES, Nodes, Pool

#: Requests over whose arrival utilisation is averaged before it is looked up. The curves already
#: contain random arrivals, which shorter windows would count twice (3 % of 1000 requests).
_COUNTED = 1000
#: Tolerance against rounding in ``ceil`` and comparisons.
_TINY = 1e-9


@dataclass
class Played:
    """Time series of a simulated fleet.

    Attributes:
        step: Length of a time step in seconds.
        arrived: Requests of each model that arrived, shape ``(models, steps)``, as the next five.
        served: Requests that engines accepted, less those cut off by interruptions.
        backlog: Requests that wait at the end of the step.
        share: Utilisation: the fraction of their capacity that the replicas served.
        wait: Seconds until an engine accepts the requests of the step; infinite if none ever does.
        good: Fraction of the arrived requests that meet the SLO.
        ready: Replicas of each pool that serve, shape ``(pools, steps)``, as the next three.
        paid: Replicas that are paid for.
        joules: Energy of their devices.
        lost: Interruptions.
        wished: Largest number of replicas that the policy of each pool asked for.
        short: Largest number of replicas of each pool that lacked devices at once.
    """

    step: float
    arrived: np.ndarray
    served: np.ndarray
    backlog: np.ndarray
    share: np.ndarray
    wait: np.ndarray
    good: np.ndarray
    ready: np.ndarray
    paid: np.ndarray
    joules: np.ndarray
    lost: np.ndarray
    wished: list[int]
    short: list[int]


@dataclass
class _State:
    """State of a pool during the simulation; times in seconds."""

    pool: Pool
    nodes: Nodes
    ready: int = 0
    #: Times at which starting replicas will serve, and at which cold ones will be warm; sorted.
    coming: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    places: list[list[tuple[int, int]]] = field(default_factory=list)
    #: Time since which the policy has wanted more (1) or fewer (-1) replicas, and which.
    since: float = inf
    way: int = 0
    wished: int = 0
    short: int = 0

    def __post_init__(self) -> None:
        own = self.pool
        self.ready = self._add(own.initial)
        curves = own.warm, own.cold or own.warm
        self.capacity = [curve.capacity for curve in curves]
        self.flights, self.queues, self.cuts = (
            [curve.table(getattr(curve, name)) for curve in curves]
            for name in ("in_flight", "waiting", "cut")
        )

    def _add(self, count: int) -> int:
        """Take devices for up to ``count`` replicas; returns the number that got devices."""
        for done in range(count):
            found = self.nodes.take(self.pool.kind, self.pool.devices)
            if found is None:
                self.short = max(self.short, count - done)
                return done
            self.places.append(found)
        return count

    def _drop(self) -> None:
        self.nodes.give(self.pool.kind, self.places.pop())

    def start(self, count: int, now: float, ahead: float) -> None:
        """Start replicas on devices that become available after ``ahead`` seconds."""
        for _ in range(self._add(count)):
            insort(self.coming, now + ahead + self.pool.start_s)

    def advance(self, now: float) -> None:
        """Move replicas that are ready, or warm, by the time ``now`` to their new state."""
        done = bisect_right(self.coming, now)
        if self.pool.cold is not None:
            for time in self.coming[:done]:
                insort(self.cold, time + self.pool.warm_s)
        del self.coming[:done]
        self.ready += done
        del self.cold[: bisect_right(self.cold, now)]

    def power(self) -> float:
        """Capacity of all replicas in requests per second."""
        young = len(self.cold)
        return (self.ready - young) * self.capacity[0] + young * self.capacity[1]

    def interrupt(self, count: int, share: float, now: float) -> tuple[int, float]:
        """Interrupt and replace replicas; returns their number and the requests cut off."""
        spot = self.pool.spot
        count = min(count, self.ready)
        if spot is None or not count:
            return 0, 0.0
        for _ in range(count):
            # Cold replicas are as likely to be interrupted as warm ones.
            if len(self.cold) * 2 > self.ready:
                self.cold.pop()
            self.ready -= 1
            self._drop()
        self.start(count, now, max(spot.notice_s, spot.replacement_s))
        return count, count * self.cuts[0][_place(share)]

    def paid(self, now: float) -> float:
        """Number of replicas whose devices are available."""
        return self.ready + bisect_right(self.coming, now + self.pool.start_s)

    def scale(self, share: float, backlog: float, now: float) -> None:
        """Apply the autoscaling policy.

        Args:
            share: Utilisation in the step that ends.
            backlog: Waiting requests that fall to this pool.
            now: End of the step.
        """
        own, rule = self.pool, self.pool.scaling
        young, at = len(self.cold), _place(share)
        if rule.metric == "utilisation":
            seen = self.ready * share
        else:
            table = self.flights if rule.metric == "concurrency" else self.queues
            seen = backlog + (self.ready - young) * table[0][at] + young * table[1][at]
        wish = max(own.least, ceil(seen / rule.target - _TINY))
        if backlog > _TINY and not self.ready:
            wish = max(wish, 1)
        self.wished = max(self.wished, wish)
        have = self.ready + len(self.coming)
        wish = min(wish, own.most)
        way = (wish > have) - (wish < have)
        if way != self.way:
            self.way, self.since = way, now
        if way and now - self.since >= (rule.up_s if way > 0 else rule.down_s) - _TINY:
            self.way = 0
            if way > 0:
                self.start(wish - have, now, own.provision_s)
            for _ in range(have - wish):
                self._remove()

    def _remove(self) -> None:
        """Stop the youngest replica."""
        if self.coming:
            self.coming.pop()
        else:
            self.ready -= 1
            if self.cold:
                self.cold.pop()
        self._drop()


def _place(share: float) -> int:
    return int(share * PLACES + 0.5)


def play(
    pools: Sequence[Pool], arrived: np.ndarray, step: float, nodes: Nodes, seed: int = 0
) -> Played:
    """Simulate pools of replicas over a series of arrivals.

    The replicas of a model share one queue and get requests in proportion to their capacity. Pools
    that come first in ``pools`` take scarce devices first.

    Args:
        pools: Pools of replicas.
        arrived: Requests of each model in each step, shape ``(models, steps)``.
        step: Length of a step in seconds.
        nodes: Devices that the pools share; kinds that it does not list are unlimited.
        seed: Seed of the interruptions, a Poisson process.
    """
    models, steps = arrived.shape
    served, backlog, share = (np.zeros((models, steps)) for _ in range(3))
    ready, paid, young, lost, cut = (np.zeros((len(pools), steps)) for _ in range(5))
    states = [_State(pool, nodes) for pool in pools]
    of_model = [[s for s in states if s.pool.model == model] for model in range(models)]
    rng = np.random.default_rng(seed)
    left, used = [0.0] * models, [0.0] * models
    for at in range(steps):
        now = at * step
        again = [0.0] * models
        for i, state in enumerate(states):
            state.advance(now)
            spot, model = state.pool.spot, state.pool.model
            if spot is not None and state.ready:
                hit = int(rng.poisson(spot.rate_per_h * state.ready * step / 3600.0))
                lost[i, at], cut[i, at] = state.interrupt(hit, used[model], now)
                again[model] += cut[i, at]
                paid[i, at] = lost[i, at] * spot.notice_s / step
            ready[i, at], young[i, at] = state.ready, len(state.cold)
            paid[i, at] += state.paid(now)
        for model, own in enumerate(of_model):
            power = sum(state.power() for state in own)
            waiting = left[model] + float(arrived[model, at])
            done = min(waiting, power * step)
            used[model] = share[model, at] = done / (power * step) if power else 0.0
            served[model, at] = done - again[model]
            left[model] = backlog[model, at] = waiting - done + again[model]
            for state in own:
                part = state.power() / power if power else 1.0
                state.scale(used[model], left[model] * part, now + step)
    wait, good = np.zeros((models, steps)), np.zeros((models, steps))
    for model in range(models):
        own_pools = [i for i, pool in enumerate(pools) if pool.model == model]
        # At full load engines accept more requests than they hold on average.
        room = sum(ready[i] * pools[i].warm.room for i in own_pools)
        taken = np.cumsum(served[model]) + np.minimum(backlog[model], room)
        wait[model], when = _waits(arrived[model], taken, step)
        load = np.where(backlog[model] > room, 1.0, smoothed(share[model], arrived[model]))
        kept = _good(
            [pools[i] for i in own_pools],
            ready[own_pools][:, when],
            young[own_pools][:, when],
            load[when],
            wait[model],
        )
        # Requests that an interruption cuts off miss the SLO.
        late = cut[own_pools].sum(axis=0) / np.maximum(arrived[model], _TINY)
        good[model] = np.maximum(kept - late, 0.0)
    watts = (np.interp(share[pool.model], pool.warm.shares, pool.warm.watts) for pool in pools)
    joules = np.array(list(watts)) * paid * step
    wished = [max(state.wished, state.pool.least) for state in states]
    short = [state.short for state in states]
    return Played(
        step, arrived, served, backlog, share, wait, good, ready, paid, joules, lost, wished, short
    )


def smoothed(share: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    """Moving average over the time of a thousand requests (:data:`_COUNTED`), shape ``(steps,)``.

    Args:
        share: Values to average, one for each step.
        arrived: Requests in each step.
    """
    mean = float(arrived.mean())
    width = min(len(share), max(1, round(_COUNTED / mean))) if mean else 1
    total = np.concatenate([[0.0], np.cumsum(share)])
    at = np.arange(len(share))
    low, high = np.maximum(at - width // 2, 0), np.minimum(at - width // 2 + width, len(share))
    means: np.ndarray = (total[high] - total[low]) / (high - low)
    return means


def _waits(arrived: np.ndarray, taken: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Wait in seconds of the requests of each step, and the step in which they are accepted.

    Requests are accepted in order of arrival, and arrive in the middle of their step on average.

    Args:
        arrived: Requests in each step, shape ``(steps,)``.
        taken: Requests accepted up to the end of each step.
        step: Length of a step in seconds.
    """
    # The total falls where requests are cut off, which then wait again.
    taken = np.maximum.accumulate(taken)
    middle = np.cumsum(arrived) - arrived / 2.0
    when = np.searchsorted(taken, middle * (1.0 - _TINY))
    last = np.minimum(when, len(taken) - 1)
    before = np.where(last > 0, taken[last - 1], 0.0)
    within = (middle - before) / np.maximum(taken[last] - before, _TINY)
    own = np.arange(len(taken))
    wait = np.maximum((last - own + np.clip(within, 0.0, 1.0) - 0.5) * step, 0.0)
    return np.where(arrived > 0, np.where(when < len(taken), wait, inf), 0.0), last


def _good(
    pools: Sequence[Pool],
    ready: np.ndarray,
    young: np.ndarray,
    share: np.ndarray,
    wait: np.ndarray,
) -> np.ndarray:
    """Fraction of the requests of one model that meet its SLO, shape ``(steps,)``."""
    total, kept = np.zeros((2, len(share)))
    for pool, all_of, cold in zip(pools, ready, young, strict=True):
        for curve, count in ((pool.warm, all_of - cold), (pool.cold, cold)):
            if curve is not None:
                total += count * curve.capacity
                kept += count * curve.capacity * curve.good(share, wait)
    # Requests that no engine ever accepts miss it.
    return np.where(np.isfinite(wait), kept / np.maximum(total, _TINY), 0.0)
