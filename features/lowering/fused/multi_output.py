"""Kernels with several results: siblings that share an input, producers with a consumer.

The order and the checks follow XLA:GPU's MultiOutputFusion, which runs after PriorityFusion.

On request (``xla_gpu_use_horizontal_fusion``) independent work shares a kernel, too: small loops,
or reductions, whose results one op reads. The rules come from XLA's HorizontalLoopFusion and
HorizontalInputFusion passes, which the compiler of JAX 0.10 no longer has.
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
from .folding import is_elementwise
from .graph import Node
from .heroes import hero_of, turn_of
from .machine import Machine
from .work import LAUNCH, Work, narrow_reduction

#: Start, limit and stride of a slice along each dimension.
Limits = Sequence[tuple[int, int, int]]


class MultiOutputFusion:
    """Merge clusters that iterate over the same elements.

    Args:
        clusters: Changed in place.
        machine: Determines whether a fusion pays off.
    """

    def __init__(self, clusters: Clusters, machine: Machine) -> None:
        self.clusters = clusters
        self.machine = machine
        self.needs = Dependences(clusters)
        # Here clusters are merged into new ones and never modified.
        self._frames: dict[Cluster, Frame | None] = {}

    def run(self) -> None:
        """Traverse the graph from its results to its arguments."""
        # From the results up: merging consumers leaves their producers fewer readers.
        for node in reversed(self.clusters.nodes):
            self._siblings(node)
            producer = self.clusters.by_root.get(id(node))
            if producer is not None:
                self._with_consumer(producer)
        if self.clusters.fused_products:
            self.clusters.drop_unread()

    def _siblings(self, node: Node) -> None:
        """Merge clusters that all read ``node``."""
        # Scalars have very many readers; sharing one saves nothing.
        if node.size <= 1:
            return
        readers = [c for c in self.clusters.readers.get(id(node), {}).values() if _joins(c)]
        readers.sort(key=lambda c: self.clusters.position[id(c.root)])
        i = 0
        # Merged clusters stay in the list, so that a third sibling can be merged with them.
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
        """Merge a producer with one of its consumers while keeping its result for the others."""
        frame = self._frame(producer)
        # A TPU's kernel can reduce the result of its product and write both.
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
            # A third kernel between the two would depend on one and feed the other.
            if self._between(producer, consumer):
                continue
            if self._follows(consumer) if product else self._pays(producer, consumer):
                self.needs.merge(producer, consumer)
                return

    def _follows(self, cluster: Cluster) -> bool:
        """Return whether a kernel reduces a product, or computes each element from its own."""
        frame = self._frame(cluster)
        if frame is None or frame.kind not in ("reduce", "loop"):
            return False
        return frame.kind == "reduce" or all(map(_by_element, cluster.nodes))

    def _frame(self, cluster: Cluster) -> Frame | None:
        if cluster not in self._frames:
            self._frames[cluster] = frame_of(cluster)
        return self._frames[cluster]

    def _alike(self, first: Cluster, second: Cluster) -> bool:
        """Return whether both clusters iterate over the same elements in the same way."""
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
        # Saves one launch, and the shared input is read only once.
        return Work(members, roots, self.machine).ticks() + LAUNCH <= apart

    def _apart(self, first: Cluster, second: Cluster) -> bool:
        """Return whether neither cluster depends on the other."""
        return not (self.needs.reaches(first, second) or self.needs.reaches(second, first))

    def _between(self, producer: Cluster, consumer: Cluster) -> bool:
        """Return whether the consumer also depends on the producer through a third kernel."""
        others = [p for p in self.clusters.producers(consumer) if p is not producer]
        return any(
            other is not consumer and self.needs.reaches(other, producer) for other in others
        )


def _joins(cluster: Cluster) -> bool:
    """Return whether a cluster can share a kernel: not a library call or in-place update."""
    return (
        cluster.consumes
        and not cluster.rows
        and not cluster.multiplies
        and not any(root.opcode in UPDATES for root in cluster.roots)
    )


def _by_element(node: Node) -> bool:
    return is_elementwise(node) or node.opcode == "broadcast" or node.size <= 1


class Frame(NamedTuple):
    """The iteration space of a cluster's threads."""

    kind: str
    size: int
    detail: object = None


def _fit(first: Frame | None, second: Frame | None) -> bool:
    """Return whether two clusters fit one kernel: a loop fits anything with as many elements."""
    if first is None or second is None or first.size != second.size:
        return False
    if "loop" in (first.kind, second.kind):
        return True
    return first.kind == second.kind and first.detail == second.detail


def frame_of(cluster: Cluster) -> Frame | None:
    """Return the iteration space of a cluster; ``None`` if it can share no kernel."""
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
    """Return whether two clusters read overlapping parts of a value rather than separate slices.

    XLA checks this only while both have a single result, and so does this function.
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
    """Return whether a cluster reads a value through a reshape, which makes it another array.

    A reshape in a reduction that reads only this large value is moved up to the value.
    """
    members = cluster.members.values()
    if not any(operand is node for member in members for operand in member.operands):
        return True
    reshaped = cluster.root.opcode == "reduce" and cluster.root.operands[0].opcode == "reshape"
    return reshaped and sum(2 * other.size >= node.size for other in cluster.inputs) == 1


# Limits from XLA's horizontal_loop_fusion.cc. Larger loops take longer than the launch that merging
# would save.
#: Most elements of a loop that shares a kernel with loops of its shape, or of other shapes
#: (kShapeThreshold).
MAX_ALIKE = 8192 * 8192
MAX_MIXED = 128 * 2048
#: Most ops of these loops (kInstrCountThreshold).
MAX_OPS_ALIKE = 128
MAX_OPS_MIXED = 30
#: Number of results that a kernel must stay below (kMaxFusionBatchSize); twice as many if each is a
#: single op.
MAX_RESULTS = 32
#: Bytes of kernel arguments (8-byte pointers) that a kernel must stay below (kMaxCudaParamSize;
#: CUDA allows 4 KiB).
MAX_ARGUMENT_BYTES = 4000
_POINTER = 8


class HorizontalFusion:
    """Merge independent clusters that have the same single reader, or are results of the graph.

    No path can connect two of them, since it would lead through that reader.

    Args:
        clusters: Changed in place.
    """

    def __init__(self, clusters: Clusters) -> None:
        self.clusters = clusters

    def run(self) -> None:
        """Traverse from the results to the arguments until nothing changes."""
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
        """Merge the producers of ``consumer``, or of the graph's results if it is ``None``."""
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
        """List the clusters read by the consumer alone, or those of unread graph results."""
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
        """Group loops over smaller arrays of any shapes, concatenated into one flat range.

        Loops that share an argument are left out: neither could still update it in place.
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

    A loop over arrays of several sizes is already such a merged kernel, and is not extended.
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
    """Group loops with equal ``key``, similar ones together, so that each group fits one kernel.

    Groups of single-op loops may have ``lone`` times as many results.
    """

    def fits(group: list[Cluster]) -> bool:
        # XLA applies the limit of the first loop in a group; fusions count as several ops.
        limit = MAX_RESULTS * (lone if len(group[0].members) == 1 else 1)
        results = sum(len(c.roots) for c in group)
        arguments = results + sum(len(c.inputs) for c in group)
        return results < limit and arguments * _POINTER < MAX_ARGUMENT_BYTES

    # Loops with similar work go together: a kernel takes as long as its longest thread.
    return _groups(sorted(loops, key=lambda c: (_ops(c), c.root.size)), key, fits)


def _groups(
    clusters: Iterable[Cluster],
    key: Callable[[Cluster], tuple[object, ...]],
    fits: Callable[[list[Cluster]], bool],
) -> list[list[Cluster]]:
    """Group clusters with equal ``key``, in order, as long as each group fits one kernel."""
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
    """Return the shape of a reduction's operand and the reduced dimensions."""
    inside = {id(node) for node in cluster.members.values()}
    heroes = (hero_of(root, inside) for root in cluster.roots)
    hero = next(hero for hero in heroes if hero.opcode == "reduce")
    return (hero.operands[0].type.shape, tuple(hero.attrs.get("dimensions", ())))


def _arrays(group: Iterable[Cluster]) -> int:
    """Count the arrays that one kernel for the whole group would read and write."""
    members = list(group)
    inputs = {id(source_of(node)) for cluster in members for node in cluster.inputs}
    return len(inputs) + sum(len(cluster.roots) for cluster in members)


def _ops(cluster: Cluster) -> int:
    """Count the ops in a kernel's computation, including its parameters."""
    return len(cluster.members) + len(cluster.inputs)
