"""Attention priced as published attention kernels, for fused calls and for models given by size.

A kernel takes the same time whether XLA calls it through cuDNN or PyTorch through
``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...features.operators import op_features
from ..core.base import KernelPrediction
from ..operators.prediction import FamilyPrediction
from .operator_library import widened

#: Kernels of TensorRT-LLM, which stand in for cuDNN's on Blackwell: both are written for it, unlike
#: FlashAttention 2, which vLLM's rows there use.
_TRTLLM = {"backend": "trtllm", "kernel": "torch_flow", "dtype": "bf16", "kv_dtype": "bf16"}
#: Ending of the names of FlashAttention 2's kernels.
_FA2 = "fa2"
#: Family of causal attention with many queries, whose rows also write keys and values to a cache.
_PREFILL = "graph/context_attention"
#: Ratio of backward to forward time for heads up to this width and beyond: rows of attention and
#: its ``vjp`` on H100 in the kernel pack's ``tpu`` table (512 to 16,384 tokens, without a bias).
#: The backward pass has five products instead of two (Dao, FlashAttention-2, ICLR 2024), repeats
#: the exponentials and keeps two gradients in registers: up to 128, Triton's kernels take 2.7 to
#: 3.1 times and those written for Hopper 3.2 to 3.7 times the forward pass; 3.2 is the middle. At
#: 256 registers spill: Triton's take 3.9 to 4.5 times, Hopper's 8 to 12 times.
BACKWARD_WIDTH, BACKWARD, BACKWARD_WIDE = 128, 3.2, 4.3
#: Log half-widths added for another library (30 %: the published rows are forward kernels of
#: serving libraries, between which attention differs by 15 to 65 %, published-tensor-core pack; of
#: 78 cuDNN calls on an H100, intervals with 25 % cover 83 %), for a backward pass (the same plus
#: the spread of the ratio above), and for a backward pass of wide heads (a factor of 2.2, as
#: between Triton's and Hopper's kernels).
OTHER_LIBRARY, OTHER_PASS, OTHER_WIDE = 0.3, 0.35, 0.8


def attention_key(sizes: Mapping[str, int]) -> str:
    """Family of published rows that an attention call belongs to.

    Args:
        sizes: ``q_len`` and ``causal``; a single causal query is a decode step.
    """
    if not sizes["causal"]:
        return "graph/encoder_attention"
    # Decode kernels split the keys over the cores, prefill kernels the queries: two families of
    # kernels, even if the same call serves both.
    return "graph/generation_attention" if sizes["q_len"] == 1 else _PREFILL


def flash_attention(sizes: Mapping[str, int], device: DeviceSpec) -> dict[str, str]:
    """Columns that name the kernel of a framework built on FlashAttention."""
    version = "fa3" if device.rules.warp_groups else _FA2
    # vLLM's vision towers have a separate kernel for attention without a mask; the names are those
    # of the published rows.
    name = "vllm_flash_attn" if sizes["causal"] else "vllm_vit_flash_attn"
    kernel = f"{name}_{version}"
    return {"backend": "vllm", "kernel": kernel, "dtype": "bf16", "kv_dtype": "bf16"}


def fused_attention(sizes: Mapping[str, int], device: DeviceSpec) -> dict[str, str]:
    """Columns of the published kernel that stands in for a library's fused attention on a device.

    On Hopper, FlashAttention 3 stands in for cuDNN: without the cache write, its rows are within
    15 % (mean) of 78 cuDNN calls on an H100 (``jax_nn`` in the kernel pack's ``tpu`` table), with
    it within 34 %, TensorRT-LLM's within 58 %. Older chips run FlashAttention 2, or cuDNN kernels
    with the same instructions.
    """
    if device.rules.paired_cores:
        return _TRTLLM
    own = flash_attention(sizes, device)
    return {**own, "dtype": "fp16", "kv_dtype": "fp16"} if lacks_bf16(device) else own


def lacks_bf16(device: DeviceSpec) -> bool:
    """Whether a chip's tensor cores support f16 but not bf16, as Volta's and Turing's."""
    return device.matrix_peak("f16") > 2.0 * device.matrix_peak("bf16")


def without_cache(
    family: str, rows: pd.DataFrame, latency: np.ndarray, device: DeviceSpec
) -> np.ndarray:
    """Remove the write of keys and values to a cache, which rows of serving's prefill include.

    Args:
        family: Family of the ``n`` rows.
        rows: Rows as for an operator model.
        latency: Predicted latencies, shape ``(n,)``.
        device: Device they run on.
    """
    if family != _PREFILL:
        return latency
    found = op_features(rows.assign(device=device.name), family, {device.name: device})
    # Its share of the estimate (features/operators/attention.py).
    return np.asarray(latency * (1.0 - found.X[:, found.names.index("extra_base")]))


def backward_ratio(head_dim: np.ndarray) -> np.ndarray:
    """Ratio of backward to forward time, by width of the heads, shape ``(n,)``."""
    return np.where(head_dim > BACKWARD_WIDTH, BACKWARD_WIDE, BACKWARD)


class Families(Protocol):
    """Predictor of published families, such as :class:`~.operator_library.Operators`."""

    def predict(self, key: str, rows: pd.DataFrame, device: DeviceSpec) -> FamilyPrediction:
        """Latencies of rows of one family on one device."""


def attention_answer(
    calls: Sequence[Mapping[str, int]], operators: Families, device: DeviceSpec
) -> KernelPrediction:
    """Predict fused attention calls.

    Args:
        calls: Parameters as of :func:`~opcast.models.gpu.routes.attention_of`; ``flash2`` is 1 if
            FlashAttention 2 runs, or what is priced by it: its rows then stand in for no library.
        operators: Published families.
        device: Device they run on.

    Returns:
        Latencies in seconds with 90 % intervals, one per call.
    """
    rows = pd.DataFrame([{"flash2": 0, **call, **fused_attention(call, device)} for call in calls])
    answer = KernelPrediction.empty(len(rows))
    key = np.array([attention_key(call) for call in calls], object)
    for family in dict.fromkeys(key.tolist()):
        at = np.flatnonzero(key == family)
        # What was measured of a library on its chips is found by the operator's name.
        measured = (rows["flash2"] == 1) & rows["kernel"].str.endswith(_FA2)
        asked = rows.assign(op=np.where(measured, family.split("/")[1], "")).iloc[at]
        prediction = operators.predict(family, asked, device)
        alone = without_cache(family, asked, prediction.latency, device)
        # A backward call is looked up as its forward pass and scaled: the published families have
        # no backward kernels.
        back = rows["backward"].to_numpy(bool)[at]
        wide = rows["head_dim"].to_numpy()[at] > BACKWARD_WIDTH
        half = np.where(back, np.where(wide, OTHER_WIDE, OTHER_PASS), OTHER_LIBRARY)
        ratio = backward_ratio(rows["head_dim"].to_numpy()[at])
        latency = alone * np.where(back, ratio, 1.0)
        # Two kernels of one chip define no domain: a backward pass is always outside.
        inside = prediction.in_domain & ~back
        answer.put(at, widened(prediction, latency, half, f"learned:{family}", inside))
    return answer
