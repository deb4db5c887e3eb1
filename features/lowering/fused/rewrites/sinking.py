"""Move transposes after products down: elementwise ops run in the order that the product left.

A compiler that assigns layouts keeps what a GEMM wrote as it lies and lets elementwise ops and
reductions work on it; a transpose is left where an op needs a certain order.
"""

from __future__ import annotations

from ....ir.program import TensorType
from ..dataflow.classify import source_of
from ..dataflow.folding import is_elementwise, spread, transposed
from ..dataflow.graph import Graph, Node, rewrite

#: How many ops back from an operand its order is looked for. Engineering estimate: it bounds the
#: search where elementwise ops form long chains.
_DEPTH = 6


def sink_transposes(graph: Graph) -> None:
    """Move transposes of products and convolutions below elementwise ops and reductions."""
    sinkable: set[int] = set()

    def rule(node: Node) -> Node | None:
        if node.opcode == "transpose":
            # Only their layouts are fixed by a library; other transposes are fused anyway.
            if source_of(node.operands[0]).opcode in ("dot", "convolution"):
                sinkable.add(id(node))
            return None
        made = _sunk(node, sinkable)
        if made is not None and made.type.shape:  # a scalar may stand beside operands of any shape
            sinkable.add(id(made))
        return made

    rewrite(graph, rule)


def _sunk(node: Node, sinkable: set[int]) -> Node | None:
    """Do an op before transposing; ``None`` if an operand does not allow it."""
    first = next((o for o in node.operands if id(o) in sinkable), None)
    if first is None:
        return None
    order = tuple(first.attrs["dimensions"])
    if node.opcode == "reduce":
        return _sunk_reduce(node, order) if len(node.operands) == 2 else None
    if not is_elementwise(node) or node.called:
        return None
    operands = []
    for operand in node.operands:
        turned = _turned(operand, order, _DEPTH)
        if turned is None:
            return None
        operands.append(turned)
    shape = operands[node.operands.index(first)].type.shape
    kind = TensorType(node.type.dtype, shape)
    inner = Node(node.opcode, operands, (kind,), dict(node.attrs), source=node.source)
    return Node("transpose", [inner], node.results, {"dimensions": order}, source=node.source)


def _sunk_reduce(node: Node, order: tuple[int, ...]) -> Node | None:
    wide, start = node.operands
    inner = wide.operands[0]
    dims = tuple(sorted(order[d] for d in node.attrs["dimensions"]))
    kept = [d for d in range(len(order)) if d not in dims]
    place = {d: i for i, d in enumerate(kept)}
    turn = tuple(place[order[d]] for d in range(len(order)) if order[d] not in dims)
    kind = TensorType(node.type.dtype, tuple(inner.type.shape[d] for d in kept))
    attrs = {**node.attrs, "dimensions": dims}
    made = Node("reduce", [inner, start], (kind,), attrs, node.called, source=node.source)
    return Node("transpose", [made], node.results, {"dimensions": turn}, source=node.source)


def _turned(node: Node, order: tuple[int, ...], depth: int) -> Node | None:
    """Turn a value to the order from before a transpose by ``order``; ``None`` if that costs."""
    # Scalars have no order.
    if not node.type.shape:
        return node
    if node.opcode == "transpose":
        return _turned_transpose(node, order)
    shape = [0] * len(order)
    for d, size in enumerate(node.type.shape):
        shape[order[d]] = size
    kind = TensorType(node.type.dtype, tuple(shape))
    if node.opcode == "broadcast":
        return _turned_broadcast(node, order, kind.shape)
    if node.opcode == "iota":
        attrs = {"dimensions": (order[node.attrs["dimensions"][0]],)}
        return Node("iota", [], (kind,), attrs, source=node.source)
    if not is_elementwise(node) or node.called or depth == 0:
        return None
    operands = []
    for operand in node.operands:
        turned = _turned(operand, order, depth - 1)
        if turned is None:
            return None
        operands.append(turned)
    return Node(node.opcode, operands, (kind,), dict(node.attrs), source=node.source)


def _turned_transpose(node: Node, order: tuple[int, ...]) -> Node:
    """Make another transpose of the same value: at worst it takes a kernel, as this one would."""
    dims = [0] * len(order)
    for d, place in zip(node.attrs["dimensions"], order, strict=True):
        dims[place] = d
    return transposed(node.operands[0], dims, node.source)


def _turned_broadcast(node: Node, order: tuple[int, ...], shape: tuple[int, ...]) -> Node:
    small = node.operands[0]
    dims = [order[d] for d in node.attrs.get("dimensions", ())]
    if small.opcode == "transpose":
        before = small.attrs["dimensions"]
        moved = [0] * len(dims)
        for i, d in enumerate(before):
            moved[d] = dims[i]
        small, dims = small.operands[0], moved
    return spread(small, dims, shape, node.source)
