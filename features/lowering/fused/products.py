"""Matrix products as GEMM libraries take them: three dimensions, transposes folded.

XLA's DotDecomposer and TransposeFolding do the same.

A library reads an operand in any order of batch, rows and columns as long as each of the three is
one run of memory and batches are not innermost; a kernel that Triton generates also takes batches
there. Other orders need a transpose of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ...ir.precision import widened
from ...ir.program import TensorType, WindowDim
from .clusters import PRODUCTS
from .folding import converted, reshape, transposed
from .graph import Graph, Node, rewrite, rewrite_all, users_of


class _Operand(NamedTuple):
    """An operand of a product with the dimensions of each role, in the order of the pairs.

    ``any_order`` says whether batches may be innermost.
    """

    node: Node
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contract: tuple[int, ...]
    any_order: bool


def canonical_dots(graph: Graph, *, any_order: bool = False) -> None:
    """Turn every ``dot`` into one of two or three dimensions between reshapes and transposes.

    Args:
        graph: The graph.
        any_order: Whether a kernel that is generated reads operands of which batches are innermost.
    """
    users = users_of(graph.nodes())
    outputs = {id(node) for node in graph.outputs}
    swapped: set[int] = set()

    def rule(node: Node) -> Node | None:
        if node.opcode == "dot":
            mine = users[id(node)]
            alone = len(mine) == 1 and id(node) not in outputs
            order = _written_order(mine[0], node, any_order) if alone else ""
            if order:
                swapped.add(id(mine[0]))
            # C = A·B transposed is Bᵀ·Aᵀ: swapping the operands saves the transpose of the result.
            return _canonical(node, order.find("c") < order.find("r"), any_order)
        return reshape(node.operands[0], node.type.shape) if id(node) in swapped else None

    rewrite(graph, rule)


def _written_order(transpose: Node, dot: Node, any_order: bool) -> str:
    """Order in which a product is written where that is its transpose: ``bcr``, ``rbc``.

    Empty if no kernel writes it so (XLA's DotCanSupportShapeWithLayout), or it is no other one.
    """
    if transpose.opcode != "transpose":
        return ""
    batch = len(dot.attrs.get("lhs_batch_dims", ()))
    rows = len(dot.operands[0].type.shape) - batch - len(dot.attrs["lhs_contracting_dims"])
    rank = len(dot.type.shape)
    dims = [d for d in transpose.attrs["dimensions"] if dot.type.shape[d] != 1]
    roles = ["b"] * batch + ["r"] * rows + ["c"] * (rank - batch - rows)
    order = "".join(dict.fromkeys(roles[d] for d in dims))
    runs = [[d for d in dims if roles[d] == role] for role in order]
    # Each role is one run of memory.
    whole = [d for run in map(sorted, runs) for d in run] == dims != sorted(dims)
    return order if whole and (any_order or not order.endswith("b")) else ""


def _canonical(dot: Node, swap: bool, any_order: bool) -> Node:
    sides = [_roles(dot, "lhs", 0, any_order), _roles(dot, "rhs", 1, any_order)]
    sides = _matched(sides)
    if swap:
        sides.reverse()
    (lhs, left), (rhs, right) = (_prepared(side, position) for position, side in enumerate(sides))
    first, second = sides
    sizes = [prod(first.node.type.shape[d] for d in dims) for dims in (first.batch, first.free)] + [
        prod(second.node.type.shape[d] for d in second.free)
    ]
    attrs = _precision(dot)
    batched = bool(first.batch)
    attrs["lhs_contracting_dims"] = (left.index("c"),)
    attrs["rhs_contracting_dims"] = (right.index("c"),)
    attrs["lhs_batch_dims"] = (left.index("b"),) if batched else ()
    attrs["rhs_batch_dims"] = (right.index("b"),) if batched else ()
    shape = tuple(sizes if batched else sizes[1:])
    product = Node(
        "dot", [lhs, rhs], (TensorType(dot.type.dtype, shape),), attrs, source=dot.source
    )
    return product if swap else reshape(product, dot.type.shape)


def _precision(dot: Node) -> dict[str, object]:
    """The attributes that say how exactly a product is computed, and so how fast."""
    return {k: v for k, v in dot.attrs.items() if k in ("operand_precision", "algorithm")}


def _roles(dot: Node, side: str, position: int, any_order: bool) -> _Operand:
    node = dot.operands[position]
    batch = tuple(dot.attrs.get(f"{side}_batch_dims", ()))
    contract = tuple(dot.attrs[f"{side}_contracting_dims"])
    free = tuple(d for d in range(len(node.type.shape)) if d not in batch and d not in contract)
    return _Operand(node, batch, free, contract, any_order)


def _matched(sides: Sequence[_Operand]) -> list[_Operand]:
    """Reorder pairs of batch and contracted dimensions as one operand stores them."""
    for leader in sides:
        # Either operand may lead; its order must let both be read without a transpose.
        batch = sorted(range(len(leader.batch)), key=leader.batch.__getitem__)
        contract = sorted(range(len(leader.contract)), key=leader.contract.__getitem__)
        # Batches keep their order: the result has it.
        if batch != list(range(len(batch))):
            continue
        ordered = [
            side._replace(contract=tuple(side.contract[i] for i in contract)) for side in sides
        ]
        if all(_order(side) for side in ordered):
            return ordered
    return list(sides)


def _prepared(side: _Operand, position: int) -> tuple[Node, str]:
    """Reshape an operand to one dimension for each role, and name the roles in that order."""
    # A transposed operand is read in its original order if a library can (TransposeFolding).
    node = side.node
    if node.opcode == "convert" and node.operands[0].opcode == "transpose":
        node = _turned_back(node)
    if node.opcode == "transpose":
        through = _moved_to(side, node.operands[0], node.attrs["dimensions"])
        side = through if _order(through) else side
    if not _order(side):
        middle = (side.free, side.contract) if position == 0 else (side.contract, side.free)
        side = _transposed(side, (*side.batch, *middle[0], *middle[1]))
    order = _order(side) or "bfc"
    roles = {"b": side.batch, "f": side.free, "c": side.contract}
    if not side.batch:
        order = order.replace("b", "")
    shape = tuple(prod(side.node.type.shape[d] for d in roles[role]) for role in order)
    return reshape(side.node, shape), order


def _turned_back(convert: Node) -> Node:
    """Convert before a transpose instead of after it."""
    transpose = convert.operands[0]
    value = transpose.operands[0]
    made = converted(value, convert.type.dtype, convert.source)
    return transposed(made, transpose.attrs["dimensions"], transpose.source)


def _transposed(side: _Operand, order: tuple[int, ...]) -> _Operand:
    return _moved_to(side, transposed(side.node, order), {d: new for new, d in enumerate(order)})


def _moved_to(side: _Operand, node: Node, place: Sequence[int] | Mapping[int, int]) -> _Operand:
    """Return the operand with another node, in which each dimension has its place."""
    batch, free, contract = (
        tuple(place[d] for d in dims) for dims in (side.batch, side.free, side.contract)
    )
    return _Operand(node, batch, free, contract, side.any_order)


def _order(side: _Operand) -> str:
    """Name the roles in memory order, such as ``bfc``; empty if a library cannot read it so."""
    shape = side.node.type.shape
    names: dict[int, str] = {}
    wanted: dict[str, list[int]] = {}
    for role, dims in (("b", side.batch), ("f", side.free), ("c", side.contract)):
        wanted[role] = [d for d in dims if shape[d] != 1]
        names.update(dict.fromkeys(wanted[role], role))
    order = ""
    for d in range(len(shape)):
        role = names.get(d, "")
        if role and not order.endswith(role):
            order += role
    if len(set(order)) < len(order) or any(dims != sorted(dims) for dims in wanted.values()):
        return ""
    # cuBLAS strides between batches: rows or columns have to be contiguous.
    if order.endswith("b") and len(order) > 1 and not side.any_order:
        return ""
    missing = [role for role in "bfc" if role not in order]
    return "".join(missing) + order


def widen_products(graph: Graph, narrow: frozenset[str] | None) -> None:
    """Widen the operands of products of formats that XLA has no kernel for, by :func:`widened`.

    Args:
        graph: Changed in place; loops and branches are not entered.
        narrow: Floats of 8 bits that the matrix units have; ``None`` leaves products of floats
            alone.
    """

    def rule(node: Node) -> Node | None:
        if node.opcode != "dot":
            return None
        wide = widened([o.type.dtype for o in node.operands], node.type.dtype, narrow)
        if not wide:
            return None
        operands = [
            Node("convert", [o], (o.type._replace(dtype=wide),), source=o.source)
            for o in node.operands
        ]
        return replace(node, operands=operands)

    rewrite(graph, rule)


#: Floats of 16 bits, of which a CPU's compiler has no products but of bf16 with f32 results.
_HALVES = frozenset(("bf16", "f16"))


def host_products(graph: Graph) -> None:
    """Compute products and convolutions of 16 bits in f32, as a CPU's compiler does.

    Args:
        graph: Changed in place; loops and branches are not entered.
    """

    def rule(node: Node) -> Node | None:
        kinds = {o.type.dtype for o in node.operands}
        if node.opcode not in PRODUCTS or not kinds & _HALVES:
            return None
        if node.opcode == "dot" and kinds == {"bf16"} and node.type.dtype == "f32":
            return None
        operands = [converted(o, "f32") if o.type.dtype in _HALVES else o for o in node.operands]
        wide = replace(node, operands=operands, results=(node.type._replace(dtype="f32"),))
        return converted(wide, node.type.dtype)

    rewrite(graph, rule)


def convolved_products(graph: Graph) -> None:
    """Write products as the convolutions that a TPU's compiler makes of them.

    One operand is the filter, with one dimension of its own; the other dimensions of the first are
    its images and their places, batches are places of both, which a dilation by their number keeps
    apart. Products of other forms stay: of several contracted dimensions, or own ones on both
    sides.

    Args:
        graph: Changed in place, its loops and branches too.
    """
    rewrite_all(graph, lambda node: _convolved(node) if node.opcode == "dot" else None)


def _convolved(dot: Node) -> Node | None:
    sides = [_roles(dot, key, place, True) for place, key in enumerate(("lhs", "rhs"))]
    # The filter is the one with a single dimension of its own, the second if both have.
    image, kernel = sides if len(sides[1].free) == 1 else sides[::-1]
    if len(kernel.free) != 1 or not image.free or len(image.contract) != 1:
        return None
    *places, images = image.free
    spatial = [*image.batch, *places]
    shape = (*kernel.node.type.shape, *(1 for _ in places))
    filters = reshape(kernel.node, shape) if places else kernel.node
    written = {d: str(number) for number, d in enumerate(kernel.batch)}
    first = len(kernel.node.type.shape)
    written |= {first + i: str(len(kernel.batch) + i) for i in range(len(places))}
    written |= {kernel.contract[0]: "i", kernel.free[0]: "o"}
    numbers = [str(i) for i in range(len(spatial))]
    batch, own = numbers[: len(image.batch)], [*numbers[len(image.batch) :], "b"]
    out = [*batch, *own, "f"] if image is sides[0] else [*batch, "f", *own]
    read = {d: str(number) for number, d in enumerate(spatial)}
    read |= {images: "b", image.contract[0]: "f"}
    sizes = [image.node.type.shape[d] for d in image.batch]
    window = [WindowDim(size, max(size - 1, 1), lhs_dilation=size) for size in sizes]
    attrs = {
        **_precision(dot),
        "window": (*window, *(WindowDim(1) for _ in places)),
        "dim_labels": f"{_word(read)}_{_word(written)}->{''.join(out)}",
        "feature_group_count": 1,
        "batch_group_count": 1,
    }
    return Node("convolution", [image.node, filters], dot.results, attrs, source=dot.source)


def _word(letters: Mapping[int, str]) -> str:
    return "".join(letters[d] for d in range(len(letters)))
