"""Gradients of max pooling, spelled out as XLA's SelectAndScatterExpander does."""

from __future__ import annotations

from ....common.types import JsonObject
from ...ir.program import Computation, Op, Program, TensorType
from .folding import splat, splat_node
from .graph import Node, element

#: Type of positions in an array.
INDEX = "s32"


def scattered(node: Node, program: Program) -> Node:
    """Spell out a gradient of max pooling: each window's largest element, then a scatter to it."""
    operand, source, start = node.operands
    shape, windows = operand.type.shape, source.type.shape
    rank = len(shape)
    whole = TensorType(INDEX, shape)
    places = [Node("iota", [], (whole,), {"dimensions": (d,)}) for d in range(rank)]
    # Position -1 marks a window that met no element yet.
    none = splat_node(-1, TensorType(INDEX))
    kinds = (TensorType(operand.type.dtype, windows), *[TensorType(INDEX, windows)] * rank)
    search = Node(
        "reduce-window",
        [operand, *places, start, *[none] * rank],
        kinds,
        {"window": node.attrs["window"]},
        (_chooser(program, operand.type.dtype, rank),),
        [],
        True,
        node.source,
    )
    column = TensorType(INDEX, (source.type.size, 1))
    columns = [
        Node("reshape", [element(search, d + 1)], (column,), source=node.source)
        for d in range(rank)
    ]
    kind = TensorType(INDEX, (source.type.size, rank))
    indices = Node("concatenate", columns, (kind,), {"dimensions": (1,)}, source=node.source)
    flat = TensorType(source.type.dtype, (source.type.size,))
    updates = Node("reshape", [source], (flat,), source=node.source)
    zeros = Node("broadcast", [start], node.results, {"dimensions": ()}, source=node.source)
    every = tuple(range(rank))
    attrs = {
        "update_window_dims": (),
        "inserted_window_dims": every,
        "scatter_dims_to_operand_dims": every,
        "index_vector_dim": 1,
        "indices_are_sorted": False,
        "unique_indices": False,
    }
    called = (node.called[1],)
    return Node(
        "scatter", [zeros, indices, updates], node.results, attrs, called, source=node.source
    )


def cropped(node: Node) -> Node | None:
    """Scatter single elements into the part that is read: what falls outside is dropped anyway."""
    made = node.operands[0]
    limits = node.attrs.get("slice", ())
    if made.opcode != "scatter" or made.attrs.get("update_window_dims") or made.is_tuple:
        return None
    if splat(made.operands[0]) is None or any((low, step) != (0, 1) for low, _, step in limits):
        return None
    zeros = splat_node(splat(made.operands[0]), node.type, node.source)
    operands = [zeros, *made.operands[1:]]
    return Node("scatter", operands, node.results, made.attrs, made.called, source=made.source)


def _chooser(program: Program, dtype: str, rank: int) -> str:
    """Make a computation that keeps the larger of two values that were met, and its position."""
    name = f"opcast.larger.{dtype}.{rank}"
    if name in program.computations:
        return name
    types = [TensorType(dtype), *[TensorType(INDEX)] * rank]
    ops = [Op(f"{name}.p{i}", "parameter", (), (t,), {"index": i}) for i, t in enumerate(types * 2)]
    count = len(types)
    # Position -1: no element yet, which the other one then replaces.
    ops.append(Op(f"{name}.n", "constant", (), (TensorType(INDEX),), {"value": -1}))
    steps: tuple[tuple[str, tuple[int, ...], JsonObject], ...] = (
        ("compare", (0, count), {"direction": "GE"}),
        ("compare", (1, 2 * count), {"direction": "NE"}),
        ("compare", (count + 1, 2 * count), {"direction": "NE"}),
        ("not", (2 * count + 3,), {}),
        ("and", (2 * count + 1, 2 * count + 2), {}),
        ("or", (2 * count + 5, 2 * count + 4), {}),
    )
    for i, (opcode, read, attrs) in enumerate(steps):
        ops.append(Op(f"{name}.c{i}", opcode, read, (TensorType("pred"),), attrs))
    test, chosen = len(ops) - 1, []
    for i, t in enumerate(types):
        # Value and positions are selected together.
        chosen.append(len(ops))
        ops.append(Op(f"{name}.s{i}", "select", (test, i, count + i), (t,)))
    ops.append(Op(f"{name}.t", "tuple", tuple(chosen), tuple(types), is_tuple=True))
    program.computations[name] = Computation(name, ops, len(ops) - 1)
    return name
