"""Split long reductions in two steps, so that enough threads take part (TreeReductionRewriter)."""

from __future__ import annotations

from math import isqrt

from ....ir.program import TensorType
from ..dataflow.classify import Reduction, Shape, is_loop_reduction, reduction
from ..dataflow.graph import Graph, Node
from ..dataflow.views import reshape

#: Most elements that one pass sums without atomics: 1024 threads of 16, 32 threads of 128
#: (ReductionDimensionRaceFreeBound in XLA's reduction_utils.cc).
MAX_ROW = 16_384
MAX_COLUMN = 4_096


def split_reductions(graph: Graph) -> None:
    """Replace each long reduction by one of parts and one of the parts' results."""
    for node in graph.nodes():
        if node.opcode == "reduce":
            _split(node)


def parts_of(length: int) -> tuple[int, int]:
    """Number of parts and elements in each: the least padding from a power of two to the root."""
    # Both steps are then about as long. A power of two saves divisions in the kernel's indexing, so
    # it wins among equal paddings (XLA's TreeReductionRewriter).
    root = isqrt(length)
    candidates = range(1 << (root.bit_length() - 1), root + 1)
    parts = min(candidates, key=lambda k: (-(-length // k) * k - length, k))
    return parts, -(-length // parts)


def _split(node: Node) -> None:
    """Turn ``node`` into the second step, with a new first step as its operands."""
    reduced = reduction(node)
    limit = MAX_ROW if reduced.shape is Shape.ROW else MAX_COLUMN
    if reduced.shape is Shape.SCATTERED or reduced.length <= limit or is_loop_reduction(node):
        return
    count = len(node.operands) // 2
    dims = sorted(node.attrs["dimensions"])
    shape = node.operands[0].type.shape
    before = tuple(s for d, s in enumerate(shape) if d < dims[0])
    after = tuple(s for d, s in enumerate(shape) if d > dims[-1])
    # The summed dimensions are not side by side (size-one dimensions between them): left as it is.
    if len(before) + len(after) + len(dims) != len(shape):
        return
    starts = node.operands[count:]
    values = [
        _in_parts(value, start, before, after, reduced)
        for value, start in zip(node.operands[:count], starts, strict=True)
    ]
    parts = parts_of(reduced.length)[0]
    kinds = tuple(TensorType(t.dtype, (*before, parts, *after)) for t in node.results)
    along = len(before) + (0 if reduced.shape is Shape.COLUMN else 1)
    attrs = {**node.attrs, "dimensions": (along,)}
    first = Node(
        "reduce", [*values, *starts], kinds, attrs, node.called, [], node.is_tuple, node.source
    )
    partial = [first]
    if node.is_tuple:
        partial = [
            Node("get-tuple-element", [first], (kind,), {"index": i}, source=node.source)
            for i, kind in enumerate(kinds)
        ]
    node.operands = [*partial, *starts]
    node.attrs = {**node.attrs, "dimensions": (len(before),)}


def _in_parts(
    value: Node, start: Node, before: tuple[int, ...], after: tuple[int, ...], reduced: Reduction
) -> Node:
    """Split the operand's summed dimensions into parts and what is summed first."""
    parts, rest = parts_of(reduced.length)
    flat = reshape(value, (*before, reduced.length, *after))
    if parts * rest != reduced.length:
        config = [(0, 0, 0)] * len(flat.type.shape)
        config[len(before)] = (0, parts * rest - reduced.length, 0)
        kind = TensorType(flat.type.dtype, (*before, parts * rest, *after))
        attrs = {"padding": tuple(config)}
        flat = Node("pad", [flat, start], (kind,), attrs, source=value.source)
    # Columns are cut so that neighbours stay side by side; rows, so that each part is contiguous.
    inner = (rest, parts) if reduced.shape is Shape.COLUMN else (parts, rest)
    return reshape(flat, (*before, *inner, *after))
