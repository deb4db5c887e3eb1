"""Cost classes of PyTorch's kernels, for which factors are learned from measured whole models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...features.devices.device import DeviceSpec
from ...models.operators import OpModel
from .aten_traffic import NAMES
from .aten_work import ATTENTION, CONVOLUTION, NORM, PRODUCT, SOFTMAX, AtenKernel

#: Maximum channels of an image.
IMAGE = 4

#: Operator families whose measurements cover cost classes directly.
_MEASURED_BY = {
    "graph/linear": ("product", "bmm"),
    "graph/context_attention": ("attention", "attention_backward"),
}


def cost_class(work: AtenKernel, compiled: bool, platform: str) -> str:
    """Return the cost class of a kernel, one of :data:`opcast.models.program.pytorch.COSTS`.

    Args:
        work: The kernel.
        compiled: Whether ``torch.compile`` made it.
        platform: Platform of the device.
    """
    back = "_backward" if work.phase == "backward" else ""
    last = "_last" if work.channels_last else ""
    if work.kind == CONVOLUTION:
        return f"{_convolution(work)}{back}{last}"
    if work.kind == PRODUCT:
        return "bmm" if work.shape[0] > 1 else "product"
    if work.kind in (ATTENTION, NORM):
        return work.kind + back
    if work.kind == SOFTMAX or work.phase == "optimizer":
        return SOFTMAX if work.kind == SOFTMAX else "update"
    generated = compiled and ("+" in work.name or "norm" in work.name)
    for norm in ("batch_norm", "group_norm"):
        if norm in work.name and not generated:
            return f"{norm.replace('_', '')}{back}{last}"
    # On a GPU a pass that is not fused takes the same time as in an eager program.
    if generated or (compiled and platform == "cpu"):
        return "fused"
    if work.name == "_to_copy":
        return "cast"
    if work.name in NAMES["copies"] or work.name in NAMES["reductions"]:
        return "copy" if work.name in NAMES["copies"] else "reduce"
    return f"pass{back}"


def _convolution(work: AtenKernel) -> str:
    groups = work.shape[0]
    if work.conv is None:
        return "conv"
    if groups > 1:
        return "depthwise" if work.is_depthwise else "grouped"
    if work.conv_size("c") <= IMAGE:
        return "stem"
    return "pointwise" if work.taps == 1 else "conv"


def measured_costs(spec: DeviceSpec, bundle: OpModel) -> frozenset[str]:
    """Return the cost classes whose kernels were measured on a chip of the same architecture.

    Speeds of products and attention under load differ most between architectures (clocks, power),
    so factors learned from whole models on other architectures do not apply to them.
    """
    found: set[str] = set()
    for key, costs in _MEASURED_BY.items():
        family = bundle.families.get(key)
        chips = [bundle.devices[name] for name in family.devices] if family else []
        if any(chip.architecture == spec.architecture for chip in chips):
            found |= set(costs)
    return frozenset(found)


def seconds_by_class(costs: Sequence[str], seconds: np.ndarray) -> dict[str, float]:
    """Return the sums of seconds, shape ``(n,)``, by cost class."""
    sums: dict[str, float] = {}
    for cost, own in zip(costs, seconds.tolist(), strict=True):
        sums[cost] = sums.get(cost, 0.0) + own
    return sums
