"""Learned effects on training steps (levels in ``models/steps/effects.yaml``) and their fit.

The simulator supplies the slopes of the measured steps, the effects are solved for, and both are
repeated around the solution. Levels are shared properties of steps: framework, chip generation,
number formats, cluster (:class:`StepContext`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import exp, hypot, log
from typing import NamedTuple

import numpy as np

from ...common.files import own_data
from ...features.devices.catalogue import measured_as
from ...features.devices.device import DeviceSpec
from ...simulate.step.costs import StepEffects
from ..effects import CLUSTER, WHOLE, Effects, Levels, Linear, Value, group_weights

#: Power limit over 16-bit matrix rate of an H100, W per TFLOP/s: 700 W and 989 TFLOP/s (data
#: sheet). The headroom of other chips is relative to it.
_H100_HEADROOM = 0.7075
#: The same of an A100 (400 W, 312 TFLOP/s), the highest of the chips that were learned from. More
#: watts per operation, as on a chip with slow matrix units, do not make a chip faster.
_MOST_HEADROOM = 1.282
#: Source of the user's own runs, which do not name one.
OWN = "own"
#: Framework or cluster of a step that does not specify it, and its value as a level.
UNKNOWN = ""
UNNAMED = ("", 1.0)
#: Properties of frameworks by name: the ``engines`` they share, which are ``compiled``, and which
#: keep ``whole_sequences``.
FRAMEWORKS = own_data("models/steps/effects.yaml")
#: Fields of :class:`~opcast.simulate.step.costs.StepEffects` whose name differs from their class.
FIELDS = {cost: f"{cost}_s" for cost in ("launch", "collective", "hop")}
#: Shift of a class's logarithm for its finite-difference slope.
_STEP = 0.2
#: Initial factors on launches, collectives and hops to try before the first slopes: where the
#: device hides the host, the host's cost has no slope.
_STARTS = {"launch": (1.0, 3.0), "collective": (1.0, 15.0), "hop": (1.0, 100.0)}
#: Steps of a framework that initial factors are tried on.
_TRIED = 40
#: Relinearizations of a fit.
_ROUNDS = 3


@dataclass(frozen=True)
class StepContext:
    """Levels of a training step.

    Attributes:
        framework: Name, such as ``nanotron``; :data:`UNKNOWN` if not known.
        architecture: Chip generation; both variants of Blackwell count as one.
        platform: ``gpu`` or ``tpu``.
        bits: Width of matrix product operands: ``16``, ``8`` or ``4`` (``32`` for f32).
        launched: Whether the host launches every kernel.
        cluster: Source of the measurements and device.
        headroom: Logarithm of the chip's power limit over its 16-bit matrix rate, relative to an
            H100: chips with less lower their clocks more under sustained matrix products. 0 for
            chips without a stated limit, and for TPUs.
        boxes: Logarithm of the number of boxes (nodes).
        device: Name of the chip.
    """

    framework: str
    architecture: str
    platform: str
    bits: str
    launched: bool
    cluster: str
    headroom: float
    boxes: float = 0.0
    device: str = UNKNOWN

    @cached_property
    def _levels(self) -> dict[str, Value]:
        # An unnamed framework or cluster is a random one: effect 0, full deviation.
        engine = FRAMEWORKS["engines"].get(self.framework, "") if self.framework else UNNAMED
        return {
            "all": self.platform,
            "architecture": self.architecture,
            "device": self.device,
            "bits": self.bits if self.platform == "gpu" else f"tpu-{self.bits}",
            "headroom": ("slope", self.headroom),
            "framework": self.framework or UNNAMED,
            "engine": engine,
            CLUSTER: self.cluster or UNNAMED,
            f"{CLUSTER}-boxes": (self.cluster, self.boxes),
        }

    def get(self, key: str, default: str, /) -> Value:
        """Value of a level of :mod:`~opcast.models.effects`, or ``default``."""
        return self._levels.get(key, default)


def is_compiled(framework: str) -> bool:
    """Whether a framework always compiles or captures a step, whatever the plan requests."""
    return framework.startswith(tuple(FRAMEWORKS["compiled"]))


def device_context(
    device: DeviceSpec,
    bits: int,
    framework: str = UNKNOWN,
    source: str = UNKNOWN,
    *,
    launched: bool = True,
    boxes: int = 1,
) -> StepContext:
    """Context of a step on a device.

    Args:
        device: The chip.
        bits: Width of matrix product operands.
        framework: Framework that runs the step.
        source: Owner of the cluster.
        launched: Whether the host launches every kernel; compiled and captured steps do not.
        boxes: Number of boxes (nodes).
    """
    name = measured_as(device)
    return StepContext(
        framework=framework,
        architecture=device.line,
        platform=device.platform,
        bits=str(bits),
        launched=launched and device.platform == "gpu",
        cluster=f"{source}|{name}" if source else UNKNOWN,
        headroom=_headroom(device),
        boxes=log(boxes),
        device=name,
    )


def _headroom(device: DeviceSpec) -> float:
    # Before Ampere the limit was never reached: V100 has 2.4 W per TFLOP/s.
    if device.platform != "gpu" or not device.power_w or device.rules.ample_power:
        return 0.0
    own = device.power_w / device.matrix_peak("bf16") * 1e12
    return log(min(own, _MOST_HEADROOM) / _H100_HEADROOM)


class EffectTable(Effects):
    """Learned effects on training steps."""

    levels = Levels.read("steps")

    def effects(
        self, context: StepContext, shifts: Mapping[str, float] | None = None
    ) -> StepEffects:
        """Effects in the simulator's form.

        Args:
            context: Levels of the step.
            shifts: Added to the logarithms of classes of cost.
        """
        logs, more = self.log_factors(context), shifts or {}
        cost = {k: _prior(k, context) * exp(logs[k] + more.get(k, 0.0)) for k in PRIOR}
        for name in ("launch", "collective", "hop"):
            cost[name] *= context.launched
        known = {FIELDS.get(name, name): value for name, value in cost.items()}
        return StepEffects(**known, decomposed=FRAMEWORKS["decomposed"].get(context.platform, 0.0))

    def whole_effects(self, context: StepContext) -> StepEffects:
        """Effects in the simulator's form, with :data:`WHOLE` multiplied into every cost."""
        return self.effects(context, dict.fromkeys(PRIOR, self.log_factors(context)[WHOLE]))

    def spread(self, context: StepContext, slopes: Mapping[str, float]) -> float:
        """Standard deviation of a step's logarithm due to the uncertainty of the effects.

        Args:
            context: Levels of the step.
            slopes: Derivative of the step's logarithm by that of each class of cost.
        """
        sure = self.log_deviations(context)
        parts = [slopes.get(cost, 0.0) * own for cost, own in sure.items() if cost != WHOLE]
        return hypot(sure[WHOLE], *parts)


#: Value of each class of cost before anything was learned, and the classes that have effects.
PRIOR, LEARNED = EffectTable.levels.prior, EffectTable.levels.learned


def _prior(cost: str, context: StepContext) -> float:
    # TPU operators are compiler estimates, which include no short bursts at a higher clock.
    burst = cost in ("product", "attention", "experts")
    return 1.0 if burst and context.platform == "tpu" else PRIOR[cost]


#: Simulator: logarithms of seconds from indices of steps, effects, and shifts of classes of cost.
Simulate = Callable[[Sequence[int], EffectTable, Mapping[str, float]], np.ndarray]


class Slopes(NamedTuple):
    """Linearization of the simulator around a table of effects.

    Attributes:
        table: Effects at which the slopes were taken.
        level: Logarithm of each step's simulated seconds without :data:`WHOLE`.
        slope: Its derivative by class of cost.
    """

    table: EffectTable
    level: np.ndarray
    slope: dict[str, np.ndarray]

    def linear(self, contexts: Sequence[StepContext], measured: np.ndarray) -> Linear[EffectTable]:
        """Linear model around the table.

        Args:
            contexts: Levels of the steps.
            measured: Logarithms of their seconds.
        """
        whole = np.array([self.table.log_factors(context)[WHOLE] for context in contexts])
        return Linear.around(self.table, contexts, self.slope, measured, self.level + whole)


def slopes_at(simulate: Simulate, table: EffectTable, count: int) -> Slopes:
    """Simulate levels and finite-difference slopes of ``count`` steps."""
    rows = range(count)
    level = simulate(rows, table, {})
    slope = {cost: (simulate(rows, table, {cost: _STEP}) - level) / _STEP for cost in LEARNED}
    return Slopes(table, level, slope | {WHOLE: np.ones(count)})


def fit_effects(
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    groups: np.ndarray,
    simulate: Simulate,
    tell: Callable[[str], None] = lambda _: None,
) -> EffectTable:
    """Learn effects from measured steps.

    Args:
        contexts: Levels of the steps.
        measured: Logarithms of their seconds.
        groups: Source and device of each step.
        simulate: The simulator.
        tell: Receives progress messages.
    """
    tell("effects: starting values")
    table = _start(contexts, measured, simulate)
    everything, weight = np.ones(len(contexts), bool), group_weights(groups)
    for turn in range(_ROUNDS):
        tell(f"effects: round {turn + 1} of {_ROUNDS}")
        slopes = slopes_at(simulate, table, len(contexts))
        table = slopes.linear(contexts, measured).solve(everything, weight)
    return table


def _start(
    contexts: Sequence[StepContext], measured: np.ndarray, simulate: Simulate
) -> EffectTable:
    """Choose starting values of the host's costs for each framework by trying a few."""
    table = EffectTable()
    frameworks = sorted({c.framework for c in contexts if c.launched and c.framework})
    for name in frameworks:
        rows = [i for i, c in enumerate(contexts) if c.launched and c.framework == name]
        rows = rows[:: max(1, len(rows) // _TRIED)]
        best, least = {}, np.inf
        for factors in product(*_STARTS.values()):
            shifts = dict(zip(_STARTS, np.log(factors), strict=True))
            error = np.abs(simulate(rows, table, shifts) - measured[rows]).mean()
            if error < least - 0.01:
                best, least = shifts, error
        table.values |= {f"{k}/framework/{name}": float(v) for k, v in best.items() if v}
    return table
