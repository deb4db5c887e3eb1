"""Prompts and decoding on workers of their own, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.simulate.serving.pools import Pool, PoolTimes, two_pools

#: Classes: prompts, passes, sequences of passes.
WEIGHTS = np.array([1.0, 1.0, 1.0])
PROMPT = np.array([0.1, 0.0, 0.0])


def decode(sequences: float) -> np.ndarray:
    return np.array([0.0, 0.01, 0.0001 * sequences])


def served(concurrency: int, servers: int = 1, batch: int = 1000) -> PoolTimes:
    return two_pools(Pool(PROMPT, servers), decode, WEIGHTS, 1, batch, 100, concurrency, 10, 0.002)


def test_one_request_waits_for_nobody() -> None:
    alone = served(1)
    assert alone.ttft == pytest.approx(0.102)
    assert alone.tpot == pytest.approx(0.0101)
    assert alone.queued == pytest.approx(0.0)
    assert alone.ttft_shares == pytest.approx([1.0, 0.0, 0.0])
    assert alone.tpot_shares == pytest.approx([0.0, 0.01 / 0.0101, 0.0001 / 0.0101])


def test_the_slower_pool_bounds_the_throughput() -> None:
    # One worker runs ten prompts a second: 200 requests in flight take 20 seconds each, all but a
    # second or two of it in the queue of prompts, and the first wave somewhat less.
    many = served(200)
    assert many.ttft + 100 * many.tpot == pytest.approx(20.0, rel=0.15)
    assert many.queued > 0.9
    assert served(200, servers=4).ttft < 0.3 * many.ttft


def test_requests_beyond_the_batch_wait() -> None:
    assert served(64, servers=8, batch=16).ttft > served(64, servers=8).ttft
    assert served(64, servers=8, batch=16).tpot <= served(64, servers=8).tpot
