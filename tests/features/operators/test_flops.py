"""FLOPs of attention and experts, counted by hand and as steps and tables ask for them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from opcast.features.operators import attention
from opcast.features.operators.op import Op, attention_flops, expert_flops, visible_pairs
from opcast.simulate.step.workload import Workload


def test_pairs_of_the_last_queries() -> None:
    # Three queries at the end of five positions see 3, 4 and 5 keys.
    assert visible_pairs(3, 5) == 3 + 4 + 5
    for q_len, kv_len in ((1, 1), (1, 9), (7, 7), (128, 4096)):
        whole = attention.visible_pairs(*(np.array([float(n)]) for n in (q_len, kv_len, 0)))
        assert whole.tolist() == [visible_pairs(q_len, kv_len)]


def test_attention_by_hand() -> None:
    # Two sequences, three heads, 12 pairs, keys of 8 and values of 6 elements.
    keys, values = 2 * 3 * 12 * 8, 2 * 3 * 12 * 6
    assert attention_flops(2, 3, 12, 8 + 6) == 2 * (keys + values)


def test_experts_by_hand() -> None:
    # 16 tokens to two experts each, half of them on this rank: 16 rows through three matrices.
    assert expert_flops(16, 2, 2, 64, 32, 6.0) == 16 * 3 * (2 * 64 * 32)


def test_calls_of_a_step_keep_their_figures() -> None:
    """To the bit those of the formulas as a step's report has always had them."""
    draw = random.Random(3)
    for _ in range(300):
        batch, heads, dim, q_len, tp, ep = (draw.randint(1, n) for n in (64, 96, 256, 65536, 8, 9))
        kv_len = q_len + draw.randint(0, 65536)
        scale = draw.choice((1.0, 2.0, 2.5))
        pairs = q_len * (kv_len - (q_len - 1) / 2)
        call = Op(
            "attention", (batch, heads, heads, dim, dim, q_len, kv_len, 1), scale=scale, name="a"
        )
        assert call.flops() == 4.0 * batch * heads * dim * pairs * scale
        call = Op("attention", (batch, heads, heads, dim, dim, 1, kv_len, 1), scale=scale)
        assert call.flops() == 4.0 * batch * heads * dim * kv_len * scale
        shape = (q_len, 7 * dim, 11 * dim, 3, 64, tp, ep)
        call = Op("moe", shape, scale=scale, name="m")
        expected = 6.0 * q_len * 3 / ep * (7 * dim) * (11 * dim) / tp * scale
        assert call.flops() == expected


@pytest.mark.parametrize("causal", [True, False])
def test_a_workload_keeps_its_figure(causal: bool) -> None:
    for batch, seq, heads in ((3, 1000, 40), (512, 8192, 96)):
        work = Workload(batch=batch, seq=seq, heads=heads, d_model=128 * heads, kv_heads=heads // 8)
        if work.causal != causal:
            work = Workload(**{**work.__dict__, "causal": causal})
        tokens = float(batch) * seq
        layer = work.attention_parameters - 2 * work.d_model + work.expert_parameters
        products = work.layers * layer + work.table_parameters * work.head_share
        pairs = tokens * (seq + 1) / 2 if causal else tokens * seq
        forward = 2.0 * products * tokens + 4.0 * work.layers * heads * work.head * pairs
        assert work.model_flops() == forward * (3.0 if work.mode == "train" else 1.0)
