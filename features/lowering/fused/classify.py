"""Which ops can be computed inside another op's kernel, and how reductions are laid out."""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import NamedTuple

from ...ir.op_table import PLACED, UPDATES, named
from .folding import is_elementwise
from .graph import Node

#: Ops that need no kernel.
FREE = named("no_fused_kernel")
#: Threads of a warp, and shortest column that XLA's column emitter takes; both limits are those of
#: IsUnnestedReductionFasterThanElemental in XLA's reduction_utils.cc (which also keeps columns of
#: up to 256 elements in loops where very few of them lie side by side).
_WARP = 32
_SMALL_COLUMN = 32


class Shape(Enum):
    """Order in which a reduction meets its elements."""

    ROW = "row"
    """Neighbouring elements are summed."""
    COLUMN = "column"
    """Elements at a stride are summed, neighbours are kept."""
    SCATTERED = "scattered"
    """Neither: kept and summed dimensions alternate."""


class Reduction(NamedTuple):
    """A reduction in groups of neighbouring dimensions.

    Attributes:
        shape: Order of the elements.
        major: Elements kept outside of the summed ones; for rows, batches summed outside.
        length: Elements summed in one run (rows) or at one stride (columns).
        minor: Elements kept inside of the summed ones; 1 for rows.
    """

    shape: Shape
    major: int
    length: int
    minor: int


def is_free(node: Node) -> bool:
    """Return whether a node needs no kernel."""
    return node.opcode in FREE


def reduction(node: Node) -> Reduction:
    """Describe how a ``reduce`` meets its elements in memory."""
    shape = node.operands[0].type.shape
    dims = frozenset(node.attrs.get("dimensions", ()))
    # Neighbouring dimensions with one role count as one; dimensions of size one take no memory.
    groups: list[tuple[bool, int]] = []
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if groups and groups[-1][0] == (d in dims):
            groups[-1] = (groups[-1][0], groups[-1][1] * size)
        else:
            groups.append((d in dims, size))
    kinds = [summed for summed, _ in groups]
    sizes = [size for _, size in groups]
    if kinds in ([], [False]):
        return Reduction(Shape.ROW, prod(sizes), 1, 1)
    if kinds in ([True], [False, True], [True, False, True]):
        major = sizes[0] if len(sizes) == 3 else 1
        return Reduction(Shape.ROW, major, sizes[-1], 1)
    if kinds in ([True, False], [False, True, False]):
        major = sizes[0] if len(sizes) == 3 else 1
        return Reduction(Shape.COLUMN, major, sizes[-2], sizes[-1])
    return Reduction(Shape.SCATTERED, 1, prod(s for k, s in groups if k), 1)


def is_loop_reduction(node: Node) -> bool:
    """Return whether a reduction is short enough for one thread to sum an element in a loop."""
    reduced = reduction(node)
    if reduced.shape is Shape.ROW:
        # Short rows of a power of two share a warp in the row emitter; others run as a loop, and
        # so does a sum of nothing, which only writes its initial value.
        return reduced.length < _WARP and (reduced.length == 0 or _WARP % reduced.length != 0)
    return reduced.shape is Shape.SCATTERED or reduced.length < _SMALL_COLUMN


def is_loop(node: Node) -> bool:
    """Return whether one thread computes one element, so that the op can be fused anywhere."""
    # Ops of several results would need a kernel with several outputs.
    if node.opcode in PLACED or is_elementwise(node):
        return not node.is_tuple
    if node.opcode == "reduce":
        return not node.is_tuple and is_loop_reduction(node)
    return node.opcode == "reduce-window" and not node.is_tuple


def is_consumer(node: Node) -> bool:
    """Return whether producers can be computed inside of the kernel of this node."""
    return is_loop(node) or node.opcode in UPDATES or node.opcode in ("reduce", "reduce-window")


def source_of(node: Node) -> Node:
    """Look through reshapes to the node whose memory a value is."""
    while node.opcode in ("reshape", "bitcast"):
        node = node.operands[0]
    return node
