"""Rewrite products that share an operand, products with a vector, and outer products.

Products that share an operand are merged (XLA's DotMerger), products with a vector become
multiplies and sums, and outer products become multiplies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from ...ir.program import Program, TensorType
from .folding import converted, inverse, is_elementwise, reshape, spread, transposed
from .graph import Graph, Node, rewrite, rewrite_all
from .reductions import accumulated, product_sizes, summed

#: Products of a matrix with a vector become a reduction if their operands have fewer elements per
#: batch than this: the threshold in XLA's dot_strength_reduction.cc. Larger ones are worth a
#: library call or a Triton kernel; neither supports products of two vectors.
SMALL_PRODUCT = 10_000_000
#: Products are merged only if at least one of them moves no more bytes than this: the default of
#: ``xla_gpu_dot_merger_threshold_mb``.
MERGE_BYTES = 32 << 20


def reduce_vector_products(
    graph: Graph, program: Program, smaller_than: int = SMALL_PRODUCT
) -> None:
    """Replace small products with a vector by multiply and sum, outer products by a multiply.

    Args:
        graph: Products are canonical
            (:func:`opcast.features.lowering.fused.products.canonical_dots`).
        program: Receives the computation that adds two scalars.
        smaller_than: Elements of the operands per batch from which on a matrix-vector product is
            kept; products of two vectors always become sums.
    """

    def rule(node: Node) -> Node | None:
        return _as_reduction(node, program, smaller_than) if node.opcode == "dot" else None

    rewrite(graph, rule)


def sum_vector_products(graph: Graph, program: Program, batches: int = 0) -> None:
    """Replace products with a vector by a multiply and a sum, as compilers do.

    A TPU's matrix unit takes only matrices; here a vector has no free dimension at all, not even
    one of size 1. Kernels generated for a GPU support at most one batch dimension.

    Args:
        graph: Its products may have any dimension order.
        program: Receives the computation that adds two scalars.
        batches: Minimum number of batch dimensions of the products to replace; if positive, free
            dimensions of size one are dropped first.
    """

    def rule(node: Node) -> Node | None:
        if node.opcode != "dot" or node.operands[0].type.dtype != node.type.dtype:
            return None
        if len(node.attrs.get("lhs_batch_dims", ())) < batches:
            return None
        return _vector_sum(node, program, ones=bool(batches), turned=bool(batches))

    rewrite_all(graph, rule)


def _without_ones(dot: Node) -> Node:
    """Drop the free dimensions of size one from the operands of a product."""
    operands, attrs = [], dict(dot.attrs)
    for operand, key in zip(dot.operands, ("lhs", "rhs"), strict=True):
        names = (f"{key}_batch_dims", f"{key}_contracting_dims")
        taken = {d for name in names for d in attrs.get(name, ())}
        kept = [d for d, size in enumerate(operand.type.shape) if size != 1 or d in taken]
        attrs |= {name: tuple(kept.index(d) for d in attrs.get(name, ())) for name in names}
        operands.append(reshape(operand, tuple(operand.type.shape[d] for d in kept)))
    batch = len(attrs.get("lhs_batch_dims", ()))
    own = tuple(size for size in dot.type.shape[batch:] if size != 1)
    kind = dot.type._replace(shape=(*dot.type.shape[:batch], *own))
    return replace(dot, operands=operands, results=(kind,), attrs=attrs)


def _vector_sum(
    dot: Node, program: Program, *, ones: bool = True, turned: bool = False
) -> Node | None:
    """Write a product with a vector as a sum; ``None`` if neither operand is a vector.

    Args:
        dot: The product.
        program: Receives the computation that adds two scalars.
        ones: Whether an operand whose free dimensions have size one counts as a vector, too.
        turned: Whether a matrix that comes from a reshape or transpose is transposed to be summed
            along its rows, as in XLA's NormalizeDotOperandToBatchMajorAndContractingMinor. For
            other matrices XLA's layout assignment makes that transpose free.
    """
    own_dims = range(len(dot.attrs.get("lhs_batch_dims", ())), len(dot.type.shape))
    dropped = [d for d in own_dims if ones and dot.type.shape[d] == 1]
    if dropped:
        dot = _without_ones(dot)
    sides = [
        (*dot.attrs.get(f"{key}_batch_dims", ()), *dot.attrs[f"{key}_contracting_dims"])
        for key in ("lhs", "rhs")
    ]
    alone = [len(o.type.shape) == len(dims) for o, dims in zip(dot.operands, sides, strict=True)]
    if not any(alone):
        return None
    # Of two vectors, the second serves as the matrix.
    own = 0 if alone[0] else 1
    matrix, dims = dot.operands[1 - own], sides[1 - own]
    batch = len(dot.attrs.get("lhs_batch_dims", ()))
    if turned and (_is_reshaped(matrix) or matrix.opcode == "transpose"):
        inner = [d for d in range(len(matrix.type.shape)) if d not in dims]
        matrix = transposed(matrix, [*dims[:batch], *inner, *dims[batch:]], dot.source)
        dims = (*range(batch), *range(batch + len(inner), len(matrix.type.shape)))
    vector = spread(
        dot.operands[own], [dims[i] for i in inverse(sides[own])], matrix.type.shape, dot.source
    )
    product = Node("multiply", [matrix, vector], matrix.results, source=dot.source)
    if not dims[batch:]:
        return None
    kept = [d for d in range(len(matrix.type.shape)) if d not in dims[batch:]]
    # XLA sums in the accumulation type of products.
    product = converted(product, accumulated(dot.type.dtype), dot.source)
    total = summed(product, dims[batch:], program, dot.source)
    total = converted(total, dot.type.dtype, dot.source)
    wanted = [*dims[:batch], *(d for d in kept if d not in dims[:batch])]
    order = [kept.index(d) for d in wanted]
    for n, place in enumerate(dropped):
        order.insert(place, len(kept) + n)
    return transposed(reshape(total, (*total.type.shape, *(1 for _ in dropped))), order, dot.source)


def _is_reshaped(node: Node) -> bool:
    """Return whether an array comes from a reshape, to which XLA gives the default layout."""
    while is_elementwise(node) and len(node.operands) == 1:
        node = node.operands[0]
    return node.opcode == "reshape"


def _as_reduction(dot: Node, program: Program, smaller_than: int) -> Node | None:
    _, rows, columns, depth = product_sizes(dot)
    if depth == 1:
        lhs, rhs = (_spread(dot, side) for side in (0, 1))
        return Node("multiply", [lhs, rhs], dot.results, source=dot.source)
    # A vector has one row or one column; outer products (depth 1) of any size become loops.
    small = (rows + columns) * depth < smaller_than
    if min(rows, columns) > 1 or (max(rows, columns) > 1 and not small):
        return None
    return _vector_sum(dot, program)


def _spread(dot: Node, side: int) -> Node:
    """Broadcast one side of an outer product to the result's shape."""
    operand = dot.operands[side]
    shape = dot.type.shape
    dims = [len(shape) - 2 + side]
    if len(shape) == 3:
        key = "lhs" if side == 0 else "rhs"
        batch = dot.attrs[f"{key}_batch_dims"][0]
        free = ({0, 1, 2} - {batch, *dot.attrs[f"{key}_contracting_dims"]}).pop()
        dims = [0, *dims] if batch < free else [*dims, 0]
    wide = spread(reshape(operand, tuple(shape[d] for d in dims)), dims, shape, dot.source)
    return converted(wide, dot.type.dtype, dot.source)


def merge_dots(graph: Graph) -> None:
    """Merge independent products that share an operand (XLA's DotMerger).

    The other operands are concatenated, and the result is sliced.
    """
    nodes = graph.nodes()
    groups: dict[tuple[int, int, object, str, str], list[Node]] = {}
    for node in nodes:
        if node.opcode != "dot":
            continue
        for side in (0, 1):
            attrs = tuple(sorted((k, repr(v)) for k, v in node.attrs.items()))
            # Operands can be concatenated only if they have the same dtype.
            other = node.operands[1 - side].type.dtype
            key = (id(node.operands[side]), side, attrs, node.type.dtype, other)
            groups.setdefault(key, []).append(node)
    replaced: dict[int, Node] = {}
    order = Dependence(nodes)
    for (_, side, *_rest), dots in groups.items():
        # A product merged by its left operand is not merged again by its right operand.
        chosen = _independent([d for d in dots if id(d) not in replaced], order)
        if len(chosen) > 1:
            _merge(chosen, side, replaced)
            order.merge(chosen)
    if replaced:
        _replace(graph, nodes, replaced)


def _independent(dots: list[Node], order: Dependence) -> list[Node]:
    """Choose products that can be merged: independent of each other, and not all of them large."""
    chosen: list[Node] = []
    for dot in dots:
        small = _moved(dot) <= MERGE_BYTES
        # DotMerger merges two products if at least one is small: large ones fill the device alone.
        if chosen and not small and not any(_moved(c) <= MERGE_BYTES for c in chosen):
            continue
        if not any(order.needs(dot, other) or order.needs(other, dot) for other in chosen):
            chosen.append(dot)
    return chosen


def _moved(dot: Node) -> int:
    return dot.nbytes + sum(o.nbytes for o in dot.operands)


class Dependence:
    """Dependences between nodes while products are merged.

    Args:
        nodes: All nodes, operands first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._position = {id(node): place for place, node in enumerate(nodes)}
        self._merged: dict[int, list[Node]] = {}
        # Sorted, disjoint ranges of the node order that merged products span.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def merge(self, dots: list[Node]) -> None:
        """Make each of some products depend on the operands of all, as in a single kernel."""
        self._merged.update((id(dot), dots) for dot in dots)
        places = [self._position[id(dot)] for dot in dots]
        start, end = min(places), max(places)
        first = bisect_left(self._ends, start)
        behind = bisect_right(self._starts, end)
        if first < behind:
            start, end = min(start, self._starts[first]), max(end, self._ends[behind - 1])
        self._starts[first:behind], self._ends[first:behind] = [start], [end]

    def needs(self, node: Node, other: Node) -> bool:
        """Return whether ``node`` depends on ``other``."""
        # Operands precede their users. Only merged products lead back to a later node, and none
        # leads out of its range: earlier nodes cannot depend on ``other``.
        limit = self._position[id(other)]
        stretch = bisect_right(self._starts, limit) - 1
        if stretch >= 0 and self._ends[stretch] >= limit:
            limit = self._starts[stretch]
        position = self._position
        stack, seen = [node], {id(node)}
        while stack:
            found = stack.pop()
            if position[id(found)] < limit:
                continue
            for one in self._merged.get(id(found), (found,)):
                for operand in one.operands:
                    if operand is other:
                        return True
                    if id(operand) not in seen:
                        seen.add(id(operand))
                        stack.append(operand)
        return False


def _merge(dots: list[Node], side: int, replaced: dict[int, Node]) -> None:
    first = dots[0]
    shared = first.operands[side]
    others = [dot.operands[1 - side] for dot in dots]
    key = "rhs" if side == 0 else "lhs"
    used = {*first.attrs[f"{key}_contracting_dims"], *first.attrs[f"{key}_batch_dims"]}
    # The free dimension of the operand that is not shared.
    along = next(d for d in range(len(first.type.shape)) if d not in used)
    shape = list(others[0].type.shape)
    shape[along] = sum(other.type.shape[along] for other in others)
    kind = TensorType(others[0].type.dtype, tuple(shape))
    joined = Node("concatenate", others, (kind,), {"dimensions": (along,)}, source=first.source)
    # With a shared left operand the results are adjacent columns; with a shared right one, rows.
    column = len(first.type.shape) - 1 - side
    result = list(first.type.shape)
    result[column] = shape[along]
    operands = [shared, joined] if side == 0 else [joined, shared]
    kind = TensorType(first.type.dtype, tuple(result))
    product = Node("dot", operands, (kind,), dict(first.attrs), source=first.source)
    start = 0
    for dot in dots:
        end = start + dot.type.shape[column]
        limits = [(0, size, 1) for size in dot.type.shape]
        limits[column] = (start, end, 1)
        start = end
        attrs = {"slice": tuple(limits)}
        replaced[id(dot)] = Node("slice", [product], dot.results, attrs, source=dot.source)


def _replace(graph: Graph, nodes: list[Node], replaced: dict[int, Node]) -> None:
    products = [part.operands[0] for part in replaced.values()]
    joined = [o for product in products for o in product.operands if o.opcode == "concatenate"]
    for node in (*nodes, *products, *joined):
        node.operands = [replaced.get(id(o), o) for o in node.operands]
    graph.outputs = [replaced.get(id(node), node) for node in graph.outputs]
