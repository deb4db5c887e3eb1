"""Fold known values and simplify ops that only move data.

Constants, splats and arithmetic on them are folded; chains of reshapes, transposes, broadcasts,
slices and pads are merged into one op.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...ir.op_table import ELEMENTWISE
from ...ir.program import Source, TensorType
from .graph import Node, constant

#: Arithmetic on known scalars with Python numbers: enough for counters, bounds and epsilons.
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "negate": operator.neg,
    "abs": abs,
    "sqrt": math.sqrt,
    "exponential": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "not": operator.not_,
    "rsqrt": lambda x: 1 / math.sqrt(x),
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
#: Ops whose result may be a single value or repeat one (:func:`fold`).
_REPEATING = frozenset(("constant", "broadcast", "reshape", "iota"))


def is_elementwise(node: Node) -> bool:
    """Return whether each element of the result depends on one element of each operand."""
    return node.opcode in ELEMENTWISE or node.opcode.startswith("chlo.")


def splat(node: Node) -> Any:
    """Return the value that all elements share; ``None`` if it is unknown or they differ."""
    # Repeating or reshaping a single value does not change it.
    while node.opcode in ("broadcast", "reshape"):
        node = node.operands[0]
    if node.opcode != "constant":
        return None
    value = node.attrs.get("value")
    if isinstance(value, list):
        return value[0] if len(value) == 1 else None
    return value


def is_splat(node: Node, value: float) -> bool:
    """Return whether all elements are known to be ``value``."""
    repeated = splat(node)
    # True == 1 in Python, but a predicate must not match a number.
    return repeated is not None and not isinstance(repeated, bool) and repeated == value


def splat_node(value: object, like: TensorType, source: Source | None = None) -> Node:
    """Make an array of one value: a scalar constant, broadcast if the type has dimensions."""
    scalar = constant(value, TensorType(like.dtype))
    if not like.shape:
        return scalar
    return Node("broadcast", [scalar], (like,), {"dimensions": ()}, source=source)


def fold(node: Node) -> Node | None:
    """Evaluate an op on known scalars, or apply it before broadcasts that repeat single values.

    Returns:
        A constant, or a broadcast of a result computed once; ``None`` if neither is possible.
    """
    if node.opcode == "constant":
        value = node.attrs.get("value")
        known = value is not None and not isinstance(value, list) and node.type.shape
        return splat_node(value, node.type) if known else None
    for operand in node.operands:
        if operand.opcode not in _REPEATING:
            return None
    if not node.operands or not is_elementwise(node) or node.called:
        return None
    values = [splat(operand) for operand in node.operands]
    if all(value is not None for value in values):
        result = _evaluate(node, values)
        return None if result is None else splat_node(result, node.type)
    return _sink(node)


def _evaluate(node: Node, values: list[Any]) -> object:
    opcode, dtype = node.opcode, node.type.dtype
    try:
        if opcode in _BINARY and len(values) == 2:
            return _cast(_BINARY[opcode](*values), dtype)
        if opcode in _UNARY:
            return _cast(_UNARY[opcode](values[0]), dtype)
        # Integer division rounds towards zero in HLO, towards minus infinity in Python: not folded.
        if opcode == "divide" and not dtype.startswith(("s", "u")):
            return values[0] / values[1]
        if opcode == "compare":
            return _COMPARE[str(node.attrs["direction"])](*values)
        if opcode == "convert":
            return _cast(values[0], dtype)
        if opcode in ("and", "or") and dtype == "pred":
            return all(values) if opcode == "and" else any(values)
    except (ArithmeticError, ValueError, TypeError, KeyError):
        return None
    return None


def _cast(value: Any, dtype: str) -> object:
    if isinstance(value, complex) or dtype.startswith("c"):
        return value
    if dtype == "pred":
        return bool(value)
    if dtype.startswith(("s", "u")):
        return int(value)
    return float(value)


def _sink(node: Node) -> Node | None:
    """Move an elementwise op on broadcasts before the broadcast.

    At most one operand may broadcast an array; the others broadcast scalars, as in XLA's
    TryToSinkBroadcastAfterOpWithUniqueNonScalarOperand.
    """
    if not node.type.shape:
        return None
    operands = [_one_iota(operand) for operand in node.operands]
    if any(operand.opcode != "broadcast" for operand in operands):
        return None
    small = {id(o): o for o in operands if o.operands[0].type.shape}
    if len(small) > 1:
        return None
    wide = next(iter(small.values()), operands[0])
    shape = wide.operands[0].type.shape
    inner = [
        o.operands[0] if o is wide else spread(o.operands[0], (), shape, o.source) for o in operands
    ]
    result = TensorType(node.type.dtype, shape)
    made = Node(node.opcode, inner, (result,), dict(node.attrs), source=node.source)
    dims = wide.attrs["dimensions"]
    return Node("broadcast", [made], node.results, {"dimensions": dims}, source=node.source)


def _one_iota(node: Node) -> Node:
    """Write an iota of several dimensions as the broadcast of a one-dimensional iota."""
    dims = tuple(node.attrs.get("dimensions", ()))
    if node.opcode != "iota" or len(dims) != 1 or len(node.type.shape) < 2:
        return node
    kind = TensorType(node.type.dtype, (node.type.shape[dims[0]],))
    along = Node("iota", [], (kind,), {"dimensions": (0,)}, source=node.source)
    return Node("broadcast", [along], node.results, {"dimensions": dims}, source=node.source)


def simplify_view(node: Node) -> Node | None:
    """Return a simpler node with the same value; ``None`` if there is none."""
    rule = _RULES.get(node.opcode)
    return rule(node) if rule is not None else None


def reshape(node: Node, shape: tuple[int, ...], like: Node | None = None) -> Node:
    """Make a reshape of ``node``, or return ``node`` itself if it already has that shape."""
    if node.type.shape == shape:
        return node
    source = (like or node).source
    return Node("reshape", [node], (TensorType(node.type.dtype, shape),), source=source)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of a permutation, or the indices that sort a sequence."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def transposed(node: Node, order: Sequence[int], source: Source | None = None) -> Node:
    """Make a transpose of ``node``, or return ``node`` itself if no dimension moves."""
    order = tuple(order)
    if order == tuple(range(len(order))):
        return node
    kind = TensorType(node.type.dtype, tuple(node.type.shape[d] for d in order))
    return Node("transpose", [node], (kind,), {"dimensions": order}, source=source or node.source)


def converted(node: Node, dtype: str, source: Source | None = None) -> Node:
    """Make a conversion of ``node``, or return ``node`` itself if it already has that type."""
    if node.type.dtype == dtype:
        return node
    kind = node.type._replace(dtype=dtype)
    return Node("convert", [node], (kind,), source=source or node.source)


def spread(node: Node, dims: Sequence[int], shape: tuple[int, ...], source: Source | None) -> Node:
    """Broadcast ``node`` to a shape, in which its dimensions become ``dims`` (in any order)."""
    # A broadcast must map dimensions in ascending order.
    small = transposed(node, inverse(dims), source)
    kind = TensorType(node.type.dtype, shape)
    return Node("broadcast", [small], (kind,), {"dimensions": tuple(sorted(dims))}, source=source)


def padded(
    node: Node, config: Sequence[tuple[int, int, int]], value: Node, source: Source | None
) -> Node:
    """Pad ``node`` with ``value``, given the low, high and interior padding of each dimension."""
    if not any(map(any, config)):
        return node
    shape = tuple(
        size + low + high + max(0, size - 1) * inside
        for size, (low, high, inside) in zip(node.type.shape, config, strict=True)
    )
    kind = TensorType(node.type.dtype, shape)
    return Node("pad", [node, value], (kind,), {"padding": tuple(config)}, source=source)


def reduced(node: Node, value: Node, dims: Sequence[int]) -> Node:
    """Reduce dimensions of ``value`` like the reduction ``node``, with its initial value."""
    shape = tuple(size for d, size in enumerate(value.type.shape) if d not in dims)
    kind, attrs = TensorType(node.type.dtype, shape), {**node.attrs, "dimensions": tuple(dims)}
    operands = [value, node.operands[1]]
    return Node("reduce", operands, (kind,), attrs, node.called, source=node.source)


def _reshape(node: Node) -> Node | None:
    inner = node.operands[0]
    if inner.type.shape == node.type.shape:
        return inner
    if inner.opcode == "reshape":
        return Node("reshape", [inner.operands[0]], node.results, source=node.source)
    if inner.opcode == "broadcast" and not inner.operands[0].type.shape:
        return Node("broadcast", [inner.operands[0]], node.results, {"dimensions": ()})
    # Masks compare iotas of one shape: once the reshape is gone, equal iotas are merged.
    if inner.opcode == "iota" and squeezed(inner.type.shape) == squeezed(node.type.shape):
        return _moved_iota(inner, node)
    return None


def _moved_iota(inner: Node, node: Node) -> Node | None:
    """Make an iota whose dimensions of size one are in other positions."""
    (along,) = inner.attrs["dimensions"]
    if inner.type.shape[along] == 1:
        return None
    rank = len(squeezed(inner.type.shape[:along]))
    places = [d for d, size in enumerate(node.type.shape) if size != 1]
    return Node("iota", [], node.results, {"dimensions": (places[rank],)}, source=node.source)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop dimensions of size one, which take no memory."""
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
        # A broadcast must map dimensions in ascending order; other orders need a transpose.
        if dims == tuple(sorted(dims)):
            return Node("broadcast", [inner.operands[0]], node.results, {"dimensions": dims})
    moved = [d for d in order if inner.type.shape[d] != 1]
    if moved == sorted(moved):
        return Node("reshape", [inner], node.results, source=node.source)
    return None


def _broadcast(node: Node) -> Node | None:
    """Simplify expanded size-one dimensions, nested broadcasts and broadcasts to the same shape."""
    inner = node.operands[0]
    dims = tuple(node.attrs.get("dimensions", ()))
    shape = node.type.shape
    if inner.type.shape == shape:
        return inner
    # HLO's broadcast may not expand a dimension of size one, so it is dropped first.
    kept = [i for i, d in enumerate(dims) if inner.type.shape[i] != 1]
    if len(kept) < len(dims):
        small = reshape(inner, tuple(inner.type.shape[i] for i in kept), node)
        attrs = {"dimensions": tuple(dims[i] for i in kept)}
        return Node("broadcast", [small], node.results, attrs, source=node.source)
    if inner.opcode == "iota":
        (along,) = inner.attrs["dimensions"]
        return Node("iota", [], node.results, {"dimensions": (dims[along],)}, source=node.source)
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
    """Replace a slice of a concatenation by a slice of the only operand that it reads."""
    along = int(inner.attrs["dimensions"][0])
    begin, end, step = node.attrs["slice"][along]
    offset = 0
    for operand in inner.operands:
        size = operand.type.shape[along]
        # A slice across two operands still needs the concatenation.
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
    inner, shape = node.operands[0], node.type.shape
    dims = {d for d in node.attrs["dimensions"] if shape[d] != 1}
    if not dims:
        return inner
    if inner.opcode != "reverse":
        return None
    # Reversing a dimension twice restores it.
    attrs = {"dimensions": tuple(sorted(dims ^ set(inner.attrs["dimensions"])))}
    return Node("reverse", [inner.operands[0]], node.results, attrs, source=node.source)


_RULES: dict[str, Callable[[Node], Node | None]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "reverse": _reverse,
}
