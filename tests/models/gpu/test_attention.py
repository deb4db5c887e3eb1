"""Fused attention: cuDNN's own times on an H100, and one price by every way it is called."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.models.gpu.attention import attention_answer, fused_attention
from opcast.models.gpu.operator_library import Operators

KERNELS = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[4] / "shared" / "data"))
    / "published-kernels"
)
SIZES = ("batch", "q_heads", "kv_heads", "head_dim", "v_head_dim", "q_len", "kv_len", "causal")


def call(**changed):
    sizes = dict.fromkeys(("batch", "window", "backward"), 0) | {"batch": 1, "causal": 1}
    heads = {"q_heads": 16, "kv_heads": 16, "head_dim": 64, "v_head_dim": 64}
    return sizes | heads | {"q_len": 4096, "kv_len": 4096} | changed


def test_each_chip_runs_the_kernels_made_for_it():
    named = {
        name: fused_attention(call(), find_device(name))["kernel"]
        for name in ("h100-sxm", "a100-sxm-80gb", "rtx-4090", "b200")
    }
    assert named == {
        "h100-sxm": "vllm_flash_attn_fa3",
        "a100-sxm-80gb": "vllm_flash_attn_fa2",
        "rtx-4090": "vllm_flash_attn_fa2",
        "b200": "torch_flow",
    }


def test_cudnns_attention_on_an_h100_as_measured():
    """Rows of ``jax_nn``, which is cuDNN's; none of them was learned from."""
    if not (KERNELS / "tpu.parquet").is_file():
        pytest.skip("the published kernels are not here")
    rows = pd.read_parquet(KERNELS / "tpu.parquet")
    plain = (rows["biased"] == 0) & (rows["masked"] == 0) & (rows["op"] == "attention")
    own = rows[plain & (rows["device"] == "h100-sxm") & (rows["implementation"] == "jax_nn")]
    assert len(own) > 60
    calls = [
        {**dict(zip(SIZES, map(int, sizes), strict=True)), "window": 0, "backward": 0}
        for sizes in own[list(SIZES)].itertuples(index=False)
    ]
    answer = attention_answer(calls, Operators(), find_device("h100-sxm"))
    measured = own["latency_us"].to_numpy() * 1e-6
    assert np.abs(answer.latency / measured - 1).mean() < 0.17
    inside = (answer.lo <= measured) & (measured <= answer.hi)
    assert inside.mean() > 0.85
