"""Normalisations of rows as one kernel: reduce, broadcast, combine (SoftmaxRewriterTriton)."""

from __future__ import annotations

from ..dataflow.classify import Shape, reduction, source_of
from ..dataflow.folding import is_elementwise, splat
from ..dataflow.graph import Node
from .clusters import Cluster, Clusters


def fuse_softmax(clusters: Clusters) -> None:
    """Make clusters of chains of diamonds: ``f(x, broadcast(g(reduce(x))))`` along rows.

    Args:
        clusters: One op each; changed in place.
    """
    diamonds: dict[int, tuple[Node, list[Node]]] = {}
    for node in clusters.nodes:
        diamond = _diamond(clusters, node)
        if diamond is None:
            continue
        top, members = diamond
        # Softmax is two diamonds, a maximum and a sum: the second begins where the first ends.
        above, chain = _climb(clusters, top, diamonds)
        if above is not None:
            # Chained diamonds become one kernel, under the last one's root.
            first, earlier = diamonds.pop(id(above))
            diamonds[id(node)] = (first, [*earlier, *chain, *members])
        else:
            diamonds[id(node)] = (top, members)
    for root_id, (_, members) in diamonds.items():
        _join(clusters, root_id, members)


def _join(clusters: Clusters, root_id: int, members: list[Node]) -> None:
    position = clusters.position
    for node in members:
        own = clusters.by_root.get(id(node))
        if own is not None:
            clusters.remove(own)
    root = next(node for node in members if id(node) == root_id)
    made = Cluster([root], {position[id(n)]: n for n in members})
    made.rows = True
    clusters.add(made)


def _single(clusters: Clusters, node: Node) -> bool:
    """Return whether only one op reads a node's value."""
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 1


def _diamond(clusters: Clusters, node: Node) -> tuple[Node, list[Node]] | None:
    """Find the top and members of the diamond that ends in ``node``."""
    if len(node.operands) != 2 or not is_elementwise(node) or node.called:
        return None
    for side in (0, 1):
        wide, narrow = source_of(node.operands[side]), source_of(node.operands[1 - side])
        if narrow.opcode != "broadcast" or splat(narrow) is not None:
            continue
        dims = narrow.attrs.get("dimensions", ())
        rank = len(narrow.type.shape)
        # Only a broadcast along the last dimension undoes a reduction of rows.
        if tuple(dims) != tuple(range(rank - 1)) or not _single(clusters, narrow):
            continue
        chain = [node, narrow]
        inner = source_of(narrow.operands[0])
        # Between reduction and broadcast: scale, epsilon, square root of a norm.
        while is_elementwise(inner) and _single(clusters, inner) and len(inner.operands) <= 2:
            chain.append(inner)
            following = [source_of(o) for o in inner.operands if splat(o) is None]
            if len(following) != 1:
                break
            inner = following[0]
        if inner.opcode != "reduce" or not _single(clusters, inner) or len(inner.operands) != 2:
            continue
        # Triton's kernel keeps one row in a block: it must be contiguous.
        if reduction(inner).shape is not Shape.ROW or len(inner.attrs["dimensions"]) != 1:
            continue
        top, between = _top(clusters, source_of(inner.operands[0]), wide)
        # The reduction and the combining op; a third reader would need the value in memory.
        if top is wide and _two_users(clusters, wide):
            chain += [inner, *between]
            return wide, [*chain, *_constants(clusters, chain)]
    return None


def _top(clusters: Clusters, node: Node, wanted: Node) -> tuple[Node, list[Node]]:
    """Climb from a reduction through ops on one value that only it needs."""
    chain: list[Node] = []
    while node is not wanted and is_elementwise(node) and _single(clusters, node):
        following = {id(source_of(o)): source_of(o) for o in node.operands if splat(o) is None}
        if len(following) != 1:
            break
        chain.append(node)
        node = next(iter(following.values()))
    return node, chain


def _two_users(clusters: Clusters, node: Node) -> bool:
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 2


def _constants(clusters: Clusters, nodes: list[Node]) -> list[Node]:
    """Return the broadcast constants that only these nodes read."""
    constants: dict[int, Node] = {}
    for node in nodes:
        for operand in node.operands:
            source = source_of(operand)
            filled = source.opcode == "broadcast" and splat(source) is not None
            if filled and _single(clusters, source):
                constants[id(source)] = source
    return list(constants.values())


def _climb(
    clusters: Clusters, top: Node, diamonds: dict[int, tuple[Node, list[Node]]]
) -> tuple[Node | None, list[Node]]:
    """Find the end of an earlier diamond above ``top``, and the ops between."""
    chain: list[Node] = []
    node = top
    while id(node) not in diamonds:
        following = [source_of(o) for o in node.operands if splat(o) is None]
        if not is_elementwise(node) or len(following) != 1:
            return None, []
        chain.append(node)
        node = following[0]
        if id(node) not in diamonds and not _single(clusters, node):
            return None, []
    if node is not top and not _single(clusters, node):
        return None, []
    return node, chain
