import pytest

from opcast.common.errors import DeviceError
from opcast.simulate.clusters.topology import Dimension, Topology
from opcast.simulate.collectives.choose import candidates
from opcast.simulate.collectives.trees import binary_tree

from .message_check import cases, main
from .message_composed import message_seconds
from .message_schedules import PHASES, Schedule, run_phase
from .messages import DOWN, Links, Message, arrivals

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
         "collective_permute")  # fmt: skip


def topology(kind="switch", size=4, **more):
    return Topology((Dimension(kind, size, 1e9, 1.0, **more),))


def times(topology, *messages):
    links = Links(topology)
    made = [Message(links.path(a, b, *way), size, after) for a, b, size, after, *way in messages]
    return arrivals(links, made).tolist()


def test_one_message_is_cut_through_a_switch():
    assert times(topology(), (0, 1, 2e9, ())) == [3.0]  # two links of half a second, 2 GB once


def test_messages_queue_at_a_port_in_the_order_of_the_schedule():
    found = times(topology(), (0, 1, 2e9, ()), (2, 1, 1e9, ()), (3, 2, 1e9, ()))
    assert found == [3.0, 4.0, 2.0]  # the second waits for the first at the receiver's port


def test_messages_wait_for_what_they_depend_on():
    assert times(topology(), (0, 1, 1e9, ()), (1, 2, 1e9, (0,))) == [2.0, 4.0]


def test_a_ring_has_half_its_bandwidth_each_way():
    ring = topology("ring", 5)
    assert times(ring, (0, 1, 1e9, ())) == [3.0]
    assert times(ring, (0, 3, 1e9, ())) == [4.0]  # two hops downwards
    assert times(ring, (0, 1, 1e9, (), DOWN)) == [6.0]  # four hops


def test_leaves_share_the_links_to_the_spine():
    tree = topology("fat_tree", 4, radix=2, oversubscription=2.0)
    assert times(tree, (0, 2, 1e9, ()), (1, 3, 1e9, ()), (0, 1, 1e9, ())) == [3.0, 4.0, 3.0]
    free = topology("fat_tree", 4, radix=2)
    assert times(free, (0, 2, 1e9, ()), (1, 3, 1e9, ())) == [3.0, 3.0]


def test_leaves_of_one_tree_have_children_in_the_other():
    parents = binary_tree(8)
    assert parents == [1, 3, 1, 7, 5, 3, 5, -1]
    assert all(parent % 2 == 1 for parent in parents[:-1])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["ring", "fully_connected", "switch"])
@pytest.mark.parametrize("size", [4e4, 4e6, 4e9])
def test_every_formula_is_what_the_messages_take(kind, n, size):
    shape = Topology((Dimension(kind, n, 1e11, 1e-6),))
    for collective in KINDS:
        for algorithm, cost in candidates(collective, size, shape.dims):
            taken = message_seconds(collective, size, shape, algorithm)
            pipelined = algorithm == "tree" and collective == "all_reduce"
            tolerance = 0.03 if pipelined and size > 1e6 else 1e-6
            assert sum(cost) == pytest.approx(taken, rel=tolerance), (collective, algorithm)


@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (2, 2, 2), (2, 3, 4)])
def test_tori_are_what_the_messages_take(shape):
    n = 1
    for axis in shape:
        n *= axis
    torus = Topology((Dimension("torus", n, 1e11, 1e-6, shape=shape),))
    for collective in KINDS:
        for algorithm, cost in candidates(collective, 1e7, torus.dims):
            assert sum(cost) == pytest.approx(message_seconds(collective, 1e7, torus, algorithm))


def test_rings_over_boxes_are_what_the_messages_take():
    boxes = Topology((Dimension("switch", 4, 1e11, 1e-6), Dimension("switch", 4, 1e10, 5e-6)))
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        for size in (1e5, 1e8):
            found = dict(candidates(collective, size, boxes.dims))
            for algorithm in ("multi_ring", "hierarchical"):
                taken = message_seconds(collective, size, boxes, algorithm)
                assert sum(found[algorithm]) == pytest.approx(taken, rel=0.02)


def test_formulas_are_within_three_per_cent_for_4_and_8_devices():
    for n in (4, 8):
        worst = max(cases(n), key=lambda case: abs(case.error))
        assert abs(worst.error) < 0.03, worst


@pytest.mark.slow
@pytest.mark.parametrize("n", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_formulas_are_within_three_per_cent_for_many_devices(n):
    worst = max(cases(n, sizes=(2.0**18, 2.0**28)), key=lambda case: abs(case.error))
    assert abs(worst.error) < 0.03, worst


def test_the_table_names_topologies_and_the_largest_difference(capsys):
    main(["--devices", "4"])
    text = capsys.readouterr().out
    assert "torus 2-D" in text and "halving_doubling" in text and "largest difference" in text


def test_what_has_no_schedule():
    with pytest.raises(DeviceError, match="no schedule of hierarchical"):
        message_seconds("all_reduce", 1.0, topology(size=1), "hierarchical")


@pytest.mark.parametrize(
    ("collective", "algorithm", "copies"),
    [
        # Bytes on all links over the bytes of one buffer: 4 devices, two links a message.
        ("all_reduce", "ring", 2 * 4 * 2 * 3 / 4),
        ("all_reduce", "halving_doubling", 2 * 4 * 2 * 3 / 4),
        ("all_reduce", "direct", 2 * 4 * 2 * 3 / 4),
        ("all_reduce", "tree", 2 * 2 * 3),  # up and down three edges, half of the bytes each tree
        ("all_reduce", "in_network", 4 * (1 + 1 / 4 + 1 / 4 + 1)),
        ("all_to_all", "direct", 2 * 4 * 3 / 4),
        ("broadcast", "tree", 2 * 3),
        ("broadcast", "ring", 2 * 3),
    ],
)
def test_algorithms_send_no_byte_too_many(collective, algorithm, copies):
    schedule = Schedule(Links(topology(reduction="multicast")))
    run_phase(schedule, [(PHASES[algorithm], 0, collective, 1e6)])
    sent = sum(m.size * len(m.path) for m in schedule.messages)
    assert sent == pytest.approx(copies * 1e6)
