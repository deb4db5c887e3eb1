"""Learned effects on training steps (``models/effects/steps.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, hypot

from ...simulate.step.costs import StepEffects
from ..effects.effects import WHOLE, Effects, Levels
from .context import StepContext


class EffectTable(Effects):
    """Effects on training steps."""

    levels = Levels.read("steps")

    def effects(
        self, context: StepContext, shifts: Mapping[str, float] | None = None
    ) -> StepEffects:
        """Effects as the simulator takes them.

        Args:
            context: Of the step.
            shifts: Added to the logarithm of a class.
        """
        logs, more = self.log_factors(context), shifts or {}
        cost = {k: _prior(k, context) * exp(logs[k] + more.get(k, 0.0)) for k in PRIOR}
        for name in ("launch", "collective", "hop"):
            cost[name] *= context.launched
        return StepEffects(**{FIELDS.get(name, name): value for name, value in cost.items()})

    def whole_effects(self, context: StepContext) -> StepEffects:
        """Effects with the factor on the whole step spread over all costs."""
        return self.effects(context, dict.fromkeys(PRIOR, self.log_factors(context)[WHOLE]))

    def spread(self, context: StepContext, slopes: Mapping[str, float]) -> float:
        """How sure a step is: the deviation of its logarithm by those of the effects.

        Args:
            context: Of the step.
            slopes: Change of the step's logarithm with that of each class of cost.
        """
        sure = self.log_deviations(context)
        parts = [slopes.get(cost, 0.0) * own for cost, own in sure.items() if cost != WHOLE]
        return hypot(sure[WHOLE], *parts)


#: Value of each class of cost where nothing was learned, and the classes that have effects.
PRIOR, LEARNED = EffectTable.levels.prior, EffectTable.levels.learned
#: Fields of :class:`~opcast.simulate.step.costs.StepEffects` that are not named as their class.
FIELDS = {cost: f"{cost}_s" for cost in ("launch", "collective", "hop")}


def _prior(cost: str, context: StepContext) -> float:
    # A TPU's operators are its compiler's estimates, which hold no short bursts at a higher clock.
    burst = cost in ("product", "attention", "experts")
    return 1.0 if burst and context.platform == "tpu" else PRIOR[cost]
