import numpy as np
import pytest

from opcast.models.collectives.curve import (
    PARAMETERS,
    SPREAD,
    START,
    Points,
    curve_us,
    steps,
    wire_bytes,
)

LARGE, SMALL = 2.0**30, 512.0


def points(size, world=4.0, bandwidth=1e5, **changes):
    size = np.atleast_1d(np.asarray(size, dtype=float))
    n = len(size)
    wire = wire_bytes("all_reduce", size, np.full(n, world), gathers_shards=False)
    fields = {
        "size": size,
        "world": np.full(n, world),
        "steps": steps(np.full(n, world)),
        "spread": np.full(n, world),
        "wire": wire,
        "wire_low": wire,
        "bandwidth": np.full(n, bandwidth),
        "scale": np.ones(n),
        "copy": np.zeros(n),
        "eager": np.zeros(n),
    }
    return Points(**{**fields, **changes})


@pytest.mark.parametrize(
    ("op", "shards", "expected"),
    [
        ("all_reduce", False, 2 * 3 / 4 * 1000),
        ("all_gather", False, 3 / 4 * 1000),
        ("all_gather", True, 3 * 1000),
        ("reduce_scatter", True, 3 / 4 * 1000),
        ("alltoall", False, 3 / 4 * 1000),
        ("send_recv", False, 1000),
    ],
)
def test_ring_volumes_of_1000_bytes_on_4_devices(op, shards, expected):
    assert wire_bytes(op, np.array([1000.0]), np.array([4.0]), shards)[0] == expected


def test_steps_are_those_of_a_ring_up_to_8_devices_then_of_a_tree():
    np.testing.assert_allclose(steps(np.array([2.0, 4.0, 8.0, 16.0, 64.0])), [1, 3, 7, 9, 13])
    # All-gathers are handed on around the ring, however many devices there are.
    np.testing.assert_allclose(steps(np.array([2.0, 8.0, 64.0]), True), [1, 7, 63])


def test_a_small_message_costs_its_start_ups_alone():
    parameters = dict(zip(PARAMETERS, START, strict=True))
    # 5 us to start, 3 steps of 1.2 us, and 768 bytes on 15 % of 1e5 bytes/us.
    expected = 5.0 + 3 * 1.2 + 2 * 3 / 4 * SMALL / (0.15 * 1e5)
    assert parameters["log_a_low"] == pytest.approx(np.log(5.0))
    assert curve_us(START, points(SMALL))[0] == pytest.approx(expected, rel=1e-3)


def test_a_large_message_costs_its_ring_volume_at_the_bulk_efficiency():
    ideal = 2 * 3 / 4 * LARGE / 1e5
    expected = 15.0 + 3 * 1.5 + ideal / 0.75 + np.sqrt(ideal)
    assert curve_us(START, points(LARGE))[0] == pytest.approx(expected, rel=1e-3)


def test_twice_the_bandwidth_nearly_halves_a_large_message_and_not_a_small_one():
    fast = curve_us(START, points([SMALL, LARGE], bandwidth=2e5))
    slow = curve_us(START, points([SMALL, LARGE]))
    np.testing.assert_allclose(slow / fast, [1.0, 2.0], atol=0.02)


def test_the_host_is_a_lower_bound_and_copies_the_message():
    graph = curve_us(START, points([SMALL, LARGE]))
    copy = np.array([0.0, 500.0])
    eager = curve_us(START, points([SMALL, LARGE], eager=np.ones(2), copy=copy))
    assert eager[0] == pytest.approx(25.0, rel=0.01)  # the host's time in START
    assert eager[1] == pytest.approx(graph[1] + 500.0)


def test_vectors_agree_in_length():
    assert len(PARAMETERS) == len(START) == len(SPREAD)
