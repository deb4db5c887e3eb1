"""Serving model: learned effects, with intervals that depend on which runs were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product

import numpy as np

from ...common.types import JsonMapping, typed
from ..core.store import JsonModel
from ..effects import source_note
from ..trust.calibrator import COVERAGE, STANDARD, Calibrator, Ends
from .effects import APART, Context, ServingEffects
from .ends import (
    ELSEWHERE,
    FOREIGN,
    NEW,
    REGIMES,
    TIERS,
    bound_of,
    kind_of,
)

#: Learned metrics: mean time to the first token, mean time per further token, time over all tokens.
METRICS = ("ttft", "tpot", "per_token")
#: Time of a whole request in a closed loop. It is the sum of its two parts rather than learned; the
#: errors of the parts partly cancel, so its intervals are calibrated separately.
REQUEST_TIME = "e2e"


@dataclass(frozen=True)
class OwnStack:
    """A serving stack that a model was adapted to.

    Attributes:
        memory: Fraction of GPU memory that its engines use; 0 if no run reports it.
        groups: Groups of its runs, as of :func:`group_key`.
        ends: Interval bounds by the text of :func:`~.ends.kind_of`.
    """

    memory: float = 0.0
    groups: tuple[str, ...] = ()
    ends: dict[str, Ends] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """Provenance: the runs that a model was learned from.

    Attributes:
        rows: Number of rows.
        groups: Model groups by framework and chip (:func:`group_key`).
        clusters: Machines by source and device.
        chips: Devices with engines, formats and model groups (:func:`chip_key`).
        shapes: Model groups by the sizes of the models.
        sources: Sources of the runs.
        devices: Devices that they ran on.
        vendors: Vendors of the devices; ``None`` if a file does not list them.
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
    """Learned serving model.

    Attributes:
        effects: Effects on the classes of cost.
        ends: Interval bounds in deviations of a latency's logarithm
            (:meth:`~.effects.ServingEffects.spread`), by the text of an :class:`~.ends.EndKey`.
        provenance: The runs it was learned from.
    """

    form, what = 2, "serving"

    effects: ServingEffects = field(default_factory=ServingEffects)
    ends: dict[str, Ends] = field(default_factory=dict)
    provenance: Known = Known()

    def tier(self, context: Context) -> str:
        """The most similar measured runs of a row, one of :data:`TIERS`."""
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
        """Calibration set of a row of a :meth:`tier`: the place of an :class:`~.ends.EndKey`."""
        known = context.get("cluster", "") in self.provenance.clusters
        if not (known and self.effects.knows("engine", context.get("engine", ""))):
            return ELSEWHERE
        return "" if tier == TIERS[0] else NEW

    def source_note(self, source: str, device: str) -> tuple[str, ...]:
        """A note that a named source has no effect, since none of its runs were learned from."""
        known = {*self.provenance.clusters, *self.provenance.own}
        return source_note("machines", known, source, device) if source else ()

    def _own(self, context: Context) -> OwnStack:
        """The adapted stack with runs of the row's model group and engine, if any."""
        stack = self.provenance.own.get(context.get("cluster", ""), OwnStack())
        return stack if group_key(context) in stack.groups else OwnStack()

    def group_of(self, shape: str) -> str:
        """Model group of the measured models of a shape; the shape itself without any."""
        return self.provenance.shapes.get(shape, shape)

    def own_stack(self, device: str, source: str = "") -> tuple[str, float]:
        """Source of the runs on a device that the model was adapted to, and their memory fraction.

        Args:
            device: Name of the device.
            source: Only accept this source, and return it in any case; empty for any.

        Returns:
            An empty source and 0 if there are none.
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
        """Bounds of the 90 % interval, as factors on an estimate.

        A time to the first token consists of waiting for other requests and of service, so that its
        bounds are interpolated between the regimes by the share of waiting.

        Args:
            metric: One of :data:`METRICS`, or :data:`REQUEST_TIME`.
            tier: Most similar measured runs of the row, one of :data:`TIERS`.
            queued: Share of waiting in the time to the first token.
            context: Levels of the row.
            spread: Deviation of the logarithm (:meth:`~.effects.ServingEffects.spread`).
            place: Result of :meth:`place`; ``None`` to compute it.
        """
        own = self._own(context).ends
        where = self.place(context, tier) if place is None else place
        foreign = FOREIGN if tier == "vendor" else 1.0
        unit = spread * foreign

        def factors(share: float) -> np.ndarray:
            kind = kind_of(metric, share, context)
            keys = [*kind._replace(place=where).fallbacks()]
            ends = Calibrator(self.ends).of(map(str, keys), STANDARD)
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
        """Bounds, as factors, of the times of a request whose parts and throughput are tied.

        In a closed loop, the request rate is the number in flight over the time of one request
        (Little's law); requests that are all sent at once finish with the run. Throughput therefore
        has the bounds of whole requests, and each part is at most the longest request time less the
        least time of the other part.

        Args:
            tier: Most similar measured runs of the row, one of :data:`TIERS`.
            queued: Share of waiting in the time to the first token.
            context: Levels of the row.
            parts: Mean seconds to the first token, and from there to the last.
            whole: Metric whose bounds whole requests take: :data:`REQUEST_TIME` in a closed loop,
                else ``per_token``.
            spreads: Deviations of the logarithms of ``ttft``, ``tpot`` and ``whole``.

        Returns:
            Bounds of ``ttft``, ``tpot`` and :data:`REQUEST_TIME`.
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
        """Convert to plain data for JSON."""
        return {
            **self.effects.to_dict(digits=4),
            "ends": {k: [round(e, 5) for e in v] for k, v in sorted(self.ends.items())},
            "provenance": asdict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> ServingModel:
        """Read :meth:`to_dict`'s data."""
        return cls(
            ServingEffects.from_dict(data),
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
    """Interval bounds of a stack that a model was adapted to, by the text of :func:`kind_of`.

    Args:
        model: The model before adaptation.
        errors: Held-out errors of the runs by kind: logarithms of measured over predicted, in
            deviations. A kind without errors keeps the bounds it had.
    """
    ends = {}
    cases = product((*METRICS, REQUEST_TIME), REGIMES, ("", APART))
    for kind in {kind_of(name, queued, {"spread": how}).shared for name, queued, how in cases}:
        left = errors.get(str(kind), ())
        keys = map(str, kind._replace(place="" if left else ELSEWHERE).fallbacks())
        low, high = Calibrator(model.ends).of(keys, STANDARD)
        if left:
            # The extreme ones, since few runs underestimate the spread of further ones.
            outer = (1.0 - COVERAGE) / 2.0
            low = min(low, float(np.quantile(left, outer, method="lower")))
            high = max(high, float(np.quantile(left, 1.0 - outer, method="higher")))
        ends[str(kind)] = (round(low, 5), round(high, 5))
    return ends
