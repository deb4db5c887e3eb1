"""Arrays filled with a constant: one for each op that writes into one, made by one kernel.

An update in place destroys the array that it writes to. Where several start from the same zeros
(the gradients of embedding tables), the compiler makes a copy for each, and CopyFusion, which runs
after buffers are separated, makes all copies results of the kernel that fills the first. It does so
in the entry only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ....ir.op_table import UPDATES
from ..dataflow.classify import source_of
from ..dataflow.folding import splat, splat_node
from ..dataflow.graph import Graph, Node
from .clusters import Cluster, Clusters
from .priority import MAX_OPERANDS


def own_fills(graph: Graph) -> None:
    """Give each update in place its own array, where several would write to one fill."""
    writes: dict[int, list[tuple[Node, int]]] = {}
    for node in graph.nodes():
        for i in written(node):
            source = source_of(node.operands[i])
            if source.opcode == "broadcast" and splat(source) is not None:
                writes.setdefault(id(source), []).append((node, i))
    for places in writes.values():
        # The first keeps the shared fill; XLA's CopyInsertion copies for the others.
        for node, i in places[1:]:
            like = node.operands[i]
            own = splat_node(splat(like), like.type)
            own.source = source_of(like).source
            node.operands[i] = own


def join_fills(clusters: Clusters) -> None:
    """Merge the fills that updates of one array start from, and the fills that start one loop."""
    known: dict[Hashable, Cluster] = {}
    for key, fill in _fills(clusters):
        own = clusters.by_root.get(id(fill))
        # Something was fused into it, so it is no plain fill any more.
        if own is None or own.inputs or fill.opcode != "broadcast":
            continue
        first = known.setdefault(key, own)
        if first is not own:
            if len(first.roots) + len(own.roots) <= MAX_OPERANDS:
                known[key] = clusters.merge(first, own)
            else:
                known[key] = own


def written(node: Node) -> range:
    """Return the places of the operands that an op updates in place."""
    if node.opcode not in UPDATES:
        return range(0)
    return range((len(node.operands) - 1) // 2 if node.opcode == "scatter" else 1)


def _fills(clusters: Clusters) -> Iterator[tuple[Hashable, Node]]:
    """Yield arrays that a loop starts from or an update writes to, with what they must share."""
    for node in clusters.nodes:
        if node.opcode == "while":
            for operand in dict.fromkeys(map(source_of, node.operands)):
                yield (id(node), operand.type.shape), operand
    for node in clusters.nodes:
        for i in written(node):
            fill = source_of(node.operands[i])
            yield (repr(splat(fill)), fill.type.dtype, fill.size), fill
