"""Least times of requests at the rates of data sheets, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.features.devices.catalogue import read_device
from opcast.simulate.serving.latencies import floors
from opcast.simulate.serving.served import EnginePlan, ServedModel
from opcast.simulate.step.named_workloads import make_workload

H100 = read_device("h100-sxm")
SIZES = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256}
LLAMA = ServedModel(make_workload("llama", SIZES))
#: Parameters of Llama 3 8B in products of every token: queries, keys and values; output;
#: feed-forward; and of the head.
LAYERS = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
HEAD = 128256 * 4096
#: Of the data sheet: bytes and dense FLOPs a second; 50 MB of L2.
BANDWIDTH, BF16, FP8, L2 = 3.35e12, 989.4e12, 1978.9e12, 50 * 2**20
ONE, FOUR = EnginePlan(), EnginePlan(tp=4, moe_tp=4)
ASKED = (np.array([1024]), np.array([256]), np.array([0]))


def test_a_dense_model_by_hand() -> None:
    found = floors(LLAMA, H100, FOUR, FOUR, *ASKED)
    # Two key-value heads of 128 on each device, keys and values in 16 bits, of 32 layers.
    cache = (1024 + 128) * 32 * 2 * 2 * 128 * 2
    weights = 2 * (LAYERS + HEAD) / 4 - L2
    assert found.tpot == pytest.approx((weights + cache) / BANDWIDTH, rel=1e-6)
    # Eight heads, each pair of tokens at four FLOPs of 128; a token sees those before and itself.
    attention = 32 * 8 * 4 * 128 * 1024 * 1025 / 2
    assert found.ttft == pytest.approx((2 * LAYERS / 4 * 1024 + attention) / BF16, rel=1e-6)
    assert found.e2e == pytest.approx(found.ttft + 255 * found.tpot)


def test_formats_have_peaks_of_their_own() -> None:
    half = floors(replace(LLAMA, weights="fp8"), H100, ONE, ONE, *ASKED)
    attention = 32 * 32 * 4 * 128 * 1024 * 1025 / 2
    assert half.ttft == pytest.approx(2 * LAYERS * 1024 / FP8 + attention / BF16, rel=1e-6)
    # The head stays in 16 bits.
    cache = (1024 + 128) * 32 * 2 * 8 * 128 * 2
    assert half.tpot == pytest.approx((LAYERS + 2 * HEAD - L2 + cache) / BANDWIDTH, rel=1e-6)
    # Weights that are widened multiply in 16 bits.
    wide = floors(replace(LLAMA, weights="fp8_wo"), H100, ONE, ONE, *ASKED)
    assert wide.tpot == pytest.approx(half.tpot)
    assert wide.ttft == pytest.approx((2 * LAYERS * 1024 + attention) / BF16, rel=1e-6)


def test_what_a_cache_has_is_not_run_but_seen() -> None:
    prompts, outputs, _ = ASKED
    found = floors(LLAMA, H100, ONE, ONE, prompts, outputs, np.array([24]))
    pairs = 1000 * 24 + 1000 * 1001 / 2
    own = 2 * LAYERS * 1000 + 32 * 32 * 4 * 128 * pairs
    assert found.ttft == pytest.approx(own / BF16, rel=1e-6)
    # One token has the weights to read all the same.
    all_but_one = floors(LLAMA, H100, ONE, ONE, prompts, outputs, prompts - 1)
    assert all_but_one.ttft == pytest.approx((2 * (LAYERS + HEAD) - L2) / BANDWIDTH, rel=1e-6)


def test_plans_drafts_and_workers_apart() -> None:
    one, two = (floors(LLAMA, H100, plan, plan, *ASKED) for plan in (ONE, EnginePlan(pp=2)))
    # A token passes one stage after the other; chunks of a prompt are in both at a time.
    assert two.ttft == pytest.approx(one.ttft / 2)
    assert two.tpot == pytest.approx(one.tpot - L2 / BANDWIDTH)
    drafted = floors(LLAMA, H100, ONE, ONE, *ASKED, accepted=2.5)
    assert drafted.tpot == pytest.approx(one.tpot / 2.5)
    four = floors(LLAMA, H100, FOUR, FOUR, *ASKED)
    apart = floors(LLAMA, H100, ONE, FOUR, *ASKED)
    assert (apart.ttft, apart.tpot) == (four.ttft, one.tpot)


def test_of_experts_those_that_a_token_reaches() -> None:
    sizes = {**SIZES, "experts": 64, "top_k": 8, "d_ff": 2048, "seq": 1024}
    model = ServedModel(make_workload("moe", sizes))
    expert = 3 * 4096 * 2048
    outside = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 4096 * 64) + HEAD
    cache = (1024 + 128) * 32 * 2 * 8 * 128 * 2
    one = floors(model, H100, ONE, ONE, *ASKED)
    weights = 2 * (outside + 32 * 8 * expert)
    assert one.tpot == pytest.approx((weights - L2 + cache) / BANDWIDTH, rel=1e-6)
    # Spread over 16 ranks with sequences of their own, one of them holds a chosen one at least.
    spread = EnginePlan(dp=16, ep=16)
    wide = floors(model, H100, spread, spread, *ASKED)
    weights = 2 * (outside + 32 * expert)
    assert wide.tpot == pytest.approx((weights - L2 + cache) / BANDWIDTH, rel=1e-6)
    # A prompt's experts are on all ranks, its attention on one.
    dense = 2 * (outside - HEAD) * 1024 + 32 * 32 * 4 * 128 * 1024 * 1025 / 2
    assert wide.ttft == pytest.approx((dense + 2 * 32 * 8 * expert * 1024 / 16) / BF16, rel=1e-6)


def test_windows_leave_the_caches_out() -> None:
    windowed = replace(LLAMA, workload=replace(LLAMA.workload, window=512))
    found = floors(windowed, H100, ONE, ONE, *ASKED)
    assert found.tpot == pytest.approx((2 * (LAYERS + HEAD) - L2) / BANDWIDTH, rel=1e-6)
    assert found.ttft == pytest.approx(2 * LAYERS * 1024 / BF16, rel=1e-6)
