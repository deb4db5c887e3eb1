"""The event-driven engine against the loop over iterations, and its policies by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.fleet import run_fleet
from opcast.simulate.serving.load import Chunk, Load, Run, Station
from opcast.simulate.serving.policies import Policy
from opcast.tests.support.serving_loop import Request, plain_cache, serve

#: Seconds of a pass: fixed, for each token, and for each token that decoding attends to.
FIXED, TOKEN, SEEN = 1e-3, 2e-5, 1e-8


class Linear:
    """Costs in three classes: passes, their tokens, tokens that decoding attends to."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        return np.array([steps, steps * batch, steps * (cached + batch * (steps + 1) / 2.0)])

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        tokens = batch + sum(chunk.tokens for chunk in chunks)
        return np.array([1.0, tokens, cached + batch if batch else 0.0])

    def swap(self, tokens: float) -> np.ndarray:
        return np.array([0.0, 0.1 * tokens, 0.0])


WEIGHTS = np.array([FIXED, TOKEN, SEEN])


def run_engine(load: Load, room: int, policy: Policy, **options: object) -> Run:
    station = Station(Linear(), WEIGHTS, plain_cache(room), policy)
    return run_fleet(load, station, **options)  # type: ignore[arg-type]


def slow(chunks: Sequence[Chunk], batch: int, length: float) -> float:
    tokens = batch + sum(chunk.tokens for chunk in chunks)
    return FIXED + TOKEN * tokens + SEEN * batch * length


def drawn(count: int, rate: float, seed: int = 0) -> tuple[Load, list[Request]]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts, outputs = rng.integers(1, 900, count), rng.integers(1, 300, count)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return Load(prompts, outputs, arrivals), [Request(*row) for row in rows]


@pytest.mark.parametrize("rate", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("budget", [512, 8192])
def test_events_and_iterations_agree(rate: float, budget: int) -> None:
    load, requests = drawn(200, rate)
    policy = Policy(max_batch=32, token_budget=budget, reserve=1.0)
    fast = run_engine(load, 10**7, policy)
    exact = serve(requests, slow, 10**7, max_batch=32, token_budget=budget)
    assert fast.first - fast.sent == pytest.approx(exact.first_token, rel=1e-9)
    assert fast.finished == pytest.approx(exact.finished, rel=1e-9)
    assert fast.iterations == exact.iterations
    assert fast.largest_batch <= 32


def test_a_request_misses_the_pass_that_was_prepared_before_it_came() -> None:
    one = FIXED + 100 * TOKEN
    step = FIXED + TOKEN + SEEN * 101
    load = Load(np.array([100, 10]), np.array([50, 1]), np.array([0.0, one + 0.5 * step]))
    at_once, later = (
        run_engine(load, 1000, Policy(ahead=ahead)).first[1] for ahead in (False, True)
    )
    assert at_once == pytest.approx(one + step + FIXED + 11 * TOKEN + SEEN * 102)
    # A further token first, which the prompt's pass then attends to.
    assert later - at_once == pytest.approx(FIXED + TOKEN + SEEN * 102 + SEEN)
    # Nothing is prepared where nothing runs: both begin at once.
    both = run_engine(
        Load(np.array([5, 5]), np.array([2, 2]), np.zeros(2)), 1000, Policy(ahead=True)
    )
    assert both.first == pytest.approx(FIXED + 10 * TOKEN)


def test_one_request_by_hand() -> None:
    load = Load(np.array([100]), np.array([3]), np.zeros(1))
    run = run_engine(load, 1000, Policy(), delay=0.5)
    first = 0.5 + FIXED + 100 * TOKEN
    # Two more tokens, which attend to 101 and 102 tokens.
    last = first + 2 * FIXED + 2 * TOKEN + SEEN * (101 + 102)
    assert run.first[0] == pytest.approx(first)
    assert run.finished[0] == pytest.approx(last)
    # Shares by class: what the engine did while the request waited, and while it decoded.
    assert run.waits == pytest.approx([FIXED, 100 * TOKEN, 0.0])
    assert run.tokens == pytest.approx([2 * FIXED, 2 * TOKEN, 203 * SEEN])


def test_a_closed_loop_keeps_its_concurrency() -> None:
    load = Load(np.full(40, 64), np.full(40, 17), np.zeros(40), concurrency=8)
    run = run_engine(load, 10**6, Policy())
    assert run.largest_batch == 8
    # Every request but the first eight is sent when another one ends.
    assert sorted(run.sent[8:]) == pytest.approx(sorted(run.finished)[:32])


def test_prompts_that_run_first_hold_up_decoding() -> None:
    load = Load(np.array([10, 4000]), np.array([50, 2]), np.array([0.0, 0.02]))
    beside = run_engine(load, 10**6, Policy(token_budget=256))
    first = run_engine(load, 10**6, Policy(token_budget=256, mixed=False))
    assert first.first[1] < beside.first[1]
    # Sixteen passes over the prompt come between two tokens of the other request.
    assert first.finished[0] - beside.finished[0] == pytest.approx(16 * FIXED, rel=0.1)


def test_a_full_cache_evicts_and_still_serves_all() -> None:
    load = Load(np.full(10, 100), np.full(10, 100), np.zeros(10))
    tight = run_engine(load, 1100, Policy())
    sure = run_engine(load, 1100, Policy(reserve=1.0))
    free = run_engine(load, 10**6, Policy())
    assert tight.evicted > 0 and sure.evicted == 0
    assert tight.largest_cache <= 1100 + 10
    assert (tight.finished > 0.0).all()
    assert min(tight.makespan, sure.makespan) > free.makespan
    # 1100 tokens hold five requests of at most 199 each.
    assert sure.largest_batch == 5


def test_prompts_that_are_not_cut_wait_for_room_in_the_budget() -> None:
    load = Load(np.array([600, 600]), np.array([1, 1]), np.zeros(2))
    whole = run_engine(load, 10**6, Policy(token_budget=1000, chunked=False))
    cut = run_engine(load, 10**6, Policy(token_budget=1000))
    assert whole.first == pytest.approx([FIXED + 600 * TOKEN, 2 * FIXED + 1200 * TOKEN])
    assert cut.first == pytest.approx([FIXED + 1000 * TOKEN, 2 * FIXED + 1200 * TOKEN])


def test_prompts_wait_until_every_rank_has_one() -> None:
    # Two decode when a third prompt comes, and a fourth ten passes later.
    step = FIXED + 2 * TOKEN
    came = 0.01 + np.array([0.0, 0.0, 0.1, 0.1 + 10 * step]) * [0, 0, 1, 1]
    load = Load(np.array([10, 10, 10, 10]), np.array([500, 500, 50, 50]), came)

    def first(gather: int) -> np.ndarray:
        return run_engine(load, 10**6, Policy(ranks=2, gather=gather)).first

    at_once, together, given_up = first(0), first(60), first(4)
    assert at_once[3] - at_once[2] == pytest.approx(10 * step, rel=0.2)
    # Both run in the pass after the second of them came.
    assert together[2] == together[3] >= came[3]
    # The first of them waits for four passes, then runs alone.
    assert given_up[2] - at_once[2] == pytest.approx(4 * step, rel=0.05)
    # While fewer decode than there are ranks, prompts run as they come.
    alone = run_engine(load, 10**6, Policy(ranks=3, gather=60)).first
    assert alone[2] == pytest.approx(at_once[2])


def test_prompts_wait_until_they_fill_a_pass() -> None:
    step = FIXED + TOKEN
    came = 0.01 + np.array([0.0, 0.1, 0.1 + 10 * step]) * [0, 1, 1]
    load = Load(np.array([10, 300, 300]), np.array([500, 50, 50]), came)

    def first(**rules: float) -> np.ndarray:
        return run_engine(load, 10**6, Policy(token_budget=1000, **rules)).first  # type: ignore[arg-type]

    at_once, filled, given_up = first(), first(gather=60, fill=0.5), first(gather=4, fill=0.5)
    # 300 and one decoding are fewer than 500, 600 are more.
    assert filled[1] == filled[2] >= came[2]
    assert given_up[1] - at_once[1] == pytest.approx(4 * step, rel=0.05)
    assert first(gather=60, fill=0.3)[1] == at_once[1]


def test_requests_are_received_every_so_many_passes() -> None:
    step = FIXED + TOKEN
    came = 0.01 + np.array([0.0, 0.1]) * [0, 1]
    load = Load(np.array([10, 10]), np.array([500, 50]), came)
    first = {poll: run_engine(load, 10**6, Policy(poll=poll)).first[1] for poll in (1, 10, 30)}
    # The prompt's pass comes after a whole number of intervals since the pass before decoding.
    for poll, found in first.items():
        passes = (found - FIXED - 11 * TOKEN - (FIXED + 10 * TOKEN) - 0.01) / step
        assert passes % poll == pytest.approx(0.0, abs=0.1) or passes % poll > poll - 0.1
        assert 0.0 <= found - first[1] < poll * step


def test_a_rank_runs_no_more_than_its_share_of_the_budget() -> None:
    load = Load(np.array([600, 600]), np.array([1, 1]), np.zeros(2))
    one = run_engine(load, 10**6, Policy(token_budget=1000))
    two = run_engine(load, 10**6, Policy(token_budget=1000, ranks=2))
    assert one.first == pytest.approx([FIXED + 1000 * TOKEN, 2 * FIXED + 1200 * TOKEN])
    # 500 tokens of each in the first pass.
    assert two.first == pytest.approx([2 * FIXED + 1200 * TOKEN] * 2)


def test_requests_that_do_not_fit_are_refused() -> None:
    load = Load(np.array([100]), np.array([100]), np.zeros(1))
    with pytest.raises(PlanError, match="200 tokens of cache"):
        run_engine(load, 150, Policy())
    with pytest.raises(PlanError, match="at least"):
        Load(np.array([0]), np.array([1]), np.zeros(1))


def test_large_loads_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        load, _ = drawn(count, 20.0)
        start = time.process_time()
        run = run_engine(load, 400_000, Policy())
        assert run.finished.min() > 0.0
        return time.process_time() - start

    # Four times as many requests; quadratic work would take 16 times as long.
    assert seconds(8_000) < 8.0 * min(seconds(2_000) for _ in range(3))
