"""Attention as published attention kernels: of fused calls in programs, and of models by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...simulate.step.layer_ops import ATTENTION_BACKWARD
from .operator_library import Operators
from .route_answer import Answer, spread

#: Whose kernels stand for cuDNN's; ``trtllm`` has most rows.
CUDNN = {"backend": "trtllm", "kernel": "torch_flow", "dtype": "bf16", "kv_dtype": "bf16"}
#: Architectures that FlashAttention-3 is written for (Shah et al., 2024).
_FA3 = ("hopper",)
#: Log half-widths added for another library, and for a backward pass. Chosen by judgement: the
#: published rows hold forward kernels of serving libraries only.
OTHER_LIBRARY, OTHER_PASS = 0.25, 0.5


def attention_key(sizes: Mapping[str, int]) -> str:
    """Family of published rows that an attention belongs to.

    Args:
        sizes: ``q_len`` and ``causal``; one causal query is a step of generation.
    """
    if not sizes["causal"]:
        return "graph/encoder_attention"
    return "graph/generation_attention" if sizes["q_len"] == 1 else "graph/context_attention"


def flash_attention(sizes: Mapping[str, int], device: DeviceSpec) -> dict[str, str]:
    """Whose kernels a framework with FlashAttention runs, as columns of a row."""
    version = "fa3" if device.architecture in _FA3 else "fa2"
    name = "vllm_flash_attn" if sizes["causal"] else "vllm_vit_flash_attn"
    kernel = f"{name}_{version}"
    return {"backend": "vllm", "kernel": kernel, "dtype": "bf16", "kv_dtype": "bf16"}


def attention_answer(
    calls: Sequence[Mapping[str, int]], operators: Operators, device: DeviceSpec
) -> Answer:
    """Latencies of fused attention calls.

    Args:
        calls: As :func:`~opcast.models.gpu.routes.attention_of` describes them.
        operators: Published families.
        device: Where they run.
    """
    rows = pd.DataFrame(list(calls)).assign(**CUDNN)
    answer = Answer.empty(len(rows))
    key = np.array([attention_key(call) for call in calls], object)
    for family in dict.fromkeys(key.tolist()):
        at = np.flatnonzero(key == family)
        prediction = operators.predict(family, rows.iloc[at], device)
        back = rows["backward"].to_numpy(bool)[at]
        plain = spread(prediction.latency, prediction.lo, prediction.hi, OTHER_LIBRARY)
        wide = spread(prediction.latency, prediction.lo, prediction.hi, OTHER_PASS)
        lower, upper = (np.where(back, w, p) for w, p in zip(wide, plain, strict=True))
        latency = prediction.latency * np.where(back, ATTENTION_BACKWARD, 1.0)
        inside = prediction.in_domain & ~back
        answer.put(at, Answer.around(latency, lower, upper, f"learned:{family}", inside))
    return answer
