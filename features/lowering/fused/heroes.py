"""The op that decides how a kernel runs, its hero: a sum, or a transpose through shared memory.

The rules are those of XLA's ``FindNonTrivialHero`` and ``GetDescriptionForTiledTransposeEmitter``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...ir.program import DTYPE_BITS
from .clusters import source_of
from .folding import is_elementwise
from .graph import Node

#: Neighbours that a tile of a transpose has at least on either side: the first number, or the
#: second if the tile has as many elements as the third (kMinDimensionToTransposeTiled and
#: kMinTotalDimensionsToTransposeTiled in XLA's ir_emission_utils.h).
_SIDE, _SHORT_SIDE, _AREA = 16, 8, 64 * 128
#: Bytes that may stay together at most where a tile is turned around them.
_TOGETHER = 8
#: Most operands of an op that a kernel looks for its hero through.
_OPERANDS = 3

#: Sizes of a tiled transpose's result, and the order in which they come: neighbours that stay
#: together count as one dimension.
Turn = tuple[tuple[int, ...], tuple[int, ...]]


def turn_of(node: Node) -> Turn | None:
    """Describe a transpose that is written through shared memory; ``None`` for all other ops."""
    if node.opcode != "transpose":
        return None
    sizes, order = _grouped(node)
    if len(order) < 2:
        return None
    width = max(1, DTYPE_BITS[node.type.dtype] // 8)
    last = len(order) - 1
    if order[-1] == last:
        # Before the last one, in the operand and in the result.
        side = min(sizes[order.index(last - 1)], sizes[-2])
        together = width * sizes[-1]
        return (sizes, order) if together <= _TOGETHER and together * side >= _SIDE else None
    sides = (sizes[order.index(last)], sizes[-1])
    short = min(sides) >= _SHORT_SIDE and sides[0] * sides[1] >= _AREA
    return (sizes, order) if min(sides) >= _SIDE or short else None


def _grouped(node: Node) -> Turn:
    """Sizes and order of a transpose's result without ones, neighbours that stay so as one."""
    sizes: list[int] = []
    firsts: list[int] = []
    shape = node.operands[0].type.shape
    # Dimensions of size one do not part neighbours.
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
    """Return whether a transpose makes neighbouring results read elements that lie apart."""
    if node.opcode != "transpose":
        return False
    _, order = _grouped(node)
    return bool(order) and order[-1] != len(order) - 1


def hero_of(root: Node, inside: Collection[int]) -> Node:
    """Find the op that decides how a kernel computes a result: a sum, a transpose, or the result.

    Args:
        root: Is written.
        inside: What the kernel computes, by ``id``.
    """
    node = root
    while _is_passed(node, 1) and id(source_of(node.operands[0])) in inside:
        node = source_of(node.operands[0])
    return _transpose_above(node, inside) or (node if node.opcode == "reduce" else root)


def _is_passed(node: Node, operands: int) -> bool:
    """Return whether a hero is looked for above an op, if it has no more operands than this."""
    return 0 < len(node.operands) <= operands and is_elementwise(node)


def _transpose_above(start: Node, inside: Collection[int]) -> Node | None:
    """Find the only transpose of tiles that element-wise ops lead to."""
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
    """Return whether a kernel turns tiles in shared memory, so that it reads neighbours together.

    Args:
        members: What it computes, operands before users.
        roots: What it writes.
    """
    nodes = {id(node): node for node in members}
    heroes = [hero_of(root, nodes) for root in roots]
    turned = {id(hero): turn for hero in heroes if (turn := turn_of(hero))}
    if len(set(turned.values())) != 1 or any(hero.opcode == "reduce" for hero in heroes):
        return False
    # Behind other than element-wise ops a tile's elements would be read one by one.
    below = set(turned)
    for node in nodes.values():
        if id(node) not in turned and any(id(source_of(o)) in below for o in node.operands):
            if not _is_passed(node, _OPERANDS):
                return False
            below.add(id(node))
    return True
