"""Nodes of a partitioned program: kernels that compute, and collectives among devices.

In unoptimised programs, collectives are combined as XLA's GPU and TPU compilers do: those of one
kind over the same devices as long as none depends on another and their sum stays below a threshold
(XLA's AllReduceCombiner, AllGatherCombiner and ReduceScatterCombiner). Earlier passes, such as the
creation of reduce-scatters from all-reduces, are in
:mod:`opcast.features.lowering.xla_collectives`; the overlap of collectives with computation
(AsyncCollectiveCreator, LatencyHidingScheduler) is up to :mod:`~opcast.simulate.program.streams`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...common.errors import ProgramError
from ...features.kernels.kernel import Kernel
from ..collectives.choose import collective_name
from .list_schedule import Dependencies

#: Maximum bytes of combined collectives: XLA's defaults on GPUs, ``kDefault…CombineThreshold`` in
#: ``xla/service/collective_utils.h``, without their 7 odd bytes.
THRESHOLDS = {
    "all_reduce": 30.0 * 2**20,
    "all_gather": 30.0 * 2**20,
    "reduce_scatter": 30.0 * 2**20,
}


@dataclass(frozen=True)
class Collective:
    """A collective of one device.

    Attributes:
        kind: Name as in :data:`~opcast.simulate.collectives.choose.COLLECTIVES`.
        size: Bytes that each rank contributes.
        group: Ranks of the representative group.
        waits: Whether the device blocks on it at its place in the schedule.
        groups: All groups; for device-to-device transfers, pairs of source and target.
        reduction: Element type and op of a reduction; ``None`` for other collectives.
    """

    kind: str
    size: float
    group: tuple[int, ...]
    waits: bool = False
    groups: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    reduction: tuple[str, str] | None = field(default=None, compare=False)

    @property
    def whole(self) -> float:
        """Bytes of the whole buffer as NCCL counts: the result of a gather, or the input."""
        return self.size * (len(self.group) if self.kind == "all_gather" else 1)


@dataclass(frozen=True)
class Node:
    """A kernel of a program.

    Attributes:
        name: Name in the program.
        opcode: HLO opcode.
        operands: Positions of earlier nodes whose results it reads.
        seconds: Computation, all executions; 0 for collectives and for kernels that take no time.
        collective: The collective, if it is one.
        result_bytes: Bytes that it writes.
        times: Number of executions (the trip count of its loops).
        members: Positions of the kernels that it represents.
        done: Whether it is the ``done`` half of an asynchronous pair, which only waits.
    """

    name: str
    opcode: str
    operands: tuple[int, ...]
    seconds: float = 0.0
    collective: Collective | None = None
    result_bytes: float = 0.0
    times: float = 1.0
    members: tuple[int, ...] = ()
    done: bool = False


def program_nodes(
    kernels: Sequence[Kernel], seconds: Sequence[float], devices: int, *, scheduled: bool
) -> list[Node]:
    """Convert lowered kernels to nodes.

    Args:
        kernels: Kernels in program order.
        seconds: Seconds of one execution of each; collectives' are ignored.
        devices: Number of devices of the program, which empty replica groups refer to.
        scheduled: Whether the order is the target's schedule. If so, a collective that is not a
            start/done pair, or is marked ``is_sync``, blocks the device.

    Raises:
        ProgramError: A collective names no partners.
    """
    nodes = []
    for place, kernel in enumerate(kernels):
        done = kernel.async_role == "done" and kernel.async_peer >= 0
        collective = None
        if kernel.kind == "collective" and not done:
            collective = _collective(kernel, devices, scheduled=scheduled)
        # The time of an asynchronous collective belongs to its start; the done half waits for it.
        operands = (*kernel.operands, kernel.async_peer) if done else kernel.operands
        time = 0.0 if collective or done or not kernel.takes_time else float(seconds[place])
        nodes.append(
            Node(
                name=kernel.name,
                opcode=kernel.opcode,
                # Later positions are loop carries: their values come from the last iteration.
                operands=tuple(o for o in operands if 0 <= o < place),
                seconds=time * kernel.multiplicity,
                collective=collective,
                result_bytes=float(kernel.op.result_bytes),
                times=kernel.multiplicity,
                members=(place,),
                done=done,
            )
        )
    return nodes


def _collective(kernel: Kernel, devices: int, *, scheduled: bool) -> Collective | None:
    op, entry = kernel.op, kernel.body.entry_computation
    opcode = op.opcode.removesuffix("-start")
    # Identity ops move nothing; the time of a transfer is the time of its ``send``.
    if opcode in ("partition-id", "replica-id", "recv", "send-done", "recv-done"):
        return None
    # Operands, not results: the convention is bytes contributed (a gather's result is larger).
    size = float(sum(entry.ops[i].result_bytes for i in op.operands))
    group = _partners(kernel, devices)
    # Nothing to exchange: the node takes no time.
    if len(group) < 2 or size <= 0:
        return None
    waits = scheduled and (kernel.async_role != "start" or _is_sync(kernel))
    groups, reduction = _groups(kernel, group), _reduction(kernel)
    return Collective(collective_name(opcode), size, group, waits, groups, reduction)


def _reduction(kernel: Kernel) -> tuple[str, str] | None:
    """Element type and op of a reduction; the kernel's name in place of several ops."""
    if not kernel.op.called:
        return None
    only = kernel.body.computations[kernel.op.called[0]].only_op
    if only is None:
        # A unique key, so that these are never combined: XLA combines none of them.
        return kernel.op.type.dtype, kernel.name
    return only.type.dtype, only.opcode


def _groups(kernel: Kernel, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All groups in program order; ``group`` alone if the program lists none."""
    attrs = kernel.op.attrs
    named = attrs.get("source_target_pairs") or attrs.get("replica_groups") or (group,)
    return tuple(tuple(int(d) for d in g) for g in named)


def _partners(kernel: Kernel, devices: int) -> tuple[int, ...]:
    attrs = kernel.op.attrs
    if "source_target_pairs" in attrs:
        return _chain([(int(a), int(b)) for a, b in attrs["source_target_pairs"]])
    groups = attrs.get("replica_groups") or ()
    # Empty groups mean all devices (HLO's semantics of ``replica_groups={}``).
    if not groups:
        if kernel.opcode in ("send", "recv"):
            return tuple(range(min(2, devices)))
        return tuple(range(devices))
    # All groups run at once; the largest one ends last.
    return max((tuple(int(d) for d in g) for g in groups), key=lambda g: len(g))


def _chain(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Ranks of a permutation's longest chain, in the order in which data moves."""
    ahead = {a: b for a, b in pairs if a != b}
    best: tuple[int, ...] = ()
    for first in ahead:
        chain, at = [first], ahead[first]
        while at not in chain and at in ahead:
            chain.append(at)
            at = ahead[at]
        if at not in chain:
            chain.append(at)
        if len(chain) > len(best):
            best = tuple(chain)
        # A cycle through all sources: no other start can give a longer chain.
        if len(best) == len(ahead):
            break
    return best


def _is_sync(kernel: Kernel) -> bool:
    # XLA moved the flag from the top of ``backend_config`` into ``collective_backend_config``.
    config = kernel.op.attrs.get("backend_config")
    inner = config.get("collective_backend_config", config) if isinstance(config, dict) else {}
    return bool(isinstance(inner, dict) and inner.get("is_sync"))


def check_devices(nodes: Sequence[Node], size: int) -> None:
    """Reject a program that was partitioned for more devices than the cluster has.

    Raises:
        ProgramError: A collective names a rank that the cluster lacks.
    """
    for node in nodes:
        if node.collective and max(node.collective.group) >= size:
            raise ProgramError(
                f"the program talks to device {max(node.collective.group)}, the cluster has {size}",
                where=node.name,
                hint="take a cluster of as many devices as the program was partitioned for",
            )


def combine_all(nodes: Sequence[Node]) -> list[Node]:
    """Combine collectives of every kind; the order of nodes stays topological."""
    combined = list(nodes)
    for kind, threshold in THRESHOLDS.items():
        combined = combine(combined, kind, threshold)
    return combined


def combine(nodes: Sequence[Node], kind: str, threshold: float) -> list[Node]:
    """Combine collectives of one kind over the same devices with the same reduction.

    Args:
        nodes: Nodes in topological order.
        kind: Kind of the collectives to combine.
        threshold: Maximum result bytes of a combined one; larger ones stay as they are.
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
    # Bytes of the result, which XLA's thresholds count.
    assert node.collective is not None
    many = len(node.collective.group)
    return node.collective.size * {"all_gather": many, "reduce_scatter": 1 / many}.get(
        node.collective.kind, 1.0
    )


def _below(nodes: Sequence[Node]) -> list[int]:
    """Transitive operands of each node, itself included, as a bit set."""
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
    """Whether the node needs a member, or the combined members need the node."""
    mask = sum(1 << m for m in members)
    return bool(below[place] & mask) or any(below[m] >> place & 1 for m in members)


def _join(below: list[int], members: Sequence[int]) -> None:
    """Extend the closure: a node that needs one member now needs the operands of all of them."""
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
    """Topological order, lowest rank first (Kahn, CACM 5, 1962)."""
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
