"""Error propagation: from the intervals of operators to the interval of what they compose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log

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

#: Correlation between the errors of one step's operators. Engineering estimate: 0 would mean that
#: errors cancel, 1 that the model is off by the same factor everywhere.
RHO = 0.45


#: Relative half-width for what the composition itself adds: gaps between kernels, framework
#: overhead and overlap that the formulas do not see. Engineering estimate; no measured step on a
#: cluster was available to fit it.
COMPOSITION_ERROR = 0.08


def combined_spread(ends: np.ndarray, rho: float) -> tuple[float, float]:
    """Half-widths of a sum whose terms have errors with pairwise correlation ``rho``.

    Args:
        ends: Half-widths of the terms downwards and upwards, shape ``(n, 2)``.
        rho: 0 for independent errors (root of the sum of squares), 1 for a common one (sum).

    Returns:
        ``sqrt((1 - rho) · sum of squares + rho · square of the sum)``, downwards and upwards.
    """
    # Variance of a sum of equicorrelated terms, sum_i s_i^2 + rho sum_{i != j} s_i s_j, rearranged.
    # Half-widths may stand for standard deviations, since all of them are of the same coverage.
    apart, together = (ends**2).sum(axis=0), ends.sum(axis=0) ** 2
    both = np.sqrt((1.0 - rho) * apart + rho * together)
    return float(both[0]), float(both[1])


#: Change of the logarithm of a class of cost by which a step's sensitivity to it is measured.
_STEP = 0.2
#: Classes of cost that are no operators.
_WAITS = ("inside", "between", "launch", "collective", "hop")
#: Scopes of estimates of operators whose errors measured steps of other chips do not hold.
_UNKNOWN = ("unseen", "roofline")


def sensitivities(
    workload: Workload,
    plan: Plan,
    costs: Costs,
    step: StepTime,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Change of the logarithm of a step's time with that of each class of cost.

    A step is homogeneous in its costs: twice all of them is twice the step. So the changes add up
    to 1, and what is left beside waiting belongs to the operators, by their seconds.

    Args:
        workload: The model.
        plan: Resolved.
        costs: Under which ``step`` was composed.
        step: The step.
        seconds: Of the operators of the busiest stage, by class.
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
    """How far a step reaches by the intervals of operators that no model was fitted to.

    Their errors are taken as common: a chip that is slower than expected is so throughout.

    Args:
        times: Seconds and both ends of one execution of each operator.
        counts: Executions of each.
        scopes: Of the estimates.
        share: Of the step that operators decide.

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


def step_interval(
    learned: StepModel,
    context: StepContext,
    workload: Workload,
    plan: Plan,
    costs: Costs,
    step: StepTime,
    latency: OperatorLatency,
) -> tuple[float, float]:
    """Ends of a step's 90 % interval, as logarithms of factors on the estimate.

    The interval is as wide as the effects that decide the step are unsure; on a chip of which no
    step was measured, it is wider by what is not known of the chip's operators.

    Args:
        learned: Model of steps.
        context: Of the step.
        workload: The model that is trained.
        plan: Resolved.
        costs: Under which the step was composed.
        step: The step.
        latency: What priced its operators.
        most_tasks: As of :func:`~opcast.simulate.step.compose.step_time`.
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
        reach = unknown_operators(costs.ops, counts, latency.scopes, share)
    return learned.interval(context, slopes, reach)
