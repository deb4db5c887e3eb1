"""Long reductions run in two steps, so that enough threads take part (XLA's tree reduction)."""

from __future__ import annotations

from math import isqrt

from ..ir import TensorType
from .classify import Shape, is_loop_reduction, reduction
from .graph import Graph, Node
from .views import reshape

#: Most elements that one pass sums without atomics: 1024 threads of 16, 32 threads of 128.
MAX_ROW = 16_384
MAX_COLUMN = 4_096
MAX_BATCHED = 8


def split_reductions(graph: Graph) -> None:
    """Replace each long reduction by one of parts and one of the parts' results."""
    replaced: dict[int, Node] = {}
    for node in graph.nodes():
        node.operands = [replaced.get(id(o), o) for o in node.operands]
        if node.opcode == "reduce" and len(node.operands) == 2:
            made = _split(node)
            if made is not None:
                replaced[id(node)] = made
    graph.outputs = [replaced.get(id(node), node) for node in graph.outputs]


def _split(node: Node) -> Node | None:
    if is_loop_reduction(node):
        return None
    found = reduction(node)
    limit = MAX_ROW if found.shape is Shape.ROW else MAX_COLUMN
    dims = sorted(node.attrs["dimensions"])
    source, start = node.operands
    if found.length <= limit or found.shape is Shape.SCATTERED:
        return None
    parts = 1 << (isqrt(found.length).bit_length() - 1)
    if found.length % parts:
        return None
    # The run of summed dimensions becomes two: parts, and what is summed first.
    kept_before = [s for d, s in enumerate(source.type.shape) if d < dims[0]]
    kept_after = [s for d, s in enumerate(source.type.shape) if d > dims[-1]]
    if len(kept_before) + len(kept_after) + len(dims) != len(source.type.shape):
        return None
    rest = found.length // parts
    inner = (rest, parts) if found.shape is Shape.COLUMN else (parts, rest)
    view = reshape(source, (*kept_before, *inner, *kept_after))
    along = len(kept_before) + (0 if found.shape is Shape.COLUMN else 1)
    kind = TensorType(node.type.dtype, (*kept_before, parts, *kept_after))
    attrs = {**node.attrs, "dimensions": (along,)}
    first = Node("reduce", [view, start], (kind,), attrs, node.called, source=node.source)
    attrs = {**node.attrs, "dimensions": (len(kept_before),)}
    return Node("reduce", [first, start], node.results, attrs, node.called, source=node.source)
