"""Combining collectives as XLA's GPU and TPU compilers do, for programs that come unoptimised.

Collectives of one kind over the same devices are combined as long as none depends on another and
their sum stays below a threshold (XLA's AllReduceCombiner, AllGatherCombiner and
ReduceScatterCombiner). Earlier passes, such as the creation of reduce-scatters from all-reduces,
are in :mod:`opcast.features.lowering.xla_collectives`; running collectives beside the computation
(AsyncCollectiveCreator, LatencyHidingScheduler) is up to :mod:`~opcast.simulate.program.streams`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ..dependencies import Dependencies
from .nodes import Node

#: Bytes up to which collectives are combined: XLA's defaults on GPUs, ``kDefault…CombineThreshold``
#: in ``xla/service/collective_utils.h``, without their 7 odd bytes.
THRESHOLDS = {
    "all_reduce": 30.0 * 2**20,
    "all_gather": 30.0 * 2**20,
    "reduce_scatter": 30.0 * 2**20,
}


def combine_all(nodes: Sequence[Node]) -> list[Node]:
    """Combine collectives of every kind; the order of nodes stays topological."""
    combined = list(nodes)
    for kind, threshold in THRESHOLDS.items():
        combined = combine(combined, kind, threshold)
    return combined


def combine(nodes: Sequence[Node], kind: str, threshold: float) -> list[Node]:
    """Combine collectives of a kind, and of one reduction if they reduce, over the same devices.

    Args:
        nodes: Nodes in topological order.
        kind: Kind of the collectives to combine.
        threshold: Most bytes that a combined one may return; larger ones stay as they are.
    """
    below = _below(nodes)
    target = list(range(len(nodes)))
    open_: dict[tuple[object, ...], list[int]] = {}
    for place, node in enumerate(nodes):
        if node.collective is None or node.collective.kind != kind:
            continue
        own = node.collective
        if _bytes(node) > threshold:
            continue
        # ``groups`` besides ``group``: equal first groups do not make equal partitions. Executions
        # must agree, because collectives in and outside a loop cannot be merged. Reductions agree
        # in element type and op (XLA's AllReduceKey); gathers of different types are combined.
        key = (own.group, own.groups, own.reduction, node.times, own.waits)
        members = open_.get(key, [])
        size = sum(_bytes(nodes[m]) for m in members) + _bytes(node)
        # Greedy as in XLA's combiners: a collective that does not fit opens the next set.
        if members and size <= threshold and not _needs(below, members, place):
            target[place] = members[0]
            members.append(place)
            _join(below, members)
        else:
            open_[key] = [place]
    return _rebuilt(nodes, target)


def _bytes(node: Node) -> float:
    # Bytes of the result, which is what XLA's thresholds count.
    assert node.collective is not None
    many = len(node.collective.group)
    return node.collective.size * {"all_gather": many, "reduce_scatter": 1 / many}.get(
        node.collective.kind, 1.0
    )


def _below(nodes: Sequence[Node]) -> list[int]:
    """Return the transitive operands of each node, itself included, as a bit set."""
    # Python's integers as bit sets: one word operation per 30 nodes makes the closure of programs
    # with thousands of nodes affordable.
    below: list[int] = []
    for place, node in enumerate(nodes):
        bits = 1 << place
        for operand in node.operands:
            bits |= below[operand]
        below.append(bits)
    return below


def _needs(below: Sequence[int], members: Sequence[int], place: int) -> bool:
    """Whether the node needs a member, or the members, combined as they are, need the node."""
    mask = sum(1 << m for m in members)
    return bool(below[place] & mask) or any(below[m] >> place & 1 for m in members)


def _join(below: list[int], members: Sequence[int]) -> None:
    """Extend the closure: whatever needs one member now needs all that any of them needs."""
    mask, everything = sum(1 << m for m in members), 0
    for m in members:
        everything |= below[m]
    for place, bits in enumerate(below):
        if bits & mask:
            below[place] = bits | everything


def _rebuilt(nodes: Sequence[Node], target: Sequence[int]) -> list[Node]:
    """Merge nodes into their targets and restore the topological order."""
    groups: dict[int, list[int]] = {}
    for place, to in enumerate(target):
        groups.setdefault(to, []).append(place)
    if len(groups) == len(nodes):
        return list(nodes)
    # A merged node runs where its last member stood, when all operands exist.
    merged = {to: _merged(nodes, members, target) for to, members in groups.items()}
    order = _ordered(merged, {to: max(members) for to, members in groups.items()})
    where = {to: i for i, to in enumerate(order)}
    return [
        replace(merged[to], operands=tuple(sorted(where[o] for o in merged[to].operands)))
        for to in order
    ]


def _merged(nodes: Sequence[Node], members: Sequence[int], target: Sequence[int]) -> Node:
    first = nodes[members[0]]
    operands = {target[o] for m in members for o in nodes[m].operands}
    own = first.collective
    if own is not None and len(members) > 1:
        sizes = [c.size for m in members if (c := nodes[m].collective) is not None]
        own = replace(own, size=sum(sizes))
    return replace(
        first,
        operands=tuple(operands),
        collective=own,
        result_bytes=sum(nodes[m].result_bytes for m in members),
        members=tuple(k for m in members for k in nodes[m].members),
    )


def _ordered(merged: dict[int, Node], rank: dict[int, int]) -> list[int]:
    """Return a topological order, lowest rank first (Kahn, CACM 5, 1962)."""
    nodes = list(merged)
    place = {to: i for i, to in enumerate(nodes)}
    waits = Dependencies([[place[o] for o in node.operands] for node in merged.values()])
    ready = [(rank[nodes[i]], nodes[i]) for i in waits.ready()]
    heapq.heapify(ready)
    order = []
    while ready:
        _, to = heapq.heappop(ready)
        order.append(to)
        for reader in waits.finish(place[to]):
            heapq.heappush(ready, (rank[nodes[reader]], nodes[reader]))
    return order
