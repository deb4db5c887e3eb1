"""Attention priced as published attention kernels, for fused calls and for models given by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from .operator_library import Operators
from .route_answer import Answer, spread

#: The published kernels that stand in for cuDNN's fused attention, of which no rows were published:
#: ``trtllm`` has the most rows of prefill over all types (published-tensor-core pack).
CUDNN = {"backend": "trtllm", "kernel": "torch_flow", "dtype": "bf16", "kv_dtype": "bf16"}
#: Architectures that FlashAttention-3 is written for (Shah et al., 2024): it relies on Hopper's
#: asynchronous matrix instructions and copies, so every other GPU runs FlashAttention-2.
_FA3 = ("hopper",)
#: Time of a backward pass over the forward pass by the width of a head, up to 128 and beyond: rows
#: of attention and its ``vjp`` on H100 in the kernel pack's ``tpu`` table (512 to 16,384 tokens,
#: without a bias). Five products for two (Dao, FlashAttention-2, ICLR 2024), the exponentials
#: again, and two gradients kept in registers: up to 128, Triton's kernels take 2.7 to 3.1 times and
#: those made for Hopper 3.2 to 3.7 times the forward pass, of which this is the middle. At 256
#: registers overflow: Triton's take 3.9 to 4.5 times, Hopper's own 8 to 12 times.
BACKWARD_WIDTH, BACKWARD, BACKWARD_WIDE = 128, 3.2, 4.3
#: Log half-widths added for another library (25 %, an engineering estimate: the published rows hold
#: forward kernels of serving libraries only, between which attention differs by 15 to 65 %,
#: published-tensor-core pack), for a backward pass (that, and the spread of the ratio above), and
#: for one of wide heads (a factor of 2.2, as between the two kinds of kernel).
OTHER_LIBRARY, OTHER_PASS, OTHER_WIDE = 0.25, 0.35, 0.8


def attention_key(sizes: Mapping[str, int]) -> str:
    """Family of published rows that an attention call belongs to.

    Args:
        sizes: ``q_len`` and ``causal``; a single causal query is a decode step.
    """
    if not sizes["causal"]:
        return "graph/encoder_attention"
    # Decode kernels split the keys over the cores, prefill kernels the queries: two families of
    # kernels, even where the same call serves both.
    return "graph/generation_attention" if sizes["q_len"] == 1 else "graph/context_attention"


def flash_attention(sizes: Mapping[str, int], device: DeviceSpec) -> dict[str, str]:
    """Columns that name the kernel which a framework built on FlashAttention would run."""
    version = "fa3" if device.architecture in _FA3 else "fa2"
    # vLLM's vision towers have a kernel entry of their own for attention without a mask; the names
    # are those of the published rows.
    name = "vllm_flash_attn" if sizes["causal"] else "vllm_vit_flash_attn"
    kernel = f"{name}_{version}"
    return {"backend": "vllm", "kernel": kernel, "dtype": "bf16", "kv_dtype": "bf16"}


def attention_answer(
    calls: Sequence[Mapping[str, int]], operators: Operators, device: DeviceSpec
) -> Answer:
    """Predict fused attention calls.

    Args:
        calls: Parameters as :func:`~opcast.models.gpu.routes.attention_of` gives them.
        operators: Published families.
        device: Device they run on.

    Returns:
        Latencies in seconds with 90 % intervals, one for each call.
    """
    rows = pd.DataFrame(list(calls)).assign(**CUDNN)
    answer = Answer.empty(len(rows))
    key = np.array([attention_key(call) for call in calls], object)
    for family in dict.fromkeys(key.tolist()):
        at = np.flatnonzero(key == family)
        prediction = operators.predict(family, rows.iloc[at], device)
        # A backward call is looked up as its forward pass and scaled: the published families have
        # no backward kernels.
        back = rows["backward"].to_numpy(bool)[at]
        wide = rows["head_dim"].to_numpy()[at] > BACKWARD_WIDTH
        half = np.where(back, np.where(wide, OTHER_WIDE, OTHER_PASS), OTHER_LIBRARY)
        lower, upper = spread(prediction.latency, prediction.lo, prediction.hi, half)
        ratio = np.where(wide, BACKWARD_WIDE, BACKWARD)
        latency = prediction.latency * np.where(back, ratio, 1.0)
        # Two kernels of one chip are no domain: a backward pass never counts as inside one.
        inside = prediction.in_domain & ~back
        answer.put(at, Answer.around(latency, lower, upper, f"learned:{family}", inside))
    return answer
