"""Ends of intervals of serving: their keys, and how they are calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..trust.calibrator import COVERAGE, Calibrator, Ends, weighted_quantile
from .effects import Context

#: What is known of a row, most first: runs of its model, framework and chip generation; of both but
#: not of the model; of the generation alone; not even of that; of no chip of the vendor.
TIERS = ("model", "framework", "architecture", "new", "vendor")
#: How much wider, as logarithms, intervals are on chips of a vendor without any run than on new
#: ones of a known vendor; engineering estimate: operators there are priced by rooflines.
FOREIGN = 1.5
#: Value of the level ``spread`` of prompts that run on workers of their own.
APART = "disaggregated"
#: Share of waiting in a time to the first token from which its interval is another one.
SATURATED = 0.5
#: Ends of the interval where nothing was calibrated, as logarithms.
UNCALIBRATED = (-1.0, 1.0)
#: Fewest latencies that an interval is calibrated on.
LEAST = 20


class EndKey(NamedTuple):
    """What the ends of an interval are of.

    Attributes:
        metric: What is predicted.
        queued: Whether it is mostly waiting.
        apart: Whether prompts run on workers of their own.
        framework: Whose these are; empty for all.
        tier: What is known of the row, one of :data:`TIERS`; empty for any.
        elsewhere: Whether nobody measured the machines, by their source and device.
    """

    metric: str
    queued: bool = False
    apart: bool = False
    framework: str = ""
    tier: str = ""
    elsewhere: bool = False

    def __str__(self) -> str:
        """As in files, such as ``ttft-queued-apart-sglang/model/elsewhere``."""
        kind = (self.metric, "queued" * self.queued, "apart" * self.apart, self.framework)
        parts = ("-".join(filter(None, kind)), self.tier, "elsewhere" * self.elsewhere)
        return "/".join(filter(None, parts))

    @property
    def shared(self) -> EndKey:
        """The key that all frameworks have in common."""
        return self._replace(framework="")

    def fallbacks(self) -> Iterator[EndKey]:
        """The key and those that stand in for it, the most special one first."""
        for elsewhere in dict.fromkeys((self.elsewhere, False)):
            key = self._replace(elsewhere=elsewhere)
            yield from (key, key.shared, key.shared._replace(apart=False))


def kind_of(metric: str, queued: float, context: Context) -> EndKey:
    """Key of what an interval is of, without what is known of the row.

    Waiting makes times to the first token another one, workers that run prompts alone all times.
    How long these take to hand a request over is the framework's own: without a column that says
    why, TensorRT-LLM takes seconds on some machines, which says nothing of the others.
    """
    first, apart = metric == "ttft", context.get("spread") == APART
    named = context.get("framework", "") if first and apart else ""
    return EndKey(metric, first and queued > SATURATED, apart, named)


class Score(NamedTuple):
    """Error of a latency that was left out.

    Attributes:
        key: Of its interval.
        context: Of its row.
        group: Group of its row; groups count by the root of their size.
        latency: Number of the latency, which may have been left out in several ways.
        error: Logarithm of measured over predicted.
    """

    key: EndKey
    context: Context
    group: str
    latency: int
    error: float


def serving_ends(scores: Iterable[Score]) -> dict[str, Ends]:
    """Ends of intervals from errors of rows that were left out, by the text of their keys."""
    parts: dict[EndKey, list[Score]] = {}
    for score in scores:
        for key in {score.key, score.key.shared}:
            parts.setdefault(key, []).append(score)
    errors = {
        key: _errors(key, own)
        for key, own in parts.items()
        if len({score.latency for score in own}) >= LEAST
    }
    found = Calibrator[EndKey]()
    ends = found.ends
    for kind in {key._replace(tier="", elsewhere=False) for key in parts}:
        near = [kind._replace(tier=tier) for tier in TIERS]
        far = [key._replace(elsewhere=True) for key in near]
        for *known, new, vendor in (near, far):
            some = [key for key in (*known, new) if key in errors]
            reach = [_reach([errors[key] for key in some], side) for side in (-1, 1)]
            ends |= {key: (-low, high) for key, low, high in zip(some, *reach, strict=True)}
            for better, worse in pairwise([*known, new]):
                # Of a tier without errors nothing else is known.
                found.widen(worse, better)
            if new in ends:
                low, high = ends[new]
                ends[vendor] = (FOREIGN * low, FOREIGN * high)
        for here, there in zip(near, far, strict=True):
            found.widen(there, here)
    for key, (low, high) in ends.items():
        # One framework's runs are some of all, so that they do not tell of more that may be.
        least, most = ends.get(key.shared, (low, high))
        ends[key] = (max(low, least), min(high, most))
    return {str(key): own for key, own in ends.items()}


class Errors(NamedTuple):
    """Errors that ends are quantiles of, as logarithms, and their weights, shape ``(n,)`` each."""

    values: np.ndarray
    weight: np.ndarray

    def reach(self, side: int) -> float:
        """How far an end lies from the prediction: the lower one (-1) or the upper one (1)."""
        quantile = weighted_quantile(self.values, self.weight, (1 + side * COVERAGE) / 2)
        return max(0.0, side * quantile)


def _reach(tiers: Sequence[Errors], side: int) -> list[float]:
    """How far the ends of tiers reach to a side, no less far the less is known.

    Who knows less is not surer. Where the errors of a tier nevertheless reach less far than those
    of a better known one, a few groups of this one decide that, and the errors of both are those
    of one tier: an isotonic regression by pooling adjacent violators (Barlow et al., Statistical
    Inference under Order Restrictions, 1972).
    """
    pools: list[tuple[int, Errors]] = []
    for own in tiers:
        number = 1
        while pools and own.reach(side) < pools[-1][1].reach(side):
            better, others = pools.pop()
            number += better
            own = Errors(*map(np.concatenate, zip(others, own, strict=True)))
        pools.append((number, own))
    return [reach for number, own in pools for reach in [own.reach(side)] * number]


def _errors(key: EndKey, scores: Sequence[Score]) -> Errors:
    """Errors of a key's scores, wider by what these do not show."""
    groups = np.array([score.group for score in scores])
    values = np.array([score.error for score in scores])
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    # Not scaled to 1 on average, since tiers that are pooled count by the roots of their groups.
    weight = counts[index] ** -0.5
    # What was new of the rows: the next one is further off than any of n with a probability of
    # about 1 / n.
    novel = {"framework": ["group"], "architecture": ["engine"], "new": ["architecture"]}
    new = novel.get(key.tier, [])
    new += ["cluster"] if key.elsewhere else []
    kinds = [np.array([score.context.get(name, "") for score in scores]) for name in new]
    wider = 1.0 + 1.0 / min((_number(kind, weight) for kind in kinds), default=np.inf)
    if key.tier == "architecture":
        # Of an engine that nobody measured, it is not known on which side of the others it lies.
        values, weight = np.concatenate([values, -values]), np.tile(weight, 2)
    return Errors(wider * values, weight)


def _number(kinds: np.ndarray, weight: np.ndarray) -> float:
    """Effective number of kinds, of which a few may have most of the weight."""
    _, index = np.unique(kinds, return_inverse=True)
    shares = np.bincount(index, weight) / weight.sum()
    return float(1.0 / (shares**2).sum())
