"""The model of serving: effects, and intervals by what is known of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...common.paths import PACKAGE
from ...common.types import JsonMapping
from ..core.store import read_json_model, write_json_model
from ..trust.calibrator import Calibrator
from ..trust.conformal import COVERAGE
from .effects import Context, ServingEffects

#: Format of the file that :meth:`ServingModel.save` writes.
FORMAT = 1
#: Model that ships with the package.
PRETRAINED = PACKAGE / "models" / "pretrained" / "serving.json"
#: What is predicted: mean time to the first token, mean time of a further one, time over tokens.
METRICS = ("ttft", "tpot", "per_token")
#: Time of a whole request of a closed loop. It is not learned but made of its two parts, whose
#: errors partly make up for each other, so that it has ends of its own.
REQUEST_TIME = "e2e"
#: What is known of a row, most first: runs of its model, framework and chip generation; of both but
#: not of the model; of the generation alone; not even of that; of no chip of the vendor.
TIERS = ("model", "framework", "architecture", "new", "vendor")
#: How much wider, as logarithms, intervals are on chips of a vendor without any run than on new
#: ones of a known vendor; engineering estimate: operators there are priced by rooflines.
FOREIGN = 1.5
#: Ends on machines that nobody measured, by their source and device, have this appended to the key.
ELSEWHERE = "/elsewhere"
#: Value of the level ``spread`` of prompts that run on workers of their own.
APART = "disaggregated"
#: Share of waiting in a time to the first token from which its interval is another one.
SATURATED = 0.5
#: Ends of the interval where nothing was calibrated, as logarithms.
UNCALIBRATED = (-1.0, 1.0)
#: Fewest latencies that an interval is calibrated on.
LEAST = 20


@dataclass
class ServingModel:
    """Learned serving.

    Attributes:
        effects: On classes of cost.
        ends: Ends of the interval as logarithms, by ``kind/tier`` (:func:`kind_of`), and for
            machines that nobody measured by that and :data:`ELSEWHERE`.
        provenance: What it was learned from: ``groups`` are model groups by framework and chip,
            ``shapes`` the groups of models by their sizes, ``vendors`` those of the chips,
            ``clusters`` the machines by source and device,
            ``own`` the stacks it was adapted to: ``memory``, ``groups`` and ``ends`` of each.
    """

    effects: ServingEffects = field(default_factory=ServingEffects)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)

    def tier(self, context: Context) -> str:
        """What is known of a row, one of :data:`TIERS`."""
        groups = self.provenance.get("groups", ())
        if isinstance(groups, list) and group_key(context) in groups:
            return "model"
        if self._own(context):
            return "model"
        if not self.effects.knows("architecture", context.get("architecture", "")):
            vendors = self.provenance.get("vendors", ())
            known = not isinstance(vendors, list) or context.get("vendor", "") in vendors
            return "new" if known else "vendor"
        named = self.effects.knows("engine", context.get("engine", ""))
        return "framework" if named else "architecture"

    def measured_on(self, context: Context) -> bool:
        """Whether there are runs of a row's very machines: of its source, on its device."""
        clusters = self.provenance.get("clusters", ())
        return isinstance(clusters, list) and context.get("cluster", "") in clusters

    def _own(self, context: Context) -> Mapping[str, object]:
        """The stack with runs of a row's model and engine that the model was adapted to, if any."""
        own = self.provenance.get("own", {})
        stack = own.get(context.get("cluster", "")) if isinstance(own, dict) else None
        known = isinstance(stack, dict) and group_key(context) in stack.get("groups", ())
        return stack if isinstance(stack, dict) and known else {}

    def group_of(self, shape: str) -> str:
        """Model group of the measured runs whose model has a shape; without any, the shape."""
        shapes = self.provenance.get("shapes", {})
        return str(shapes.get(shape, shape)) if isinstance(shapes, dict) else shape

    def own_stack(self, device: str, source: str = "") -> tuple[str, float]:
        """Source of the runs on a device that the model was adapted to, and their memory's share.

        Args:
            device: Its name.
            source: The only one that counts, and that is given back; empty for any.

        Returns:
            Empty and 0 where there are none.
        """
        own = self.provenance.get("own", {})
        for name, stack in own.items() if isinstance(own, dict) else ():
            known, _, where = str(name).partition("|")
            if where == device and source in ("", known):
                return known, float(stack["memory"])
        return source, 0.0

    def interval(
        self,
        metric: str,
        tier: str,
        queued: float,
        context: Context,
        measured_on: bool | None = None,
    ) -> tuple[float, float]:
        """Ends of the 90 % interval as factors on an estimate.

        A time to the first token is a sum of what waits for other requests and of what does not, so
        that its ends are those of both kinds in these shares.

        Args:
            metric: One of :data:`METRICS`, or :data:`REQUEST_TIME`.
            tier: What is known of the row, one of :data:`TIERS`.
            queued: Share of the time to the first token that is waiting.
            context: Of the row.
            measured_on: Whether runs of its machines were measured; ``None`` to look it up.
        """
        own = self._own(context).get("ends", {})
        here = self.measured_on(context) if measured_on is None else measured_on

        def factors(share: float) -> np.ndarray:
            kind = kind_of(metric, share, context)
            ends = self.ends_of(kind, tier, here)
            return np.exp(own.get(shared_kind(kind), ends) if isinstance(own, dict) else ends)

        low, high = (1.0 - queued) * factors(0.0) + queued * factors(1.0)
        return float(low), float(high)

    def tied_intervals(
        self, tier: str, queued: float, context: Context, parts: tuple[float, float], whole: str
    ) -> dict[str, tuple[float, float]]:
        """Ends as factors of the times of a request where its parts and the throughput are tied.

        In a closed loop, requests a second are those in flight over the time of one (Little's law),
        and requests that are all sent at once end with the run. So throughput has the ends of whole
        requests, and a part is at most what the least of the other leaves of the longest request.

        Args:
            tier: What is known of the row, one of :data:`TIERS`.
            queued: Share of the time to the first token that is waiting.
            context: Of the row.
            parts: Mean seconds to the first token, and from there to the last.
            whole: Metric whose ends whole requests have: :data:`REQUEST_TIME` of a closed loop,
                else ``per_token``.

        Returns:
            Of ``ttft``, ``tpot`` and :data:`REQUEST_TIME`.
        """
        first, after = parts
        ends = [self.interval(metric, tier, queued, context) for metric in ("ttft", "tpot")]
        if whole != REQUEST_TIME or any(key.startswith(REQUEST_TIME) for key in self.ends):
            factors = self.interval(whole, tier, queued, context)
            low, high = ((first + after) * factor for factor in factors)
        else:
            low, high = (first * one + after * other for one, other in zip(*ends, strict=True))
        tied = {REQUEST_TIME: (low / (first + after), high / (first + after))}
        sizes = {"ttft": (first, after * ends[1][0], after * ends[1][1], ends[0])}
        sizes["tpot"] = (after, first * ends[0][0], first * ends[0][1], ends[1])
        for metric, (own, least, most, (down, up)) in sizes.items():
            if own > 0.0:
                down, up = max(down, (low - most) / own), min(up, (high - least) / own)
            tied[metric] = (min(down, 1.0), max(up, 1.0))
        return tied

    def ends_of(self, kind: str, tier: str, measured_on: bool) -> tuple[float, float]:
        """Ends of the 90 % interval as logarithms.

        Args:
            kind: From :func:`kind_of`.
            tier: What is known of the row, one of :data:`TIERS`.
            measured_on: Whether runs of its machines were measured.
        """
        shared = shared_kind(kind)
        names = dict.fromkeys((kind, shared, shared.removesuffix("-apart")))
        near = [f"{name}/{tier}" for name in names]
        if not measured_on:
            near = [f"{name}{ELSEWHERE}" for name in near] + near
        return Calibrator(self.ends).of(near, UNCALIBRATED)

    def save(self, path: Path) -> None:
        """Write the model as one JSON file."""
        data = {
            "effects": {k: round(v, 5) for k, v in sorted(self.effects.values.items())},
            "ends": {k: [round(e, 5) for e in v] for k, v in self.ends.items()},
            "provenance": self.provenance,
        }
        write_json_model(path, FORMAT, data)

    @classmethod
    def load(cls, path: Path = PRETRAINED) -> ServingModel:
        """Read a model.

        Raises:
            ModelError: The file is missing, damaged, or of another format.
        """

        def made(data: JsonMapping) -> ServingModel:
            return cls(
                ServingEffects({str(k): float(v) for k, v in data["effects"].items()}),
                {str(k): (float(v[0]), float(v[1])) for k, v in data["ends"].items()},
                dict(data["provenance"]),
            )

        return read_json_model(path, FORMAT, "serving", made)


@lru_cache(maxsize=1)
def shipped_serving() -> ServingModel:
    """The model that ships with the package, read once."""
    return ServingModel.load()


def find_serving_model(name: str) -> ServingModel:
    """The model of serving that ships, for ``default``, or one from a file.

    Raises:
        ModelError: The file is missing or damaged.
    """
    return shipped_serving() if name == "default" else ServingModel.load(Path(name))


def group_key(context: Context) -> str:
    """Model group, engine and chip generation of a row."""
    return "|".join(context.get(name, "") for name in ("group", "engine", "architecture"))


def kind_of(metric: str, queued: float, context: Context) -> str:
    """Metric that an interval is of.

    Waiting makes times to the first token another one, workers that run prompts alone all times.
    How long these take to hand a request over is the framework's own: without a column that says
    why, TensorRT-LLM takes seconds on some machines, which says nothing of the others.
    """
    if context.get("spread") != APART:
        return "ttft-queued" if metric == "ttft" and queued > SATURATED else metric
    if metric != "ttft":
        return f"{metric}{_APART}"
    named = context.get("framework", "")
    first = "ttft-queued" if queued > SATURATED else metric
    return f"{first}{_APART}" + (f"-{named}" if named else "")


#: What kinds of workers that run prompts alone end with, but for the framework.
_APART = "-apart"


def shared_kind(kind: str) -> str:
    """The kind that all frameworks have in common."""
    return kind[: kind.index(_APART) + len(_APART)] if _APART in kind else kind


def own_ends(
    model: ServingModel, tier: str, errors: Mapping[str, Sequence[float]]
) -> dict[str, tuple[float, float]]:
    """Ends of intervals of a stack that a model was adapted to, by :func:`kind_of`.

    Args:
        model: Before it was adapted.
        tier: What it knew of the stack's runs.
        errors: By kind: logarithms of measured over predicted, of runs that were left out. Without
            any, nothing more is known of a kind than before.
    """
    ends = {}
    cases = product((*METRICS, REQUEST_TIME), (0.0, 1.0), ("", APART))
    for kind in {kind_of(metric, queued, {"spread": how}) for metric, queued, how in cases}:
        left = errors.get(kind, ())
        known = f"{kind}/{TIERS[0] if left else tier}"
        low, high = model.ends.get(known, UNCALIBRATED)
        if not left:
            low, high = model.ends.get(known + ELSEWHERE, (low, high))
        if left:
            # The outer ones, since a few runs do not show how far others lie.
            outer = (1.0 - COVERAGE) / 2.0
            low = min(low, float(np.quantile(left, outer, method="lower")))
            high = max(high, float(np.quantile(left, 1.0 - outer, method="higher")))
        ends[kind] = (round(low, 5), round(high, 5))
    return ends


class Score(NamedTuple):
    """Error of a latency that was left out.

    Attributes:
        kind: :func:`kind_of` it.
        tier: What was known of its row.
        measured_on: Whether runs of its machines were learned from.
        context: Of its row.
        group: Group of its row; groups count by the root of their size.
        latency: Number of the latency, which may have been left out in several ways.
        error: Logarithm of measured over predicted.
    """

    kind: str
    tier: str
    measured_on: bool
    context: Context
    group: str
    latency: int
    error: float


def serving_ends(scores: Iterable[Score]) -> dict[str, tuple[float, float]]:
    """Ends of intervals from errors of rows that were left out."""
    parts: dict[tuple[str, str, bool], list[Score]] = {}
    for score in scores:
        for kind in {score.kind, shared_kind(score.kind)}:
            parts.setdefault((kind, score.tier, score.measured_on), []).append(score)
    found = Calibrator()
    for (kind, tier, here), own in parts.items():
        if len({score.latency for score in own}) >= LEAST:
            _calibrate(found, f"{kind}/{tier}{'' if here else ELSEWHERE}", own, tier, here)
    ends = found.ends
    for kind in {kind for kind, _, _ in parts}:
        for place in ("", ELSEWHERE):
            for better, worse in pairwise(TIERS[:-1]):
                # Who knows less is not surer.
                found.widen(f"{kind}/{worse}{place}", f"{kind}/{better}{place}")
            widest = ends.get(f"{kind}/new{place}")
            if widest:
                ends[f"{kind}/vendor{place}"] = (FOREIGN * widest[0], FOREIGN * widest[1])
        for tier in TIERS:
            found.widen(f"{kind}/{tier}{ELSEWHERE}", f"{kind}/{tier}")
    for name, (low, high) in ends.items():
        kind, _, rest = name.partition("/")
        # One framework's runs are some of all, so that they do not tell of more that may be.
        shared = ends.get(f"{shared_kind(kind)}/{rest}", (low, high))
        ends[name] = (max(low, shared[0]), min(high, shared[1]))
    return ends


def _calibrate(found: Calibrator, key: str, scores: Sequence[Score], tier: str, here: bool) -> None:
    """Take the ends of a key from the scores of a tier, on measured machines or others."""
    groups = np.array([score.group for score in scores])
    values = np.array([score.error for score in scores])
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    weight = counts[index] ** -0.5
    # What was new of the rows: the next one is further off than any of n with a probability of
    # about 1 / n.
    novel = {"framework": ["group"], "architecture": ["engine"], "new": ["architecture"]}
    new = novel.get(tier, [])
    new += [] if here else ["cluster"]
    kinds = [np.array([score.context.get(name, "") for score in scores]) for name in new]
    wider = 1.0 + 1.0 / min((_number(kind, weight) for kind in kinds), default=np.inf)
    if tier == "architecture":
        # Of an engine that nobody measured, it is not known on which side of the others it lies.
        values, weight = np.concatenate([values, -values]), np.tile(weight, 2)
    found.add(key, values, weight, wider)


def _number(kinds: np.ndarray, weight: np.ndarray) -> float:
    """Effective number of kinds, of which a few may have most of the weight."""
    _, index = np.unique(kinds, return_inverse=True)
    shares = np.bincount(index, weight) / weight.sum()
    return float(1.0 / (shares**2).sum())
