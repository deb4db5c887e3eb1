"""Find the hero of a kernel, the op that determines how it runs: a reduction or tiled transpose.

The rules are those of XLA's ``FindNonTrivialHero`` and ``GetDescriptionForTiledTransposeEmitter``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...ir.program import DTYPE_BITS
from .clusters import source_of
from .folding import is_elementwise
from .graph import Node

#: Minimum length of both sides of a transpose tile: the first number, or the second if the tile has
#: at least as many elements as the third (kMinDimensionToTransposeTiled and
#: kMinTotalDimensionsToTransposeTiled in XLA's ir_emission_utils.h).
_SIDE, _SHORT_SIDE, _AREA = 16, 8, 64 * 128
#: Most contiguous bytes that a tiled transpose may move as one unit.
_TOGETHER = 8
#: Most operands of an op that the search for a hero passes through.
_OPERANDS = 3

#: Sizes of the result of a tiled transpose, and its permutation; dimensions that stay adjacent are
#: merged.
Turn = tuple[tuple[int, ...], tuple[int, ...]]


def turn_of(node: Node) -> Turn | None:
    """Describe a transpose that goes through shared memory; ``None`` for all other ops."""
    if node.opcode != "transpose":
        return None
    sizes, order = _grouped(node)
    if len(order) < 2:
        return None
    width = max(1, DTYPE_BITS[node.type.dtype] // 8)
    last = len(order) - 1
    if order[-1] == last:
        # The dimensions before the last one, in the operand and in the result.
        side = min(sizes[order.index(last - 1)], sizes[-2])
        together = width * sizes[-1]
        return (sizes, order) if together <= _TOGETHER and together * side >= _SIDE else None
    sides = (sizes[order.index(last)], sizes[-1])
    short = min(sides) >= _SHORT_SIDE and sides[0] * sides[1] >= _AREA
    return (sizes, order) if min(sides) >= _SIDE or short else None


def _grouped(node: Node) -> Turn:
    """Return sizes and order of a transpose, without ones and with adjacent dimensions merged."""
    sizes: list[int] = []
    firsts: list[int] = []
    shape = node.operands[0].type.shape
    # Dimensions of size one do not separate neighbours.
    place = {d: i for i, d in enumerate(d for d in range(len(shape)) if shape[d] != 1)}
    before = -2
    for d in node.attrs["dimensions"]:
        if shape[d] == 1:
            continue
        if place[d] == before + 1:
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
            firsts.append(place[d])
        before = place[d]
    ranks = sorted(firsts)
    return tuple(sizes), tuple(map(ranks.index, firsts))


def turns_minor(node: Node) -> bool:
    """Return whether adjacent results of a transpose read elements that are not adjacent."""
    if node.opcode != "transpose":
        return False
    _, order = _grouped(node)
    return bool(order) and order[-1] != len(order) - 1


def hero_of(root: Node, inside: Collection[int]) -> Node:
    """Find the op that determines how a kernel computes a result; by default the result itself.

    Args:
        root: A node that the kernel writes.
        inside: Nodes that the kernel computes, by ``id``.
    """
    node = root
    while _is_passed(node, 1) and id(source_of(node.operands[0])) in inside:
        node = source_of(node.operands[0])
    return _transpose_above(node, inside) or (node if node.opcode == "reduce" else root)


def _is_passed(node: Node, operands: int) -> bool:
    """Return whether the hero search passes an op: elementwise, at most ``operands`` operands."""
    return 0 < len(node.operands) <= operands and is_elementwise(node)


def _transpose_above(start: Node, inside: Collection[int]) -> Node | None:
    """Find the tiled transpose that elementwise ops lead to, if there is exactly one."""
    found: Node | None = None
    seen, todo = {id(start)}, [start]
    for node in todo:
        if turn_of(node):
            if found is not None:
                return None
            found = node
        elif _is_passed(node, _OPERANDS):
            for above in map(source_of, node.operands):
                if id(above) in inside and id(above) not in seen:
                    seen.add(id(above))
                    todo.append(above)
    return found


def turns_tiles(members: Iterable[Node], roots: Iterable[Node]) -> bool:
    """Return whether a kernel transposes tiles in shared memory, which makes its reads coalesced.

    Args:
        members: Nodes that it computes, operands before users.
        roots: Nodes that it writes.
    """
    nodes = {id(node): node for node in members}
    heroes = [hero_of(root, nodes) for root in roots]
    turned = {id(hero): turn for hero in heroes if (turn := turn_of(hero))}
    if len(set(turned.values())) != 1 or any(hero.opcode == "reduce" for hero in heroes):
        return False
    # After ops that are not elementwise, the elements of a tile would be read one by one.
    below = set(turned)
    for node in nodes.values():
        if id(node) not in turned and any(id(source_of(o)) in below for o in node.operands):
            if not _is_passed(node, _OPERANDS):
                return False
            below.add(id(node))
    return True
