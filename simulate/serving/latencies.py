"""Latencies of a simulated run as its users see them, and what its engines held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from .floor import NO_FLOOR, Floors
from .load import History, Load, Run

#: Percentiles of latencies, beside the mean.
LEVELS = (50, 90, 99)
#: What is reported of each request.
METRICS = ("ttft", "tpot", "itl", "e2e")


class Slo(NamedTuple):
    """What a request has to keep, in seconds; infinite where nothing is asked.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time of a further token.
        e2e: Time to the last token.
    """

    ttft: float = inf
    tpot: float = inf
    e2e: float = inf


#: Nothing is asked.
FREE = Slo()


@dataclass(frozen=True)
class Served:
    """Latencies of one simulated run as a user sees them, in seconds, shape ``(n,)``.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time of a further token; NaN for requests of one.
        e2e: Time to the last token.
        gaps: Times between tokens of all requests, sorted.
        weights: How many tokens came after each gap.
        counts: How many requests each stands for.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    gaps: np.ndarray
    weights: np.ndarray
    counts: np.ndarray

    def figure(self, metric: str, level: int | str) -> float:
        """A percentile of a metric, its ``mean`` or its ``std``; 0 where there is none."""
        if metric == "itl":
            return _weighted(self.gaps, self.weights, level)
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}[metric]
        known = np.isfinite(values)
        values, counts = values[known], self.counts[known]
        if isinstance(level, int) and len(values) and (counts == 1.0).all():
            return float(np.percentile(values, level))
        order = np.argsort(values)
        return _weighted(values[order], counts[order], level)

    def good(self, slo: Slo) -> float:
        """Share of the requests that keep an SLO."""
        tpot = np.nan_to_num(self.tpot, nan=0.0)
        kept = (self.ttft <= slo.ttft) & (tpot <= slo.tpot) & (self.e2e <= slo.e2e)
        return float(np.average(kept, weights=self.counts))


def _weighted(values: np.ndarray, weights: np.ndarray, level: int | str) -> float:
    """A percentile of sorted values, their ``mean`` or ``std``; 0 where there is none."""
    if not len(values):
        return 0.0
    if isinstance(level, int):
        total = np.cumsum(weights)
        return float(values[np.searchsorted(total, level / 100.0 * total[-1])])
    mean = float(np.average(values, weights=weights))
    if level == "mean":
        return mean
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))


def served(
    load: Load, run: Run, first: float = 1.0, slower: float = 1.0, floor: Floors = NO_FLOOR
) -> Served:
    """Latencies of a run.

    Args:
        load: Its requests.
        run: The run.
        first: Factor on times to the first token.
        slower: Factor on everything after it.
        floor: Least times, below which no factor takes them.
    """
    ttft = np.maximum((run.first - run.sent) * first, floor.ttft)
    after = np.maximum((run.finished - run.first) * slower, floor.e2e - floor.ttft)
    # One token has no time per further token.
    tpot = after / np.where(load.outputs > 1, load.outputs - 1.0, np.nan)
    gaps = [gap for history in run.histories for gap in history.gaps]
    if gaps:
        times, weights = (np.array(column, float) for column in zip(*gaps, strict=True))
    else:
        known = np.isfinite(tpot)
        times, weights = tpot[known] / slower, ((load.outputs - 1.0) * load.counts)[known]
    order = np.argsort(times)
    between = np.maximum(times[order] * slower, floor.tpot.min())
    return Served(ttft, tpot, ttft + after, between, weights[order], load.counts)


def tied(
    seen: Served, first: float, slower: float, whole: float, floor: Floors = NO_FLOOR
) -> Served:
    """Latencies with factors of their own on whole requests, none of which is shorter than a part.

    Args:
        seen: Latencies.
        first: Factor on times to the first token.
        slower: Factor on times of a further token.
        whole: Factor on times of requests.
        floor: Least times, below which no factor takes them.
    """
    e2e = np.maximum(seen.e2e * whole, floor.e2e)
    return replace(
        seen,
        ttft=np.maximum(np.minimum(seen.ttft * first, e2e), floor.ttft),
        tpot=np.maximum(seen.tpot * slower, floor.tpot),
        e2e=e2e,
        gaps=np.maximum(seen.gaps * slower, floor.tpot.min()),
    )


def wider(end: Served, other: Served, side: int) -> Served:
    """The outer of two ends of an interval: the lower one for side 0, the upper for 1."""
    outer = np.maximum if side else np.minimum
    found = replace(
        end,
        ttft=outer(end.ttft, other.ttft),
        tpot=outer(end.tpot, other.tpot),
        e2e=outer(end.e2e, other.e2e),
    )
    # Runs of ends have no history: gaps between tokens are as much further off as their means.
    before, after = (one.figure("tpot", "mean") for one in (end, found))
    return replace(found, gaps=end.gaps * (after / before)) if before > 0.0 else found


def states_of(run: Run, room: int, engines: int) -> dict[str, float]:
    """Means over time of what decoding engines held and ran; nothing without histories.

    The queue is of all that wait: at an engine, or where workers of their own run prompts, at one
    of those, at its link and at an engine.
    """
    if not run.histories:
        return {}
    found: dict[str, list[float]] = {"kv": [], "batch": [], "peak": []}
    for history in run.histories[:engines]:
        if not history.time:
            continue
        for name, values in (("kv", history.held), ("batch", history.batch)):
            found[name].append(_over_time(history, values))
        found["peak"].append(max(history.held))
    if not found["kv"]:
        return {}
    ahead = run.histories[engines:]
    queues = [_queue(run.histories[:engines]), _queue(ahead), _links(run, len(ahead))]
    mean, longest = np.sum(queues, axis=0)
    return {
        "kv_occupancy_mean": float(np.mean(found["kv"])) / room,
        "kv_occupancy_max": max(found["peak"]) / room,
        "batch_mean": float(np.mean(found["batch"])),
        "queue_mean": float(mean),
        "queue_max": float(longest),
    }


def _over_time(history: History, values: Sequence[float]) -> float:
    """Mean over time of what a history kept at its times."""
    spans = np.diff(history.time, prepend=0.0)
    return float(np.array(values) @ spans) / max(float(spans.sum()), 1e-12)


def _queue(histories: Sequence[History]) -> tuple[float, float]:
    """Requests that wait at one of several engines: mean over time, and most at any."""
    means, longest = [], 0
    for history in histories:
        if history.time:
            means.append(_over_time(history, history.waiting))
            longest = max(longest, max(history.waiting))
    return (float(np.mean(means)), float(longest)) if means else (0.0, 0.0)


def _links(run: Run, count: int) -> tuple[float, float]:
    """Caches that wait for one of several links: mean over the run, and most at any time."""
    waits = run.moves[run.moves[:, 1] > run.moves[:, 0]]
    if not len(waits):
        return 0.0, 0.0
    # One more when a cache is ready, one less when it moves: ends before beginnings of one time.
    times = np.concatenate([waits[:, 1], waits[:, 0]])
    steps = np.repeat([-1, 1], len(waits))
    most = np.cumsum(steps[np.argsort(times, kind="stable")]).max()
    return float((waits[:, 1] - waits[:, 0]).sum()) / run.makespan / count, float(most) / count


def queued_share(load: Load, run: Run) -> float:
    """Share of the mean time to the first token that is waiting for other requests.

    Of the prompts of which about as many tokens had to be run (half an octave), the one that waited
    least was alone, or nearly so. What a cache has of a prompt is not run.
    """
    waits, alone = _waits(load, run)
    mean = partial(np.average, weights=load.counts)
    return max(0.0, 1.0 - float(mean(alone)) / float(mean(waits)))


def typical_wait(load: Load, run: Run) -> float:
    """Share of the time to the first token that the median request waits for others.

    Of a closed loop, requests after those that are sent at once when it begins: their burst ends,
    however long the loop lasts.
    """
    waits, alone = _waits(load, run)
    start = load.concurrency if load.concurrency < len(waits) else 0
    return float(np.median(1.0 - alone[start:] / waits[start:]))


def _waits(load: Load, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Times to first tokens, and those that requests alone would have; seconds, shape ``(n,)``."""
    waits = run.first - run.sent
    bins = np.round(2.0 * np.log2(load.prompts - run.found)).astype(int)
    least = np.full(bins.max() + 1, inf)
    np.minimum.at(least, bins, waits)
    return waits, least[bins]
