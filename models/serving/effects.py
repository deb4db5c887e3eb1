"""Learned effects on serving (``models/effects/serving.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...simulate.serving.classes import CLASSES, REQUEST
from ..effects.effects import WHOLE, Effects, Levels

#: Factor on the time to the first token; that on every latency of a row is :data:`WHOLE`.
FIRST = "first"
#: Name of the level of a model group on an engine and a generation of chips. It is learned last, of
#: what the others leave, so that what they share is not put down to it.
KNOWN = "known"
#: Levels of a row by name; a missing or empty value has no effect.
Context = Mapping[str, str]
#: Costs in the order of weights.
COSTS = (*CLASSES, REQUEST)


class ServingEffects(Effects):
    """Effects on serving."""

    levels = Levels.read("serving")

    def weights(self, context: Context) -> np.ndarray:
        """Seconds of a unit of each of :data:`COSTS`; what makes all slower is in each."""
        logs = self.log_factors(context)
        return np.array([PRIOR[cost] * np.exp(logs[cost] + logs[WHOLE]) for cost in COSTS])

    def first(self, context: Context) -> float:
        """Factor on times to the first token."""
        return float(np.exp(self.log_factors(context)[FIRST]))


#: Value of each class of cost where nothing was learned.
PRIOR = ServingEffects.levels.prior
