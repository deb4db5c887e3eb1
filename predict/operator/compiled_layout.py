"""Whether ``torch.compile`` lays images out with the channels last.

Inductor's rule (``decide_layout_opt`` of torch/_inductor/graph.py), of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...features.ir.torch.record import FORWARD, AtenCall

#: Inductor's own figures: how much longer convolutions take with the channels last, by kind.
_LONGER = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
#: Most channels of a small convolution, and operators for each convolution from which on few
#: convolutions are not worth it.
_SMALL, _FEW = 64, 300


def lays_channels_last(calls: Sequence[AtenCall]) -> bool:
    """Whether the convolutions of a program run with the channels last when it is compiled.

    Args:
        calls: Operators of its forward pass, and of its backward pass in training.
    """
    forward = [call for call in calls if call.phase == FORWARD]
    found = [call for call in forward if call.name == "aten.convolution"]
    if not found or len(forward) >= _FEW * len(found):
        return False
    kinds = [_kind(call) for call in found]
    if len(forward) < len(calls):
        risky = "grouped" in kinds or any(map(_narrows, found))
        return not risky and set(kinds) != {"small"}
    flops = [prod(c.outputs[0].shape) * prod(c.inputs[1].shape[1:]) for c in found]
    longer = sum(f * _LONGER[kind] for f, kind in zip(flops, kinds, strict=True))
    return longer <= sum(flops)


def _kind(call: AtenCall) -> str:
    outputs, inputs = call.inputs[1].shape[:2]
    if call.whole(-1) > 1 and inputs > 1:
        return "grouped"
    if max(outputs, inputs) <= _SMALL:
        return "small"
    return "narrowing" if _narrows(call) else "other"


def _narrows(call: AtenCall) -> bool:
    """Whether a filter of several taps has at most half as many outputs as inputs."""
    outputs, inputs, *sides = call.inputs[1].shape
    return outputs * 2 <= inputs and sides[0] > 1
