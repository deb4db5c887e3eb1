"""Ends of intervals of serving: their keys, and how they are calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..trust.calibrator import NORMAL_90, Calibrator, Ends, weighted_quantile
from .effects import APART, Context

#: What was measured of a row, most first: its model under its engine in its formats on its chip;
#: all of that but the model; the chip alone; others of its generation; none of these; no chip of
#: its vendor.
TIERS = ("model", "framework", "device", "architecture", "new", "vendor")
#: Where intervals are: of models that nobody measured with their engine on their chip, on machines
#: that somebody did; where nobody measured the machines, by their source and device, or the engine.
NEW, ELSEWHERE = "new", "elsewhere"
#: How much wider intervals are on chips of a vendor without any run than elsewhere; engineering
#: estimate: operators there are priced by rooflines.
FOREIGN = 1.5
#: Share of waiting in a time to the first token from which its interval is another one.
SATURATED = 0.5
#: The same from which nearly all of it is a queue, whose length follows from small differences of
#: what engines serve and what is asked.
FULL = 0.9
#: Shares of waiting that stand for times that hardly wait, for those that wait, and for queues.
REGIMES = (SATURATED / 2.0, (SATURATED + FULL) / 2.0, 1.0)
#: Ends of the interval where nothing was calibrated, in deviations: 90 % of a normal distribution.
UNCALIBRATED = (-NORMAL_90, NORMAL_90)
#: Share of the errors of left-out rows between the logarithms that no end lies beyond. Deviations
#: of effects that make up for each other, as those of hosts do, count as if they did not: where
#: hosts decide, their multiples alone would reach for factors of 70.
BOUNDED = 0.95
#: Fewest latencies that an interval is calibrated on.
LEAST = 20


class EndKey(NamedTuple):
    """What the ends of an interval are of.

    How much is known of a row's framework, chip and model is in its deviation
    (:meth:`~.effects.ServingEffects.spread`), which ends are multiples of.

    Attributes:
        metric: What is predicted.
        queued: ``queued`` of what is mostly waiting, ``full`` of what is nearly nothing else, else
            empty.
        apart: Whether prompts run on workers of their own.
        models: ``dense`` or ``experts``; empty for all.
        place: :data:`NEW`, :data:`ELSEWHERE`, or empty where all of it was measured.
    """

    metric: str
    queued: str = ""
    apart: bool = False
    models: str = ""
    place: str = ""

    def __str__(self) -> str:
        """As in files, such as ``ttft-queued-apart/elsewhere`` and ``tpot-dense``."""
        kind = (self.metric, self.queued, "apart" * self.apart, self.models)
        return "/".join(filter(None, ("-".join(filter(None, kind)), self.place)))

    @property
    def surer(self) -> tuple[str, ...]:
        """Places that more is known of, the nearest first."""
        return {ELSEWHERE: (NEW, ""), NEW: ("",)}.get(self.place, ())

    @property
    def shared(self) -> EndKey:
        """The key that all models have in common."""
        return self._replace(models="")

    def fallbacks(self) -> Iterator[EndKey]:
        """The key and those that stand in for it, the most special one first."""
        for place in (self.place, *self.surer):
            key = self._replace(place=place)
            yield from (key, key.shared, key.shared._replace(apart=False))
            if self.queued:
                yield key._replace(queued="queued", apart=False)
                yield key._replace(queued="", models="", apart=False)


def kind_of(metric: str, queued: float, context: Context) -> EndKey:
    """Key of what an interval is of, without what is known of the row.

    Waiting makes a time another one: how long a queue gets, and what runs beside it, follows from
    limits that are not said. So do workers that run prompts alone of first tokens; a further token
    is what it is elsewhere. Which kernels an engine has for experts differs by factors, those of
    dense layers are much alike.
    """
    apart = metric == "ttft" and context.get("spread") == APART
    waiting = ("full" if queued > FULL else "queued") if queued > SATURATED else ""
    models = "experts" if context.get("expert_format") else "dense"
    if apart or waiting or metric == "per_token":
        # What passes take is a part of these, beside what waits and what a whole run holds.
        models = ""
    return EndKey(metric, waiting, apart, models)


class Score(NamedTuple):
    """Error of a latency that was left out.

    Attributes:
        key: Of its interval.
        tier: What was known of its row, one of :data:`TIERS`.
        context: Of its row.
        group: Group of its row; groups count by the root of their size.
        latency: Number of the latency, which may have been left out in several ways.
        error: Logarithm of measured over predicted.
        spread: How far off it was expected to be, its deviation.
    """

    key: EndKey
    tier: str
    context: Context
    group: str
    latency: int
    error: float
    spread: float


def bound_of(key: EndKey) -> str:
    """Text under which the logarithms that no end of a key lies beyond stand among the ends."""
    return f"{key}/bound"


def serving_ends(scores: Iterable[Score]) -> dict[str, Ends]:
    """Ends of intervals in deviations from errors of rows that were left out, by their keys' text.

    Beside them, under :func:`bound_of`, logarithms that they do not reach beyond.

    Who knows less is not surer: ends of models, machines and engines that nobody measured reach no
    less far than those of measured ones.
    """
    parts: dict[EndKey, list[Score]] = {}
    for score in scores:
        for key in {score.key, score.key.shared}:
            parts.setdefault(key, []).append(score)
    found, bounds = Calibrator[EndKey](), Calibrator[EndKey]()
    for key, own in parts.items():
        if len({score.latency for score in own}) >= LEAST:
            spreads = np.array([score.spread for score in own])
            values, weight = _errors(key, own)
            found.add(key, values, weight)
            tail = (1.0 - BOUNDED) / 2.0
            least, most = (
                weighted_quantile(values * spreads, weight, share) for share in (tail, 1.0 - tail)
            )
            bounds.ends[key] = (min(least, 0.0), max(most, 0.0))
    for kind in (found, bounds):
        for key in sorted(kind.ends, key=lambda key: len(key.surer)):
            for place in key.surer:
                kind.widen(key, key._replace(place=place))
        for key, (low, high) in kind.ends.items():
            if key.place == ELSEWHERE:
                # How far off the next machines may be is told by those of all models.
                least, most = kind.ends.get(key.shared, (low, high))
                kind.ends[key] = (max(low, least), min(high, most))
    return {str(key): own for key, own in found.ends.items()} | {
        bound_of(key): own for key, own in bounds.ends.items()
    }


def _errors(key: EndKey, scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray]:
    """Errors of a key's scores, wider by what these do not show, and their weights."""
    groups = np.array([score.group for score in scores])
    units = np.array([FOREIGN if score.tier == TIERS[-1] else 1.0 for score in scores])
    values = np.array([score.error / score.spread for score in scores]) / units
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    weight = counts[index] ** -0.5
    if key.place == ELSEWHERE:
        # The next machines are further off than any of n with a probability of about 1 / n.
        clusters = [score.context.get("cluster", "") for score in scores]
        values = values * (1.0 + 1.0 / _number(clusters, weight))
    return values, weight


def _number(kinds: Sequence[str], weight: np.ndarray) -> float:
    """Effective number of kinds, of which a few may have most of the weight."""
    _, index = np.unique(kinds, return_inverse=True)
    shares = np.bincount(index, weight) / weight.sum()
    return float(1.0 / (shares**2).sum())
