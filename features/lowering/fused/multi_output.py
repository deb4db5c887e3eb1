"""Kernels with several results: siblings of one input, producers with a consumer.

The order and the checks follow XLA:GPU's MultiOutputFusion, which runs after PriorityFusion.

On request (``xla_gpu_use_horizontal_fusion``) independent work shares a kernel, too: small loops,
or reductions, whose results one op reads. The rules come from XLA's passes HorizontalLoopFusion and
HorizontalInputFusion, which the compiler that JAX 0.10 brings no longer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...ir.op_table import UPDATES
from .clusters import (
    MAX_OPERANDS,
    Cluster,
    Clusters,
    Dependences,
    is_loop_reduction,
    owner,
    reduction,
    source_of,
)
from .graph import Node
from .heroes import hero_of, turn_of
from .machine import Machine
from .work import LAUNCH, Work, narrow_reduction

#: Start, limit and stride of a slice along each dimension.
Limits = Sequence[tuple[int, int, int]]


class MultiOutputFusion:
    """Joins clusters that run over the same elements.

    Args:
        clusters: Changed in place.
        machine: What decides whether a fusion pays.
    """

    def __init__(self, clusters: Clusters, machine: Machine) -> None:
        self.clusters = clusters
        self.machine = machine
        self.needs = Dependences(clusters)
        # Clusters are merged into new ones here, never changed.
        self._frames: dict[Cluster, Frame | None] = {}

    def run(self) -> None:
        """Go through the graph from its results to its arguments."""
        # From the results up: merged consumers make their producers' readers fewer.
        for node in reversed(self.clusters.nodes):
            self._siblings(node)
            producer = self.clusters.by_root.get(id(node))
            if producer is not None:
                self._with_consumer(producer)
        if self.clusters.fused_products:
            self.clusters.drop_unread()

    def _siblings(self, node: Node) -> None:
        """Join clusters that all read ``node``."""
        # Scalars are read by nearly everything; sharing one saves nothing.
        if node.size <= 1:
            return
        readers = [c for c in self.clusters.readers.get(id(node), {}).values() if _joins(c)]
        readers.sort(key=lambda c: self.clusters.position[id(c.root)])
        i = 0
        # Merged clusters stay in the list, so that a third sibling can join them.
        while i < len(readers):
            j = i + 1
            while j < len(readers):
                first, second = readers[i], readers[j]
                fits = self._alike(first, second) and self._apart(first, second)
                if fits and _shares(node, first, second):
                    readers[i] = self.needs.merge(first, second)
                    del readers[j]
                else:
                    j += 1
            i += 1

    def _with_consumer(self, producer: Cluster) -> None:
        """Join a producer with one that reads it, though others read it too."""
        frame = self._frame(producer)
        # A TPU's kernel sums the result of its product beside writing it.
        product = self.clusters.fused_products and producer.multiplies and producer.consumes
        if not (_joins(producer) or product) or frame is None or frame.kind != "loop":
            return
        if "transpose" in producer.opcodes:  # XLA's IsPhysicallyTransposing
            return
        position = self.clusters.position
        consumers = sorted(self.clusters.users(producer), key=lambda c: position[id(c.root)])
        for consumer in consumers:
            if not (_joins(consumer) and self._alike(producer, consumer)):
                continue
            # A third kernel that needs one and feeds the other would have to run between them.
            if self._between(producer, consumer):
                continue
            if self._sums(consumer) if product else self._pays(producer, consumer):
                self.needs.merge(producer, consumer)
                return

    def _sums(self, cluster: Cluster) -> bool:
        frame = self._frame(cluster)
        return frame is not None and frame.kind == "reduce"

    def _frame(self, cluster: Cluster) -> Frame | None:
        if cluster not in self._frames:
            self._frames[cluster] = frame_of(cluster)
        return self._frames[cluster]

    def _alike(self, first: Cluster, second: Cluster) -> bool:
        """Return whether both run over the same elements in the same way."""
        if first is second or not _fit(self._frame(first), self._frame(second)):
            return False
        inputs = {id(n) for c in (first, second) for n in c.inputs}
        return len(inputs) + len(first.roots) + len(second.roots) <= MAX_OPERANDS

    def _pays(self, producer: Cluster, consumer: Cluster) -> bool:
        if narrow_reduction(consumer, self.machine) is not None:
            return False
        apart = sum(
            Work(c.nodes, c.roots, self.machine).ticks() + LAUNCH for c in (producer, consumer)
        )
        both = {**producer.members, **consumer.members}
        members = [both[i] for i in sorted(both)]
        roots = [*producer.roots, *consumer.roots]
        # One launch less, and the shared input is read once.
        return Work(members, roots, self.machine).ticks() + LAUNCH <= apart

    def _apart(self, first: Cluster, second: Cluster) -> bool:
        """Return whether neither needs the other."""
        return not (self.needs.reaches(first, second) or self.needs.reaches(second, first))

    def _between(self, producer: Cluster, consumer: Cluster) -> bool:
        """Return whether the consumer also needs the producer by way of a third kernel."""
        others = [p for p in self.clusters.producers(consumer) if p is not producer]
        return any(
            other is not consumer and self.needs.reaches(other, producer) for other in others
        )


def _joins(cluster: Cluster) -> bool:
    """Return whether a cluster can share a kernel: no library call, no update in place."""
    return (
        cluster.consumes
        and not cluster.rows
        and not cluster.multiplies
        and not any(root.opcode in UPDATES for root in cluster.roots)
    )


class Frame(NamedTuple):
    """What the threads of a cluster run over."""

    kind: str
    size: int
    detail: object = None


def _fit(first: Frame | None, second: Frame | None) -> bool:
    """Return whether two clusters fit one kernel: a loop fits anything over as many elements."""
    if first is None or second is None or first.size != second.size:
        return False
    if "loop" in (first.kind, second.kind):
        return True
    return first.kind == second.kind and first.detail == second.detail


def frame_of(cluster: Cluster) -> Frame | None:
    """Return what a cluster's threads run over; ``None`` if that fits no other kernel."""
    inside = {id(node) for node in cluster.members.values()}
    for root in cluster.roots:
        hero = hero_of(root, inside)
        if hero.opcode == "reduce" and not is_loop_reduction(hero):
            return Frame("reduce", hero.operands[0].size, reduction(hero))
        if turn := turn_of(hero):
            return Frame("transpose", hero.size, turn)
    root = cluster.root
    if root.opcode == "reduce-window":
        return None
    return Frame("loop", root.size)


def _shares(node: Node, first: Cluster, second: Cluster) -> bool:
    """Return whether two clusters read common parts of a value, not one slice each.

    The compiler sees this only while each has a single result; so does this.
    """
    if _through_view(node, first) != _through_view(node, second):
        return False
    if len(first.roots) + len(second.roots) > 2:
        return True
    parts = []
    for cluster in (first, second):
        readers = [
            member
            for member in cluster.members.values()
            if any(source_of(operand) is node for operand in member.operands)
        ]
        if any(reader.opcode != "slice" for reader in readers):
            return True
        parts.append([reader.attrs["slice"] for reader in readers])
    return any(_overlap(one, other) for one in parts[0] for other in parts[1])


def _overlap(one: Limits, other: Limits) -> bool:
    return all(a < d and c < b for (a, b, _), (c, d, _) in zip(one, other, strict=True))


def _through_view(node: Node, cluster: Cluster) -> bool:
    """Return whether a cluster reads a value by way of a reshape, which makes it another array.

    A reshape within a function of this value alone moves up to the value itself.
    """
    members = cluster.members.values()
    if not any(operand is node for member in members for operand in member.operands):
        return True
    reshaped = cluster.root.opcode == "reduce" and cluster.root.operands[0].opcode == "reshape"
    return reshaped and sum(2 * other.size >= node.size for other in cluster.inputs) == 1


# Limits come from XLA's horizontal_loop_fusion.cc. Larger loops take longer than the launch that
# joining them would save.
#: Most elements of a loop that shares a kernel with others of its shape, or of other shapes
#: (kShapeThreshold).
MAX_ALIKE = 8192 * 8192
MAX_MIXED = 128 * 2048
#: Most ops of such a loop (kInstrCountThreshold).
MAX_OPS_ALIKE = 128
MAX_OPS_MIXED = 30
#: Results that end a kernel (kMaxFusionBatchSize): this many, or more, are too many; twice that if
#: each is one op.
MAX_RESULTS = 32
#: Bytes of kernel arguments, pointers of eight bytes, that end a kernel (kMaxCudaParamSize: CUDA
#: allows 4 KiB).
MAX_ARGUMENT_BYTES = 4000
_POINTER = 8


class HorizontalFusion:
    """Joins clusters that only one reader, or the graph's results, need.

    No path can lead between two of them: it would go by way of that reader.

    Args:
        clusters: Changed in place.
    """

    def __init__(self, clusters: Clusters) -> None:
        self.clusters = clusters

    def run(self) -> None:
        """Go from the results to the arguments until nothing changes."""
        while self._pass():
            pass

    def _pass(self) -> bool:
        changed = self._feeding(None)
        for node in reversed(self.clusters.nodes):
            consumer = self.clusters.by_root.get(id(node))
            if consumer is not None and consumer.roots[-1] is node:
                changed |= self._feeding(consumer)
        return changed

    def _feeding(self, consumer: Cluster | None) -> bool:
        """Join what ``consumer`` reads; the graph's results if it is ``None``."""
        rules: tuple[Callable[[list[Cluster]], list[list[Cluster]]], ...] = (
            self._loops_alike,
            self._loops_mixed,
            self._reductions,
        )
        changed = False
        for rule in rules:
            for group in rule(self._candidates(consumer)):
                joined = group[0]
                for other in group[1:]:
                    joined = self.clusters.merge(joined, other)
                    changed = True
        return changed

    def _candidates(self, consumer: Cluster | None) -> list[Cluster]:
        """Return the clusters that nobody but the consumer and the graph's results read."""
        clusters = self.clusters
        if consumer is None:
            made = [clusters.by_root.get(id(owner(n))) for n in clusters.graph.outputs]
            makers = {id(c): c for c in made if c is not None}.values()
            return [c for c in makers if not clusters.users(c)]
        return [c for c in clusters.producers(consumer) if clusters.users(c) == [consumer]]

    def _loops_alike(self, candidates: list[Cluster]) -> list[list[Cluster]]:
        """Group loops over arrays of one shape."""
        loops = [c for c in candidates if _is_small_loop(c, MAX_ALIKE, MAX_OPS_ALIKE)]
        return _spans(loops, lambda c: (*_kind_of(c), c.root.type.shape), lone=2)

    def _loops_mixed(self, candidates: list[Cluster]) -> list[list[Cluster]]:
        """Group loops over smaller arrays of any shapes, one after the other in a flat range.

        One that updates an argument in place could not do so any more if another reads it.
        """
        readers: dict[int, int] = {}
        for cluster in candidates:
            for node in cluster.inputs:
                readers[id(node)] = readers.get(id(node), 0) + 1
        loops = [
            c
            for c in candidates
            if _is_small_loop(c, MAX_MIXED, MAX_OPS_MIXED)
            and all(n.opcode != "parameter" or readers[id(n)] == 1 for n in c.inputs)
        ]
        return _spans(loops, _kind_of)

    def _reductions(self, candidates: list[Cluster]) -> list[list[Cluster]]:
        """Group reductions of arrays of one shape along the same dimensions."""
        reductions = []
        for cluster in candidates:
            frame = frame_of(cluster)
            if cluster.consumes and not cluster.rows and frame and frame.kind == "reduce":
                reductions.append(cluster)
        reductions.sort(key=_ops)
        return _groups(reductions, _reduced, lambda group: _arrays(group) <= MAX_OPERANDS)


def _is_small_loop(cluster: Cluster, elements: int, ops: int) -> bool:
    """Return whether a cluster is a plain loop whose launch costs more than its work.

    One over arrays of several sizes is such a kernel of many already, and takes no more.
    """
    frame = frame_of(cluster)
    return (
        cluster.loops
        and frame is not None
        and frame.kind == "loop"
        and frame.size <= elements
        and _ops(cluster) <= ops
        and len({(root.type.dtype, root.size) for root in cluster.roots}) == 1
        and not any(root.opcode in UPDATES for root in cluster.roots)
    )


def _kind_of(cluster: Cluster) -> tuple[object, ...]:
    return (cluster.root.type.dtype, len(cluster.roots))


def _spans(
    loops: list[Cluster], key: Callable[[Cluster], tuple[object, ...]], lone: int = 1
) -> list[list[Cluster]]:
    """Group loops that share ``key``, similar ones together, so that each group fits one kernel.

    Loops of one op each may have ``lone`` times as many results.
    """

    def fits(group: list[Cluster]) -> bool:
        # XLA decides by the first of a group; fusions count as several ops.
        limit = MAX_RESULTS * (lone if len(group[0].members) == 1 else 1)
        results = sum(len(c.roots) for c in group)
        arguments = results + sum(len(c.inputs) for c in group)
        return results < limit and arguments * _POINTER < MAX_ARGUMENT_BYTES

    # Similar amounts of work side by side: a kernel takes as long as its longest thread.
    return _groups(sorted(loops, key=lambda c: (_ops(c), c.root.size)), key, fits)


def _groups(
    clusters: Iterable[Cluster],
    key: Callable[[Cluster], tuple[object, ...]],
    fits: Callable[[list[Cluster]], bool],
) -> list[list[Cluster]]:
    """Group clusters that share ``key``, in their order, as long as a group fits one kernel."""
    by_key: dict[tuple[object, ...], list[Cluster]] = {}
    for cluster in clusters:
        by_key.setdefault(key(cluster), []).append(cluster)
    groups = []
    for first, *others in by_key.values():
        groups.append([first])
        for cluster in others:
            if fits([*groups[-1], cluster]):
                groups[-1].append(cluster)
            else:
                groups.append([cluster])
    return groups


def _reduced(cluster: Cluster) -> tuple[object, ...]:
    """Return the shape and dimensions of what a reduction sums."""
    inside = {id(node) for node in cluster.members.values()}
    heroes = (hero_of(root, inside) for root in cluster.roots)
    hero = next(hero for hero in heroes if hero.opcode == "reduce")
    return (hero.operands[0].type.shape, tuple(hero.attrs.get("dimensions", ())))


def _arrays(group: Iterable[Cluster]) -> int:
    """Count the arrays that one kernel for all would read and write."""
    members = list(group)
    inputs = {id(source_of(node)) for cluster in members for node in cluster.inputs}
    return len(inputs) + sum(len(cluster.roots) for cluster in members)


def _ops(cluster: Cluster) -> int:
    """Count the ops of a kernel's computation, its parameters included."""
    return len(cluster.members) + len(cluster.inputs)
