"""Fuse row normalisations (reduce, broadcast, combine) into one kernel, before loops are fused.

The rules are those of XLA's SoftmaxRewriterTriton; the TPU compiler fuses fewer of them.
"""

from __future__ import annotations

from typing import NamedTuple

from .clusters import Cluster, Clusters, Shape, reduction, source_of
from .folding import is_elementwise, splat
from .graph import Node

#: Ops that Triton, which generates the row kernels, does not fuse (triton_support.cc).
_NOT_BY_ROWS = frozenset(
    ("concatenate", "dynamic-slice", "dynamic-update-slice", "gather", "pad", "reverse")
)


class _Diamond(NamedTuple):
    """A chain of diamonds.

    Attributes:
        top: The value from which the first diamond starts.
        members: Nodes of the kernel.
        ends: Nodes whose values the kernel writes.
    """

    top: Node
    members: list[Node]
    ends: list[Node]


def fuse_softmax(clusters: Clusters) -> None:
    """Make clusters of chains of diamonds: ``f(x, broadcast(g(reduce(x))))`` along rows.

    On TPUs only arrays of rank three or more qualify, ``g`` must be absent, and the last step is
    left to a product that reads the result.

    Args:
        clusters: One op each; changed in place.
    """
    diamonds: dict[int, _Diamond] = {}
    for node in clusters.nodes:
        diamond = _diamond(clusters, node)
        if diamond is None:
            continue
        top, members = diamond
        # Softmax is two diamonds, a maximum and a sum: the second starts where the first ends.
        above, chain = _climb(clusters, top, diamonds)
        ends = [node]
        if clusters.fused_products and _feeds_product(clusters, node):
            if above is None:
                continue
            # The product divides: the kernel ends with the summed values and the sums.
            members = [next(n for n in members if n.opcode == "reduce")]
            ends = [top, *members]
        if above is not None:
            # Chained diamonds become one kernel, under the last one's root.
            first, earlier, _ = diamonds.pop(id(above))
            diamonds[id(node)] = _Diamond(first, [*earlier, *chain, *members], ends)
        else:
            diamonds[id(node)] = _Diamond(top, members, ends)
    for _, members, ends in diamonds.values():
        _join(clusters, members, ends)


def _join(clusters: Clusters, members: list[Node], ends: list[Node]) -> None:
    position = clusters.position
    for node in members:
        own = clusters.by_root.get(id(node))
        if own is not None:
            clusters.remove(own)
    made = Cluster(ends, {position[id(n)]: n for n in members})
    made.rows = True
    clusters.add(made)


def _feeds_product(clusters: Clusters, node: Node) -> bool:
    """Return whether only products read a value, possibly after a conversion."""
    readers = list(clusters.readers.get(id(node), {}).values())
    while len(readers) == 1 and readers[0].root.opcode == "convert":
        node = readers[0].root
        readers = list(clusters.readers.get(id(node), {}).values())
    return bool(readers) and id(node) not in clusters.kept and all(c.multiplies for c in readers)


def is_single(clusters: Clusters, node: Node) -> bool:
    """Return whether a node's value has exactly one reader."""
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 1


def _diamond(clusters: Clusters, node: Node) -> tuple[Node, list[Node]] | None:
    """Find the top and the members of the diamond that ends in ``node``."""
    if len(node.operands) != 2 or not is_elementwise(node) or node.called:
        return None
    for side in (0, 1):
        wide, narrow = source_of(node.operands[side]), source_of(node.operands[1 - side])
        if narrow.opcode != "broadcast" or splat(narrow) is not None:
            continue
        shape = narrow.type.shape
        # Only a broadcast along the last dimension matches a reduction of rows; dimensions of size
        # one take no memory.
        dims = [d for d in narrow.attrs.get("dimensions", ()) if shape[d] != 1]
        outer = [d for d, size in enumerate(shape[:-1]) if size != 1]
        if dims != outer or not is_single(clusters, narrow):
            continue
        chain = [node, narrow]
        inner = source_of(narrow.operands[0])
        # Between reduction and broadcast: scale, epsilon, or square root of a norm.
        while is_elementwise(inner) and is_single(clusters, inner) and len(inner.operands) <= 2:
            chain.append(inner)
            following = [source_of(o) for o in inner.operands if splat(o) is None]
            if len(following) != 1:
                break
            inner = following[0]
        if clusters.fused_products and (len(chain) > 2 or len(shape) < 3):
            continue
        if inner.opcode != "reduce" or not is_single(clusters, inner) or len(inner.operands) != 2:
            continue
        # Triton's kernel keeps a row in one block: the row must be contiguous.
        if reduction(inner).shape is not Shape.ROW or len(inner.attrs["dimensions"]) != 1:
            continue
        # Elementwise ops may precede both sides: without bf16 arithmetic the combining op is
        # enclosed in conversions, while the reduction need not be.
        beside, above = _path(clusters, wide), _path(clusters, source_of(inner.operands[0]))
        inside = {id(n) for n in beside}
        upwards = next((i for i, n in enumerate(above) if id(n) in inside), None)
        if upwards is not None:
            top = above[upwards]
            chain += [inner, *above[:upwards], *beside[: beside.index(top)]]
            return top, [*chain, *_constants(clusters, chain)]
    return None


def _path(clusters: Clusters, node: Node) -> list[Node]:
    """Climb through unary ops that only their reader needs; the first is ``node``."""
    path = [node]
    while is_elementwise(node) and is_single(clusters, node):
        following = {id(source_of(o)): source_of(o) for o in node.operands if splat(o) is None}
        if len(following) != 1:
            break
        node = next(iter(following.values()))
        path.append(node)
    return path


def _two_users(clusters: Clusters, node: Node) -> bool:
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 2


def _constants(clusters: Clusters, nodes: list[Node]) -> list[Node]:
    """Return the broadcast constants that only these nodes read."""
    constants: dict[int, Node] = {}
    for node in nodes:
        for operand in node.operands:
            source = source_of(operand)
            filled = source.opcode == "broadcast" and splat(source) is not None
            if filled and is_single(clusters, source):
                constants[id(source)] = source
    return list(constants.values())


def _climb(
    clusters: Clusters, top: Node, diamonds: dict[int, _Diamond]
) -> tuple[Node | None, list[Node]]:
    """Find the end of an earlier diamond above ``top``, and the ops between the two."""
    chain: list[Node] = []
    node = top
    # A reader other than the reduction and the combining op would need the value in memory.
    if not _two_users(clusters, top):
        return None, []
    while id(node) not in diamonds:
        following = [source_of(o) for o in node.operands if splat(o) is None]
        if not is_elementwise(node) or len(following) != 1:
            return None, []
        chain.append(node)
        node = following[0]
        if id(node) not in diamonds and not is_single(clusters, node):
            return None, []
    if node is not top and not is_single(clusters, node):
        return None, []
    return node, chain


def is_read_by_rows(node: Node) -> bool:
    """Return whether Triton can compute an op; unsigned integers (random bits) are excluded."""
    return node.opcode not in _NOT_BY_ROWS and not node.type.dtype.startswith("u")


def count_of(rows: Cluster) -> int:
    """Count the rows that a row kernel processes."""
    widest = max(rows.members.values(), key=lambda node: node.size)
    return widest.size // widest.type.shape[-1]


def works_by_rows(node: Node, count: int) -> bool:
    """Return whether an op works on each of ``count`` rows independently.

    Sums across the rows need results from other blocks.
    """
    if node.opcode == "reduce":
        along = tuple(node.attrs["dimensions"]) == (len(node.operands[0].type.shape) - 1,)
        return not node.is_tuple and along and node.size == count
    if node.opcode == "broadcast" or is_elementwise(node):
        return not node.is_tuple and is_read_by_rows(node)
    return False
