"""Dimension orders of arrays in TPU memory, and reshapes between them.

TPU memory pads the two minor dimensions of an array to tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from math import prod

from ...ir.program import DTYPE_BITS, LANES, SUBLANES, TensorType, tiled_size

#: Dimensions of an array, minor to major, as in :class:`TensorType`.
Order = tuple[int, ...]


def default_order(t: TensorType) -> Order:
    """Return the order with the least padding; row-major wins ties.

    Args:
        t: The array's type; types under 32 bits pack at least as many rows as fill a word.
    """
    if len(t.shape) < 2:
        return tuple(range(len(t.shape)))
    return _orders(t)[0]


def _orders(t: TensorType) -> list[Order]:
    """List orders for all pairs of minor dimensions, the others row-major, least padding first."""
    dims = range(len(t.shape))
    found = [
        (a, b, *(d for d in reversed(dims) if d not in (a, b))) for a, b in permutations(dims, 2)
    ]
    return sorted(found, key=lambda order: (padded_size(t, order), -order[0], -order[1]))


def padded_size(t: TensorType, order: Order) -> int:
    """Count the elements of an array of rank two or more in an order, padded to tiles."""
    lanes, rows = t.shape[order[0]], t.shape[order[1]]
    packed = 32 // max(DTYPE_BITS[t.dtype], 1)
    return prod(t.shape[d] for d in order[2:]) * tiled_size(lanes, rows, packed)


def row_major(t: TensorType) -> Order:
    """Return the row-major order: the last dimension is minor."""
    return tuple(reversed(range(len(t.shape))))


def order_of(t: TensorType) -> Order:
    """Return the order given in a type's layout."""
    return row_major(t) if t.layout is None else t.layout


def reshaped(shape: Sequence[int], order: Order, result: Sequence[int]) -> Order | None:
    """Return the order of a reshape's result if it is a bitcast; ``None`` if it moves data.

    Args:
        shape: Shape of the operand.
        order: Order of the operand.
        result: Shape of the result.
    """
    groups = groups_of(shape, result)
    place = {d: i for i, d in enumerate(spaced(shape, order))}
    made: list[tuple[int, list[int]]] = []
    for before, after in groups:
        places = [place[d] for d in reversed(before)]
        # Dimensions that are merged must be adjacent, in row-major order.
        if places != list(range(places[0], places[0] + len(places))):
            return None
        made.append((places[0], after[::-1]))
    derived = [d for _, after in sorted(made) for d in after]
    if not _same_tiles(_sizes(shape, spaced(shape, order)), _sizes(result, derived)):
        return None
    ones = [d for d in reversed(range(len(result))) if result[d] == 1]
    return (*derived, *ones)


def turned_before(t: TensorType, order: Order, result: TensorType) -> tuple[Order, Order] | None:
    """Find orders of operand and result with which a reshape is a bitcast after a copy.

    ``None`` if they pad more than the result's best order. Splits of whole lanes move as tiles do.

    Args:
        t: Type of the operand.
        order: Order of the operand.
        result: Type of the result.
    """
    if len(t.shape) < 2 or len(result.shape) < 2:
        return None
    orders = _orders(result)
    best = orders[0]
    minor, own = result.shape[best[0]], t.shape[order[0]]
    if minor != own and minor % LANES == 0 and own % LANES == 0 and best[0] == len(best) - 1:
        return None
    limit = padded_size(result, best)
    for made in orders:
        if padded_size(result, made) > limit:
            return None
        before = reshaped(result.shape, made, t.shape)
        if before is not None:
            return before, made
    return None


def groups_of(shape: Sequence[int], result: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Match groups of dimensions with the same elements in two shapes: minimal, without ones."""
    a = [d for d, size in enumerate(shape) if size != 1]
    b = [d for d, size in enumerate(result) if size != 1]
    groups = []
    while a and b:
        before, after = [a.pop(0)], [b.pop(0)]
        x, y = shape[before[0]], result[after[0]]
        while x != y:
            if x < y and a:
                before.append(a.pop(0))
                x *= shape[before[-1]]
            elif b:
                after.append(b.pop(0))
                y *= result[after[-1]]
            else:
                break
        groups.append((before, after))
    return groups


def spaced(shape: Sequence[int], order: Iterable[int]) -> list[int]:
    """Drop the dimensions of size one, which take no memory, from an order."""
    return [d for d in order if shape[d] != 1]


def _sizes(shape: Sequence[int], spaced: Sequence[int]) -> list[int]:
    return [shape[d] for d in spaced]


def _same_tiles(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether equal elements with these sizes (minor to major) have the same memory layout.

    Whole tiles of rows can be split and merged, and a vector of whole tiles is stored as rows of
    128.
    """
    (lanes, rows), (new_lanes, new_rows) = ((*sizes, 1, 1)[:2] for sizes in (before, after))
    if lanes == new_lanes:
        return rows == new_rows or (rows % SUBLANES == 0 and new_rows % SUBLANES == 0)
    vectors = ((before, new_lanes), (after, lanes))
    return any(
        len(sizes) == 1 and sizes[0] % (LANES * SUBLANES) == 0 and other == LANES
        for sizes, other in vectors
    )
