"""Move reshapes below their readers and write concatenations as maxima, as on TPUs.

A group norm splits the channels of an image, which are in the lanes. The compiler works on the
image as it is stored: it sums whole dimensions before the split, and broadcasts to the dimensions
from before the split. A concatenation becomes the maximum of its parts, padded with the least
value. The rules were read off small programs compiled for a v5e.
"""

from __future__ import annotations

from math import prod

from ...ir.program import DTYPE_BITS, TensorType
from .folding import converted, is_elementwise, padded, reduced, reshape, simplify_view, spread
from .graph import Graph, Node, constant, rewrite_all
from .orders import groups_of

#: Least value of each family of types other than floats.
_LEAST = {"p": False, "u": 0, "s": -(2**31)}


def move_reshapes(graph: Graph) -> None:
    """Move reshapes below elementwise ops and sums over whole dimensions, in loops too.

    Args:
        graph: Changed in place.
    """
    rewrite_all(graph, _below)


def join_by_maxima(graph: Graph) -> None:
    """Write concatenations as maxima of their parts, padded with the least value, in loops too.

    Args:
        graph: Changed in place.
    """
    rewrite_all(graph, _joined)


def _joined(node: Node) -> Node | None:
    dtype = node.type.dtype
    if node.opcode != "concatenate" or dtype.startswith("c"):
        return None
    (along,) = node.attrs["dimensions"]
    least = constant(_LEAST.get(dtype[0], float("-inf")), TensorType(dtype))
    total, start, made = node.type.shape[along], 0, []
    for operand in node.operands:
        size = operand.type.shape[along]
        config = [(0, 0, 0)] * len(node.type.shape)
        config[along] = (start, total - start - size, 0)
        made.append(padded(operand, config, least, node.source))
        start += size
    opcode = "or" if dtype == "pred" else "maximum"
    while len(made) > 1:
        pairs = [made[i : i + 2] for i in range(0, len(made), 2)]
        made = [
            Node(opcode, pair, node.results, source=node.source) if len(pair) > 1 else pair[0]
            for pair in pairs
        ]
    return made[0]


def _below(node: Node) -> Node | None:
    if node.opcode == "reshape":
        return simplify_view(node)
    if node.opcode == "reduce":
        return _summed(node)
    if node.opcode == "convert" and node.operands[0].opcode == "concatenate":
        return _converted_parts(node)
    if not is_elementwise(node) or node.called or node.is_tuple:
        return None
    view = next((o for o in node.operands if o.opcode == "reshape"), None)
    if view is None or view.type.shape != node.type.shape:
        return None
    before = view.operands[0].type.shape
    operands = [_from_before(operand, before, node.type.shape) for operand in node.operands]
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands):
        return None
    kind = TensorType(node.type.dtype, before)
    made = Node(node.opcode, known, (kind,), dict(node.attrs), source=node.source)
    return Node("reshape", [made], node.results, source=node.source)


def _converted_parts(node: Node) -> Node | None:
    """Convert the parts of a concatenation instead of the whole, if that narrows the type."""
    joined, dtype = node.operands[0], node.type.dtype
    if DTYPE_BITS[dtype] >= DTYPE_BITS[joined.type.dtype]:
        return None
    parts = [converted(operand, dtype, node.source) for operand in joined.operands]
    return Node("concatenate", parts, node.results, joined.attrs, source=joined.source)


def _from_before(operand: Node, before: tuple[int, ...], shape: tuple[int, ...]) -> Node | None:
    """Return the value in the shape before a reshape; ``None`` if all of it must be reshaped."""
    if not operand.type.shape:
        return operand
    if operand.opcode == "reshape" and operand.operands[0].type.shape == before:
        return operand.operands[0]
    if operand.opcode != "broadcast":
        return None
    small, dims = operand.operands[0], operand.attrs.get("dimensions", ())
    own = [d for d in dims if shape[d] != 1]
    met = [group for group in groups_of(before, shape) if not set(own).isdisjoint(group[1])]
    needed = sorted(d for _, after in met for d in after)
    sizes = tuple(shape[d] for d in needed)
    # Repeat along the missing parts of a split dimension first, as long as that array is small.
    if needed != own and 2 * prod(sizes) > prod(shape):
        return None
    small = reshape(small, tuple(shape[d] for d in own), operand)
    if needed != own:
        small = spread(small, [needed.index(d) for d in own], sizes, operand.source)
    places = sorted(d for group, _ in met for d in group)
    small = reshape(small, tuple(before[d] for d in places), operand)
    return spread(small, places, before, operand.source)


def _summed(node: Node) -> Node | None:
    """Reduce whole dimensions before the reshape that splits others, then the split parts."""
    view = node.operands[0]
    if node.is_tuple or len(node.operands) != 2 or view.opcode != "reshape":
        return None
    inner, start = view.operands[0], node.operands[1]
    before, shape = inner.type.shape, view.type.shape
    gone = set(node.attrs["dimensions"])
    whole = [group for group in groups_of(before, shape) if gone.issuperset(group[1])]
    if not whole:
        return None
    first = sorted(d for group, _ in whole for d in group)
    made = reduced(node, inner, first)
    done = {d for _, after in whole for d in after}
    # Reduced dimensions of size one are done, too.
    done |= {d for d in gone if shape[d] == 1}
    left = [d for d in range(len(shape)) if d not in done]
    parts = [i for i, d in enumerate(left) if d in gone]
    if not parts:
        return reshape(made, node.type.shape)
    split = reshape(made, tuple(shape[d] for d in left))
    attrs = {**node.attrs, "dimensions": tuple(parts)}
    return Node("reduce", [split, start], node.results, attrs, node.called, source=node.source)
