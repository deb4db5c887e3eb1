"""Convolutions as libraries take them.

cuDNN: channels innermost, symmetric padding, filters not reversed. XLA:GPU chooses the layout in
its layout assignment and pads in ConvPaddingLegalization. Libraries of CPUs: ``b01f_01io->b01f``,
which XLA:CPU's ConvCanonicalization writes; what has another form it runs as scalar loops.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...ir.program import TensorType, WindowDim
from .folding import padded, reshape, transposed
from .graph import Graph, Node, constant, rewrite
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
        return _on_host(node) if machine.host else _canonical(node, _channels_last(node, machine))

    rewrite(graph, rule)


def _channels_last(conv: Node, machine: Machine) -> bool:
    """Return whether features are innermost: never in volumes."""
    rank = len(conv.type.shape)
    image = rank == 4 and conv.operands[0].type.dtype in ("bf16", "f16")
    return rank <= 4 and (machine.channels_last or (image and machine.half_channels_last))


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
    kernel = _unreversed(conv)
    if kernel is conv.operands[1] and not gradient:
        conv = _without_holes(conv, lhs)
    data = _padded(conv, lhs)
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


def _on_host(conv: Node) -> Node:
    """The convolution in f32 with channels innermost, as XLA:CPU hands it to its library."""
    lhs, rhs, out = _labels(conv)
    space = "".join(str(i) for i in range(len(lhs) - 2))
    data, kernel, result = f"b{space}f", f"{space}io", f"b{space}f"
    dtype = "f32" if conv.type.dtype in ("bf16", "f16") else conv.type.dtype
    operands = [
        _as_type(_ordered(operand, have, want), dtype)
        for operand, have, want in zip(conv.operands, (lhs, rhs), (data, kernel), strict=True)
    ]
    shape = tuple(conv.type.shape[out.index(c)] for c in result)
    attrs = {**conv.attrs, "dim_labels": f"{data}_{kernel}->{result}"}
    made = replace(conv, operands=operands, results=(TensorType(dtype, shape),), attrs=attrs)
    return _ordered(_as_type(made, conv.type.dtype), result, out)


def _as_type(node: Node, dtype: str) -> Node:
    if node.type.dtype == dtype:
        return node
    return Node("convert", [node], (node.type._replace(dtype=dtype),), source=node.source)


def _ordered(node: Node, labels: str, wanted: str) -> Node:
    order = tuple(labels.index(c) for c in wanted)
    moved = [d for d in order if node.type.shape[d] != 1]
    # Only dimensions of size one change places: no data moves.
    if moved == sorted(moved):
        return reshape(node, tuple(node.type.shape[d] for d in order))
    return transposed(node, order)


def _without_holes(conv: Node, labels: str) -> Node:
    """Write the holes between the elements of a transposed convolution's input as zeros.

    The library skips them in gradients alone, which reverse their filter; of one element it need
    not be (MatchBackwardInput in XLA's conv_rewriter.cc).
    """
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    if all(w.lhs_dilation == 1 for w in window) or all(w.size == 1 for w in window):
        return conv
    config = [(0, 0, 0)] * len(labels)
    for i, w in enumerate(window):
        config[labels.index(str(i))] = (max(0, w.pad_low), max(0, w.pad_high), w.lhs_dilation - 1)
    zero = constant(0, TensorType(conv.operands[0].type.dtype))
    data = padded(conv.operands[0], config, zero, conv.source)
    plain = tuple(
        w._replace(lhs_dilation=1, pad_low=min(0, w.pad_low), pad_high=min(0, w.pad_high))
        for w in window
    )
    attrs = {**conv.attrs, "window": plain}
    return Node("convolution", [data, *conv.operands[1:]], conv.results, attrs, source=conv.source)


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
