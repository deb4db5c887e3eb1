"""Arithmetic on bf16 that a GPU has no instructions for runs in f32, between conversions.

As XLA's FloatNormalization does by its GpuFloatSupport: moves, comparisons, choices, signs,
``exp`` and ``log`` stay in bf16, sums and products from compute capability 9.0 on, all other
element-wise ops, and reductions by them, become f32. f16 is left alone. The sets agree with the
opcodes of 800 programs that were compiled for an H100 and an A100 (JAX 0.10).
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.op_table import ELEMENTWISE
from ...ir.program import Program, TensorType
from .graph import Graph, Node, rewrite
from .work import Machine

_NARROW, _WIDE = "bf16", "f32"
#: Element-wise ops on bf16 that every GPU keeps.
_KEPT = frozenset(
    ("abs", "and", "compare", "convert", "exponential", "log", "maximum", "minimum", "negate")
) | {"reduce-precision", "select", "bitcast-convert"}
#: Those that it keeps from compute capability 9.0 on.
_ARITHMETIC = frozenset(("add", "multiply", "subtract"))
#: Ops whose computation combines two elements, given with an initial value.
_FOLDS = ("reduce", "reduce-window")


def widen(graph: Graph, machine: Machine, program: Program) -> None:
    """Put conversions to f32 and back around ops that have no bf16, in loops and branches too.

    Args:
        graph: Changed in place.
        machine: Tells whether sums and products of bf16 are native.
        program: Takes in reducers on f32.
    """
    kept = _KEPT | _ARITHMETIC if machine.bf16_arithmetic else _KEPT

    def rule(node: Node) -> Node | None:
        for inner in node.graphs:
            widen(inner, machine, program)
        if node.is_tuple or not any(t.dtype == _NARROW for t in _types(node)):
            return None
        if node.opcode in _FOLDS:
            inside = program.computations[node.called[0]].ops if node.called else []
            native = all(op.opcode == "parameter" or op.opcode in kept for op in inside)
            return None if native else _wide(node, tuple(_reducer(n, program) for n in node.called))
        # What CHLO spells out is one op here, which converts inside.
        own = node.opcode in ELEMENTWISE and node.opcode not in kept
        return _wide(node, ()) if own else None

    rewrite(graph, rule)


def _types(node: Node) -> list[TensorType]:
    return [*node.results, *(operand.type for operand in node.operands)]


def _wide(node: Node, called: tuple[str, ...]) -> Node:
    """The op in f32, and its result in its own type."""
    operands = [_converted(operand, _WIDE) for operand in node.operands]
    kind = node.type._replace(dtype=_WIDE) if node.type.dtype == _NARROW else node.type
    made = replace(node, operands=operands, results=(kind,), called=called)
    return made if kind == node.type else _converted(made, _NARROW, whole=True)


def _converted(value: Node, dtype: str, *, whole: bool = False) -> Node:
    if value.type.dtype != _NARROW and not whole:
        return value
    kind = value.type._replace(dtype=dtype)
    return Node("convert", [value], (kind,), source=value.source)


def _reducer(name: str, program: Program) -> str:
    """Name of a reducer's counterpart on f32; made if it is not there."""
    wide = f"{name}.{_WIDE}"
    if wide not in program.computations:
        own = program.computations[name]
        ops = [
            replace(op, results=tuple(
                t._replace(dtype=_WIDE) if t.dtype == _NARROW else t for t in op.results
            ))
            for op in own.ops
        ]  # fmt: skip
        program.computations[wide] = replace(own, name=wide, ops=ops)
    return wide
