"""Kernels of independent work: small loops, or reductions, whose results one op reads.

The rules come from XLA's passes HorizontalLoopFusion and HorizontalInputFusion. Both are gone
from the compiler that JAX 0.10 brings: a step that updates seven parameters runs seven kernels.
Compilers before them run them by default, so they stand behind their option,
``xla_gpu_use_horizontal_fusion``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....ir.op_table import UPDATES
from ..dataflow.classify import source_of
from ..dataflow.graph import Node
from .clusters import Cluster, Clusters, owner
from .multi_output import frame_of, hero_of
from .priority import MAX_OPERANDS

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
        by_size: dict[tuple[object, ...], list[Cluster]] = {}
        for cluster in candidates:
            frame = frame_of(cluster)
            if cluster.consumes and not cluster.rows and frame and frame.kind == "reduce":
                by_size.setdefault(_reduced(cluster), []).append(cluster)
        groups = []
        for alike in by_size.values():
            alike.sort(key=_ops)
            group: list[Cluster] = []
            for cluster in alike:
                if _arrays([*group, cluster]) > MAX_OPERANDS:
                    groups.append(group)
                    group = []
                group.append(cluster)
            groups.append(group)
        return groups


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
    by_key: dict[tuple[object, ...], list[Cluster]] = {}
    # Similar amounts of work side by side: a kernel takes as long as its longest thread.
    for cluster in sorted(loops, key=lambda c: (_ops(c), c.root.size)):
        by_key.setdefault(key(cluster), []).append(cluster)
    groups = []
    for alike in by_key.values():
        group: list[Cluster] = []
        for cluster in alike:
            # XLA decides by the first of a group; fusions count as several ops.
            limit = MAX_RESULTS * (lone if len((group or [cluster])[0].members) == 1 else 1)
            results = sum(len(c.roots) for c in (*group, cluster))
            arguments = sum(len(c.inputs) + len(c.roots) for c in (*group, cluster))
            if group and (results >= limit or arguments * _POINTER >= MAX_ARGUMENT_BYTES):
                groups.append(group)
                group = []
            group.append(cluster)
        groups.append(group)
    return groups


def _reduced(cluster: Cluster) -> tuple[object, ...]:
    """Return the shape and dimensions of what a reduction sums."""
    hero = _summing(cluster)
    return (hero.operands[0].type.shape, tuple(hero.attrs.get("dimensions", ())))


def _summing(cluster: Cluster) -> Node:
    heroes = [hero_of(root, cluster) for root in cluster.roots]
    return next(hero for hero in heroes if hero.opcode == "reduce")


def _arrays(group: Iterable[Cluster]) -> int:
    """Count the arrays that one kernel for all would read and write."""
    members = list(group)
    inputs = {id(source_of(node)) for cluster in members for node in cluster.inputs}
    return len(inputs) + sum(len(cluster.roots) for cluster in members)


def _ops(cluster: Cluster) -> int:
    """Count the ops of a kernel's computation, its parameters included."""
    return len(cluster.members) + len(cluster.inputs)
