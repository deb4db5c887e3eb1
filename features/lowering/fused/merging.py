"""Products that share an operand become one (XLA's DotMerger)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ...ir.program import TensorType
from .graph import Graph, Node

#: Products are merged if at least one moves no more bytes than this: the default of
#: ``xla_gpu_dot_merger_threshold_mb``.
MERGE_BYTES = 32 << 20


def merge_dots(graph: Graph) -> None:
    """Merge products that share an operand and do not depend on each other (XLA's DotMerger).

    The other operands are concatenated, and the result is sliced.
    """
    nodes = graph.nodes()
    groups: dict[tuple[int, int, object, str, str], list[Node]] = {}
    for node in nodes:
        if node.opcode != "dot":
            continue
        for side in (0, 1):
            attrs = tuple(sorted((k, repr(v)) for k, v in node.attrs.items()))
            # Operands that are concatenated need one dtype.
            other = node.operands[1 - side].type.dtype
            key = (id(node.operands[side]), side, attrs, node.type.dtype, other)
            groups.setdefault(key, []).append(node)
    replaced: dict[int, Node] = {}
    order = Dependence(nodes)
    for (_, side, *_rest), dots in groups.items():
        # A product that was merged by its left operand is not merged again by its right one.
        chosen = _independent([d for d in dots if id(d) not in replaced], order)
        if len(chosen) > 1:
            _merge(chosen, side, replaced)
            order.merge(chosen)
    if replaced:
        _replace(graph, nodes, replaced)


def _independent(dots: list[Node], order: Dependence) -> list[Node]:
    """Choose products that can be one: none reads another's result, and not all are large."""
    chosen: list[Node] = []
    for dot in dots:
        small = _moved(dot) <= MERGE_BYTES
        # DotMerger joins two if at least one is small: large ones fill the device alone.
        if chosen and not small and not any(_moved(c) <= MERGE_BYTES for c in chosen):
            continue
        if not any(order.needs(dot, other) or order.needs(other, dot) for other in chosen):
            chosen.append(dot)
    return chosen


def _moved(dot: Node) -> int:
    return dot.nbytes + sum(o.nbytes for o in dot.operands)


class Dependence:
    """Which node needs which, while products are merged.

    Args:
        nodes: All nodes, operands first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._position = {id(node): place for place, node in enumerate(nodes)}
        self._merged: dict[int, list[Node]] = {}
        # Stretches of the order that merged products reach over, ascending; none touch.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def merge(self, dots: list[Node]) -> None:
        """Let each of some products need what any of them needs, as one kernel does."""
        self._merged.update((id(dot), dots) for dot in dots)
        places = [self._position[id(dot)] for dot in dots]
        start, end = min(places), max(places)
        first = bisect_left(self._ends, start)
        behind = bisect_right(self._starts, end)
        if first < behind:
            start, end = min(start, self._starts[first]), max(end, self._ends[behind - 1])
        self._starts[first:behind], self._ends[first:behind] = [start], [end]

    def needs(self, node: Node, other: Node) -> bool:
        """Return whether ``node`` depends on ``other``."""
        # Operands stand before their users. Only products that are merged lead back to a later
        # node, and none of them leads out of its stretch: what stands before cannot need ``other``.
        limit = self._position[id(other)]
        stretch = bisect_right(self._starts, limit) - 1
        if stretch >= 0 and self._ends[stretch] >= limit:
            limit = self._starts[stretch]
        position = self._position
        stack, seen = [node], {id(node)}
        while stack:
            found = stack.pop()
            if position[id(found)] < limit:
                continue
            for one in self._merged.get(id(found), (found,)):
                for operand in one.operands:
                    if operand is other:
                        return True
                    if id(operand) not in seen:
                        seen.add(id(operand))
                        stack.append(operand)
        return False


def _merge(dots: list[Node], side: int, replaced: dict[int, Node]) -> None:
    first = dots[0]
    shared = first.operands[side]
    others = [dot.operands[1 - side] for dot in dots]
    key = "rhs" if side == 0 else "lhs"
    used = {*first.attrs[f"{key}_contracting_dims"], *first.attrs[f"{key}_batch_dims"]}
    # The free dimension of the operand that is not shared.
    along = next(d for d in range(len(first.type.shape)) if d not in used)
    shape = list(others[0].type.shape)
    shape[along] = sum(other.type.shape[along] for other in others)
    kind = TensorType(others[0].type.dtype, tuple(shape))
    joined = Node("concatenate", others, (kind,), {"dimensions": (along,)}, source=first.source)
    # Shared left operand: results lie side by side in columns; shared right one: in rows.
    column = len(first.type.shape) - 1 - side
    result = list(first.type.shape)
    result[column] = shape[along]
    operands = [shared, joined] if side == 0 else [joined, shared]
    kind = TensorType(first.type.dtype, tuple(result))
    product = Node("dot", operands, (kind,), dict(first.attrs), source=first.source)
    start = 0
    for dot in dots:
        end = start + dot.type.shape[column]
        limits = [(0, size, 1) for size in dot.type.shape]
        limits[column] = (start, end, 1)
        start = end
        attrs = {"slice": tuple(limits)}
        replaced[id(dot)] = Node("slice", [product], dot.results, attrs, source=dot.source)


def _replace(graph: Graph, nodes: list[Node], replaced: dict[int, Node]) -> None:
    products = [part.operands[0] for part in replaced.values()]
    joined = [o for product in products for o in product.operands if o.opcode == "concatenate"]
    for node in (*nodes, *products, *joined):
        node.operands = [replaced.get(id(o), o) for o in node.operands]
    graph.outputs = [replaced.get(id(node), node) for node in graph.outputs]
