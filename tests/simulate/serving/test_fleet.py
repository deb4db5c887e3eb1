"""Engines behind a router, prompts on workers of their own, caches that are shared or swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.fleet import capacity, run_fleet
from opcast.simulate.serving.latencies import states_of
from opcast.simulate.serving.load import Chunk, Load, Station
from opcast.simulate.serving.occupancy import PrefixCache
from opcast.simulate.serving.policies import Policy
from opcast.tests.support.serving_loop import plain_cache

#: Seconds of a pass: fixed, and for each token.
FIXED, TOKEN = 1.0, 0.01
WEIGHTS = np.array([FIXED, TOKEN])


class Tokens:
    """A pass costs its tokens; a cache of n tokens moves in n / 100 seconds."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        return np.array([steps, steps * batch], float)

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        return np.array([1.0, batch + sum(chunk.tokens for chunk in chunks)])

    def swap(self, tokens: float) -> np.ndarray:
        return np.array([0.0, tokens])


def station(count: int = 1, room: int = 10**6, **rules: object) -> Station:
    return Station(Tokens(), WEIGHTS, plain_cache(room), Policy(**rules), count)  # type: ignore[arg-type]


def load(prompts: Sequence[int], outputs: Sequence[int], arrivals: Sequence[float]) -> Load:
    return Load(np.array(prompts), np.array(outputs), np.array(arrivals, float))


def test_routers_by_hand() -> None:
    # The first request keeps its engine for long; the second is done when the third comes.
    asked = load([100, 100, 100], [100, 2, 2], [0.0, 0.1, 10.0])
    turns = run_fleet(asked, station(2))
    assert turns.engine.tolist() == [0, 1, 0]
    assert run_fleet(asked, station(2), router="least-loaded").engine.tolist() == [0, 1, 1]
    with pytest.raises(PlanError, match="'random' is not known"):
        run_fleet(asked, station(2), router="random")


def test_what_engines_serve_at_most_by_hand() -> None:
    # Four prompts of 100 in a pass of 1 + 4 s, then ten passes of 1.04 s for four sequences each.
    asked = load([100] * 4, [11] * 4, [0.0] * 4)
    wave = 5.0 + 10 * 1.04
    assert capacity(asked, station(max_batch=4)) == pytest.approx(4 / wave)
    assert capacity(asked, station(2, max_batch=4)) == pytest.approx(8 / wave)
    # Apart, prompts take 5 s and three engines decode faster than that: the slower decides.
    ahead, behind = station(max_batch=4), station(3, max_batch=4)
    assert capacity(asked, behind, ahead) == pytest.approx(4 / 5.0)
    assert capacity(asked, replace(behind, count=1), ahead) == pytest.approx(4 / 10.4)
    # The first token is the prompt's: nothing is left to decode.
    once = replace(asked, outputs=np.ones(4, int))
    assert capacity(once, behind, ahead) == pytest.approx(4 / 5.0)


def test_few_requests_with_arrivals_fill_the_batches_of_many() -> None:
    # One request or two a minute apart say nothing of what engines can serve: prompts of 100 in
    # passes of eight, each 1 + 8 s, then ten passes of 1.08 s for eight sequences.
    wave = 9.0 + 10 * 1.08
    for count in (1, 2, 40):
        apart = load([100] * count, [11] * count, [60.0 * at + 60.0 for at in range(count)])
        assert capacity(apart, station(max_batch=8)) == pytest.approx(8 / wave)
    # Those that are sent at once are all that there is.
    assert capacity(load([100], [11], [0.0]), station(max_batch=8)) == pytest.approx(1 / 12.1)


def test_what_engines_serve_at_most_of_prompts_with_blocks() -> None:
    # Blocks that differ change nothing: a load is served in waves as one without blocks, although
    # as many requests as it has fit into one batch.
    plain = load([100] * 4, [11] * 4, [0.0] * 4)
    apart = replace(plain, blocks=[(9,), (2,), (3,), (4,)], block_tokens=100)
    assert capacity(apart, station(2)) == pytest.approx(8 / (5.0 + 10 * 1.04))
    assert capacity(apart, station(2)) == pytest.approx(capacity(plain, station(2)))
    # One block for all: the first of four runs 100 tokens, the others one each, in every wave.
    alike = replace(plain, blocks=[(7,)] * 4, block_tokens=100)
    assert capacity(alike, station()) == pytest.approx(4 / (1.0 + 1.03 + 10 * 1.04))
    # Of workers apart, prompts take 2.03 s of every four and decoding 10.4 s.
    assert capacity(alike, station(6), station()) == pytest.approx(4 / 2.03)
    # More requests than four batches hold are looked at but for the last batch: two of 19 run all.
    many = load([100] * 20, [1] * 20, [0.0] * 20)
    shared = replace(many, blocks=[(8,)] + [(7,)] * 19, block_tokens=100)
    assert capacity(shared, station(max_batch=1)) == pytest.approx(19 / (2 * 2.0 + 17 * 1.01))


def test_a_run_says_what_its_cache_had_of_each_prompt() -> None:
    asked = replace(
        load([100] * 3, [2] * 3, [0.0, 10.0, 20.0]),
        blocks=[(1, 2), (1, 3), (4, 2)],
        block_tokens=50,
    )
    for front in (None, station()):
        assert run_fleet(asked, station(), front).found.tolist() == [0, 50, 0]


def test_equal_engines_share_an_open_load_as_one_with_half_of_it() -> None:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.5, 200))
    asked = Load(rng.integers(1, 300, 200), rng.integers(1, 50, 200), arrivals)
    both = run_fleet(asked, station(2))
    half = Load(asked.prompts[::2], asked.outputs[::2], arrivals[::2])
    alone = run_fleet(half, station(1))
    assert both.finished[::2] == pytest.approx(alone.finished, rel=1e-12)
    assert both.first[::2] == pytest.approx(alone.first, rel=1e-12)


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_a_closed_loop_over_engines_keeps_its_concurrency(router: str) -> None:
    rng = np.random.default_rng(2)
    asked = Load(rng.integers(1, 300, 120), rng.integers(2, 40, 120), np.zeros(120), 12)
    run = run_fleet(asked, station(3), router=router)
    events = [(t, 1) for t in run.sent] + [(t, -1) for t in run.finished]
    level = np.cumsum([step for _, step in sorted(events)])
    assert level.max() == 12
    # Who comes back goes to the engine that has room for it.
    if router == "least-loaded":
        assert np.ptp(np.bincount(run.engine)) < 40


def test_prompts_on_workers_of_their_own_by_hand() -> None:
    asked = load([100], [3], [0.0])
    run = run_fleet(asked, station(), station(), transfer=lambda tokens: 0.05 * tokens)
    # A pass over the prompt, 5 seconds of moving its cache, two passes over a token.
    first = FIXED + 100 * TOKEN + 5.0
    assert run.first[0] == pytest.approx(first)
    assert run.finished[0] == pytest.approx(first + 2 * (FIXED + TOKEN))


def test_what_waits_for_a_link_is_in_the_queue() -> None:
    """Prompts end after 2 and 4 s; each cache takes 10 s, so that the second waits for 8."""
    asked = load([100, 100], [2, 2], [0.0, 0.0])
    ahead = station(max_batch=1)
    run = run_fleet(asked, station(), ahead, transfer=lambda tokens: 10.0, record=True)
    ready = FIXED + 100 * TOKEN
    assert run.moves == pytest.approx(np.array([[ready, ready], [2 * ready, ready + 10.0]]))
    found = states_of(run, 1000, 1)
    assert found["queue_mean"] >= (10.0 - ready) / run.makespan and found["queue_max"] >= 1.0
    assert states_of(replace(run, moves=np.zeros((0, 2))), 1000, 1)["queue_mean"] == pytest.approx(
        found["queue_mean"] - (10.0 - ready) / run.makespan
    )


def test_a_full_engine_is_not_taken_for_a_free_one() -> None:
    # The first request decodes for a hundred passes when the second is handed over.
    asked = load([100, 100], [101, 101], [0.0, 5.0])
    run = run_fleet(asked, station(2, max_batch=1), station())
    assert run.engine.tolist() == [0, 1]
    assert run.first - run.sent == pytest.approx([FIXED + 100 * TOKEN] * 2)


def test_prompts_apart_do_not_hold_up_decoding() -> None:
    asked = load([10, 2000], [50, 2], [0.0, 5.0])
    rules = {"token_budget": 200, "mixed": False}
    beside = run_fleet(asked, station(**rules))
    apart = run_fleet(asked, station(), station(**rules))
    # Ten passes of 200 tokens come between two tokens of the first request.
    assert beside.finished[0] - apart.finished[0] == pytest.approx(10 * (FIXED + 200 * TOKEN))


def test_a_closed_loop_with_prompts_apart_serves_all() -> None:
    asked = Load(np.full(30, 50), np.full(30, 10), np.zeros(30), 4)
    run = run_fleet(asked, station(2), station(1))
    assert (run.finished > run.first).all() and (run.first > run.sent).all()
    assert sorted(run.sent[4:]) == pytest.approx(sorted(run.finished)[:26])


def test_hits_save_their_part_of_the_prompt() -> None:
    asked = load([100], [2], [0.0])
    run = run_fleet(replace(asked, hits=np.array([60])), station())
    assert run.first[0] == pytest.approx(FIXED + 40 * TOKEN)
    # A prompt that is known as a whole still runs its last token.
    run = run_fleet(replace(asked, hits=np.array([100])), station())
    assert run.first[0] == pytest.approx(FIXED + TOKEN)
    assert run.hit_tokens == 99


def test_prompts_that_begin_alike_are_run_once() -> None:
    blocks = [(1, 2, 3), (1, 2, 4), (9,)]
    asked = replace(
        load([30, 30, 10], [1, 1, 1], [0.0, 10.0, 20.0]), blocks=blocks, block_tokens=10
    )
    run = run_fleet(asked, station())
    assert (run.first - run.sent) == pytest.approx([FIXED + n * TOKEN for n in (30, 10, 10)])
    # Of two engines the one that knows the beginning gets the second request.
    aware = run_fleet(asked, station(2), router="prefix-aware")
    assert aware.engine.tolist()[:2] == [0, 0] and aware.hit_tokens == 20
    assert run_fleet(asked, station(2)).hit_tokens == 0


def test_a_router_weighs_what_is_known_against_what_is_queued() -> None:
    # Prompts of 300 tokens of which 200 are known to engine 0 once it has begun the first. While
    # that is running (300 to run, 300 to keep) the second costs 600 + 100 there and 300 elsewhere.
    asked = replace(
        load([300, 300, 300, 300], [1, 1, 50, 1], [0.0, 1.0, 20.0, 25.0]),
        blocks=[(1, 2, 3), (1, 2, 4), (1, 2, 5), (9, 8, 7)],
        block_tokens=100,
    )
    run = run_fleet(asked, station(2), router="prefix-aware")
    # The third finds both engines idle and equal; the last avoids the one that decodes.
    assert run.engine.tolist() == [0, 1, 0, 1]
    assert run.found.tolist() == [0, 0, 200, 0]


def test_a_prompt_that_all_share_keeps_no_engine_idle() -> None:
    """A user's four engines behind one system prompt: the first that knew it got most of all."""
    rng = np.random.default_rng(3)
    count, common = 400, tuple(range(8))
    arrivals = np.cumsum(rng.exponential(3.0, count))
    asked = Load(
        np.full(count, 1200),
        np.full(count, 5),
        arrivals,
        blocks=[
            (*common, 100 + 4 * i, 101 + 4 * i, 102 + 4 * i, 103 + 4 * i) for i in range(count)
        ],
        block_tokens=100,
    )
    turns = run_fleet(asked, station(4))
    aware = run_fleet(asked, station(4), router="prefix-aware")
    wait = [float((run.first - run.sent).mean()) for run in (turns, aware)]
    assert np.bincount(aware.engine, minlength=4).min() > 0.15 * count
    assert wait[1] < 1.1 * wait[0]


def test_the_least_recently_used_blocks_are_forgotten() -> None:
    kept = PrefixCache(10)
    kept.add((1, 2), 100.0)
    kept.add((3,), 100.0)
    kept.add((1,), 25.0)
    # Room for two: of 1, 2 and 3 the end of the first prompt was used least recently.
    assert kept.match((1, 2)) == 10 and kept.match((3,)) == 10 and kept.match((2,)) == 0


def test_swapping_moves_what_recomputing_runs_again() -> None:
    asked = load([100] * 3, [60] * 3, [0.0] * 3)
    runs = {s: run_fleet(asked, station(room=360, swap=s)) for s in (False, True)}
    assert runs[False].evicted > 0 and runs[True].evicted > 0
    for run in runs.values():
        assert (run.finished > 0.0).all() and run.largest_cache <= 363
    # Out and in at 0.01 seconds a token, against a pass of a second and the same for each token.
    assert runs[True].makespan != runs[False].makespan


def test_blocks_and_watermark_leave_less_room() -> None:
    asked = load([100] * 4, [1] * 4, [0.0] * 4)
    rules = {"token_budget": 1000, "reserve": 1.0}
    assert run_fleet(asked, station(room=400, **rules)).largest_batch == 4
    # Half a block of 31 tokens more for each: 4 x 115 do not fit, three do.
    assert run_fleet(asked, station(room=400, block=31, **rules)).largest_batch == 3
    assert run_fleet(asked, station(room=400, watermark=0.3, **rules)).largest_batch == 2


def test_accepted_drafts_make_passes_fewer() -> None:
    asked = load([100], [21], [0.0])
    run = run_fleet(asked, replace(station(), accepted=2.5))
    # Twenty tokens in eight passes.
    assert run.finished[0] - run.first[0] == pytest.approx(8 * (FIXED + TOKEN))
    assert run.iterations == 9


def test_histories_add_up() -> None:
    asked = Load(np.full(20, 50), np.full(20, 10), np.zeros(20), 4)
    run = run_fleet(asked, station(), record=True)
    (history,) = run.histories
    assert sum(history.passes) == run.iterations
    assert sum(history.spans) == pytest.approx(run.makespan)
    # Nine tokens of each request come after another one.
    assert sum(count for _, count in history.gaps) == 20 * 9
    between = sum(gap * count for gap, count in history.gaps)
    assert between == pytest.approx(float((run.finished - run.first).sum()))


def test_caches_follow_each_other_over_the_link_of_their_worker() -> None:
    asked = load([100, 100], [2, 2], [0.0, 0.0])
    for workers, later in ((1, 5.0), (2, 0.0)):
        run = run_fleet(asked, station(2), station(workers), transfer=lambda tokens: 5.0)
        # Both prompts are run in one pass, or side by side; then each cache takes 5 seconds.
        first, second = sorted(run.first - run.sent)
        assert second - first == pytest.approx(later)
