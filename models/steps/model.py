"""Training step model: learned effects, with intervals that depend on which runs were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...common.errors import PlanError
from ...common.types import JsonMapping, typed
from ..core.store import JsonModel
from ..effects import CLUSTER, source_note
from ..trust.calibrator import STANDARD, Calibrator, Ends, with_error
from .effects import FRAMEWORKS, OWN, UNKNOWN, EffectTable, StepContext
from .memory import MemoryLaw

#: Most similar measured runs of a step, most similar first: the same cluster; the same framework
#: and chip generation; the same generation; neither.
TIERS = (CLUSTER, "framework", "architecture", "new")
#: Calibration set of steps on clusters without runs, pooled over tiers: the deviations of the
#: effects already reflect how well each is known.
ELSEWHERE = "elsewhere"
#: Suffix of the calibration sets for models with experts, whose routing and exchange differ between
#: frameworks beyond the effects (of the held-out rows, dense bounds covered 98 % of dense models
#: and 66 % of those with experts).
OF_EXPERTS = "/experts"
#: Pairs of calibration sets of which the second must not have narrower bounds than the first.
_LESS_SURE = (
    (CLUSTER, ELSEWHERE),
    (CLUSTER, CLUSTER + OF_EXPERTS),
    (ELSEWHERE, ELSEWHERE + OF_EXPERTS),
    (CLUSTER + OF_EXPERTS, ELSEWHERE + OF_EXPERTS),
)


@dataclass
class StepModel(JsonModel):
    """Learned training step model.

    Attributes:
        table: Effects.
        ends: Interval bounds in deviations of a step's logarithm (:meth:`EffectTable.spread`): for
            clusters with runs (:data:`CLUSTER`), for others (:data:`ELSEWHERE`), for models with
            experts on both (:data:`OF_EXPERTS`), and by cluster where it has enough runs.
        memory: Laws of peak memory by framework.
        provenance: Description of the training data.
    """

    form, what = 4, "steps"

    table: EffectTable = field(default_factory=EffectTable)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory: dict[str, MemoryLaw] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)

    def tier(self, context: StepContext) -> str:
        """The most similar measured runs of a step, one of :data:`TIERS`."""
        if context.cluster and self.table.knows(CLUSTER, context.cluster):
            return CLUSTER
        if not self.table.knows("architecture", context.architecture):
            return "new"
        named = context.framework and self.table.knows("framework", context.framework)
        return "framework" if named else "architecture"

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Names of the frameworks that are measured or have rules in ``effects.yaml``."""
        tables = ("engines", "compiled", "whole_sequences", "recipes")
        known = {name for table in tables for name in FRAMEWORKS[table]} | {*self.memory}
        learned = (key.split("/") for key in self.table.values)
        known |= {
            name for _, level, name in (k for k in learned if len(k) == 3) if level == "framework"
        }
        return tuple(sorted(known - {UNKNOWN}))

    def check_framework(self, framework: str) -> None:
        """Reject an unknown framework.

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
        """Chips with steps in the training data."""
        named = self.provenance.get("devices", ())
        return frozenset(map(str, named)) if isinstance(named, (list, tuple)) else frozenset()

    def interval(
        self,
        context: StepContext,
        slopes: Mapping[str, float],
        operators: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:
        """Bounds of a step's 90 % interval, as logarithms of factors on the estimate.

        Args:
            context: Levels of the step.
            slopes: Derivative of the step's logarithm by that of each class of cost.
            operators: Down and up, the extent of the step due to the intervals of its operators and
                collectives, as logarithms ≥ 0. Leave at 0 on chips with steps in the training data:
                the errors of those steps include it.
        """
        known = calibrated_as(self.tier(context), slopes)
        keys = (context.cluster, known) if known == CLUSTER else (known,)
        low, high = Calibrator(self.ends).of(keys, STANDARD)
        spread = self.table.spread(context, slopes)
        return with_error((low * spread, high * spread), operators)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {
            **self.table.to_dict(digits=5),
            "ends": {k: [round(e, 5) for e in v] for k, v in self.ends.items()},
            "memory": {k: law.to_list() for k, law in self.memory.items()},
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> StepModel:
        """Read :meth:`to_dict`'s data."""
        return cls(
            EffectTable.from_dict(data),
            typed(dict[str, Ends], data["ends"], "ends"),
            {str(k): MemoryLaw(*map(float, v)) for k, v in data["memory"].items()},
            dict(data["provenance"]),
        )

    def source_note(self, source: str, device: str) -> tuple[str, ...]:
        """A note that a named source has no effect, as no run on its cluster was learned from."""
        if source in ("", OWN):
            return ()
        keys = (key.split("/", 2) for key in self.table.values)
        known = {name for _, level, name in keys if level == CLUSTER}
        return source_note("clusters", known, source, device)


def calibrated_as(tier: str, slopes: Mapping[str, float]) -> str:
    """Calibration set of a step's interval, a key of ``StepModel.ends``.

    Args:
        tier: Most similar measured runs of the step, one of :data:`TIERS`.
        slopes: Derivative of the step's logarithm by that of each class of cost.
    """
    known = CLUSTER if tier == CLUSTER else ELSEWHERE
    return known + OF_EXPERTS if slopes.get("experts", 0.0) > 0.0 else known


def interval_ends(known: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> Calibrator[str]:
    """Calibrate interval bounds on the errors of held-out steps, shape ``(n,)`` each.

    Args:
        known: Keys, from :func:`calibrated_as`.
        scores: Logarithms of measured over predicted seconds, in deviations.
        groups: Their groups, which have equal weights, however many runs they have.
    """
    found = Calibrator[str]().pool(scores, known.tolist(), least=1, group=groups)
    for better, worse in _LESS_SURE:
        # Less knowledge never narrows an interval.
        found.widen(worse, better)
    return found
