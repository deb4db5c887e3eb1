"""Lower bounds of a step: peak rates of the data sheet, and the hideable part of all-to-alls.

No step is shorter than its arithmetic at the dense peak of its number formats (Williams et al.,
Roofline, 2009). Of the time spent waiting for expert-parallel all-to-alls, a part can be saved.
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

#: Matrix products of fused attention in the backward over those in the forward pass: five to two
#: (Dao, FlashAttention-2, ICLR 2024), without the lower rate assumed for its estimate.
_BACKWARD_PRODUCTS = 2.5
#: Share of a training step above which expert-parallel waiting is noted, and the share of it that
#: the best overlap and routing may save. Engineering estimates: DeepSeek-V3 reports 1,543 tokens/s
#: per H800 (2,048 of them, 2024, with DualPipe and node-limited routing), against 830 predicted for
#: as many H100.
EXCHANGE_SHARE, EXCHANGE_SAVED = 0.3, 0.7


def multiplied_format(workload: Workload, spec: DeviceSpec) -> str:
    """Return the format in which a device multiplies the operands of a workload's layers.

    Formats without units on the device are widened and run at the rate of the wider format, as in
    frameworks that simulate narrow formats.

    Args:
        workload: The model.
        spec: The device.

    Returns:
        One of :data:`~opcast.simulate.step.workload.PRODUCTS`.
    """
    own = workload.product_dtype
    while wider := FORMATS[own].wider:
        # Matrix units of V100 and T4 support only f16: narrower types do not run at its rate.
        rate = max(spec.matrix_peak(FORMATS[name].rate) for name in (wider, "f16"))
        if spec.matrix_peak(FORMATS[own].rate) > rate:
            return own
        own = wider
        if own == "bf16" and workload.dtype in ("f16", "f32"):
            return workload.dtype
    return own


def as_multiplied(workload: Workload, spec: DeviceSpec) -> Workload:
    """Return the workload with its products in the format that a device multiplies."""
    own = multiplied_format(workload, spec)
    if own == workload.product_dtype:
        return workload
    return replace(workload, products="" if own == workload.dtype else own)


def widened_note(workload: Workload, spec: DeviceSpec) -> tuple[str, ...]:
    """Return notes if a device has no faster units for the format of a workload's products."""
    own = multiplied_format(workload, spec)
    notes: tuple[str, ...] = ()
    if own != workload.product_dtype:
        notes = (
            f"{spec.name} has no units for {workload.product_dtype} that are faster than those for "
            f"{own}: products run in {own}",
        )
    slow, fast = (spec.matrix_peak(FORMATS[name].rate) for name in (own, "f16"))
    if own == "bf16" and fast > slow:
        notes += (
            f"{spec.name} multiplies {own} at {slow / 1e12:.3g} TFLOP/s, f16 at "
            f"{fast / 1e12:.3g}: dtype=f16 is faster",
        )
    return notes


def arithmetic_seconds(workload: Workload, plan: Plan, spec: DeviceSpec) -> float:
    """Return the minimum seconds of a step: matrix products of the busiest stage at dense peak.

    Recomputed products count, as do products that all tensor-parallel ranks repeat; passes over
    memory, collectives and launches are free.

    Args:
        workload: The model.
        plan: The resolved plan.
        spec: The device.
    """
    return max(
        sum(_least(call, spec) * count for call, count in stage.counts().items())
        for stage in dict.fromkeys(step_stages(workload, plan))
    )


def best_seconds(workload: Workload, plan: Plan, spec: DeviceSpec) -> float:
    """Return seconds at the highest fraction of peak in the training data; 0 without data.

    Args:
        workload: The model.
        plan: The resolved plan.
        spec: The device.
    """
    share: float = FRAMEWORKS["best_share"].get(spec.platform, 0.0)
    if workload.mode != "train" or not share:
        return 0.0
    peak = spec.matrix_peak(FORMATS[workload.product_dtype].rate)
    return workload.model_flops() / plan.devices / peak / share


def best_note(seconds: float, best: float, spec: DeviceSpec) -> tuple[str, ...]:
    """Return a note if a step reaches a higher fraction of peak than any in the training data.

    Args:
        seconds: Seconds of the step.
        best: Result of :func:`best_seconds`.
        spec: The device.
    """
    if seconds >= best:
        return ()
    share = FRAMEWORKS["best_share"][spec.platform]
    return (
        f"{share * best / seconds:.0%} of the peak is more than any step on a "
        f"{spec.platform.upper()} in the training data ({share:.0%}): the estimate assumes kernels "
        "at their best, and the interval reaches up to a step at that share",
    )


def _least(call: Op, spec: DeviceSpec) -> float:
    behind = call.family == "attention" and call.name.endswith("_dx")
    return call.least_s(spec) * (_BACKWARD_PRODUCTS / ATTENTION_BACKWARD if behind else 1.0)


def exchange_wait(workload: Workload, step: StepTime) -> float:
    """Return the seconds in which a training step waits for expert-parallel all-to-alls.

    All of them are exposed, since they are composed without overlap
    (:mod:`opcast.simulate.step.stage_times`).
    """
    if workload.mode != "train":
        return 0.0
    return min(step.communication.get("expert", 0.0), step.exposed)


def least_seconds(workload: Workload, step: StepTime) -> float:
    """Return the seconds of a step that hides most expert all-to-alls, if these are a large part.

    Other pipeline stages wait for the same all-to-alls, so the bubble shrinks with them.
    """
    wait = exchange_wait(workload, step)
    if wait <= EXCHANGE_SHARE * step.total:
        return step.total
    return step.total - EXCHANGE_SAVED * wait * step.total / (step.total - step.bubble)
