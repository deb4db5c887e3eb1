"""Loads of ranks of experts, and what sending tokens to them takes, against published tables."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.features.operators.routing import busy_rank
from opcast.simulate.serving.checkpoints import served_by_name
from opcast.simulate.serving.forward import token_ops
from opcast.simulate.serving.served import EnginePlan, Formats
from opcast.simulate.serving.token_exchange import (
    EXPERT_SKEW,
    Links,
    busiest,
    exchange_seconds,
    row_bytes,
    slots_of,
)

#: H800: 200 GB/s of NVLink one way, and a card of 400 Gb/s.
H800 = Links(8, 200e9, 50e9)
TOKEN, RESULT = row_bytes(7168, 8)


@pytest.mark.parametrize(
    ("ranks", "redundant", "published"), [(32, 0, 2.564), (32, 32, 1.109), (36, 32, 1.115)]
)
def test_the_busiest_rank_of_deepseek_r1(ranks: int, redundant: int, published: float) -> None:
    # TensorRT-LLM's blog, Scaling Expert Parallelism, 2025, table 1, over layers.
    assert busiest(1024, 256, ranks, redundant, EXPERT_SKEW) == pytest.approx(published, rel=0.12)


def test_even_loads_wait_for_chance_alone() -> None:
    assert busiest(1e12, 256, 32, None, 0.0) == pytest.approx(1.0, abs=1e-4)
    # sqrt(2 ln 32 / 1024) of the mean.
    assert busiest(1024, 256, 32, None, 0.0) == pytest.approx(1.0823, abs=1e-3)
    assert busiest(100, 256, 1, 0, 1.0) == 1.0


def test_more_copies_make_ranks_more_even() -> None:
    shares = [busiest(1e9, 256, 64, n, EXPERT_SKEW) for n in (0, 64, 128, 256)]
    assert shares[0] > 2.5 and shares[1:] == pytest.approx([1.0] * 3, abs=0.05)


def test_default_copies() -> None:
    # DeepSeek's and LMSYS's 32 of 256 on 32, 72 and 144 ranks; one expert for each of 320.
    assert [slots_of(256, n, None) for n in (32, 72, 144, 320)] == [9, 4, 2, 1]
    wide = EnginePlan(dp=72, ep=72)
    assert wide.wide and wide.experts_held(256) == 4 and wide.copies(256) == 32
    assert EnginePlan(dp=8, ep=8).experts_held(256) == 32.0


def test_copies_are_of_wide_engines() -> None:
    with pytest.raises(PlanError, match="redundant=4"):
        EnginePlan(dp=8, ep=8, redundant=4)
    with pytest.raises(PlanError, match="redundant=-1"):
        EnginePlan(dp=16, ep=16, redundant=-1)


@pytest.mark.parametrize(
    ("ranks", "dispatch_us", "combine_us"),
    [
        (8, 77, 114),
        (16, 118, 195),
        (32, 155, 273),
        (64, 173, 314),
        (128, 192, 369),
        (256, 194, 360),
    ],
)
def test_low_latency_kernels(ranks: int, dispatch_us: float, combine_us: float) -> None:
    # github.com/deepseek-ai/DeepEP, docs/legacy.md: 128 tokens, 7168 wide, 8 experts.
    for row, published in ((TOKEN, dispatch_us), (RESULT, combine_us)):
        found = exchange_seconds(H800, ranks, 128 * row, 8, 4, direct=True)
        assert found * 1e6 == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(("ranks", "gb_s"), [(16, 43), (32, 58), (64, 51)])
def test_high_throughput_kernels(ranks: int, gb_s: float) -> None:
    # The same, 4096 tokens in at most 4 boxes: bytes of a token in each box, its own included.
    boxes = ranks // 8
    reached = min(4.0, boxes * (1.0 - (1.0 - 1.0 / boxes) ** 8))
    sent = 4096 * TOKEN
    found = exchange_seconds(H800, ranks, sent, 8, 4, direct=False)
    assert sent * reached / found / 1e9 == pytest.approx(gb_s, rel=0.12)


def test_operands_of_16_bits_are_sent_as_they_are() -> None:
    assert row_bytes(128, 16) == (256.0, 256.0)
    assert row_bytes(128, 8) == (132.0, 256.0)


def test_experts_in_a_box_are_as_uneven_however_many_tokens() -> None:
    """The busiest of eight ranks, which the tables' power law loads ever more unevenly."""
    model = served_by_name("deepseek-v3", {}, Formats())
    for tokens, most in ((256, 1.2), (8192, 1.4), (65536, 1.4)):
        ops = token_ops(model, EnginePlan(tp=8, ep=8), tokens)
        (experts,) = [op for op, _ in ops if op.family == "moe"]
        asked = (experts.shape[0], 8, 256, 8, experts.skew)
        rows = float(busy_rank(*(np.array([float(n)]) for n in asked))[0][0])
        assert 1.1 < rows / tokens <= most
