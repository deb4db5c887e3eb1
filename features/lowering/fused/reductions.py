"""Split long reductions into two steps and deep products into parts, and pad odd products.

Splitting long reductions occupies enough threads (XLA's TreeReductionRewriter).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isqrt, prod
from typing import NamedTuple

from ...ir.precision import arithmetic
from ...ir.program import (
    DTYPE_BITS,
    FLOAT8,
    HALF,
    Computation,
    Op,
    Program,
    Source,
    TensorType,
    dtype_family,
)
from .clusters import Reduction, Shape, is_loop_reduction, reduction
from .folding import converted, is_elementwise, padded, reduced, reshape, splat_node
from .graph import Graph, Node, rewrite
from .machine import Machine

#: Most elements that one pass sums without atomics: 1024 threads × 16, or 32 threads × 128
#: (ReductionDimensionRaceFreeBound in XLA's reduction_utils.cc).
MAX_ROW = 16_384
MAX_COLUMN = 4_096


def split_reductions(graph: Graph) -> None:
    """Reduce non-adjacent dimensions one after the other, and long dimensions in two steps."""
    for node in graph.nodes():
        if node.opcode == "reduce":
            for step in (*_apart(node), node):
                _split(step)


def _apart(node: Node) -> list[Node]:
    """Make ``node`` reduce one run of adjacent dimensions, and new nodes reduce longer runs first.

    XLA's ReductionSplitter does the same, except for reductions of several arrays.
    """
    steps: list[Node] = []
    while reduction(node).shape is Shape.SCATTERED and not node.is_tuple:
        value, start = node.operands
        shape, dims = value.type.shape, sorted(node.attrs["dimensions"])
        runs: list[list[int]] = []
        for d in dims:
            # Dimensions of size one take no memory: they do not interrupt a run.
            if runs and prod(shape[runs[-1][-1] + 1 : d]) == 1:
                runs[-1].append(d)
            else:
                runs.append([d])
        longest = max(runs, key=lambda run: prod(shape[d] for d in run))
        kept = [d for d in range(len(shape)) if d not in longest]
        first = reduced(node, value, longest)
        node.operands = [first, start]
        node.attrs = {**node.attrs, "dimensions": tuple(i for i, d in enumerate(kept) if d in dims)}
        steps.append(first)
    return steps


def parts_of(length: int) -> tuple[int, int]:
    """Return number and length of parts near the square root of a length, with least padding."""
    # Near the square root both steps are about as long. A power of two saves divisions in the
    # index computation, so it wins ties (XLA's TreeReductionRewriter).
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
    # Summed dimensions that are separated by dimensions of size one: left unchanged.
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
    """Split the summed dimensions of the operand into parts and the elements summed first."""
    parts, rest = parts_of(reduced.length)
    flat = reshape(value, (*before, reduced.length, *after))
    config = [(0, 0, 0)] * len(flat.type.shape)
    config[len(before)] = (0, parts * rest - reduced.length, 0)
    flat = padded(flat, config, start, value.source)
    # Split columns so that neighbours stay adjacent, and rows so that each part is contiguous.
    inner = (rest, parts) if reduced.shape is Shape.COLUMN else (parts, rest)
    return reshape(flat, (*before, *inner, *after))


#: Multiple to which 16-bit library GEMMs are padded for the matrix units (CublasPadForGemms).
PADDED_TO = 8


class _SplitCost(NamedTuple):
    """XLA's costs of a FLOP, of a byte of the product and of the sum of parts, and of that sum."""

    flop: float
    byte: float
    summed_byte: float
    launch: float


#: XLA's costs by minimum compute capability × 10, and the side of its tiles (XLA of JAX 0.10;
#: they reproduce the parts of 96 products compiled for A100, H100 and B200).
_SPLIT_COSTS = {
    100: _SplitCost(100.0, 0.0848863, 189.711, 1.21563e8),
    90: _SplitCost(100.0, 0.194136, 193.1384, 4.36e7),
    0: _SplitCost(100.0, 0.0666955, 467.815, 5.65307e7),
}
_TILE = 128
#: Numbers of parts that XLA tries.
_PARTS = tuple(1 << i for i in range(12))
#: FLOPs that XLA counts for a multiply-add, by the number of products in its algorithm.
_STEP_FLOPS = {1: 2, 3: 12, 6: 20, 9: 28}
#: The depth of a part is padded to a multiple of this many bytes.
_ALIGNED = 16


def split_products(graph: Graph, machine: Machine, program: Program) -> None:
    """Split the contracted dimension of products that leave cores idle, and sum the parts.

    XLA does so for products that can have generated kernels, not for library calls.

    Args:
        graph: Its products are canonical.
        machine: Its number of cores determines the parts.
        program: Receives the computation that adds two scalars.
    """

    def rule(node: Node) -> Node | None:
        parts = _depth_parts(node, machine) if node.opcode == "dot" else 1
        return _in_depth_parts(node, parts, program) if parts > 1 else None

    rewrite(graph, rule)


def _depth_parts(dot: Node, machine: Machine) -> int:
    """Return the number of parts into which XLA's SplitkRewriter splits a product's depth."""
    if any(o.type.dtype in ("s32", "u32") for o in dot.operands):
        return 1
    weights = next(w for least, w in _SPLIT_COSTS.items() if machine.capability >= least)
    batch, rows, columns, depth = product_sizes(dot)
    left, right = (DTYPE_BITS[_stored(o).type.dtype] / 8 for o in dot.operands)
    if not batch * rows * columns:
        # XLA removes products with empty results.
        return 1
    result = DTYPE_BITS[dot.type.dtype] / 8
    wide = DTYPE_BITS[accumulated(dot.type.dtype)] / 8
    tile = min(rows, _TILE) * min(columns, _TILE)
    tiles = batch * ceil(rows / _TILE) * ceil(columns / _TILE)
    step = _STEP_FLOPS.get(arithmetic(dot.operands[0].type.dtype, dot.attrs).passes, 2)
    read = batch * depth * (rows * left + columns * right)
    made = batch * rows * columns

    def cost(parts: int) -> float:
        """Return the cost in XLA's units."""
        waves = max(1.0, parts * tiles / (machine.cores * _TILE**2 / tile))
        flops = step * tile * ceil(depth / parts) * waves
        written = made * result if parts == 1 else parts * made * wide
        product = max(flops * weights.flop, (read + written) * weights.byte)
        if parts == 1:
            return product
        return product + weights.launch + made * (parts * wide + result) * weights.summed_byte

    return min(_PARTS, key=cost)


def accumulated(dtype: str) -> str:
    """Return the accumulation type of products with a result type."""
    return "f32" if dtype_family(dtype) in (HALF, FLOAT8) else dtype


def _stored(node: Node) -> Node:
    """Return the array from which an operand is computed by unary elementwise ops."""
    while is_elementwise(node) and len(node.operands) == 1:
        node = node.operands[0]
    return node


def _in_depth_parts(dot: Node, parts: int, program: Program) -> Node:
    """Multiply the parts as a batched product, and sum the results in 32 bits."""
    operands, attrs = [], dict(dot.attrs)
    narrowest = min(DTYPE_BITS[_stored(operand).type.dtype] for operand in dot.operands)
    aligned = max(8 * _ALIGNED // narrowest, 1)
    for side, operand in zip(("lhs", "rhs"), dot.operands, strict=True):
        along = dot.attrs[f"{side}_contracting_dims"][0]
        shape = operand.type.shape
        length = ceil(shape[along] / parts / aligned) * aligned
        config = [(0, 0, 0)] * len(shape)
        config[along] = (0, length * parts - shape[along], 0)
        zero = splat_node(0, TensorType(operand.type.dtype))
        whole = padded(operand, config, zero, dot.source)
        operands.append(reshape(whole, (*shape[:along], parts, length, *shape[along + 1 :])))
        batch = [d + (d >= along) for d in dot.attrs[f"{side}_batch_dims"]]
        attrs[f"{side}_batch_dims"] = (*batch, along)
        attrs[f"{side}_contracting_dims"] = (along + 1,)
    wanted = dot.type
    dtype = accumulated(wanted.dtype)
    kind = TensorType(dtype, (*wanted.shape[:-2], parts, *wanted.shape[-2:]))
    product = Node("dot", operands, (kind,), attrs, source=dot.source)
    total = summed(product, (len(wanted.shape) - 2,), program, dot.source)
    return converted(total, wanted.dtype, dot.source)


def pad_products(graph: Graph) -> None:
    """Pad 16-bit products whose sizes are not multiples of eight, and slice the result."""
    rewrite(graph, lambda node: _padded(node) if node.opcode == "dot" else None)


def product_sizes(dot: Node) -> tuple[int, int, int, int]:
    """Return the batch, rows, columns and contracted length of a canonical product."""
    shape = dot.type.shape
    batch = shape[0] if len(shape) == 3 else 1
    depth = dot.operands[0].type.shape[dot.attrs["lhs_contracting_dims"][0]]
    return batch, shape[-2], shape[-1], depth


def adder(program: Program, dtype: str) -> str:
    """Return the name of a computation that adds two scalars, which is made on first use."""
    return combiner(program, "add", dtype)


def combiner(program: Program, opcode: str, dtype: str) -> str:
    """Return the name of a computation that applies a binary op, which is made on first use."""
    name = f"opcast.{opcode}.{dtype}"
    if name not in program.computations:
        kind = TensorType(dtype)
        ops = [
            Op(f"{name}.0", "parameter", (), (kind,), {"index": 0}),
            Op(f"{name}.1", "parameter", (), (kind,), {"index": 1}),
            Op(f"{name}.2", opcode, (0, 1), (kind,)),
        ]
        program.computations[name] = Computation(name, ops, 2)
    return name


def summed(value: Node, dims: Sequence[int], program: Program, source: Source | None) -> Node:
    """Sum ``value`` over dimensions."""
    dtype, own = value.type.dtype, value.type.shape
    kind = TensorType(dtype, tuple(size for d, size in enumerate(own) if d not in dims))
    operands = [value, splat_node(0, TensorType(dtype))]
    attrs = {"dimensions": tuple(sorted(dims))}
    return Node("reduce", operands, (kind,), attrs, (adder(program, dtype),), source=source)


def _padded(dot: Node) -> Node | None:
    # XLA pads only products of 16-bit types.
    if dot.operands[0].type.dtype not in ("bf16", "f16"):
        return None
    if all(size % PADDED_TO == 0 for size in product_sizes(dot)[1:]):
        return None
    operands = []
    for side, operand in zip(("lhs", "rhs"), dot.operands, strict=True):
        batch = dot.attrs[f"{side}_batch_dims"]
        config = [
            (0, 0 if d in batch else _up(size) - size, 0)
            for d, size in enumerate(operand.type.shape)
        ]
        zero = splat_node(0, TensorType(operand.type.dtype))
        operands.append(padded(operand, config, zero, dot.source))
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
