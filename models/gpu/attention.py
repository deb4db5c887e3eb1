"""Attention priced as published attention kernels, for fused calls and for models given by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...simulate.step.layer_ops import ATTENTION_BACKWARD
from .operator_library import Operators
from .route_answer import Answer, spread

#: The published kernels that stand in for cuDNN's fused attention, of which no rows were published:
#: ``trtllm`` has the most rows of prefill over all types (published-tensor-core pack).
CUDNN = {"backend": "trtllm", "kernel": "torch_flow", "dtype": "bf16", "kv_dtype": "bf16"}
#: Architectures that FlashAttention-3 is written for (Shah et al., 2024): it relies on Hopper's
#: asynchronous matrix instructions and copies, so every other GPU runs FlashAttention-2.
_FA3 = ("hopper",)
#: Log half-widths added for another library (25 %) and for a backward pass (50 %). Engineering
#: estimates, not fitted: the published rows hold forward kernels of serving libraries only. Between
#: those libraries attention differs by 15 to 65 % (published-tensor-core pack).
OTHER_LIBRARY, OTHER_PASS = 0.25, 0.5


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
        # A backward call is looked up as its forward pass and scaled: no table has backward
        # kernels.
        back = rows["backward"].to_numpy(bool)[at]
        plain = spread(prediction.latency, prediction.lo, prediction.hi, OTHER_LIBRARY)
        wide = spread(prediction.latency, prediction.lo, prediction.hi, OTHER_PASS)
        lower, upper = (np.where(back, w, p) for w, p in zip(wide, plain, strict=True))
        latency = prediction.latency * np.where(back, ATTENTION_BACKWARD, 1.0)
        # Nothing that was measured resembles a backward pass, so it never counts as in domain.
        inside = prediction.in_domain & ~back
        answer.put(at, Answer.around(latency, lower, upper, f"learned:{family}", inside))
    return answer
