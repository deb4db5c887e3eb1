"""Move transposes below the ops that read them, so that fewer remain or they come later.

Transposes move if all of their readers can use the untransposed order, as in XLA's ReshapeMover;
those of products and convolutions also move as XLA's layouts would propagate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.program import TensorType
from .clusters import source_of
from .folding import is_elementwise, reduced, spread, transposed
from .graph import Graph, Node, rewrite, users_of

#: Most consecutive ops that a transpose is moved below. Engineering estimate: XLA repeats its
#: simplifications until nothing changes.
_ROUNDS = 16


@dataclass(frozen=True)
class _Later:
    """Values computed from products that come after the product at index ``place``."""

    origin: Mapping[int, int]
    place: int

    def has(self, node: Node) -> bool:
        return self.origin.get(id(source_of(node)), -1) > self.place


_NONE = _Later({}, 0)


def move_transposes(graph: Graph) -> None:
    """Move transposes below elementwise ops if all their operands can use the untransposed order.

    Args:
        graph: Changed in place; loops and branches are not entered.
    """
    for _ in range(_ROUNDS):
        movable = _movable(graph)
        if not movable:
            return
        rewrite(graph, lambda node: _below(node) if id(node) in movable else None)  # noqa: B023


def _movable(graph: Graph) -> set[int]:
    """Return the ops, by ``id``, that can move above the transposes they read, with all readers."""
    nodes = graph.nodes()
    # Transposes of products are moved further (sink_transposes).
    transposes = [n for n in nodes if n.opcode == "transpose" and not _is_product(n.operands[0])]
    if not transposes:
        return set()
    users, kept = users_of(nodes), {id(node) for node in (*graph.outputs, *graph.effects)}
    readers = {id(user): user for t in transposes for user in users[id(t)]}
    found = {key for key, user in readers.items() if _takes_order(user)}
    left = transposes
    while left:
        # A single reader that needs the transpose keeps it for all readers.
        held = [t for t in left if id(t) in kept or any(id(u) not in found for u in users[id(t)])]
        left = [t for t in left if t not in held]
        before = len(found)
        found -= {id(user) for t in held for user in users[id(t)]}
        if len(found) == before:
            return found
    return found


def _is_product(node: Node) -> bool:
    return source_of(node).opcode in ("dot", "convolution")


def _takes_order(node: Node) -> bool:
    """Return whether an elementwise op can use the untransposed order of its operands."""
    if not is_elementwise(node) or node.called:
        return False
    orders = {tuple(o.attrs["dimensions"]) for o in node.operands if o.opcode == "transpose"}
    if len(orders) != 1:
        return False
    (order,) = orders
    return all(
        o.opcode == "transpose"
        or (o.opcode == "broadcast" and _keeps_order(o, order))
        or not o.type.shape
        for o in node.operands
    )


def _keeps_order(broadcast: Node, order: tuple[int, ...]) -> bool:
    dims = [order[d] for d in broadcast.attrs.get("dimensions", ())]
    return dims == sorted(dims)


def _below(node: Node) -> Node:
    first = next(o for o in node.operands if o.opcode == "transpose")
    order = tuple(first.attrs["dimensions"])
    inner = _turned_result(node, order, first.operands[0].type.shape, 0, _NONE)
    assert inner is not None
    return Node("transpose", [inner], node.results, {"dimensions": order}, source=node.source)


#: Depth of the search for an operand's order. Engineering estimate: it bounds the search in long
#: chains of elementwise ops.
_DEPTH = 6


def sink_transposes(graph: Graph) -> None:
    """Move transposes of products and convolutions below elementwise ops and reductions.

    Where two products with different orders meet, the order of the earlier product is used, as in
    XLA's GpuLayoutAssignment, which propagates the earliest layouts first.
    """
    sinkable: set[int] = set()
    # Index of the first product that leads to a value through elementwise ops.
    origin: dict[int, int] = {}

    def rule(node: Node) -> Node | None:
        _follow(origin, node)
        if node.opcode == "transpose":
            # Only their layouts are set by a library; other transposes are fused anyway.
            if _is_product(node.operands[0]):
                sinkable.add(id(node))
            return None
        made = _sunk(node, sinkable, origin)
        if made is not None:
            if made.type.shape:  # scalars go with operands of any shape
                sinkable.add(id(made))
            if id(node) in origin:
                origin[id(made)] = origin[id(node)]
        return made

    rewrite(graph, rule)


def _follow(origin: dict[int, int], node: Node) -> None:
    """Record the first product that a value is computed from."""
    if node.opcode in ("dot", "convolution"):
        origin[id(node)] = len(origin)
    elif node.opcode == "transpose" or is_elementwise(node):
        found = [origin[key] for o in node.operands if (key := id(source_of(o))) in origin]
        if found:
            origin[id(node)] = min(found)


def _sunk(node: Node, sinkable: set[int], origin: Mapping[int, int]) -> Node | None:
    """Apply an op before the transpose of its operand; ``None`` if another operand prevents it."""
    first = next((o for o in node.operands if id(o) in sinkable), None)
    if first is None:
        return None
    order = tuple(first.attrs["dimensions"])
    if node.opcode == "reduce":
        return _sunk_reduce(node, order) if len(node.operands) == 2 else None
    later = _Later(origin, origin.get(id(first), len(origin)))
    inner = _turned_result(node, order, first.operands[0].type.shape, _DEPTH, later)
    if inner is None:
        return None
    return Node("transpose", [inner], node.results, {"dimensions": order}, source=node.source)


def _turned_result(
    node: Node,
    order: tuple[int, ...],
    shape: tuple[int, ...],
    depth: int,
    movable: _Later,
) -> Node | None:
    """Apply an elementwise op to untransposed operands; ``None`` if that is impossible.

    Operands in ``movable`` are transposed explicitly if necessary.
    """
    if not is_elementwise(node) or node.called:
        return None
    operands = []
    for operand in node.operands:
        turned = _turned(operand, order, depth, movable)
        # Conversions still have the order of the product.
        if turned is None and movable.has(operand) and node.opcode != "convert":
            turned = transposed(operand, [order.index(d) for d in range(len(order))])
        if turned is None:
            return None
        operands.append(turned)
    kind = TensorType(node.type.dtype, shape)
    return Node(node.opcode, operands, (kind,), dict(node.attrs), source=node.source)


def _sunk_reduce(node: Node, order: tuple[int, ...]) -> Node | None:
    inner = node.operands[0].operands[0]
    dims = tuple(sorted(order[d] for d in node.attrs["dimensions"]))
    kept = [d for d in range(len(order)) if d not in dims]
    place = {d: i for i, d in enumerate(kept)}
    turn = tuple(place[order[d]] for d in range(len(order)) if order[d] not in dims)
    made = reduced(node, inner, dims)
    return Node("transpose", [made], node.results, {"dimensions": turn}, source=node.source)


def _turned(node: Node, order: tuple[int, ...], depth: int, movable: _Later) -> Node | None:
    """Return a value in the order before a transpose by ``order``; ``None`` if that has a cost."""
    # Scalars have no dimension order.
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
    return _turned_result(node, order, kind.shape, depth - 1, movable) if depth else None


def _turned_transpose(node: Node, order: tuple[int, ...]) -> Node:
    """Make another transpose of the same value: at worst it takes one kernel, as this one does."""
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
