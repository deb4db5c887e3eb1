"""Pools over time: delays, backlogs, interruptions and devices, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.simulate.serving.autoscale import play
from opcast.simulate.serving.pools import Curve, Nodes, Pool, Scaling, Spot

#: Ten requests a second, a second each; all may wait for two seconds more.
CURVE = Curve(
    10.0,
    np.array([0.5, 1.0]),
    np.array([5.0, 10.0]),
    np.array([0.0, 1.0]),
    np.array([2.0, 4.0]),
    np.array([100.0, 300.0]),
    np.full((2, 4), 2.0),
)
STEP = 10.0
FREE = Nodes({}, {})


def pool(**other: object) -> Pool:
    own = Pool(0, CURVE, None, 1, 1, 1, Scaling(), 0.0, 60.0, 0.0, 1, "gpu")
    return replace(own, **other)  # type: ignore[arg-type]


def test_delay_and_backlog_by_hand() -> None:
    # 15 requests/s meet one replica of 10: the wish of the first step's end (10 s) is granted after
    # 30 s, at 40 s, and served from 100 s on: until then 5 a second wait. Two replicas serve 20.
    scaling = Scaling("utilisation", 0.75, up_s=30.0, down_s=1e9)
    one = play([pool(most=2, scaling=scaling)], np.full((1, 30), 150.0), STEP, FREE)
    assert one.ready[0].tolist() == [1.0] * 10 + [2.0] * 20
    assert one.paid[0].tolist() == [1.0] * 4 + [2.0] * 26
    assert one.backlog[0, 9] == pytest.approx(5.0 * 100)
    assert one.backlog[0, 10:20] == pytest.approx(500.0 - 50.0 * np.arange(1, 11))
    assert one.share[0, 20:] == pytest.approx(0.75)
    # What arrives at 95 s finds 5 · 95 = 475 requests ahead: 5 s at 10, and the other 425 at 20.
    assert one.wait[0, 9] == pytest.approx(5.0 + 425.0 / 20.0)
    assert one.good[0, 9] == 0.0
    assert one.good[0, 25] == 1.0


def test_what_comes_in_is_served_or_waits() -> None:
    rng = np.random.default_rng(0)
    arrived = rng.poisson(200.0, (1, 2000)).astype(float)
    own = pool(least=1, most=4, scaling=Scaling("concurrency", 6.0, 20.0, 60.0), spot=Spot(30.0))
    one = play([own], arrived, STEP, FREE)
    assert one.served.sum() + one.backlog[0, -1] == pytest.approx(arrived.sum())
    # 30 an hour of each replica, Poisson: within three deviations.
    expected = 30.0 * one.ready.sum() * STEP / 3600.0
    assert abs(one.lost.sum() - expected) < 3.0 * expected**0.5
    assert one.ready.min() < one.ready.max() <= 4


def test_interruptions_are_replaced_and_cut_requests_come_again() -> None:
    # Every step takes the replica if it is there; others come after 20 + 60 s.
    own = pool(spot=Spot(1e6, replacement_s=20.0))
    one = play([own], np.full((1, 20), 50.0), STEP, FREE)
    assert one.lost[0].nonzero()[0].tolist() == [0, 8, 16]
    # At no load yet nothing is cut; then what it held at the share of the step before.
    assert not one.ready.any()
    assert one.backlog[0, -1] == pytest.approx(1000.0)


def test_pools_compete_for_nodes() -> None:
    # A node of eight: six are taken by a replica of four and one of two; no further four fit.
    nodes = Nodes({"gpu": 8}, {"gpu": 8})
    both = [pool(devices=4, initial=2, least=2, most=2), pool(model=1, devices=2)]
    one = play(both, np.zeros((2, 1)), STEP, nodes)
    assert one.ready[:, 0].tolist() == [2.0, 0.0]
    # Four and four devices in two nodes: eight in one piece are not there, sixteen minus a part.
    parted = Nodes({"gpu": 12}, {"gpu": 8})
    assert parted.take("gpu", 2) == [(1, 2)]
    assert parted.take("gpu", 8) == [(0, 8)]
    assert parted.take("gpu", 4) is None


def test_mixed_chips_share_requests_by_what_they_serve() -> None:
    # A pool twice as fast takes two thirds; all of the slow one's are late.
    fast = replace(CURVE, capacity=20.0)
    slow = replace(CURVE, slack=np.full((2, 4), -1.0))
    one = play([pool(warm=fast), pool(warm=slow)], np.full((1, 4), 150.0), STEP, FREE)
    assert one.share[0] == pytest.approx(0.5)
    assert one.good[0] == pytest.approx(2.0 / 3.0)
    # 100 W each at half load.
    assert one.joules.sum() == pytest.approx(2 * 100.0 * 40.0)


def test_cold_caches_serve_less() -> None:
    # A started replica serves 4 a second until its cache is warm, 60 s after it began.
    cold = replace(CURVE, capacity=4.0)
    scaling = Scaling("utilisation", 0.5, up_s=0.0, down_s=1e9)
    own = pool(cold=cold, warm_s=60.0, most=2, scaling=scaling)
    one = play([own], np.full((1, 20), 100.0), STEP, FREE)
    assert one.share[0, 7:13] == pytest.approx(100.0 / 140.0)
    assert one.share[0, 13:] == pytest.approx(0.5)
