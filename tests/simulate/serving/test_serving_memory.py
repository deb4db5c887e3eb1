"""What sequences take of a cache, by hand: windows, recurrent states, shares of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.fleet import run_fleet
from opcast.simulate.serving.load import Chunk, Load, Station
from opcast.simulate.serving.memory import (
    CacheLayout,
    Pool,
    cache_layout,
    memory_parts,
)
from opcast.simulate.serving.occupancy import Occupancy
from opcast.simulate.serving.policies import Policy, framework_defaults
from opcast.simulate.serving.served import EnginePlan, ServedModel
from opcast.simulate.step.memory import RESERVED_BYTES
from opcast.simulate.step.presets import Recurrence
from opcast.simulate.step.workload import Workload
from opcast.tests.support.serving_loop import plain_cache

ONE = EnginePlan()
#: gpt-oss-20b: half of 24 layers see 128 tokens; 2 x 8 heads x 64 x 2 bytes a token and layer.
TURNS = ServedModel(
    Workload(
        layers=24, d_model=2880, heads=64, kv_heads=8, head_dim=64, d_ff=2880, vocab=201088,
        experts=32, top_k=4, window=128, window_share=0.5,
    )
)  # fmt: skip
LAYER = 2 * 8 * 64 * 2
#: Qwen3-Next: 36 of 48 layers keep 4096 x 128 elements, the others 2 heads of 256.
STATES = ServedModel(
    Workload(
        layers=48, d_model=2048, heads=16, kv_heads=2, head_dim=256, d_ff=512, vocab=151936,
        experts=512, top_k=10, shared_experts=1,
    ),
    linear_layers=36,
    recurrence=Recurrence(12352, 4096, 4096 * 128),
)  # fmt: skip


def test_vllm_frees_what_a_window_has_passed() -> None:
    cache = 1e6 * 24 * LAYER
    layout = cache_layout(TURNS, ONE, framework_defaults("vllm"), cache)
    assert layout.tokens == 1_000_000
    # Half of the layers keep 10,000 tokens, the others 128.
    assert layout.share_of(10_000) == pytest.approx((5000 + 64) / 1e6)
    # Below the window all of them keep all.
    assert layout.share_of(100) == pytest.approx(100 / 1e6)
    assert not layout.plain and layout.window == 128


def test_groups_of_layers_are_filled_up_to_equal_size() -> None:
    # Gemma 3 27B: ten of 62 layers see everything, so that groups have ten layers, and the 52
    # others take six groups.
    own = Workload(
        layers=62, d_model=5376, heads=32, kv_heads=16, head_dim=128, d_ff=21504, vocab=262208,
        window=1024, window_share=52 / 62,
    )  # fmt: skip
    model = ServedModel(own)
    token = 2 * 16 * 128 * 2
    layout = cache_layout(model, ONE, framework_defaults("vllm"), 1e6 * 70 * token)
    assert layout.tokens == 1_000_000
    assert layout.share_of(8192) == pytest.approx((8192 * 10 + 1024 * 60) / 70 / 1e6)
    # SGLang knows no pool of windows for it, and neither do the others by themselves.
    for name in ("sglang", "tensorrt-llm", "lmdeploy"):
        kept = cache_layout(model, ONE, framework_defaults(name), 1e6 * 62 * token)
        assert kept.plain and kept.tokens == 1_000_000


def test_sglang_has_a_pool_for_windows() -> None:
    # 12 layers hold all tokens, 12 hold 0.8 times as many.
    layout = cache_layout(TURNS, ONE, framework_defaults("sglang"), 1e6 * (12 + 0.8 * 12) * LAYER)
    assert layout.tokens == pytest.approx(1_000_000, abs=1)
    assert layout.share_of(10_000) == pytest.approx(0.01)
    # Where all of a request lies within the window, that pool is the first to be full.
    assert layout.share_of(100) == pytest.approx(100 / 0.8e6)
    assert layout.parts["cache of windows"] == pytest.approx(0.8e6 * 12 * LAYER)
    assert layout.parts["cache"] == pytest.approx(1e6 * 12 * LAYER)


def test_a_window_over_all_layers() -> None:
    own = replace(TURNS.workload, experts=0, top_k=0, window=4096, window_share=1.0)
    layout = cache_layout(ServedModel(own), ONE, framework_defaults("vllm"), 1e5 * 24 * LAYER)
    assert layout.share_of(50_000) == layout.share_of(4096) == pytest.approx(0.04096)


def test_recurrent_states_take_room_for_each_sequence() -> None:
    token, state = 12 * 2 * 2 * 256 * 2, 36 * 4096 * 128 * 4
    assert STATES.state_bytes(ONE) == state == 75_497_472
    assert STATES.state_bytes(EnginePlan(tp=2, moe_tp=2)) == state / 2
    shared = cache_layout(STATES, ONE, framework_defaults("tensorrt-llm"), 40e9)
    assert shared.share_of(1000) == pytest.approx((1000 * token + state) / 40e9)
    # vLLM's blocks of attention are as large as a state of a layer: 2 MiB of 2 KiB a token.
    paged = cache_layout(STATES, ONE, framework_defaults("vllm"), 40e9)
    assert paged.block == 1024
    assert paged.share_of(1000) == pytest.approx(shared.share_of(1000))
    # A step that may be taken back needs a state for each draft.
    drafted = cache_layout(STATES, ONE, framework_defaults("vllm"), 40e9, drafts=2)
    assert drafted.share_of(1000) == pytest.approx((1000 * token + 3 * state) / 40e9)


def test_sglang_has_a_pool_for_states() -> None:
    layout = cache_layout(STATES, ONE, framework_defaults("sglang"), 38e9)
    # 0.9 against 1, and five states of a running request.
    states = 18e9 / (36 * 4096 * 128 * 4)
    assert layout.parts == {"recurrent states": pytest.approx(18e9), "cache": pytest.approx(20e9)}
    assert layout.tokens == int(20e9 / (12 * 2048))
    assert layout.share(0.0, 0.0, 10.0) == pytest.approx(50 / states)
    # One each where nothing is kept for later prompts.
    alone = cache_layout(STATES, ONE, framework_defaults("sglang"), 38e9, reuse=False)
    assert alone.share(0.0, 0.0, 10.0) == pytest.approx(10 / states)


def test_sparse_attention_keeps_all_tokens_and_keys_of_its_indexer() -> None:
    own = Workload(
        layers=61, d_model=7168, heads=128, kv_heads=0, head_dim=128, d_ff=2048, vocab=129280,
        experts=256, top_k=8, shared_experts=1, kv_lora=512, rope_dim=64, v_dim=128, window=2048,
    )  # fmt: skip
    sparse = ServedModel(own, cache="fp8")
    assert sparse.token_bytes(ONE) == 61 * (512 + 64 + 132)
    assert replace(sparse, workload=replace(own, window=0)).token_bytes(ONE) == 61 * 576
    assert cache_layout(sparse, ONE, framework_defaults("vllm"), 1e9).plain


def test_occupancy_against_a_sum_over_requests() -> None:
    layout = CacheLayout(10_000, (Pool(10_000, 0.25, 0.75, 3.0),), window=50)
    own = Occupancy(layout, Policy(reserve=0.5, block=1), accepted=1.8)
    sizes = {0: 20.0, 1: 49.5, 2: 70.0, 3: 10.0}
    since: dict[int, int] = {}
    for index, size in sizes.items():
        own.admit(index, size)
    step = 0

    def expected() -> float:
        grown = {i: size + 0.9 * (step - since.get(i, step)) for i, size in sizes.items()}
        return sum(0.25 * n + 0.75 * min(n, 50.0) + 3.0 for n in grown.values())

    def passes(steps: int) -> None:
        nonlocal step
        own.grow(len(since), steps)
        step += steps
        assert own.used == pytest.approx(expected())

    for index in (0, 1, 2):
        since[index] = step
        own.start(index)
        passes(7)
    passes(30)
    since[3] = step
    own.start(3)
    passes(5)
    # One leaves that has filled its window, and one that has not.
    for index in (1, 3):
        own.release(index)
        del sizes[index], since[index]
        passes(11)


class Passes:
    """Passes of a second each."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        return np.array([float(steps)])

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        return np.ones(1)

    def swap(self, tokens: float) -> np.ndarray:
        return np.zeros(1)


def test_windows_evict_fewer_requests() -> None:
    load = Load(np.full(10, 100), np.full(10, 100), np.zeros(10))

    def run(cache: CacheLayout) -> tuple[int, int, float]:
        found = run_fleet(load, Station(Passes(), np.ones(1), cache, Policy(max_batch=10)))
        assert (found.finished > 0.0).all()
        return found.evicted, found.largest_batch, found.makespan

    # Ten requests of 199 tokens take 1,990 of all layers, or 1,195 where half of the layers keep
    # the last 40.
    assert run(plain_cache(1200))[0] > 0
    assert run(CacheLayout(1200, (Pool(1200, 0.5, 0.5),), window=40)) == (0, 10, 100.0)
    # A pool of windows that holds four requests, and one of states that holds three.
    windows = (Pool(10_000), Pool(160, 0.0, 1.0))
    assert run(CacheLayout(10_000, windows, window=40))[:2] == (0, 4)
    states = (Pool(10_000), Pool(15, 0.0, 0.0, 5.0))
    assert run(CacheLayout(10_000, states))[:2] == (0, 3)


def test_a_request_that_no_pool_holds_is_refused() -> None:
    load = Load(np.array([100]), np.array([100]), np.zeros(1))
    small = CacheLayout(1000, (Pool(1000), Pool(10, 0.0, 1.0)), window=40)
    with pytest.raises(PlanError, match="200 tokens of cache"):
        run_fleet(load, Station(Passes(), np.ones(1), small, Policy()))


@pytest.mark.parametrize("of", ["total", "static", "free"])
def test_shares_of_the_memory_by_hand(of: str) -> None:
    gib = 2.0**30
    weights = TURNS.weight_bytes(ONE)
    parts = memory_parts(80 * gib, TURNS, ONE, 0.8, of=of)
    # Activations take 2 GiB, of which one is there before the weights are read.
    want = {
        "total": 0.8 * 80 * gib - 2 * gib - weights,
        "static": 0.8 * 79 * gib - weights,
        "free": 0.8 * (78 * gib - weights),
    }
    assert pytest.approx(2 * gib) == RESERVED_BYTES
    assert parts.cache == pytest.approx(want[of])
    assert sum(parts.to_dict().values()) == pytest.approx(80 * gib)
    assert parts.share_of(parts.cache, of) == pytest.approx(0.8)
