"""The model of serving: effects, and intervals by what is known of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product

import numpy as np

from ...common.types import JsonMapping, typed
from ..core.store import JsonModel
from ..trust.calibrator import COVERAGE, Calibrator, Ends
from .effects import APART, Context, ServingEffects
from .ends import (
    ELSEWHERE,
    FOREIGN,
    NEW,
    REGIMES,
    TIERS,
    UNCALIBRATED,
    bound_of,
    kind_of,
)

#: What is predicted: mean time to the first token, mean time of a further one, time over tokens.
METRICS = ("ttft", "tpot", "per_token")
#: Time of a whole request of a closed loop. It is not learned but made of its two parts, whose
#: errors partly make up for each other, so that it has ends of its own.
REQUEST_TIME = "e2e"


@dataclass(frozen=True)
class OwnStack:
    """A stack that a model was adapted to.

    Attributes:
        memory: Share of the memory that its engines use; 0 where no run says it.
        groups: Its runs, by :func:`group_key`.
        ends: Of its intervals, by the text of :func:`~.ends.kind_of`.
    """

    memory: float = 0.0
    groups: tuple[str, ...] = ()
    ends: dict[str, Ends] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What a model was learned from.

    Attributes:
        rows: Their number.
        groups: Model groups by framework and chip: :func:`group_key`.
        clusters: Machines by source and device.
        chips: Devices with engines, formats and model groups: :func:`chip_key`.
        shapes: Groups of models by their sizes.
        sources: Of the runs.
        devices: That they ran on.
        vendors: Those of the chips; ``None`` where a file does not say.
        own: Stacks that it was adapted to, by source and device.
    """

    rows: int = 0
    groups: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    shapes: dict[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    vendors: tuple[str, ...] | None = None
    own: dict[str, OwnStack] = field(default_factory=dict)


@dataclass
class ServingModel(JsonModel):
    """Learned serving.

    Attributes:
        effects: On classes of cost.
        ends: Ends of the interval in deviations of a latency's logarithm
            (:meth:`~.effects.ServingEffects.spread`), by the text of an :class:`~.ends.EndKey`.
        provenance: What it was learned from.
    """

    form, what = 2, "serving"

    effects: ServingEffects = field(default_factory=ServingEffects)
    ends: dict[str, Ends] = field(default_factory=dict)
    provenance: Known = Known()

    def tier(self, context: Context) -> str:
        """What was measured of a row, one of :data:`TIERS`."""
        own = chip_key(context)
        if own in self.provenance.chips or group_key(context) in self._own(context).groups:
            return "model"
        chip, device = own.rpartition("|")[0], context.get("device", "")
        if any(key.rpartition("|")[0] == chip for key in self.provenance.chips):
            return "framework"
        if any(key.partition("|")[0] == device for key in self.provenance.chips):
            return "device"
        if self.effects.knows("architecture", context.get("architecture", "")):
            return "architecture"
        vendors = self.provenance.vendors
        known = vendors is None or context.get("vendor", "") in vendors
        return "new" if known else "vendor"

    def place(self, context: Context, tier: str) -> str:
        """Which intervals a row of a :meth:`tier` has: the place of an :class:`~.ends.EndKey`."""
        known = context.get("cluster", "") in self.provenance.clusters
        if not (known and self.effects.knows("engine", context.get("engine", ""))):
            return ELSEWHERE
        return "" if tier == TIERS[0] else NEW

    def source_note(self, source: str, device: str) -> tuple[str, ...]:
        """A note where no run on a named owner's machines was learned from: the name is idle."""
        known = {*self.provenance.clusters, *self.provenance.own}
        if not source or f"{source}|{device}" in known:
            return ()
        others = sorted(name.partition("|")[0] for name in known if name.endswith(f"|{device}"))
        told = f"; known on it: {', '.join(others)}" if others else ""
        return (f"nothing was learned of machines of {source!r} with {device}{told}",)

    def _own(self, context: Context) -> OwnStack:
        """The stack with runs of a row's model and engine that the model was adapted to, if any."""
        stack = self.provenance.own.get(context.get("cluster", ""), OwnStack())
        return stack if group_key(context) in stack.groups else OwnStack()

    def group_of(self, shape: str) -> str:
        """Model group of the measured runs whose model has a shape; without any, the shape."""
        return self.provenance.shapes.get(shape, shape)

    def own_stack(self, device: str, source: str = "") -> tuple[str, float]:
        """Source of the runs on a device that the model was adapted to, and their memory's share.

        Args:
            device: Its name.
            source: The only one that counts, and that is given back; empty for any.

        Returns:
            Empty and 0 where there are none.
        """
        for name, stack in self.provenance.own.items():
            known, _, where = name.partition("|")
            if where == device and source in ("", known):
                return known, stack.memory
        return source, 0.0

    def interval(
        self,
        metric: str,
        tier: str,
        queued: float,
        context: Context,
        spread: float,
        place: str | None = None,
    ) -> tuple[float, float]:
        """Ends of the 90 % interval as factors on an estimate.

        A time to the first token is a sum of what waits for other requests and of what does not, so
        that its ends lie between those of both kinds, and of queues, by the share of the first.

        Args:
            metric: One of :data:`METRICS`, or :data:`REQUEST_TIME`.
            tier: What is known of the row, one of :data:`TIERS`.
            queued: Share of the time to the first token that is waiting.
            context: Of the row.
            spread: Deviation of the logarithm (:meth:`~.effects.ServingEffects.spread`).
            place: As of :meth:`place`; ``None`` to look it up.
        """
        own = self._own(context).ends
        where = self.place(context, tier) if place is None else place
        foreign = FOREIGN if tier == "vendor" else 1.0
        unit = spread * foreign

        def factors(share: float) -> np.ndarray:
            kind = kind_of(metric, share, context)
            keys = [*kind._replace(place=where).fallbacks()]
            ends = Calibrator(self.ends).of(map(str, keys), UNCALIBRATED)
            bound = Calibrator(self.ends).of(map(bound_of, keys), (-np.inf, np.inf))
            reach = unit * np.array(own.get(str(kind.shared), ends))
            return np.exp(np.clip(reach, *(foreign * np.array(bound))))

        ends = np.stack([factors(share) for share in REGIMES])
        low, high = (float(np.interp(queued, REGIMES, column)) for column in ends.T)
        return low, high

    def tied_intervals(
        self,
        tier: str,
        queued: float,
        context: Context,
        parts: tuple[float, float],
        whole: str,
        spreads: Mapping[str, float],
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
            spreads: Deviations of the logarithms of ``ttft``, ``tpot`` and ``whole``.

        Returns:
            Of ``ttft``, ``tpot`` and :data:`REQUEST_TIME`.
        """
        first, after = parts
        ends = [
            self.interval(metric, tier, queued, context, spreads[metric])
            for metric in ("ttft", "tpot")
        ]
        if whole != REQUEST_TIME or any(key.startswith(REQUEST_TIME) for key in self.ends):
            factors = self.interval(whole, tier, queued, context, spreads[whole])
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

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "effects": {k: round(v, 5) for k, v in sorted(self.effects.values.items())},
            "deviations": {k: round(v, 4) for k, v in sorted(self.effects.deviations.items())},
            "ends": {k: [round(e, 5) for e in v] for k, v in sorted(self.ends.items())},
            "provenance": asdict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> ServingModel:
        """Read :meth:`to_dict`'s data."""
        values, deviations = (
            typed(dict[str, float], data[name], name) for name in ("effects", "deviations")
        )
        return cls(
            ServingEffects(values, deviations),
            typed(dict[str, Ends], data["ends"], "ends"),
            typed(Known, data["provenance"], "provenance"),
        )


def group_key(context: Context) -> str:
    """Model group, engine and chip generation of a row."""
    return "|".join(context.get(name, "") for name in ("group", "engine", "architecture"))


def chip_key(context: Context) -> str:
    """Device, engine, formats of weights and experts, and model group of a row."""
    names = ("device", "engine", "format", "expert_format", "group")
    return "|".join(context.get(name, "") for name in names)


def own_ends(model: ServingModel, errors: Mapping[str, Sequence[float]]) -> dict[str, Ends]:
    """Ends of intervals of a stack that a model was adapted to, by the text of :func:`kind_of`.

    Args:
        model: Before it was adapted.
        errors: By kind: logarithms of measured over predicted, in deviations, of runs that were
            left out. Without any, nothing more is known of a kind than before.
    """
    ends = {}
    cases = product((*METRICS, REQUEST_TIME), REGIMES, ("", APART))
    for kind in {kind_of(name, queued, {"spread": how}).shared for name, queued, how in cases}:
        left = errors.get(str(kind), ())
        keys = map(str, kind._replace(place="" if left else ELSEWHERE).fallbacks())
        low, high = Calibrator(model.ends).of(keys, UNCALIBRATED)
        if left:
            # The outer ones, since a few runs do not show how far others lie.
            outer = (1.0 - COVERAGE) / 2.0
            low = min(low, float(np.quantile(left, outer, method="lower")))
            high = max(high, float(np.quantile(left, 1.0 - outer, method="higher")))
        ends[str(kind)] = (round(low, 5), round(high, 5))
    return ends
