"""From the nodes of a partitioned program to one execution trace per rank.

Computation is one stream: kernels run in program order and wait where they read the result of a
collective. Communication is also one stream: each collective of a rank waits for the previous one.
Simulators match the collectives of a group by the order in which its ranks issue them; without this
chain the order would depend on when each rank is ready, and ranks of overlapping groups could
deadlock. Chakra's durations are whole microseconds: kernels are merged until they fill one, and the
rounding error is carried over, so that the sum is correct to half a microsecond. A kernel too short
to fill one before a collective reads it counts towards the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..collectives.choose import COLLECTIVES, collective_name
from ..program.nodes import Collective, Node
from .messages import CommType, EtNode, NodeType, Value

#: ASTRA-sim treats group 0 as all ranks, whatever the file contains, so names begin at 1.
FIRST_GROUP = 1
#: Parts into which ASTRA-sim splits each collective (``preferred-dataset-splits``, as in its
#: example systems).
SPLITS = 4


@dataclass(frozen=True)
class Work:
    """Work of a node, all executions.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes read and written.
    """

    flops: float = 0.0
    bytes: float = 0.0


def comm_type(kind: str) -> CommType | None:
    """Chakra's type of a collective; ``None`` for transfers, which are sends and receives."""
    name = COLLECTIVES[collective_name(kind)].chakra
    return CommType[name] if name else None


def least_bytes(ranks: int) -> int:
    """Smallest size of a collective that ASTRA-sim can split among ``ranks`` ranks.

    It splits a collective into :data:`SPLITS` parts, and each part among the ranks, once for either
    direction of a ring; an empty message aborts it (``chunk_size > 0``).
    """
    return 2 * ranks * SPLITS


def process_groups(nodes: Sequence[Node]) -> dict[tuple[int, ...], str]:
    """Name all groups of at least two ranks, in order of first occurrence."""
    names: dict[tuple[int, ...], str] = {}
    for node in nodes:
        own = node.collective
        if own is None or comm_type(own.kind) is None:
            continue
        for group in own.groups or (own.group,):
            if len(group) > 1 and group not in names:
                names[group] = str(FIRST_GROUP + len(names))
    return names


def rank_trace(
    nodes: Sequence[Node],
    rank: int,
    groups: Mapping[tuple[int, ...], str],
    transfer: Sequence[float],
    work: Sequence[Work],
    *,
    scheduled: bool,
) -> list[EtNode]:
    """Build the trace of one rank.

    Args:
        nodes: Nodes of the program, in topological order.
        rank: The rank.
        groups: Names of process groups.
        transfer: Seconds of each node's collective, all executions; kept as its duration.
        work: Work of each node.
        scheduled: Whether a collective starts at its place in the order, or as soon as its
            operands are ready.
    """
    made = _Rank(rank=rank, groups=groups, scheduled=scheduled)
    return made.run(nodes, transfer, work)


@dataclass
class Stream:
    """A trace under construction, whose computing nodes follow each other.

    Attributes:
        nodes: Trace nodes so far.
        waits: Trace nodes that the next node of the stream has to wait for.
        last: Position in ``nodes`` of the stream's last node; -1 before the first.
    """

    nodes: list[EtNode] = field(default_factory=list)
    waits: set[int] = field(default_factory=set)
    last: int = -1

    def ready(self) -> set[int]:
        """Trace nodes that have to end before the stream's next one."""
        return self.waits | ({self.last} if self.last >= 0 else set())

    def add(
        self, name: str, kind: NodeType, deps: set[int], micros: int, attrs: Mapping[str, Value]
    ) -> int:
        """Add a node; returns its position."""
        place = len(self.nodes)
        self.nodes.append(EtNode(place, name, kind, tuple(sorted(deps)), micros, attrs))
        return place


@dataclass(kw_only=True)
class _Rank(Stream):
    """The trace of a rank.

    Attributes:
        result: Trace nodes that produce the result of a collective, by program node.
        awaited: Trace nodes that the stream has already waited for.
        micros: Microseconds not yet written, including the rounding error.
        members: Kernels not yet written: seconds and name.
        gathered: Their work.
        pending: Program nodes since the last written one.
        place_of: Position in ``nodes`` of the stream's node that holds a program node.
        tags: Number of transfers so far; matches sends with receives.
        talked: Trace nodes of the last collective.
        owed: Executions not yet written of each kind of collective: extrapolated layers run a
            fractional number of times.
    """

    rank: int
    groups: Mapping[tuple[int, ...], str]
    scheduled: bool
    result: dict[int, tuple[int, ...]] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    micros: float = 0.0
    members: list[tuple[float, str]] = field(default_factory=list)
    gathered: list[Work] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    place_of: dict[int, int] = field(default_factory=dict)
    tags: int = 0
    talked: set[int] = field(default_factory=set)
    owed: dict[str, float] = field(default_factory=dict)

    def run(
        self, nodes: Sequence[Node], transfer: Sequence[float], work: Sequence[Work]
    ) -> list[EtNode]:
        """Process the program and return the trace."""
        for place, node in enumerate(nodes):
            if node.collective is not None:
                self._communicate(place, node, node.collective, float(transfer[place]))
            else:
                self._compute(place, node, work[place])
        self._end()
        return self.nodes

    def _compute(self, place: int, node: Node, work: Work) -> None:
        needed = {i for o in node.operands for i in self.result.get(o, ())}
        # The stream is in order: what one of its nodes has waited for holds for all later ones.
        self.waits |= needed - self.awaited
        self.awaited |= needed
        self.pending.add(place)
        if node.seconds <= 0:
            return
        self.micros += node.seconds * 1e6
        self.members.append((node.seconds, node.name))
        self.gathered.append(work)
        if self.micros >= 1.0:
            self._write(round(self.micros))

    def _write(self, micros: int) -> None:
        """Write the gathered kernels as one node of the stream."""
        attrs: dict[str, Value] = {
            "is_cpu_op": False,
            "num_ops": round(sum(w.flops for w in self.gathered)),
            "tensor_size": round(sum(w.bytes for w in self.gathered)),
            "kernels": len(self.members),
        }
        # Named after its longest kernel.
        self.last = self.add(max(self.members)[1], NodeType.COMP, self.ready(), micros, attrs)
        self.micros -= micros
        self.members, self.gathered, self.waits = [], [], set()
        self.place_of.update(dict.fromkeys(self.pending, self.last))
        self.pending = set()

    def _needs(self, node: Node) -> set[int]:
        """Trace nodes that produce the operands of a collective."""
        needs = self.ready() if self.scheduled else set[int]()
        for operand in node.operands:
            if operand in self.result:
                needs.update(self.result[operand])
            elif operand in self.place_of:
                needs.add(self.place_of[operand])
            else:
                # The kernel is not written yet, being shorter than a microsecond.
                needs |= self.ready()
        return needs

    def _communicate(self, place: int, node: Node, own: Collective, seconds: float) -> None:
        deps = self._needs(node)
        # Chakra cannot express loops: executions are written out, one after another. The rounding
        # error is carried to the next collective of the kind, so that the total is correct.
        owed = self.owed.get(own.kind, 0.0) + node.times
        # Half up, not to even: 1.5 and 1.5 are 2 and 1.
        times = math.floor(owed + 0.5)
        self.owed[own.kind] = owed - times
        micros = max(1, round(seconds * 1e6 / node.times))
        for _ in range(times):
            ends = self._once(node, own, deps | self.talked, micros)
            self.talked = ends or self.talked
            deps = ends or deps
        self.result[place] = tuple(sorted(deps))
        if own.waits:
            self.waits |= deps - self.awaited
            self.awaited |= deps

    def _once(self, node: Node, own: Collective, deps: set[int], micros: int) -> set[int]:
        """Write one execution; an empty set if this rank does not take part."""
        kind = comm_type(own.kind)
        if kind is None:
            return self._transfers(node, own, deps, micros)
        group = next((g for g in own.groups or (own.group,) if self.rank in g), ())
        if len(group) < 2:
            return set()
        attrs: dict[str, Value] = {
            "is_cpu_op": False,
            "comm_type": int(kind),
            # Whole bytes, and no fewer than can be split.
            "comm_size": max(round(own.size), least_bytes(len(group))),
            "pg_name": self.groups[group],
        }
        return {self.add(node.name, NodeType.COMM_COLL, deps, micros, attrs)}

    def _transfers(self, node: Node, own: Collective, deps: set[int], micros: int) -> set[int]:
        self.tags += 1
        transfers = set()
        # Without explicit pairs the group is a chain.
        pairs = own.groups or tuple(zip(own.group, own.group[1:], strict=False))
        for source, target in ((p[0], p[1]) for p in pairs if p[0] != p[1]):
            attrs: dict[str, Value] = {
                "is_cpu_op": False,
                "comm_size": round(own.size),
                "comm_src": source,
                "comm_dst": target,
                "comm_tag": self.tags,
            }
            if self.rank == source:
                transfers.add(self.add(node.name, NodeType.COMM_SEND, deps, micros, attrs))
            elif self.rank == target:
                transfers.add(self.add(node.name, NodeType.COMM_RECV, deps, micros, attrs))
        return transfers

    def _end(self) -> None:
        """Write the remaining kernels, or add them to the last node if they round to nothing."""
        if not self.members:
            return
        # A program with computation keeps at least one node of it, however short.
        if self.micros >= 0.5 or self.last < 0:
            self._write(max(1, round(self.micros)))
            return
        old = self.nodes[self.last]
        more: dict[str, Value] = {
            "num_ops": int(old.attrs["num_ops"]) + round(sum(w.flops for w in self.gathered)),
            "tensor_size": int(old.attrs["tensor_size"])
            + round(sum(w.bytes for w in self.gathered)),
            "kernels": int(old.attrs["kernels"]) + len(self.members),
        }
        self.nodes[self.last] = replace(old, attrs={**old.attrs, **more})
