"""Rewrite convolutions into the forms that libraries accept.

cuDNN: channels innermost, symmetric padding, filters not reversed. XLA:GPU chooses the layout in
its layout assignment and pads in ConvPaddingLegalization. CPU libraries: ``b01f_01io->b01f``, which
XLA:CPU's ConvCanonicalization writes; XLA:CPU runs convolutions in other forms as scalar loops.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...ir.program import TensorType, WindowDim
from .folding import converted, padded, reshape, transposed
from .graph import Graph, Node, constant, rewrite
from .machine import Machine

#: Attribute of convolutions whose filter was reversed: input gradients.
REVERSED = "input_gradient"
#: Start, limit and stride of a slice, keyed by dimension label.
Limits = dict[str, tuple[int, int, int]]


def canonical_convs(graph: Graph, machine: Machine) -> None:
    """Rewrite every convolution into the library's layout by inserting transposes and pads.

    Args:
        graph: The graph.
        machine: Decides which types use the NHWC layout; the others use NCHW.
    """

    def rule(node: Node) -> Node | None:
        if node.opcode != "convolution" or "dim_labels" not in node.attrs:
            return None
        return _on_host(node) if machine.host else _canonical(node, _channels_last(node, machine))

    rewrite(graph, rule)


def _channels_last(conv: Node, machine: Machine) -> bool:
    """Return whether the layout is NHWC; convolutions over volumes never use it."""
    rank = len(conv.type.shape)
    image = rank == 4 and conv.operands[0].type.dtype in ("bf16", "f16")
    return rank <= 4 and (machine.channels_last or (image and machine.half_channels_last))


def is_weight_gradient(conv: Node) -> bool:
    """Return whether this is a filter gradient: its window is larger than its spatial result."""
    lhs, _, out = _labels(conv)
    # JAX writes a filter gradient with batch and features swapped, so that the sum over the batch
    # appears as a sum over features.
    if lhs.index("f") >= lhs.index("b"):
        return False
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    spatial = [conv.type.shape[out.index(str(i))] for i in range(len(window))]
    # The window is the gradient of the forward result; the result has the size of the filter.
    return prod(w.size for w in window) > prod(spatial)


def _labels(conv: Node) -> tuple[str, str, str]:
    inputs, out = str(conv.attrs["dim_labels"]).split("->")
    lhs, rhs = inputs.split("_")
    return lhs, rhs, out


def _canonical(conv: Node, channels_last: bool) -> Node:
    conv = _without_transposes(conv)
    lhs, rhs, _ = _labels(conv)
    if is_weight_gradient(conv):
        # The library reads both inputs as stored by the forward pass: batch, space, features.
        return _ordered_as(_padded(conv, lhs), "fb", "io", channels_last)
    if not _is_reversed(conv, rhs):
        return _ordered_as(_padded(_without_holes(conv, lhs), lhs), "bf", "oi", channels_last)
    # The library reads the filter in its forward layout; the forward results are the inputs here.
    evened, limits = _evened(conv)
    return _ordered_as(evened, "bf", "io", channels_last, limits)


def _ordered_as(
    conv: Node, data: str, kernel: str, channels_last: bool, limits: Limits | None = None
) -> Node:
    """Write the convolution in the library's layout; slice and transpose its result."""
    lhs, rhs, out = _labels(conv)
    space = "".join(str(i) for i in range(len(lhs) - 2))
    data, kernel = (
        own[0] + space + own[1] if channels_last else own + space for own in (data, kernel)
    )
    attrs = {**conv.attrs, "dim_labels": f"{data}_{kernel}->{data}"}
    shape = tuple(conv.type.shape[out.index(c)] for c in data)
    operands = [_ordered(conv.operands[0], lhs, data), _ordered(conv.operands[1], rhs, kernel)]
    result = TensorType(conv.type.dtype, shape)
    made = Node("convolution", operands, (result,), attrs, source=conv.source)
    own = tuple(
        (limits or {}).get(label, (0, size, 1)) for label, size in zip(data, shape, strict=True)
    )
    kind = result._replace(shape=tuple(end - start for start, end, _ in own))
    if kind != result:
        made = Node("slice", [made], (kind,), {"slice": own}, source=conv.source)
    return _ordered(made, data, out)


def _without_transposes(conv: Node) -> Node:
    """Fold transposes of the operands into the convolution (XLA's TransposeFolding).

    Only this exposes a reversed filter with swapped channels, as written by
    ``conv_transpose(transpose_kernel=True)``, as an input gradient.
    """
    *labels, out = _labels(conv)
    operands = list(conv.operands)
    for i, operand in enumerate(operands):
        if operand.opcode == "transpose":
            # Dimension ``d`` of the transpose is dimension ``order[d]`` of its operand.
            order = list(operand.attrs["dimensions"])
            labels[i] = "".join(labels[i][order.index(d)] for d in range(len(order)))
            operands[i] = operand.operands[0]
    attrs = {**conv.attrs, "dim_labels": f"{labels[0]}_{labels[1]}->{out}"}
    return replace(conv, operands=operands, attrs=attrs)


def _on_host(conv: Node) -> Node:
    """Write the convolution in f32 with channels innermost, the form of XLA:CPU's library."""
    lhs, rhs, out = _labels(conv)
    space = "".join(str(i) for i in range(len(lhs) - 2))
    data, kernel, result = f"b{space}f", f"{space}io", f"b{space}f"
    dtype = "f32" if conv.type.dtype in ("bf16", "f16") else conv.type.dtype
    operands = [
        converted(_ordered(operand, have, want), dtype)
        for operand, have, want in zip(conv.operands, (lhs, rhs), (data, kernel), strict=True)
    ]
    shape = tuple(conv.type.shape[out.index(c)] for c in result)
    attrs = {**conv.attrs, "dim_labels": f"{data}_{kernel}->{result}"}
    made = replace(conv, operands=operands, results=(TensorType(dtype, shape),), attrs=attrs)
    return _ordered(converted(made, conv.type.dtype), result, out)


def _ordered(node: Node, labels: str, wanted: str) -> Node:
    order = tuple(labels.index(c) for c in wanted)
    moved = [d for d in order if node.type.shape[d] != 1]
    # If only dimensions of size one move, no data moves.
    if moved == sorted(moved):
        return reshape(node, tuple(node.type.shape[d] for d in order))
    return transposed(node, order)


def _without_holes(conv: Node, labels: str) -> Node:
    """Materialise the dilation of a transposed convolution's input as zero padding.

    The library supports input dilation only in gradients, whose filter is reversed. A filter with
    one element need not be (MatchBackwardInput in XLA's conv_rewriter.cc).
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


def _is_reversed(conv: Node, labels: str) -> bool:
    """Return whether the filter is reversed along all spatial dimensions (input gradient)."""
    kernel = conv.operands[1]
    space = {d for d, label in enumerate(labels) if label not in "io"}
    # Dimensions of size one need no reversal.
    longer = {d for d in space if kernel.type.shape[d] != 1}
    return kernel.opcode == "reverse" and longer <= set(kernel.attrs["dimensions"]) <= space


def _evened(conv: Node) -> tuple[Node, Limits]:
    """Rewrite an input gradient for the library, with symmetric padding and the stored filter.

    The library pads the forward input symmetrically: if the two paddings differ, it computes the
    gradient of the additional padding, too, and the result is sliced (ConvPaddingLegalization).

    Returns:
        The gradient, and the slice of each spatial dimension that holds the program's gradient.
    """
    lhs, _, out = _labels(conv)
    shape, window = list(conv.type.shape), list(conv.attrs["window"])
    limits = {}
    for i, w in enumerate(window):
        d, size = out.index(str(i)), conv.operands[0].type.shape[lhs.index(str(i))]
        span = (w.size - 1) * w.rhs_dilation
        low = span - w.pad_low
        # Elements after the last window may or may not count as padding (MatchBackwardInput).
        least = span + 1 + (size - 1) * w.lhs_dilation - shape[d] - low
        high = min(max(low, least), least + w.lhs_dilation - 1)
        if min(low, high) >= 0:
            before, after = max(0, low - high), max(0, high - low)
            limits[str(i)] = (before, before + shape[d], 1)
            shape[d] += before + after
            window[i] = w._replace(pad_low=w.pad_low + before, pad_high=w.pad_high + after)
    attrs = {**conv.attrs, "window": tuple(window), REVERSED: True}
    operands = [conv.operands[0], conv.operands[1].operands[0]]
    kind = conv.type._replace(shape=tuple(shape))
    return replace(conv, operands=operands, results=(kind,), attrs=attrs), limits


def _padded(conv: Node, labels: str) -> Node:
    """Pad the input explicitly where its low and high padding differ."""
    window: tuple[WindowDim, ...] = conv.attrs["window"]
    config, even = [(0, 0, 0)] * len(labels), []
    for i, w in enumerate(window):
        shared = max(0, min(w.pad_low, w.pad_high))
        low, high = max(0, w.pad_low - shared), max(0, w.pad_high - shared)
        config[labels.index(str(i))] = (low, high, 0)
        even.append(w._replace(pad_low=w.pad_low - low, pad_high=w.pad_high - high))
    data = conv.operands[0]
    data = padded(data, config, constant(0, TensorType(data.type.dtype)), conv.source)
    attrs = {**conv.attrs, "window": tuple(even)}
    return replace(conv, operands=[data, *conv.operands[1:]], attrs=attrs)
