import json

import numpy as np
import pytest
import yaml

from opcast.common import wire
from opcast.common.errors import DatasetError
from opcast.features.devices.catalogue import find_device
from opcast.simulate.chakra.folder import write_folder
from opcast.simulate.chakra.messages import CommType, EtNode, NodeType, decode, encode
from opcast.simulate.chakra.ranks import Work, process_groups, rank_trace
from opcast.simulate.chakra.timeline import run_traces
from opcast.simulate.clusters.topology import Cluster, Dimension, Topology
from opcast.simulate.program.nodes import Collective, Node

US = 1e-6


def kernel(name, *operands, us=2.0):
    return Node(name, "fusion", operands, us * US, members=(0,))


def talk(kind, *operands, groups=((0, 1), (2, 3)), size=64.0, times=1.0, waits=False):
    own = Collective(kind, size, groups[0], waits, groups)
    return Node(kind, kind.replace("_", "-"), operands, 0.0, own, times=times)


def trace(nodes, rank=0, *, scheduled=False, micros=5.0):
    transfer = [micros * US * n.times if n.collective else 0.0 for n in nodes]
    work = [Work(10.0, 20.0)] * len(nodes)
    return rank_trace(nodes, rank, process_groups(nodes), transfer, work, scheduled=scheduled)


def test_wire_bytes_are_those_of_the_specification():
    # The examples of protobuf.dev/programming-guides/encoding: 150, "testing", packed [3, 270].
    assert wire.number(1, 150) == bytes.fromhex("089601")
    assert wire.text(2, "testing") == bytes.fromhex("120774657374696e67")
    assert wire.packed(6, [3, 270]) == bytes.fromhex("3203038e02")
    assert wire.varint(-2) == bytes.fromhex("feffffffffffffffff01")
    assert wire.signed(wire.read_varint(wire.varint(-2), 0)[0]) == -2
    assert list(wire.fields(bytes.fromhex("089601120774657374696e67"))) == [
        (1, 150),
        (2, b"testing"),
    ]


NODES = [
    EtNode(0, "dot.1", NodeType.COMP, (), 7, {"is_cpu_op": False, "num_ops": 2**40}),
    EtNode(1, "send", NodeType.COMM_SEND, (0,), 1, {"comm_dst": 3, "comm_size": 2**33}),
    EtNode(2, "r", NodeType.COMM_COLL, (0, 1), 1, {"comm_type": 7, "pg_name": "1"}),
]


def test_traces_read_back_as_they_were_and_damage_is_named():
    data = encode(NODES)
    assert data[:8] == b"\x07\x0a\x050.0.4"[:8]
    assert decode(data) == NODES
    for bad in (b"", data[:-3], b"\xff" * 30, data[1:], encode(NODES).replace(b"0.0.4", b"0.0.3")):
        with pytest.raises(DatasetError, match=r"here\.et: no Chakra trace"):
            decode(bad, "here.et")


def test_mutated_traces_raise_nothing_else():
    data, rng, refused = encode(NODES * 3), np.random.default_rng(0), 0
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            run_traces([decode(bytes(damaged))], {}).summary()
        except DatasetError:
            refused += 1
    assert refused > 1000


def test_protobuf_reads_the_same():
    descriptor = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    types = {"u64": 4, "i64": 3, "i32": 5, "flag": 8, "text": 9}

    def define(message, fields):
        own = file.message_type.add(name=message)
        for label, (number, kind) in fields.items():
            own.field.add(name=label, number=number, type=types[kind], label=1)
        return own

    one = {"i32": (7, "i32"), "i64": (9, "i64"), "u64": (13, "u64"), "flag": (27, "flag")}
    define("Attr", {"name": (1, "text"), **one, "text": (29, "text")})
    node = define(
        "Node", {"id": (1, "u64"), "name": (2, "text"), "type": (3, "i32"), "micros": (7, "u64")}
    )
    node.field.add(name="data_deps", number=5, type=4, label=3)
    node.field.add(name="attr", number=10, type=11, label=3, type_name=".et.Attr")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    cls = message_factory.GetMessageClass(pool.FindMessageTypeByName("et.Node"))
    data, at, seen = encode(NODES), 0, []
    while at < len(data):
        size, at = wire.read_varint(data, at)
        seen.append(cls.FromString(data[at : at + size]))
        at += size
    first, send, last = seen[1:]
    assert (first.id, first.name, first.type, first.micros) == (0, "dot.1", 4, 7)
    assert [(a.name, a.flag, a.i64) for a in first.attr] == [
        ("is_cpu_op", False, 0), ("num_ops", False, 2**40),
    ]  # fmt: skip
    assert [(a.i32, a.i64) for a in send.attr] == [(3, 0), (0, 2**33)]
    assert list(last.data_deps) == [0, 1]
    assert last.attr[1].text == "1"


def test_short_kernels_are_merged_and_their_sum_is_kept():
    nodes = [kernel(f"k{i}", *([i - 1] if i else []), us=0.3) for i in range(100)]
    found = trace(nodes)
    assert all(n.micros >= 1 and n.attrs["is_cpu_op"] is False for n in found)
    assert sum(n.micros for n in found) == 30
    assert sum(n.attrs["kernels"] for n in found) == 100
    assert sum(n.attrs["num_ops"] for n in found) == 1000
    assert [n.deps for n in found[:3]] == [(), (0,), (1,)]
    (single,) = trace([kernel("tiny", us=0.01)])
    assert single.micros == 1
    (merged,) = trace([kernel("long", us=3.1), kernel("tiny", 0, us=0.2)])
    assert (merged.micros, merged.attrs["kernels"], merged.name) == (3, 2, "long")


def test_collectives_depend_on_what_they_read_and_hold_up_who_reads_them():
    nodes = [
        kernel("a"), talk("all_reduce", 0, size=4096.0), kernel("b", 0),
        kernel("short", 2, us=0.2), talk("all_gather", 3), kernel("c", 1), kernel("d", 4),
    ]  # fmt: skip
    found = {n.name: n for n in trace(nodes, rank=2)}
    assert found["all_reduce"].deps == (found["a"].id,)
    assert found["b"].deps == (found["a"].id,)
    # The short kernel is not written before it; what it follows is.
    # Nor does it overtake the collective issued before it.
    assert found["all_gather"].deps == (found["all_reduce"].id, found["b"].id)
    assert found["c"].deps == tuple(sorted((found["b"].id, found["all_reduce"].id)))
    assert found["d"].deps == tuple(sorted((found["c"].id, found["all_gather"].id)))
    reduce = found["all_reduce"]
    assert reduce.bytes == 4096
    assert reduce.attrs["comm_type"] == CommType.ALL_REDUCE
    assert process_groups(nodes)[(2, 3)] == reduce.attrs["pg_name"] == "2"


def test_scheduled_collectives_keep_their_place_and_synchronous_ones_hold_the_stream():
    nodes = [kernel("a"), kernel("b", 0), talk("all_reduce", 0, waits=True), kernel("c", 1)]
    found = {n.name: n for n in trace(nodes, scheduled=True)}
    assert found["all_reduce"].deps == tuple(sorted((found["a"].id, found["b"].id)))
    assert found["all_reduce"].id in found["c"].deps


def test_loops_repeat_collectives_and_ranks_outside_take_no_part():
    nodes = [kernel("a"), talk("all_reduce", 0, groups=((0, 1),), times=3.0), kernel("b", 1)]
    inside, outside = trace(nodes), trace(nodes, rank=3)
    assert [n.deps for n in inside] == [(), (0,), (1,), (2,), (0, 3)]
    assert [n.name for n in outside] == ["a", "b"]
    assert outside[1].deps == (0,)


def test_ranks_of_overlapping_groups_issue_collectives_in_one_order():
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    nodes = [kernel("a"), kernel("b", us=9.0), talk("all_gather", 1, groups=rows),
             talk("all_reduce", 0, groups=columns)]  # fmt: skip
    for rank in range(4):
        found = {n.name: n for n in trace(nodes, rank)}
        # Ready at 2 µs, it still waits for the one before, which starts at 11.
        assert found["all_gather"].id in found["all_reduce"].deps
    traces = [trace(nodes, r) for r in range(4)]
    groups = {name: list(g) for g, name in process_groups(nodes).items()}
    assert run_traces(traces, groups).makespan_us == 2 + 9 + 5 + 5


def test_small_collectives_can_be_cut_among_their_ranks():
    # Four parts, among two ranks, in two directions: a byte each is 16.
    loss = next(n for n in trace([kernel("a"), talk("all_reduce", 0, size=8.0)]) if n.collective)
    assert loss.bytes == 16
    whole = talk("all_reduce", 0, groups=(tuple(range(64)),), size=8.0)
    assert next(n for n in trace([kernel("a"), whole]) if n.collective).bytes == 512


@pytest.mark.parametrize(
    ("times", "total"), [((13.5,), 14), ((1.5, 1.5, 1.5, 1.5), 6), ((0.3,), 0)]
)
def test_fractions_of_executions_add_up(times, total):
    nodes = [kernel("a"), *(talk("all_reduce", 0, times=n) for n in times), kernel("b", 1)]
    found = trace(nodes)
    assert sum(bool(n.collective) for n in found) == total
    assert all(n.micros == 5 for n in found if n.collective)


def test_a_torus_comes_with_one_ring_for_the_congestion_aware_network(tmp_path):
    torus = Dimension("torus", 16, 160e9, latency=1e-6, shape=(4, 4))
    cluster = Cluster("slice", "tpu-v5e", Topology((torus,)))
    write_folder(tmp_path, [[], []], {}, cluster, find_device("tpu-v5e"))
    network = yaml.safe_load((tmp_path / "network_ring.yml").read_text())
    assert network["topology"] == ["Ring"]
    assert network["npus_count"] == [16]
    # Both links of the ring have half of the 160 GB/s; 3 + 3 hops of 1 µs over 15.
    assert network["bandwidth"] == [pytest.approx(80e9 / 2**30)]
    assert network["latency"] == [pytest.approx(6 / 15 * 1000)]
    system = json.loads((tmp_path / "system_ring.json").read_text())
    assert system["all-reduce-implementation"] == ["ring"]
    switch = Cluster("box", "h100-sxm", Topology((Dimension("switch", 2, 450e9),)))
    write_folder(tmp_path / "switch", [[], []], {}, switch, find_device("h100-sxm"))
    assert not (tmp_path / "switch" / "network_ring.yml").exists()


def test_permutes_become_sends_and_receives():
    ring = tuple((r, (r + 1) % 4) for r in range(4))
    nodes = [kernel("a"), talk("collective_permute", 0, groups=ring), kernel("b", 1)]
    traces = [trace(nodes, r) for r in range(4)]
    for rank, found in enumerate(traces):
        send = next(n for n in found if n.type == NodeType.COMM_SEND)
        receive = next(n for n in found if n.type == NodeType.COMM_RECV)
        assert (send.attrs["comm_src"], send.attrs["comm_dst"]) == (rank, (rank + 1) % 4)
        assert (receive.attrs["comm_src"], receive.attrs["comm_dst"]) == ((rank - 1) % 4, rank)
        assert send.attrs["comm_tag"] == receive.attrs["comm_tag"]
        assert {send.id, receive.id} <= set(found[-1].deps)
    # 2 µs, then 5 µs for all transfers at once, then 2 µs.
    run = run_traces(traces, {})
    assert run.makespan_us == 9.0
    # What is sent and received at once is drawn on two tracks, beside a free one for collectives.
    spans = [e for e in run.chrome_trace()["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    drawn = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans if e["tid"]]
    assert sorted(tid for _, tid, _, _ in drawn) == [2, 3]
    assert {(start, length) for *_, start, length in drawn} == {(2.0, 5.0)}


def test_timeline_waits_for_partners_and_overlaps():
    nodes = [kernel("a"), talk("all_reduce", 0), kernel("b", 0, us=4), kernel("c", 1)]
    slow = [kernel("a", us=10), *nodes[1:]]
    traces = [trace(nodes), trace(slow, 1), trace(nodes, 2), trace(nodes, 3)]
    groups = {name: list(g) for g, name in process_groups(nodes).items()}
    run = run_traces(traces, groups)
    # Rank 0 waits for rank 1, which comes at 10 and reduces until 15; then c.
    assert run.start[0].tolist() == [0, 10, 2, 15]
    assert run.end[1].tolist() == [10, 15, 14, 17]
    # The other pair is not held up: 2 + max(5, 4) + 2.
    assert run.end[2].max() == 9
    assert run.makespan_us == 17.0
    events = [e for e in run.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == 17
    assert run.summary()["collectives"] == {"all_reduce": {"count": 1, "bytes": 64}}


def test_a_partner_that_never_comes_is_an_error():
    with pytest.raises(DatasetError, match="waits for ever"):
        run_traces([[NODES[0]], [EtNode(0, "r", NodeType.COMM_RECV)]], {})
    with pytest.raises(DatasetError, match="trace lacks"):
        run_traces([[NODES[1]]], {})
