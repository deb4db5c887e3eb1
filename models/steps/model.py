"""The model of steps: effects, and intervals by what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...common.errors import PlanError
from ...common.types import JsonMapping, typed
from ..core.store import JsonModel
from ..effects.effects import CLUSTER
from ..trust.calibrator import NORMAL_90, Calibrator, Ends, with_error
from .effects import FRAMEWORKS, OWN, UNKNOWN, EffectTable, StepContext
from .memory import MemoryLaw

#: What is known of a step, most first: runs of its cluster; of its framework and its generation of
#: chips; of the generation alone; of neither.
TIERS = (CLUSTER, "framework", "architecture", "new")
#: Steps of clusters without runs, whose errors are taken together: the deviations of effects tell
#: how much is known of each.
ELSEWHERE = "elsewhere"
#: What is appended to them for steps of models with experts, whose routing and exchange differ
#: between frameworks beyond what effects tell (of the rows left out, dense ends held 98 % of dense
#: models and 66 % of those with experts).
OF_EXPERTS = "/experts"
#: Ends of the interval where nothing was calibrated, in deviations: 90 % of a normal distribution.
UNCALIBRATED = (-NORMAL_90, NORMAL_90)
#: Pairs of keys of ends of which the second knows less.
_LESS_SURE = (
    (CLUSTER, ELSEWHERE),
    (CLUSTER, CLUSTER + OF_EXPERTS),
    (ELSEWHERE, ELSEWHERE + OF_EXPERTS),
    (CLUSTER + OF_EXPERTS, ELSEWHERE + OF_EXPERTS),
)


@dataclass
class StepModel(JsonModel):
    """Learned steps.

    Attributes:
        table: Effects.
        ends: Ends of the interval in deviations of a step's logarithm (:meth:`EffectTable.spread`):
            of clusters with runs (:data:`CLUSTER`), of all others (:data:`ELSEWHERE`), of both for
            models with experts (:data:`OF_EXPERTS`), and by cluster where one has runs enough for
            ends of its own.
        memory: Laws of peak memory by framework.
        provenance: What it was learned from.
    """

    form, what = 4, "steps"

    table: EffectTable = field(default_factory=EffectTable)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory: dict[str, MemoryLaw] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)

    def tier(self, context: StepContext) -> str:
        """What is known of a step, one of :data:`TIERS`."""
        if context.cluster and self.table.knows(CLUSTER, context.cluster):
            return CLUSTER
        if not self.table.knows("architecture", context.architecture):
            return "new"
        named = context.framework and self.table.knows("framework", context.framework)
        return "framework" if named else "architecture"

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Names of frameworks of which something is known, measured or by their rules."""
        tables = ("engines", "compiled", "whole_sequences", "recipes")
        known = {name for table in tables for name in FRAMEWORKS[table]} | {*self.memory}
        learned = (key.split("/") for key in self.table.values)
        known |= {
            name for _, level, name in (k for k in learned if len(k) == 3) if level == "framework"
        }
        return tuple(sorted(known - {UNKNOWN}))

    def check_framework(self, framework: str) -> None:
        """Refuse a framework of which nothing is known.

        Raises:
            PlanError: The name is not one of :attr:`frameworks`.
        """
        if framework and framework.lower() not in self.frameworks:
            raise PlanError(
                f"framework {framework!r} is not known ({', '.join(self.frameworks)})",
                hint="leave it out for an average one; 'opcast calibrate --steps' learns your own",
            )

    @property
    def devices(self) -> frozenset[str]:
        """Chips whose steps were learned from."""
        named = self.provenance.get("devices", ())
        return frozenset(map(str, named)) if isinstance(named, (list, tuple)) else frozenset()

    def interval(
        self,
        context: StepContext,
        slopes: Mapping[str, float],
        operators: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:
        """Ends of a step's 90 % interval, as logarithms of factors on the estimate.

        Args:
            context: Of the step.
            slopes: Change of the step's logarithm with that of each class of cost.
            operators: How far the step reaches down and up, as logarithms at least 0, by the
                intervals of its operators. On chips whose steps were learned from, the errors of
                those steps hold it already.
        """
        known = calibrated_as(self.tier(context), slopes)
        keys = (context.cluster, known) if known == CLUSTER else (known,)
        low, high = Calibrator(self.ends).of(keys, UNCALIBRATED)
        spread = self.table.spread(context, slopes)
        return with_error((low * spread, high * spread), operators)

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "effects": {k: round(v, 5) for k, v in sorted(self.table.values.items())},
            "deviations": {k: round(v, 5) for k, v in sorted(self.table.deviations.items())},
            "ends": {k: [round(e, 5) for e in v] for k, v in self.ends.items()},
            "memory": {k: law.to_list() for k, law in self.memory.items()},
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> StepModel:
        """Read :meth:`to_dict`'s data."""
        values, deviations = (
            typed(dict[str, float], data[name], name) for name in ("effects", "deviations")
        )
        return cls(
            EffectTable(values, deviations),
            typed(dict[str, Ends], data["ends"], "ends"),
            {str(k): MemoryLaw(*map(float, v)) for k, v in data["memory"].items()},
            dict(data["provenance"]),
        )

    def source_note(self, source: str, device: str) -> tuple[str, ...]:
        """A note where nothing was learned of a cluster by its owner's name, which then is idle."""
        if source in ("", OWN) or self.table.knows(CLUSTER, f"{source}|{device}"):
            return ()
        keys = (key.split("/", 2) for key in self.table.values)
        names = sorted({name for _, level, name in keys if level == CLUSTER})
        others = [name.partition("|")[0] for name in names if name.endswith(f"|{device}")]
        told = f"; known on it: {', '.join(others)}" if others else ""
        return (f"nothing was learned of clusters of {source!r} with {device}{told}",)


def calibrated_as(tier: str, slopes: Mapping[str, float]) -> str:
    """Steps among which the ends of a step's interval are found, a key of ``StepModel.ends``.

    Args:
        tier: What is known of it, one of :data:`TIERS`.
        slopes: Change of the step's logarithm with that of each class of cost.
    """
    known = CLUSTER if tier == CLUSTER else ELSEWHERE
    return known + OF_EXPERTS if slopes.get("experts", 0.0) > 0.0 else known


def interval_ends(
    errors: Mapping[str, Sequence[tuple[str, float]]],
) -> dict[str, tuple[float, float]]:
    """Ends of intervals, from errors of steps that were left out.

    Args:
        errors: By what :func:`calibrated_as` gives: group, and logarithm of measured over predicted
            seconds in deviations. Every group counts the same, however many runs it has.
    """
    found = Calibrator[str]()
    for tier, scores in errors.items():
        if scores:
            groups = np.array([group for group, _ in scores])
            _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
            found.add(tier, np.array([value for _, value in scores]), 1.0 / counts[index])
    for better, worse in _LESS_SURE:
        # Who knows less is not surer.
        found.widen(worse, better)
    return found.ends
