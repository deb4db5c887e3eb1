"""Convolutions as cuDNN takes them: channels innermost, symmetric padding, filters not reversed.

XLA:GPU chooses the layout in its layout assignment and pads in ConvPaddingLegalization. Gradients
of max pooling are expanded as its SelectAndScatterExpander does.
"""

from __future__ import annotations

from math import prod

from ...ir.program import Computation, Op, Program, TensorType, WindowDim
from .folding import padded, reshape, splat_node, transposed
from .graph import Graph, Node, constant, element, rewrite
from .work import Machine

#: Attribute of convolutions whose filter was reversed: gradients of an input.
REVERSED = "input_gradient"


def canonical_convs(graph: Graph, machine: Machine) -> None:
    """Bring every convolution into the library's layout, with transposes and pads around it.

    Args:
        graph: The graph.
        machine: Decides for which types features are innermost (NHWC), not outside of space (NCHW).
    """

    def rule(node: Node) -> Node | None:
        if node.opcode != "convolution" or "dim_labels" not in node.attrs:
            return None
        half = node.operands[0].type.dtype in ("bf16", "f16")
        return _canonical(node, machine.half_channels_last if half else machine.channels_last)

    rewrite(graph, rule)


def is_weight_gradient(conv: Node) -> bool:
    """Return whether a library computes a filter's gradient: the window exceeds the result."""
    lhs, _, out = _labels(conv)
    # JAX writes a filter's gradient with batch and features exchanged, so that the sum over the
    # batch is a sum over "features".
    if lhs.index("f") >= lhs.index("b"):
        return False
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    spatial = [conv.type.shape[out.index(str(i))] for i in range(len(window))]
    # The window is the forward pass's result, the result its filter.
    return prod(w.size for w in window) > prod(spatial)


def _labels(conv: Node) -> tuple[str, str, str]:
    inputs, out = str(conv.attrs["dim_labels"]).split("->")
    lhs, rhs = inputs.split("_")
    return lhs, rhs, out


def _canonical(conv: Node, channels_last: bool) -> Node:
    lhs, rhs, out = _labels(conv)
    space = "".join(str(i) for i in range(len(lhs) - 2))
    gradient = is_weight_gradient(conv)
    data, kernel = _padded(conv, lhs), _unreversed(conv)
    if gradient:
        # The library reads both inputs as the forward pass stored them: batch, space, features.
        want_lhs = f"f{space}b" if channels_last else f"fb{space}"
        want_rhs = f"i{space}o" if channels_last else f"io{space}"
        want_out = f"f{space}b" if channels_last else f"fb{space}"
    else:
        want_lhs = f"b{space}f" if channels_last else f"bf{space}"
        want_rhs = f"o{space}i" if channels_last else f"oi{space}"
        want_out = want_lhs
    attrs = {**conv.attrs, "dim_labels": f"{want_lhs}_{want_rhs}->{want_out}"}
    attrs["window"] = _window(conv, data)
    if kernel is not conv.operands[1]:
        attrs[REVERSED] = True
    shape = tuple(conv.type.shape[out.index(c)] for c in want_out)
    operands = [_ordered(data, lhs, want_lhs), _ordered(kernel, rhs, want_rhs)]
    result = TensorType(conv.type.dtype, shape)
    made = Node("convolution", operands, (result,), attrs, source=conv.source)
    return _ordered(made, want_out, out)


def _ordered(node: Node, labels: str, wanted: str) -> Node:
    order = tuple(labels.index(c) for c in wanted)
    moved = [d for d in order if node.type.shape[d] != 1]
    # Only dimensions of size one change places: no data moves.
    if moved == sorted(moved):
        return reshape(node, tuple(node.type.shape[d] for d in order))
    return transposed(node, order)


def _unreversed(conv: Node) -> Node:
    """Return the filter as it is stored; for an input's gradient the library reverses it itself."""
    kernel = conv.operands[1]
    return kernel.operands[0] if kernel.opcode == "reverse" else kernel


def _padded(conv: Node, labels: str) -> Node:
    """Pad the input where the padding differs between the two sides."""
    data = conv.operands[0]
    config = [(0, 0, 0)] * len(labels)
    for i, (low, high) in enumerate(_extra(conv)):
        config[labels.index(str(i))] = (low, high, 0)
    return padded(data, config, constant(0, TensorType(data.type.dtype)), conv.source)


def _extra(conv: Node) -> list[tuple[int, int]]:
    """Return the padding that the library cannot do: what one side has more than the other."""
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    # Holes between elements mark the gradient of an input: its padding is left to the library.
    if any(w.lhs_dilation != 1 for w in window):
        return [(0, 0)] * len(window)
    pads = []
    for w in window:
        shared = max(0, min(w.pad_low, w.pad_high))
        pads.append((max(0, w.pad_low - shared), max(0, w.pad_high - shared)))
    return pads


def _window(conv: Node, data: Node) -> tuple[WindowDim, ...]:
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    if data is conv.operands[0]:
        return window
    return tuple(
        w._replace(pad_low=w.pad_low - low, pad_high=w.pad_high - high)
        for w, (low, high) in zip(window, _extra(conv), strict=True)
    )


#: Type of positions in an array.
_INDEX = "s32"


def expand_ops(graph: Graph, program: Program) -> None:
    """Spell out ``select-and-scatter`` as a search for each window's element and a scatter.

    Args:
        graph: Changed in place, its loops and branches too.
        program: Takes in the computations that the new ops call.
    """

    def rule(node: Node) -> Node | None:
        for inner in node.graphs:
            expand_ops(inner, program)
        expands = node.opcode == "select-and-scatter" and len(node.called) == 2
        return _scattered(node, program) if expands else None

    rewrite(graph, rule)


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
