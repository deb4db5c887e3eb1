"""Scalars known beforehand: constants, arrays of one value, and arithmetic on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from ....ir.op_table import ELEMENTWISE
from ....ir.program import TensorType
from .graph import Node, constant

#: Arithmetic on known scalars, in Python's numbers: enough for counters, bounds and epsilons.
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


def is_elementwise(node: Node) -> bool:
    """Return whether each element of the result depends on one element of each operand."""
    opcode = node.opcode
    return opcode in ELEMENTWISE or (
        opcode.startswith("chlo.") and opcode not in ("chlo.top_k", "chlo.ragged_dot")
    )


def splat(node: Node) -> Any:
    """Return the one value of all elements; ``None`` if it is unknown or there are several."""
    # Repeating or renaming a single value leaves it the same.
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
    # True == 1 for Python: a predicate must not pass as a number.
    return repeated is not None and not isinstance(repeated, bool) and repeated == value


def splat_node(value: object, like: TensorType) -> Node:
    """An array of one value: a scalar constant, and a broadcast if it has dimensions."""
    scalar = constant(value, TensorType(like.dtype))
    if not like.shape:
        return scalar
    return Node("broadcast", [scalar], (like,), {"dimensions": ()})


def fold(node: Node) -> Node | None:
    """Evaluate an op on known scalars, or move it to scalars if its operands repeat one.

    Returns:
        A constant, or a broadcast of what is computed once; ``None`` if neither is possible.
    """
    if node.opcode == "constant":
        value = node.attrs.get("value")
        known = value is not None and not isinstance(value, list) and node.type.shape
        return splat_node(value, node.type) if known else None
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
        # Integer division rounds towards zero in HLO, towards minus infinity in Python: left alone.
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
    """Turn an elementwise op on broadcast scalars into the broadcast of an op on scalars."""
    shape = node.type.shape
    if not shape:
        return None
    scalars = []
    for operand in node.operands:
        # Only broadcasts of scalars: other ones would need matching dimensions.
        if operand.opcode != "broadcast" or operand.operands[0].type.shape:
            return None
        scalars.append(operand.operands[0])
    result = TensorType(node.type.dtype)
    inner = Node(node.opcode, scalars, (result,), dict(node.attrs), source=node.source)
    return Node("broadcast", [inner], node.results, {"dimensions": ()}, source=node.source)
