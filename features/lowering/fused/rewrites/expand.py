"""Expand ops as the GPU compiler does before it fuses: gradients of max pooling.

XLA's SelectAndScatterExpander.
"""

from __future__ import annotations

from ....ir.program import Computation, Op, Program, TensorType
from ..dataflow.folding import splat_node
from ..dataflow.graph import Graph, Node, element

#: Type of positions in an array.
_INDEX = "s32"


def expand_ops(graph: Graph, program: Program) -> None:
    """Spell out ``select-and-scatter`` as a search for each window's element and a scatter.

    Args:
        graph: Changed in place, its loops and branches too.
        program: Takes in the computations that the new ops call.
    """
    replaced: dict[int, Node] = {}
    for node in graph.nodes():
        node.operands = [replaced.get(id(o), o) for o in node.operands]
        for inner in node.graphs:
            expand_ops(inner, program)
        if node.opcode == "select-and-scatter" and len(node.called) == 2:
            replaced[id(node)] = _scattered(node, program)
    graph.outputs = [replaced.get(id(node), node) for node in graph.outputs]


def _scattered(node: Node, program: Program) -> Node:
    operand, source, start = node.operands
    shape, windows = operand.type.shape, source.type.shape
    rank = len(shape)
    whole = TensorType(_INDEX, shape)
    places = [Node("iota", [], (whole,), {"dimensions": (d,)}) for d in range(rank)]
    # Position -1 marks a window that met no element yet.
    none = splat_node(-1, TensorType(_INDEX))
    kinds = (TensorType(operand.type.dtype, windows), *[TensorType(_INDEX, windows)] * rank)
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
    column = TensorType(_INDEX, (source.type.size, 1))
    columns = [
        Node("reshape", [element(search, d + 1)], (column,), source=node.source)
        for d in range(rank)
    ]
    kind = TensorType(_INDEX, (source.type.size, rank))
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


def _chooser(program: Program, dtype: str, rank: int) -> str:
    """Make a computation that keeps the larger of two values, and its position."""
    name = f"opcast.larger.{dtype}.{rank}"
    if name in program.computations:
        return name
    types = [TensorType(dtype), *[TensorType(_INDEX)] * rank]
    ops = [Op(f"{name}.p{i}", "parameter", (), (t,), {"index": i}) for i, t in enumerate(types * 2)]
    count = len(types)
    ops.append(Op(f"{name}.c", "compare", (0, count), (TensorType("pred"),), {"direction": "GE"}))
    chosen = []
    for i, t in enumerate(types):
        # Value and positions are selected together, by one comparison of the values.
        chosen.append(len(ops))
        ops.append(Op(f"{name}.s{i}", "select", (2 * count, i, count + i), (t,)))
    ops.append(Op(f"{name}.t", "tuple", tuple(chosen), tuple(types), is_tuple=True))
    program.computations[name] = Computation(name, ops, len(ops) - 1)
    return name
