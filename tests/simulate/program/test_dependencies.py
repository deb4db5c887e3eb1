"""Which nodes of an event simulation may run."""

from opcast.simulate.program.list_schedule import Dependencies


def test_a_node_is_released_by_the_last_of_its_operands():
    # 0 and 1 are inputs; 2 reads both, 3 reads 2 and 0.
    waits = Dependencies([(), (), (0, 1), (2, 0)])
    assert waits.ready() == [0, 1]
    assert waits.finish(0) == []
    assert waits.finish(1) == [2]
    assert waits.finish(2) == [3]


def test_an_operand_read_twice_releases_once():
    waits = Dependencies([(), (0, 0), (0,)])
    assert waits.finish(0) == [1, 2]


def test_nodes_of_a_cycle_are_never_ready():
    assert Dependencies([(1,), (0,)]).ready() == []
