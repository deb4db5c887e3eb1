import numpy as np
import pytest

from opcast.common.errors import ProgramError
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.simulate.program.nodes import (
    Collective,
    Node,
    check_devices,
    combine,
    combine_all,
    program_nodes,
)
from opcast.simulate.program.streams import run_streams

ALL = (0, 1, 2, 3)
LINK = frozenset({"link"})


def compute(name, seconds, *operands):
    return Node(name, "fusion", operands, seconds)


def send(name, *operands, kind="all_reduce", size=8.0, group=ALL, waits=False):
    return Node(name, kind.replace("_", "-"), operands, 0.0, Collective(kind, size, group, waits))


def done(name, start):
    return Node(name, "done", (start,), done=True)


def run(nodes, transfer, *, scheduled=True, links=None):
    own = [float(transfer.get(n.name, 0.0)) for n in nodes]
    used = [(links or {}).get(n.name, LINK) if n.collective else frozenset() for n in nodes]
    return run_streams(nodes, own, used, scheduled=scheduled)


def test_asynchronous_pair_hides_behind_what_stands_between():
    nodes = [
        compute("a", 1.0), send("s", 0), compute("b", 3.0, 0), done("d", 1), compute("c", 1.0, 3),
    ]  # fmt: skip
    found = run(nodes, {"s": 2.0})
    assert found.makespan == 1 + 3 + 1
    assert (found.exposed, found.communication, found.compute) == (0.0, 2.0, 5.0)
    late = run(nodes, {"s": 5.0})
    assert late.makespan == 1 + 5 + 1
    assert late.exposed == pytest.approx(2.0)
    assert [nodes[p].name for p in late.critical] == ["a", "s", "c"]


def test_a_collective_takes_cores_from_what_runs_beside_it():
    """While it is in progress kernels run at three quarters of their rate."""
    nodes = [
        compute("a", 1.0), send("s", 0), compute("b", 3.0, 0), done("d", 1), compute("c", 1.0, 3),
    ]  # fmt: skip

    def slowed(seconds, scheduled=True):
        own = [seconds if n.name == "s" else 0.0 for n in nodes]
        used = [LINK if n.collective else frozenset() for n in nodes]
        return run_streams(nodes, own, used, scheduled=scheduled, contention=0.25)

    # In its 2 s 1.5 s of b are done; the rest at the full rate.
    for scheduled in (True, False):
        assert slowed(2.0, scheduled).makespan == pytest.approx(1 + 2 + 1.5 + 1)
        assert slowed(2.0, scheduled).exposed == pytest.approx(0.25 * 2.0)
        # Of 8 s b takes 4, and the device waits for the rest.
        assert slowed(8.0, scheduled).makespan == pytest.approx(1 + 8 + 1)
    assert slowed(0.0).exposed == 0.0


def test_synchronous_collective_holds_the_device_up():
    nodes = [compute("a", 1.0), send("s", 0, waits=True), compute("b", 3.0, 0)]
    assert run(nodes, {"s": 2.0}).makespan == 6.0


def test_collectives_on_one_link_share_it_and_on_two_do_not():
    nodes = [
        send("s", group=(0, 1)), send("t", group=(0, 2)), compute("a", 1.0), done("d", 0),
        done("e", 1),
    ]  # fmt: skip
    shared = run(nodes, {"s": 2.0, "t": 4.0})
    # Both at half their rate until s ends at 4 with t half done, which then needs 2 s more.
    assert shared.end[:2].tolist() == [4.0, 6.0]
    apart = run(nodes, {"s": 2.0, "t": 4.0}, links={"t": frozenset({"other"})})
    assert apart.end[:2].tolist() == [2.0, 4.0]


def test_collectives_of_one_group_follow_each_other():
    nodes = [send("s"), send("t"), done("d", 0), done("e", 1)]
    found = run(nodes, {"s": 2.0, "t": 4.0})
    assert found.start[:2].tolist() == [0.0, 2.0]
    assert found.makespan == 6.0


def test_unscheduled_collectives_start_when_their_operands_are_there():
    # The reduction of a's gradients runs while b computes, though it stands after it.
    nodes = [compute("a", 1.0), compute("b", 3.0), send("s", 0), compute("c", 1.0, 2)]
    assert run(nodes, {"s": 2.0}, scheduled=False).makespan == 5.0
    assert run(nodes, {"s": 2.0}).makespan == 1 + 3 + 2 + 1


def test_unscheduled_computation_that_waits_lets_other_computation_pass():
    # The update u of a's gradient stands before b, but b does not wait for the reduction.
    nodes = [compute("a", 1.0), send("s", 0), compute("u", 1.0, 1), compute("b", 3.0, 0)]
    found = run(nodes, {"s": 2.0}, scheduled=False)
    assert found.start[2:].tolist() == [4.0, 1.0]
    assert found.makespan == 5.0
    assert run(nodes, {"s": 2.0}).makespan == 1 + 2 + 1 + 3


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_makespan_lies_between_the_longer_stream_and_the_sum(seed, scheduled):
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []
    for i in range(40):
        operands = tuple(int(o) for o in rng.choice(i, size=min(i, 2), replace=False)) if i else ()
        if rng.random() < 0.3:
            group = ALL if rng.random() < 0.5 else (0, 1)
            nodes.append(send(f"s{i}", *operands, group=group))
        else:
            nodes.append(compute(f"c{i}", float(rng.random()), *operands))
    transfer = {n.name: float(rng.random()) for n in nodes if n.collective}
    found = run(nodes, transfer, scheduled=scheduled)
    total = sum(transfer.values())
    assert max(found.compute, found.communication) <= found.makespan * (1 + 1e-9)
    assert found.makespan <= found.compute + total + 1e-9
    for place, node in enumerate(nodes):
        for operand in node.operands:
            assert found.end[operand] <= found.start[place] + 1e-9
    assert all(np.diff(found.start[list(found.critical)]) >= -1e-9)


def test_independent_all_reduces_are_combined_up_to_the_threshold():
    nodes = [compute("a", 1.0), send("s", 0), compute("b", 1.0), send("t", 2), send("u", 2)]
    found = combine(nodes, "all_reduce", 16.0)
    assert [n.collective.size for n in found if n.collective] == [16.0, 8.0]
    whole = combine(nodes, "all_reduce", 24.0)
    (merged,) = [n for n in whole if n.collective]
    assert merged.collective.size == 24.0
    assert merged.operands == (0, 1)
    assert [n.name for n in whole] == ["a", "b", "s"]


def test_gathers_and_scatters_of_the_same_buffer_count_alike():
    # Of 16 bytes on four devices, a gather takes 4 of each, a scatter all 16.
    four = (0, 1, 2, 3)
    assert Collective("all_gather", 4.0, four).whole == 16.0
    assert Collective("reduce_scatter", 16.0, four).whole == 16.0
    assert Collective("all_reduce", 16.0, four).whole == 16.0


def test_collectives_that_need_one_another_stay_apart():
    chain = [send("s"), compute("a", 1.0, 0), send("t", 1)]
    assert len(combine(chain, "all_reduce", 1e9)) == 3
    # Merging both pairs would make a cycle: s needs t's producer, and t needs s's.
    crossed = [
        send("s1"), send("t1", group=(0, 1)), send("t2", 0, group=(0, 1)), send("s2", 1),
    ]  # fmt: skip
    found = combine_all(crossed)
    assert len(found) == 3
    assert run(found, {n.name: 1.0 for n in found}, scheduled=False).makespan <= 4.0


def test_groups_kinds_and_loops_are_not_mixed():
    nodes = [
        send("s"), send("t", group=(0, 1)), send("u", kind="all_gather"),
        Node("v", "all-reduce", (), 0.0, Collective("all_reduce", 8.0, ALL), times=4.0),
    ]  # fmt: skip
    assert len(combine_all(nodes)) == 4


REDUCTIONS = """HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%add.2 (a.2: f32[], b.2: f32[]) -> f32[] {
  %a.2 = f32[] parameter(0)
  %b.2 = f32[] parameter(1)
  ROOT %s.2 = f32[] add(%a.2, %b.2)
}

%add.16 (a.16: bf16[], b.16: bf16[]) -> bf16[] {
  %a.16 = bf16[] parameter(0)
  %b.16 = bf16[] parameter(1)
  ROOT %s.16 = bf16[] add(%a.16, %b.16)
}

%max (a.3: f32[], b.3: f32[]) -> f32[] {
  %a.3 = f32[] parameter(0)
  %b.3 = f32[] parameter(1)
  ROOT %s.3 = f32[] maximum(%a.3, %b.3)
}

ENTRY %main {
  %x = f32[1024] parameter(0)
  %y = f32[512] parameter(1)
  %z = bf16[256] parameter(2)
  %rx = f32[1024] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %rz = bf16[256] all-reduce(%z), replica_groups={{0,1,2,3}}, to_apply=%add.16
  %ry = f32[512] all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add.2
  %my = f32[512] all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%max
  ROOT %o = (f32[1024], f32[512], bf16[256], f32[512]) tuple(%rx, %ry, %rz, %my)
}
"""


def test_only_reductions_of_one_type_and_op_are_combined():
    kernels, _ = extract_kernels(parse_hlo(REDUCTIONS))
    nodes = program_nodes(kernels, [0.0] * len(kernels), 4, scheduled=False)
    sizes = [n.collective.size for n in combine_all(nodes) if n.collective]
    # Both sums of f32 as one of 1024 · 4 + 512 · 4 bytes; bf16 and the maximum by themselves.
    assert sorted(sizes) == [256 * 2.0, 512 * 4.0, 1024 * 4.0 + 512 * 4.0]


HLO = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %gs = (f32[1024], f32[4096]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %n = f32[1024]{0} negate(%x)
  %gd = f32[4096]{0} all-gather-done(%gs)
  %r = f32[1024]{0} all-reduce(%n), replica_groups={{0,1},{2,3}}, to_apply=%add
  %p = f32[1024]{0} collective-permute(%r), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %q = f32[1024]{0} slice(%gd), slice={[0:1024]}
  ROOT %o = f32[1024]{0} add(%q, %p)
}
"""


def test_nodes_of_scheduled_hlo():
    program = parse_hlo(HLO)
    kernels, _ = extract_kernels(program)
    nodes = program_nodes(kernels, [1.0] * len(kernels), 4, scheduled=program.is_scheduled)
    found = {n.name: n for n in nodes}
    assert found["gs"].collective == Collective("all_gather", 4096.0, ALL)
    assert found["gd"].done
    assert found["r"].collective == Collective("all_reduce", 4096.0, (0, 1), waits=True)
    assert found["p"].collective == Collective("collective_permute", 4096.0, ALL, waits=True)
    # negate 1 s beside the gather, then 2 + 2 s synchronous, slice and add.
    ends = run(nodes, {"gs": 0.5, "r": 2.0, "p": 2.0})
    assert ends.makespan == 1 + 2 + 2 + 1 + 1
    with pytest.raises(ProgramError, match="device 3"):
        check_devices(nodes, 2)
