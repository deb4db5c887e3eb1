"""Keys and calibration of the bounds of serving intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..trust.calibrator import Calibrator, Ends, group_weight, weighted_ends
from .effects import APART, Context

#: Most similar measured runs that a row has, most similar first: the same model, engine, formats
#: and chip; the same without the model; the same chip; the same chip generation; none of these; and
#: no chip of the same vendor.
TIERS = ("model", "framework", "device", "architecture", "new", "vendor")
#: Calibration sets of intervals: ``NEW`` for models without runs with this engine and chip on a
#: measured cluster, ``ELSEWHERE`` for an unmeasured cluster (source and device) or engine.
NEW, ELSEWHERE = "new", "elsewhere"
#: Factor on the width of intervals on chips of a vendor without any run. Engineering estimate:
#: operators there are priced by rooflines.
FOREIGN = 1.5
#: Share of waiting in a time to the first token above which it counts as queued.
SATURATED = 0.5
#: Share above which nearly all of it is queueing, whose length is sensitive to small differences
#: between capacity and load.
FULL = 0.9
#: Representative shares of waiting of the three regimes: unqueued, queued, full.
REGIMES = (SATURATED / 2.0, (SATURATED + FULL) / 2.0, 1.0)
#: Share of the held-out errors within the limits that clip all bounds. Effects that offset each
#: other, such as those of hosts, have deviations that add up as if independent: unclipped,
#: multiples of these would span factors of 70 where the host dominates.
BOUNDED = 0.95
#: Fewest latencies to calibrate an interval on.
LEAST = 20
#: Power of a group's size in its total weight, between 0 (groups count equally) and 1 (runs do).
#: With 0.5, 94 to 97 % of the runs of held-out sources were inside.
GROUP_POWER = 0.75


class EndKey(NamedTuple):
    """Key of a calibrated interval.

    Bounds are multiples of a latency's deviation (:meth:`~.effects.ServingEffects.spread`), which
    already reflects how well the row's framework, chip and model are known.

    Attributes:
        metric: Predicted metric.
        queued: ``queued`` if most of the time is waiting, ``full`` if nearly all is, else empty.
        apart: Whether separate workers run the prompts.
        models: ``dense`` or ``experts``; empty for all.
        place: :data:`NEW`, :data:`ELSEWHERE`, or empty for a measured model, engine and cluster.
    """

    metric: str
    queued: str = ""
    apart: bool = False
    models: str = ""
    place: str = ""

    def __str__(self) -> str:
        """Text in files, such as ``ttft-queued-apart/elsewhere`` and ``tpot-dense``."""
        kind = (self.metric, self.queued, "apart" * self.apart, self.models)
        return "/".join(filter(None, ("-".join(filter(None, kind)), self.place)))

    @property
    def surer(self) -> tuple[str, ...]:
        """Better measured places, the nearest first."""
        return {ELSEWHERE: (NEW, ""), NEW: ("",)}.get(self.place, ())

    @property
    def shared(self) -> EndKey:
        """The key shared by dense models and models with experts."""
        return self._replace(models="")

    def fallbacks(self) -> Iterator[EndKey]:
        """The key and its substitutes, the most specific first."""
        for place in (self.place, *self.surer):
            key = self._replace(place=place)
            yield from (key, key.shared, key.shared._replace(apart=False))
            if self.queued:
                yield key._replace(queued="queued", apart=False)
                yield key._replace(queued="", models="", apart=False)


def kind_of(metric: str, queued: float, context: Context) -> EndKey:
    """Key of a latency's interval, without its place.

    Queued times have keys of their own: queue lengths and concurrent work depend on limits that are
    not recorded. So do first tokens of disaggregated prefill; further tokens are not affected.
    Expert kernels differ between engines by factors, dense layers by little.
    """
    apart = metric == "ttft" and context.get("spread") == APART
    waiting = ("full" if queued > FULL else "queued") if queued > SATURATED else ""
    models = "experts" if context.get("expert_format") else "dense"
    if apart or waiting or metric == "per_token":
        # Pass times are only a part of these, besides waiting or other phases of the run.
        models = ""
    return EndKey(metric, waiting, apart, models)


class Score(NamedTuple):
    """Error of a held-out latency.

    Attributes:
        key: Key of its interval.
        tier: Most similar measured runs of its row, one of :data:`TIERS`.
        context: Levels of its row.
        group: Group of its row; a group's weight is its size to the power of :data:`GROUP_POWER`.
        latency: Index of the latency, which may be held out in several ways.
        error: Logarithm of measured over predicted.
        spread: Predicted standard deviation of the error.
    """

    key: EndKey
    tier: str
    context: Context
    group: str
    latency: int
    error: float
    spread: float


def bound_of(key: EndKey) -> str:
    """Name under which the limits that clip a key's bounds are stored."""
    return f"{key}/bound"


def serving_ends(scores: Iterable[Score]) -> dict[str, Ends]:
    """Calibrate interval bounds, in deviations, on held-out errors; keyed by the keys' text.

    The limits that clip them (logarithms) are stored under :func:`bound_of`.

    Less knowledge never narrows an interval: bounds of unmeasured models, machines and engines are
    at least as wide as those of measured ones.
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
            found.ends[key] = weighted_ends(values, weight)
            bounds.ends[key] = weighted_ends(values * spreads, weight, BOUNDED)
    for kind in (found, bounds):
        for key in sorted(kind.ends, key=lambda key: len(key.surer)):
            for place in key.surer:
                kind.widen(key, key._replace(place=place))
        for key, (low, high) in kind.ends.items():
            if key.place == ELSEWHERE:
                # The error on the next machines is estimated from all models together.
                least, most = kind.ends.get(key.shared, (low, high))
                kind.ends[key] = (max(low, least), min(high, most))
    return {str(key): own for key, own in found.ends.items()} | {
        bound_of(key): own for key, own in bounds.ends.items()
    }


def _errors(key: EndKey, scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray]:
    """Errors in deviations, widened for unseen clusters, and their weights."""
    units = np.array([FOREIGN if score.tier == TIERS[-1] else 1.0 for score in scores])
    values = np.array([score.error / score.spread for score in scores]) / units
    weight = group_weight(np.array([score.group for score in scores]), GROUP_POWER)
    if key.place == ELSEWHERE:
        # Standard factor of an interval for one more cluster after n measured ones.
        clusters = [score.context.get("cluster", "") for score in scores]
        values = values * (1.0 + 1.0 / _number(clusters, weight)) ** 0.5
    return values, weight


def _number(kinds: Sequence[str], weight: np.ndarray) -> float:
    """Effective number of kinds: the inverse Simpson index of their weights."""
    _, index = np.unique(kinds, return_inverse=True)
    shares = np.bincount(index, weight) / weight.sum()
    return float(1.0 / (shares**2).sum())
