import pytest

from opcast.common.errors import DeviceError
from opcast.simulate.clusters.topology import Dimension, Topology
from opcast.simulate.collectives.choose import (
    COLLECTIVES,
    candidates,
    collective_cost,
    collective_name,
    dims_cost,
)

US = 1e-6


def one(kind="switch", size=4, **more):
    """100 GB/s, 1 µs a step, 10 µs to launch."""
    return Topology((Dimension(kind, size, 1e11, US, 10 * US, **more),))


def parts(kind, size, topology, algorithm, group=None):
    found = collective_cost(kind, size, group or topology.size, topology, algorithm)
    return found.launch / US, found.latency / US, found.transfer / US


def test_ring_by_hand():
    # 4 devices, 8 MB each: 2 · 3 steps of 1 µs, 2 · 3/4 · 8 MB at 100 GB/s.
    assert parts("all_reduce", 8e6, one(), "ring") == pytest.approx((10, 6, 120))
    assert parts("reduce_scatter", 8e6, one(), "ring") == pytest.approx((10, 3, 60))
    assert parts("all_gather", 2e6, one(), "ring") == pytest.approx((10, 3, 60))
    # Blocks of 2 MB on a physical ring: 4²/4 of them over both links together.
    assert parts("all_to_all", 8e6, one("ring"), "ring") == pytest.approx((10, 2, 80))


@pytest.mark.parametrize("kind", ["ring", "switch", "fully_connected", "fat_tree"])
@pytest.mark.parametrize("n", [2, 4, 6])
def test_ring_all_reduce_is_reduce_scatter_and_all_gather(kind, n):
    more = {"radix": 1, "oversubscription": 2.0} if kind == "fat_tree" else {}
    topology = one(kind, n, **more)
    both = parts("all_reduce", 6e6, topology, "ring")
    scatter = parts("reduce_scatter", 6e6, topology, "ring")
    gather = parts("all_gather", 6e6 / n, topology, "ring")
    assert sum(both) == pytest.approx(10 + sum(scatter[1:]) + sum(gather[1:]))


def test_direct_tree_and_halving_by_hand():
    assert parts("all_to_all", 8e6, one(), "direct") == pytest.approx((10, 1, 60))
    assert parts("all_reduce", 8e6, one(), "one_shot") == pytest.approx((10, 1, 240))
    assert parts("all_reduce", 8e6, one(), "halving_doubling") == pytest.approx((10, 4, 120))
    assert parts("broadcast", 8e6, one(), "tree") == pytest.approx((10, 2, 160))
    assert parts("broadcast", 8e6, one(), "scatter_gather") == pytest.approx((10, 2, 120))
    # Two trees with two levels, one chunk: (2 + 2 · 2 - 3) · 1 MB.
    assert parts("all_reduce", 1e6, one(), "tree") == pytest.approx((10, 4, 30))


def test_switches_that_add_up_by_hand():
    # One chunk up and down; one chunk: first owner, 2 + 1/4 of the buffer and a latency.
    assert parts("all_reduce", 1e6, one(reduction="tree"), "in_network") == pytest.approx(
        (10, 1, 20)
    )
    multicast = one(reduction="multicast")
    assert parts("all_reduce", 1e6, multicast, "in_network") == pytest.approx((10, 1, 22.5))
    # Long buffers: 5/4 of the bytes, where a ring takes 6/4.
    long = collective_cost("all_reduce", 1e9, 4, multicast, "in_network")
    assert long.transfer == pytest.approx(1.25e9 * 65 / 64 / 1e11)


def test_oversubscribed_trees_slow_what_crosses_the_spine():
    tree = one("fat_tree", 8, radix=4, oversubscription=4.0)
    # Blocks of 1 MB: four to the other leaf take 4 · 4, seven of one's own port 7.
    assert parts("all_to_all", 8e6, tree, "direct") == pytest.approx((10, 2, 160))
    free = one("fat_tree", 8, radix=4)
    assert parts("all_to_all", 8e6, free, "direct") == pytest.approx((10, 2, 70))


def test_a_torus_uses_all_its_links():
    square = one("torus", 16, shape=(4, 4))
    assert parts("all_reduce", 8e6, square, "ring") == pytest.approx((10, 12, 2 * 15 / 16 * 80))


def two_levels(oversubscription=1.0):
    fast = Dimension("switch", 4, 1e11, US, 5 * US)
    slow = Dimension("switch", 2, 1e10, 4 * US, 10 * US)
    return Topology((fast, slow))


def test_hierarchical_by_hand():
    # Scatter 3/4 of 8 MB, exchange 2 MB across at 10 GB/s (one shot between two), gather.
    found = parts("all_reduce", 8e6, two_levels(), "hierarchical")
    assert found == pytest.approx((10, 1 + 4 + 1, 60 + 200 + 60))
    gathered = parts("all_gather", 1e6, two_levels(), "hierarchical")
    assert gathered == pytest.approx((10, 4 + 1, 100 + 60))  # 1 MB across, then 3 · 2 MB inside


def test_rings_over_all_ranks_use_every_network_port():
    # Messages of 8 MB / 8 / 4: each port to the network sends 14 of them.
    found = collective_cost("all_reduce", 8e6, 8, two_levels(), "multi_ring")
    assert found.total / US == pytest.approx(10 + 4 + 14 * 25)
    assert collective_cost("all_reduce", 8e8, 8, two_levels()).algorithm == "hierarchical"


def test_auto_is_the_fastest():
    for kind in COLLECTIVES:
        topology = one()
        best = collective_cost(kind, 1e6, 4, topology)
        every = candidates(kind.removeprefix("ragged_"), 1e6, topology.dims)
        assert best.total == pytest.approx(10 * US + min(sum(cost) for _, cost in every))


def test_a_library_offers_its_own_algorithms_unless_told_otherwise():
    nccl = one(algorithms=("ring", "tree"))
    assert collective_cost("all_reduce", 8e6, 4, nccl).algorithm == "ring"
    assert collective_cost("all_to_all", 8e6, 4, nccl).algorithm == "direct"
    assert collective_cost("all_reduce", 8e6, 4, nccl, "direct").algorithm == "direct"


def test_point_to_point_takes_one_link():
    assert parts("send_recv", 1e6, one(), "auto", [0, 1]) == pytest.approx((10, 1, 10))
    assert parts("collective_permute", 1e6, one("ring"), "auto") == pytest.approx((10, 1, 20))
    assert parts("collective_permute", 1e6, two_levels(), "auto") == pytest.approx((10, 5, 100))


def test_uneven_blocks_and_single_ranks():
    even = collective_cost("all_to_all", 8e6, 4, one())
    uneven = collective_cost("ragged_all_to_all", 8e6, 4, one(), skew=1.5)
    assert uneven.transfer == pytest.approx(1.5 * even.transfer)
    assert collective_cost("all_reduce", 8e6, [3], one()).total == 0.0


def test_more_bytes_never_take_less():
    for topology in (one(), one("ring", 5), two_levels()):
        for kind in COLLECTIVES:
            times = [
                collective_cost(kind, float(1 << k), topology.size, topology).total
                for k in range(10, 31, 4)
            ]
            assert times == sorted(times)


def test_names():
    assert collective_name("all-reduce-start") == "all_reduce"
    assert collective_name("alltoall_perf") == "all_to_all"
    assert collective_name("ragged-all-to-all") == "ragged_all_to_all"
    with pytest.raises(DeviceError, match="one of all_reduce"):
        collective_name("scan")


def test_what_cannot_be_asked():
    with pytest.raises(DeviceError, match="unknown algorithm 'magic'"):
        collective_cost("all_reduce", 1, 4, one(), "magic")
    with pytest.raises(DeviceError, match=r"tree does not do all_to_all.*these do: direct"):
        collective_cost("all_to_all", 1, 4, one(), "tree")
    with pytest.raises(DeviceError, match="bytes"):
        collective_cost("all_reduce", -1, 4, one())
    with pytest.raises(DeviceError, match="skew"):
        collective_cost("all_to_all", 1, 4, one(), skew=0.5)
    assert dims_cost("all_reduce", 1.0, ()).algorithm == "none"


@pytest.mark.parametrize("kind", ["send_recv", "collective_permute"])
def test_what_goes_from_rank_to_rank_has_one_algorithm(kind):
    for topology in (one(), two_levels()):
        chosen = collective_cost(kind, 1e6, 2, topology)
        assert chosen == collective_cost(kind, 1e6, 2, topology, "direct")
        with pytest.raises(DeviceError, match=f"ring does not do {kind}.*these do: direct"):
            collective_cost(kind, 1e6, 2, topology, "ring")


def test_large_trees_continue_small_ones():
    for kind, more in (("switch", {}), ("fat_tree", {"radix": 32})):
        small, large = one(kind, 256, **more), one(kind, 512, **more)
        before = collective_cost("all_reduce", 1e6, 256, small, "tree").total
        after = collective_cost("all_reduce", 1e6, 512, large, "tree").total
        # One more level: 20 µs of transfer, and two latencies there and back.
        assert after - before == pytest.approx(24 * US, abs=8 * US)
