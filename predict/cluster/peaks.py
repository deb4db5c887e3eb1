"""What bounds a step from below: the data sheet's rates, and what of its exchanges can be hidden.

No step is shorter than its arithmetic at the dense peak of the formats that it multiplies (Williams
et al., Roofline, 2009), whatever the kernels, and however well everything else is hidden. Of
what it waits for all-to-alls of experts a part may be saved.
"""

from __future__ import annotations

from dataclasses import replace

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from ...models.steps.effects import FRAMEWORKS
from ...simulate.step.blocks import step_stages
from ...simulate.step.compose import StepTime
from ...simulate.step.layer_ops import ATTENTION_BACKWARD
from ...simulate.step.plan import Plan
from ...simulate.step.workload import Workload

#: Products of fused attention in the backward pass over those of the forward pass: five to two
#: (Dao, FlashAttention-2, ICLR 2024), without the lower rate that its estimate assumes.
_BACKWARD_PRODUCTS = 2.5
#: Share of a training step above which waiting for expert parallelism is noted, and the share of
#: that wait that the best overlap and routing may save. Engineering estimates: DeepSeek-V3's
#: published 1,543 tokens/s and H800 (2,048 of them, 2024, with DualPipe and node-limited routing)
#: stand against 830 that are predicted for as many H100.
EXCHANGE_SHARE, EXCHANGE_SAVED = 0.3, 0.7


def multiplied_format(workload: Workload, spec: DeviceSpec) -> str:
    """Format in which a device multiplies the operands of a workload's layers.

    What a device has no units for is widened and runs at the rate of the wider format, as it does
    in frameworks that simulate narrow formats.

    Args:
        workload: The model.
        spec: The device.

    Returns:
        One of :data:`~opcast.simulate.step.workload.PRODUCTS`.
    """
    own = workload.product_dtype
    while wider := FORMATS[own].wider:
        # V100 and T4 multiply f16 alone on their matrix units; its rate is none of narrower types.
        rate = max(spec.matrix_peak(FORMATS[name].rate) for name in (wider, "f16"))
        if spec.matrix_peak(FORMATS[own].rate) > rate:
            return own
        own = wider
        if own == "bf16" and workload.dtype in ("f16", "f32"):
            return workload.dtype
    return own


def as_multiplied(workload: Workload, spec: DeviceSpec) -> Workload:
    """The workload with its products in the format that a device multiplies."""
    own = multiplied_format(workload, spec)
    if own == workload.product_dtype:
        return workload
    return replace(workload, products="" if own == workload.dtype else own)


def widened_note(workload: Workload, spec: DeviceSpec) -> tuple[str, ...]:
    """A note where a device has no units for the format of a workload's products."""
    own = multiplied_format(workload, spec)
    if own == workload.product_dtype:
        return ()
    return (
        f"{spec.name} has no units for {workload.product_dtype} that are faster than those for "
        f"{own}: products run in {own}",
    )


def arithmetic_seconds(workload: Workload, plan: Plan, spec: DeviceSpec) -> float:
    """Least seconds of a step: the matrix products of its busiest stage at the dense peak.

    What ``recompute`` runs again counts, as does what tensor-parallel ranks all do; passes over
    memory, collectives and launches are free.

    Args:
        workload: The model.
        plan: Resolved.
        spec: The devices.
    """
    return max(
        sum(_least(call, spec) * count for call, count in stage.counts().items())
        for stage in dict.fromkeys(step_stages(workload, plan))
    )


def best_seconds(workload: Workload, plan: Plan, spec: DeviceSpec) -> float:
    """Seconds at the largest share of the peak of the steps that were learned from; 0 without one.

    Args:
        workload: The model.
        plan: Resolved.
        spec: The devices.
    """
    share: float = FRAMEWORKS["best_share"].get(spec.platform, 0.0)
    if workload.mode != "train" or not share:
        return 0.0
    peak = spec.matrix_peak(FORMATS[workload.product_dtype].rate)
    return workload.model_flops() / plan.devices / peak / share


def best_note(seconds: float, best: float, spec: DeviceSpec) -> tuple[str, ...]:
    """A note where a step is faster than any that was learned from, by its share of the peak.

    Args:
        seconds: Of the step.
        best: From :func:`best_seconds`.
        spec: The devices.
    """
    if seconds >= best:
        return ()
    share = FRAMEWORKS["best_share"][spec.platform]
    return (
        f"{share * best / seconds:.0%} of the peak is more than any step of a "
        f"{spec.platform.upper()} reaches that was learned from ({share:.0%}): the time is of "
        "kernels at their best, and the upper end holds a step at that share",
    )


def _least(call: Op, spec: DeviceSpec) -> float:
    behind = call.family == "attention" and call.name.endswith("_dx")
    return call.least_s(spec) * (_BACKWARD_PRODUCTS / ATTENTION_BACKWARD if behind else 1.0)


def exchange_wait(workload: Workload, step: StepTime) -> float:
    """Seconds in which a training step waits for all-to-alls of expert parallelism.

    They are composed without overlap (:mod:`opcast.simulate.step.stage_times`), so all of them are
    exposed.
    """
    if workload.mode != "train":
        return 0.0
    return min(step.communication.get("expert", 0.0), step.exposed)


def least_seconds(workload: Workload, step: StepTime) -> float:
    """Seconds of a step that hides most of its all-to-alls of experts; all of them if it has few.

    Other stages of a pipeline wait for the same all-to-alls, so the bubble shrinks with them.
    """
    wait = exchange_wait(workload, step)
    if wait <= EXCHANGE_SHARE * step.total:
        return step.total
    return step.total - EXCHANGE_SAVED * wait * step.total / (step.total - step.bubble)
