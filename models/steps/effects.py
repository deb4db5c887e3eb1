"""Learned effects on training steps (``models/effects/steps.yaml``), and how they are learned.

The simulator is asked for the slopes of measured steps, effects are solved for, and both are
repeated where the effects then lie. Their levels are what steps share: framework, chip generation,
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
from ..adapt.active import Errors
from ..effects.effects import CLUSTER, WHOLE, Effects, Levels, Value
from ..effects.linear import Linear, group_weights

#: Power limit over the matrix rate in 16 bits of an H100, W per TFLOP/s: 700 W and 989 TFLOP/s of
#: its data sheet. Other chips' headroom is relative to it.
_H100_HEADROOM = 0.7075
#: The same of an A100 (400 W, 312 TFLOP/s), the most of any chip whose steps were learned from. A
#: chip with more watts for each operation, such as one with slow matrix units, is no faster for it.
_MOST_HEADROOM = 1.282
#: Source of runs that name none: one's own.
OWN = "own"
#: Framework, or cluster, of a step that says nothing of it, and its value as a level.
UNKNOWN = ""
UNNAMED = ("", 1.0)
#: What is known of frameworks by name: ``engines`` of those that share one, those that are
#: ``compiled``, and ``whole_sequences``.
FRAMEWORKS = own_data("models/effects/steps.yaml")


@dataclass(frozen=True)
class StepContext:
    """Levels that effects are learned on.

    Attributes:
        framework: Such as ``nanotron``; :data:`UNKNOWN` if it is not known.
        architecture: Of the chip; both kinds of Blackwell count as one.
        platform: ``gpu`` or ``tpu``.
        bits: Of the operands of products: ``16``, ``8`` or ``4`` (``32`` for f32).
        launched: Whether the host launches every kernel.
        cluster: Whose machines, and which: the source of measurements and the device.
        headroom: Logarithm of the chip's power limit over its 16-bit matrix rate, relative to an
            H100: chips with less of it lower their clocks more under minutes of products. 0 for
            chips without a stated limit, and for TPUs.
        boxes: Logarithm of the number of boxes that the devices are in.
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
        # A framework or cluster that is not named is one of all that could be.
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
        """Value of a level of :mod:`~opcast.models.effects.effects`, or ``default``."""
        return self._levels.get(key, default)


def is_compiled(framework: str) -> bool:
    """Whether a framework compiles a step, or replays it, whatever is asked."""
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
    """Context of what runs on a device.

    Args:
        device: Which chip.
        bits: Of the operands of products.
        framework: Which framework runs it.
        source: Whose cluster it is.
        launched: Whether the host launches every kernel; compiled and captured steps do not.
        boxes: That the devices are in.
    """
    name = measured_as(device)
    return StepContext(
        framework=framework,
        architecture=device.architecture.removesuffix("-ultra"),
        platform=device.platform,
        bits=str(bits),
        launched=launched and device.platform == "gpu",
        cluster=f"{source}|{name}" if source else UNKNOWN,
        headroom=_headroom(device),
        boxes=log(boxes),
        device=name,
    )


def _headroom(device: DeviceSpec) -> float:
    # Before Ampere the limit never bound: V100 has 2.4 W a TFLOP/s.
    if device.platform != "gpu" or not device.power_w or device.architecture == "volta":
        return 0.0
    own = device.power_w / device.matrix_peak("bf16") * 1e12
    return log(min(own, _MOST_HEADROOM) / _H100_HEADROOM)


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
        known = {FIELDS.get(name, name): value for name, value in cost.items()}
        return StepEffects(**known, decomposed=FRAMEWORKS["decomposed"].get(context.platform, 0.0))

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


#: Logarithms of simulated seconds: which steps, the effects, and shifts of classes of cost.
Simulate = Callable[[Sequence[int], EffectTable, Mapping[str, float]], np.ndarray]
#: Shift of a class by which its slope is measured.
_STEP = 0.2
#: Factors on launches, collectives and hops that are tried before the first slopes are taken: where
#: the host hides behind the device, its cost has no slope.
_STARTS = {"launch": (1.0, 3.0), "collective": (1.0, 15.0), "hop": (1.0, 100.0)}
#: Steps of a framework that starts are tried on.
_TRIED = 40
_ROUNDS = 3


class Slopes(NamedTuple):
    """The simulator around a table of effects.

    Attributes:
        table: Where the slopes were taken.
        level: Logarithm of each step's simulated seconds without :data:`WHOLE`.
        slope: Change of it by class of cost.
    """

    table: EffectTable
    level: np.ndarray
    slope: dict[str, np.ndarray]

    def linear(self, contexts: Sequence[StepContext], measured: np.ndarray) -> Linear[EffectTable]:
        """The linear model around the table.

        Args:
            contexts: Of the steps.
            measured: Logarithms of their seconds.
        """
        whole = np.array([self.table.log_factors(context)[WHOLE] for context in contexts])
        return Linear.around(self.table, contexts, self.slope, measured, self.level + whole)

    def part(self, which: np.ndarray) -> Slopes:
        """Slopes of some of the steps."""
        slope = {cost: values[which] for cost, values in self.slope.items()}
        return Slopes(self.table, self.level[which], slope)


def slopes_at(simulate: Simulate, table: EffectTable, count: int) -> Slopes:
    """Ask the simulator for levels and slopes of ``count`` steps."""
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
    """Learn effects from steps.

    Args:
        contexts: Of the steps.
        measured: Logarithms of their seconds.
        groups: Source and device of each.
        simulate: The simulator.
        tell: Told of progress.
    """
    tell("effects: starting values")
    table = _start(contexts, measured, simulate)
    everything, weight = np.ones(len(contexts), bool), group_weights(groups)
    for turn in range(_ROUNDS):
        tell(f"effects: round {turn + 1} of {_ROUNDS}")
        slopes = slopes_at(simulate, table, len(contexts))
        table = slopes.linear(contexts, measured).solve(everything, weight)
    return table


def unsure(
    slopes: Slopes,
    contexts: Sequence[StepContext],
    measured: np.ndarray,
    others: Slopes,
    other_contexts: Sequence[StepContext],
) -> Errors:
    """What is known of the errors of steps that were not measured, given those that were.

    Args:
        slopes: Of the measured steps.
        contexts: Of the measured steps.
        measured: Logarithms of their seconds.
        others: Of the other steps, taken at the same effects.
        other_contexts: Of the other steps.

    Returns:
        Of the others, as :meth:`~opcast.models.effects.linear.Linear.unsure` gives it.
    """
    both = Slopes(
        slopes.table,
        np.concatenate([slopes.level, others.level]),
        {cost: np.concatenate([own, others.slope[cost]]) for cost, own in slopes.slope.items()},
    )
    # Nothing is known of the others but their slopes.
    times = np.concatenate([measured, others.level])
    learn = np.arange(len(times)) < len(measured)
    return both.linear([*contexts, *other_contexts], times).unsure(learn)


def _start(
    contexts: Sequence[StepContext], measured: np.ndarray, simulate: Simulate
) -> EffectTable:
    """For each framework, the best of a few costs of its host."""
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
