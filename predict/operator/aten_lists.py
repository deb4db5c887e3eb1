"""Launches of operators over lists of tensors, as optimisers call them.

A launch of ``multi_tensor_apply`` takes so many tensors, by the lists that it reads and writes, and
so many blocks of one chunk each (MultiTensorApply.cuh: ``depth_to_max_tensors``,
``depth_to_max_blocks``, ``kChunkSize``).
"""

from __future__ import annotations

from math import ceil, prod

from ...features.ir.torch.record import AtenCall

_TENSORS = (110, 64, 48, 36, 30)
_BLOCKS, _CHUNK = 320, 65536


def is_over_lists(name: str) -> bool:
    """Whether an operator goes over lists of tensors."""
    return name.startswith(("aten._foreach", "aten._fused_adam", "aten._fused_sgd"))


def list_launches(call: AtenCall) -> int:
    """Launches of an operator over lists."""
    given, written = len(call.inputs), len(call.outputs)
    if call.name.startswith("aten._fused_adam"):
        # Parameters, gradients, two moments and the numbers of steps, of which three are written.
        each, lists = max((given - written) // 2, 1), 4
    elif call.name.startswith("aten._fused"):
        # Gradients are read alone.
        each = max(given - written, 1)
        lists = given // each
    else:
        each = max(written, 1)
        lists = max((given if call.name.endswith("_") else given + written) // each, 1)
    chunks = sum(ceil(prod(t.shape) / _CHUNK) for t in call.outputs[:each])
    return max(1, ceil(each / _TENSORS[min(lists, 5) - 1]), ceil(chunks / _BLOCKS))
