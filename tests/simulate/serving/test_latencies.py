import numpy as np
import pytest

from opcast.simulate.serving.latencies import FREE, Slo, queued_share, served
from opcast.simulate.serving.load import Load, Run


def case(prompts, first, finished, outputs=(2, 2, 2, 2), found=(0, 0, 0, 0)):
    load = Load(np.array(prompts), np.array(outputs), np.zeros(len(prompts)))
    times = {"sent": np.zeros(4), "first": np.array(first), "finished": np.array(finished)}
    return load, Run(**times, found=np.array(found))


def test_waiting_is_told_from_long_prompts():
    # Two short prompts in 1 s and two long ones in 8 s: nobody waits for another.
    load, run = case([100, 100, 800, 800], [1.0, 1.0, 8.0, 8.0], [9.0] * 4)
    assert queued_share(load, run) == 0.0
    # One of each length waits for as long again: 9 of 27 seconds.
    load, run = case([100, 100, 800, 800], [1.0, 2.0, 8.0, 16.0], [20.0] * 4)
    assert queued_share(load, run) == pytest.approx(9 / 27)


def test_waiting_is_told_from_prompts_that_a_cache_has_in_part():
    # Four prompts of 800: two run in 8 s, two of which the cache has 700 tokens in 1 s.
    load, run = case([800] * 4, [8.0, 8.0, 1.0, 1.0], [9.0] * 4, found=(0, 0, 700, 700))
    assert queued_share(load, run) == 0.0


def test_requests_of_a_long_loop_stand_for_those_that_are_not_simulated():
    # Two in flight, six simulated of twenty: the first and last two come once.
    load = Load(np.full(6, 10), np.full(6, 2), np.zeros(6), concurrency=2, stands_for=20)
    assert load.count == 20 and load.counts.tolist() == [1, 1, 8, 8, 1, 1]
    sent = np.zeros(6)
    first = np.array([9.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    seen = served(load, Run(sent, first, first + 1.0, found=np.zeros(6, int)))
    assert seen.figure("ttft", "mean") == pytest.approx((2 * 9.0 + 18 * 1.0) / 20)
    assert seen.figure("ttft", 90) == 1.0 and seen.figure("ttft", 99) == 9.0
    assert seen.good(Slo(ttft=2.0)) == pytest.approx(0.9)
    # Those of a load of its own length count once each.
    assert Load(np.full(6, 10), np.full(6, 2), np.zeros(6), 2).counts.tolist() == [1] * 6


def test_an_slo_counts_requests_and_one_token_has_no_time_per_further_token():
    load, run = case([10] * 4, [1.0, 1.0, 2.0, 2.0], [1.0, 3.0, 3.0, 9.0], (1, 2, 2, 8))
    seen = served(load, run)
    assert np.isnan(seen.tpot[0]) and seen.tpot[1:].tolist() == [2.0, 1.0, 1.0]
    assert seen.good(FREE) == 1.0 and seen.good(Slo(ttft=1.5)) == 0.5
    assert seen.good(Slo(tpot=1.5)) == 0.75 and seen.good(Slo(e2e=3.0)) == 0.75
    # Gaps count by their tokens: 2 s once, 1 s eight times.
    mean = (2.0 + 1.0 + 7.0) / 9
    assert seen.figure("itl", "mean") == pytest.approx(mean)
    spread = ((2.0 - mean) ** 2 + 8 * (1.0 - mean) ** 2) / 9
    assert seen.figure("itl", "std") == pytest.approx(spread**0.5)
    # Two of a second and two of two: half a second from the mean.
    assert (seen.figure("ttft", "mean"), seen.figure("ttft", "std")) == (1.5, 0.5)
    assert seen.figure("itl", 50) == 1.0 and seen.figure("itl", 99) == 2.0
