"""Error propagation from the intervals of operators to the interval of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, hypot, log

import numpy as np

from ...features.devices.catalogue import measured_as
from ...features.operators.op import Op
from ...models.steps.effects import FIELDS, StepContext
from ...models.steps.model import StepModel
from ...simulate.step.compose import StepTime, step_time
from ...simulate.step.costs import Costs
from ...simulate.step.plan import Plan
from ...simulate.step.workload import Workload
from ..operator.step_operators import OperatorLatency

#: Correlation between the errors of operators in the parts of a step and in models of PyTorch: 0 if
#: errors cancel, 1 if the model is off by the same factor everywhere. Engineering estimate.
RHO = 0.45
#: Relative half-width for errors of the composition of programs that several devices run: gaps
#: between kernels, and overlap that the formulas do not model. Engineering estimate: steps have
#: measured intervals (:func:`step_interval`), partitioned programs of one's own have none.
COMPOSITION_ERROR = 0.08
#: Change of the logarithm of a cost class by which a step's sensitivity to it is computed.
_STEP = 0.2
#: Cost classes other than operators.
_WAITS = ("inside", "between", "launch", "collective", "hop")
#: Scopes of operator estimates whose errors are not covered by measured steps of other chips.
_UNKNOWN = ("unseen", "roofline")


def sensitivities(
    workload: Workload,
    plan: Plan,
    costs: Costs,
    step: StepTime,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Return the derivatives of the logarithm of a step's time by that of each cost class.

    A step is homogeneous of degree 1 in its costs, so the derivatives add up to 1; the part not due
    to waiting is divided among the operators by their seconds.

    Args:
        workload: The model.
        plan: The resolved plan.
        costs: Costs that ``step`` was composed of.
        step: The step.
        seconds: Seconds of the operators of the busiest stage, by class.
    """
    found = dict[str, float]()
    leaves = {costs.leaves_box(group) for _, _, group in costs.links}
    absent = {"inside": False not in leaves, "between": True not in leaves, "hop": plan.pp == 1}
    for name in _WAITS:
        field = FIELDS.get(name, name)
        now = float(getattr(costs.effects, field))
        if not now or absent.get(name, False):
            continue
        effects = replace(costs.effects, **{field: now * exp(_STEP)})
        moved = step_time(workload, plan, costs.with_effects(effects, costs.box))
        found[name] = log(moved.total / step.total) / _STEP
    left = max(0.0, 1.0 - sum(found.values()))
    total = sum(seconds.values()) or 1.0
    return found | {kind: left * own / total for kind, own in seconds.items()}


def unknown_operators(
    times: Mapping[Op, np.ndarray],
    counts: Mapping[Op, float],
    scopes: Mapping[Op, str],
    share: float,
) -> tuple[float, float]:
    """Return a step's half-widths from the intervals of operators without a fitted model.

    Their errors are assumed to be common: a chip that is slower than expected is so throughout.

    Args:
        times: Seconds of one execution of each operator, with both bounds.
        counts: Executions of each operator.
        scopes: Scopes of the estimates.
        share: Share of the step that operators determine.

    Returns:
        Logarithms, at least 0, downwards and upwards.
    """
    middle = low = high = 0.0
    for call, count in counts.items():
        own = times[call]
        unknown = scopes[call] in _UNKNOWN
        middle += count * float(own[0])
        low += count * float(own[1] if unknown else own[0])
        high += count * float(own[2] if unknown else own[0])
    if not middle:
        return 0.0, 0.0
    return share * log(middle / max(low, 1e-3 * middle)), share * log(high / middle)


def unknown_collectives(
    workload: Workload, plan: Plan, costs: Costs, step: StepTime
) -> tuple[float, float]:
    """Return a step's half-widths from the intervals of collectives in a box.

    Their errors are assumed to be common, as those of :func:`unknown_operators`. Collectives
    between boxes have a learned effect, whose deviation covers their errors.

    Args:
        workload: The model.
        plan: The resolved plan.
        costs: Costs that ``step`` was composed of.
        step: The step.

    Returns:
        Logarithms, at least 0, downwards and upwards.
    """
    low, high = (
        log(step_time(workload, plan, costs.at_bound(side)).total / step.total) for side in (1, 2)
    )
    return max(0.0, -low), max(0.0, high)


def step_interval(
    learned: StepModel,
    context: StepContext,
    workload: Workload,
    plan: Plan,
    costs: Costs,
    step: StepTime,
    latency: OperatorLatency,
) -> tuple[float, float]:
    """Return the bounds of a step's 90 % interval, as logarithms of factors on the estimate.

    The width follows from the uncertainty of the effects that determine the step; on a chip without
    measured steps, that of the chip's operators and of its collectives in a box is added.

    Args:
        learned: Step model.
        context: Context of the step.
        workload: The model that is trained.
        plan: The resolved plan.
        costs: Costs that the step was composed of.
        step: The step.
        latency: Latency of its operators.
    """
    counts = step.busiest.counts()
    kinds = dict[str, float]()
    for call, count in counts.items():
        own = float(costs.ops[call][0]) * costs.effects.of(call) * count
        kinds[call.kind] = kinds.get(call.kind, 0.0) + own
    slopes = sensitivities(workload, plan, costs, step, kinds)
    reach = (0.0, 0.0)
    if measured_as(latency.spec) not in learned.devices:
        share = sum(slopes[kind] for kind in kinds)
        operators = unknown_operators(costs.ops, counts, latency.scopes, share)
        collectives = unknown_collectives(workload, plan, costs, step)
        reach = hypot(operators[0], collectives[0]), hypot(operators[1], collectives[1])
    return learned.interval(context, slopes, reach)
