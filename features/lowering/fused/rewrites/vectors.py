"""Rewrite products that no GEMM is called for (vectors, outer products), and pad odd shapes."""

from __future__ import annotations

from collections.abc import Callable

from ....ir.program import Computation, Op, Program, TensorType
from ..dataflow.folding import splat_node
from ..dataflow.graph import Graph, Node
from ..dataflow.views import reshape

#: Products with a vector below this many multiply-adds become a reduction: the threshold in XLA's
#: dot_strength_reduction.cc. Larger ones are worth a library call or a Triton kernel.
SMALL_PRODUCT = 10_000_000
#: Multiple to which library GEMMs in 16 bits are padded for the matrix units (CublasPadForGemms).
PADDED_TO = 8
#: Name of the computation that adds two scalars, by dtype.
ADDER = "opcast.add"


def reduce_vector_products(graph: Graph, program: Program) -> None:
    """Replace small products with a vector by a multiply and a sum, outer ones by a multiply.

    Args:
        graph: Products are canonical
            (:func:`opcast.features.lowering.fused.rewrites.products.canonical_dots`).
        program: Takes in the computation that adds two scalars.
    """
    _replace(graph, lambda node: _as_reduction(node, program))


def pad_products(graph: Graph) -> None:
    """Pad products in 16-bit floats whose sizes are no multiple of eight, and slice the result."""
    _replace(graph, _padded)


def _replace(graph: Graph, rule: Callable[[Node], Node | None]) -> None:
    replaced: dict[int, Node] = {}
    for node in graph.nodes():
        node.operands = [replaced.get(id(o), o) for o in node.operands]
        if node.opcode == "dot":
            made = rule(node)
            if made is not None:
                replaced[id(node)] = made
    graph.outputs = [replaced.get(id(node), node) for node in graph.outputs]


def _sizes(dot: Node) -> tuple[int, int, int, int]:
    """Return the batch, rows, columns and contracted length of a canonical product."""
    shape = dot.type.shape
    batch = shape[0] if len(shape) == 3 else 1
    depth = dot.operands[0].type.shape[dot.attrs["lhs_contracting_dims"][0]]
    return batch, shape[-2], shape[-1], depth


def _as_reduction(dot: Node, program: Program) -> Node | None:
    batch, rows, columns, depth = _sizes(dot)
    if depth == 1:
        lhs, rhs = (_spread(dot, side) for side in (0, 1))
        return Node("multiply", [lhs, rhs], dot.results, source=dot.source)
    # A vector has one row or one column; of outer products (depth 1) any size becomes a loop.
    if min(rows, columns) > 1 or batch * rows * columns * depth >= SMALL_PRODUCT:
        return None
    # The matrix keeps its order in memory; the vector is spread over it.
    matrix = 0 if columns == 1 else 1
    operand = dot.operands[matrix]
    key = "lhs" if matrix == 0 else "rhs"
    vector = _vector_along(dot, 1 - matrix, operand, key)
    product = Node("multiply", [operand, vector], operand.results, source=dot.source)
    if operand.type.dtype != dot.type.dtype:
        kind = TensorType(dot.type.dtype, operand.type.shape)
        product = Node("convert", [product], (kind,), source=dot.source)
    along = dot.attrs[f"{key}_contracting_dims"][0]
    shape = tuple(s for d, s in enumerate(operand.type.shape) if d != along)
    kind = TensorType(dot.type.dtype, shape)
    zero = splat_node(0, TensorType(dot.type.dtype))
    total = Node(
        "reduce",
        [product, zero],
        (kind,),
        {"dimensions": (along,)},
        (adder(program, dot.type.dtype),),
        source=dot.source,
    )
    batch_dims = dot.attrs[f"{key}_batch_dims"]
    if batch_dims and next(d for d in range(3) if d != along) != batch_dims[0]:
        # The sum left the free dimension before the batch, but a product returns the batch first.
        turned = TensorType(dot.type.dtype, (shape[1], shape[0]))
        total = Node("transpose", [total], (turned,), {"dimensions": (1, 0)}, source=dot.source)
    return reshape(total, dot.type.shape)


def _vector_along(dot: Node, side: int, matrix: Node, key: str) -> Node:
    """Spread the vector operand to the matrix's shape."""
    own = "rhs" if key == "lhs" else "lhs"
    vector = dot.operands[side]
    along = dot.attrs[f"{key}_contracting_dims"][0]
    batched = bool(dot.attrs["lhs_batch_dims"])
    dims = [along]
    sizes = [matrix.type.shape[along]]
    if batched:
        batch = dot.attrs[f"{key}_batch_dims"][0]
        first = dot.attrs[f"{own}_batch_dims"][0] < dot.attrs[f"{own}_contracting_dims"][0]
        size = matrix.type.shape[batch]
        dims, sizes = (
            ([batch, along], [size, *sizes]) if first else ([along, batch], [*sizes, size])
        )
    small = reshape(vector, tuple(sizes))
    if dims != sorted(dims):
        kind = TensorType(small.type.dtype, tuple(reversed(sizes)))
        small = Node("transpose", [small], (kind,), {"dimensions": (1, 0)}, source=dot.source)
    kind = TensorType(vector.type.dtype, matrix.type.shape)
    return Node("broadcast", [small], (kind,), {"dimensions": tuple(sorted(dims))})


def _spread(dot: Node, side: int) -> Node:
    """Spread one side of an outer product to the result's shape."""
    operand = dot.operands[side]
    shape = dot.type.shape
    batched = len(shape) == 3
    own = len(shape) - 2 + side
    dims = (0, own) if batched else (own,)
    sizes = tuple(shape[d] for d in dims)
    key = "lhs" if side == 0 else "rhs"
    if batched and dot.attrs[f"{key}_batch_dims"][0] > _free_dim(dot, key):
        turned = TensorType(operand.type.dtype, (sizes[1], sizes[0]))
        flat = reshape(operand, turned.shape)
        kind = TensorType(operand.type.dtype, sizes)
        small = Node("transpose", [flat], (kind,), {"dimensions": (1, 0)}, source=dot.source)
    else:
        small = reshape(operand, sizes)
    wide = TensorType(operand.type.dtype, shape)
    spread = Node("broadcast", [small], (wide,), {"dimensions": dims}, source=dot.source)
    if operand.type.dtype == dot.type.dtype:
        return spread
    return Node("convert", [spread], dot.results, source=dot.source)


def _free_dim(dot: Node, key: str) -> int:
    used = {*dot.attrs[f"{key}_batch_dims"], *dot.attrs[f"{key}_contracting_dims"]}
    rank = len(dot.type.shape)
    return next(d for d in range(rank) if d not in used)


def adder(program: Program, dtype: str) -> str:
    """Name of a computation of ``program`` that adds two scalars; made if it is not there."""
    name = f"{ADDER}.{dtype}"
    if name not in program.computations:
        kind = TensorType(dtype)
        ops = [
            Op(f"{name}.0", "parameter", (), (kind,), {"index": 0}),
            Op(f"{name}.1", "parameter", (), (kind,), {"index": 1}),
            Op(f"{name}.2", "add", (0, 1), (kind,)),
        ]
        program.computations[name] = Computation(name, ops, 2)
    return name


def _padded(dot: Node) -> Node | None:
    # XLA pads products of 16-bit types only.
    if dot.operands[0].type.dtype not in ("bf16", "f16"):
        return None
    if all(size % PADDED_TO == 0 for size in _sizes(dot)[1:]):
        return None
    operands = []
    for side, operand in zip(("lhs", "rhs"), dot.operands, strict=True):
        batch = dot.attrs[f"{side}_batch_dims"]
        shape = list(operand.type.shape)
        config = [(0, 0, 0)] * len(shape)
        for d, size in enumerate(shape):
            if d not in batch:
                shape[d] = _up(size)
                config[d] = (0, shape[d] - size, 0)
        kind = TensorType(operand.type.dtype, tuple(shape))
        if kind.shape == operand.type.shape:
            operands.append(operand)
            continue
        zero = splat_node(0, TensorType(operand.type.dtype))
        attrs = {"padding": tuple(config)}
        operands.append(Node("pad", [operand, zero], (kind,), attrs, source=dot.source))
    wanted = dot.type.shape
    full = (*wanted[:-2], _up(wanted[-2]), _up(wanted[-1]))
    kind = TensorType(dot.type.dtype, full)
    product = Node("dot", operands, (kind,), dict(dot.attrs), source=dot.source)
    if full == wanted:
        return product
    limits = tuple((0, size, 1) for size in wanted)
    return Node("slice", [product], dot.results, {"slice": limits}, source=dot.source)


def _up(size: int) -> int:
    return -(-size // PADDED_TO) * PADDED_TO
