"""Simplifications of ops that only move data: reshapes, transposes, broadcasts, slices, pads."""

from __future__ import annotations

from collections.abc import Callable

from ....ir.program import TensorType
from .graph import Node


def simplify_view(node: Node) -> Node | None:
    """Return a simpler node with the same value; ``None`` if there is none."""
    rule = _RULES.get(node.opcode)
    return rule(node) if rule is not None else None


def reshape(node: Node, shape: tuple[int, ...], like: Node | None = None) -> Node:
    """Make a reshape of ``node``, or return ``node`` itself if it has that shape."""
    if node.type.shape == shape:
        return node
    source = (like or node).source
    return Node("reshape", [node], (TensorType(node.type.dtype, shape),), source=source)


def _reshape(node: Node) -> Node | None:
    inner = node.operands[0]
    if inner.type.shape == node.type.shape:
        return inner
    if inner.opcode == "reshape":
        return Node("reshape", [inner.operands[0]], node.results, source=node.source)
    if inner.opcode == "broadcast" and not inner.operands[0].type.shape:
        return Node("broadcast", [inner.operands[0]], node.results, {"dimensions": ()})
    # Masks compare iotas of one shape: with the reshape moved away, equal ones are merged.
    if inner.opcode == "iota" and _squeezed(inner.type.shape) == _squeezed(node.type.shape):
        return _moved_iota(inner, node)
    return None


def _moved_iota(inner: Node, node: Node) -> Node | None:
    """Make an iota whose dimensions of size one are elsewhere."""
    (along,) = inner.attrs["dimensions"]
    if inner.type.shape[along] == 1:
        return None
    rank = len(_squeezed(inner.type.shape[:along]))
    places = [d for d, size in enumerate(node.type.shape) if size != 1]
    return Node("iota", [], node.results, {"dimensions": (places[rank],)}, source=node.source)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _transpose(node: Node) -> Node | None:
    inner = node.operands[0]
    order = tuple(node.attrs["dimensions"])
    if order == tuple(range(len(order))):
        return inner
    if inner.opcode == "transpose":
        first = tuple(inner.attrs["dimensions"])
        attrs = {"dimensions": tuple(first[d] for d in order)}
        return Node("transpose", [inner.operands[0]], node.results, attrs, source=node.source)
    if inner.opcode == "broadcast":
        place = {old: new for new, old in enumerate(order)}
        dims = tuple(place[d] for d in inner.attrs.get("dimensions", ()))
        # A broadcast maps dimensions in ascending order; others would need a transpose first.
        if dims == tuple(sorted(dims)):
            return Node("broadcast", [inner.operands[0]], node.results, {"dimensions": dims})
    moved = [d for d in order if inner.type.shape[d] != 1]
    if moved == sorted(moved):
        return Node("reshape", [inner], node.results, source=node.source)
    return None


def _broadcast(node: Node) -> Node | None:
    """Drop repeated size-one dimensions, broadcasts of broadcasts, and broadcasts of all."""
    inner = node.operands[0]
    dims = tuple(node.attrs.get("dimensions", ()))
    shape = node.type.shape
    if inner.type.shape == shape:
        return inner
    # A dimension of size one is repeated, which HLO's broadcast may not do: it is dropped first.
    kept = [i for i, d in enumerate(dims) if inner.type.shape[i] != 1]
    if len(kept) < len(dims):
        small = reshape(inner, tuple(inner.type.shape[i] for i in kept), node)
        attrs = {"dimensions": tuple(dims[i] for i in kept)}
        return Node("broadcast", [small], node.results, attrs, source=node.source)
    if inner.opcode == "broadcast":
        first = inner.attrs.get("dimensions", ())
        attrs = {"dimensions": tuple(dims[d] for d in first)}
        return Node("broadcast", [inner.operands[0]], node.results, attrs, source=node.source)
    if inner.type.size == node.type.size and dims == tuple(sorted(dims)):
        return Node("reshape", [inner], node.results, source=node.source)
    return None


def _slice(node: Node) -> Node | None:
    inner = node.operands[0]
    if inner.type.shape == node.type.shape:
        return inner
    if inner.opcode == "broadcast" and not inner.operands[0].type.shape:
        return Node("broadcast", [inner.operands[0]], node.results, {"dimensions": ()})
    limits = node.attrs["slice"]
    if inner.opcode == "slice" and all(s == 1 for _, _, s in (*limits, *inner.attrs["slice"])):
        joined = tuple(
            (a + c, a + d, 1)
            for (a, _, _), (c, d, _) in zip(inner.attrs["slice"], limits, strict=True)
        )
        return Node("slice", [inner.operands[0]], node.results, {"slice": joined})
    return _slice_of_concatenate(node, inner) if inner.opcode == "concatenate" else None


def _slice_of_concatenate(node: Node, inner: Node) -> Node | None:
    """Slice the one operand that a slice of a concatenation reads from."""
    along = int(inner.attrs["dimensions"][0])
    begin, end, step = node.attrs["slice"][along]
    offset = 0
    for operand in inner.operands:
        size = operand.type.shape[along]
        # A slice across two operands keeps the concatenation.
        if offset <= begin and end <= offset + size:
            limits = list(node.attrs["slice"])
            limits[along] = (begin - offset, end - offset, step)
            return Node("slice", [operand], node.results, {"slice": tuple(limits)})
        offset += size
    return None


def _concatenate(node: Node) -> Node | None:
    return node.operands[0] if len(node.operands) == 1 else None


def _pad(node: Node) -> Node | None:
    nothing = all(not any(config) for config in node.attrs["padding"])
    return node.operands[0] if nothing else None


def _reverse(node: Node) -> Node | None:
    shape = node.type.shape
    dims = tuple(d for d in node.attrs["dimensions"] if shape[d] != 1)
    return None if dims else node.operands[0]


_RULES: dict[str, Callable[[Node], Node | None]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "reverse": _reverse,
}
