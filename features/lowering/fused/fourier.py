"""Expand Fourier transforms into matrix products, as the TPU's compiler does (JAX 0.10, v5e).

A transform of up to :data:`DIRECT` elements, or of a length that is no power of two, is one product
with a matrix of cosines and sines; a longer one is a transform of both factors of its length, with
a rotation between them (Cooley and Tukey, Math. Comp. 19, 1965). A complex product takes three real
ones (Gauss). The results have the right shapes and work, not the right numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ir.program import TensorType
from .folding import padded, reshape, splat_node, spread, transposed
from .graph import Node

#: Longest transform by a single product, factor of longer ones, and the longest of two factors.
DIRECT, FACTOR, LONGEST = 256, 128, 128 * 128


class _Parts(NamedTuple):
    """A complex array."""

    real: Node
    imag: Node


def fourier(node: Node) -> Node | None:
    """Expand a transform of 32-bit numbers; ``None`` for others.

    Args:
        node: An ``fft``.
    """
    source, kind = node.operands[0], str(node.attrs.get("fft_type", "FFT"))
    lengths = tuple(node.attrs.get("fft_length", ()))
    rank = len(source.type.shape)
    if source.type.dtype not in ("f32", "c64") or not 0 < len(lengths) <= rank:
        return None
    dims = list(range(rank - len(lengths), rank))
    if source.type.dtype == "f32":
        parts = _Parts(source, splat_node(0.0, source.type))
        last = _along(parts, rank - 1)
        half = node.type.shape[-1]
        parts = _Parts(*(_cut(part, 0, half) for part in last))
        dims.pop()
    else:
        plain = TensorType("f32", source.type.shape)
        parts = _Parts(*(_op(name, plain.shape, source) for name in ("real", "imag")))
    if kind == "IRFFT":
        parts = _whole(parts, lengths[-1])
    for dim in dims:
        parts = _along(parts, dim)
    if node.type.dtype == "f32":
        return parts.real
    return Node("complex", list(parts), node.results, source=node.source)


def _op(opcode: str, shape: tuple[int, ...], *operands: Node) -> Node:
    return Node(opcode, list(operands), (TensorType("f32", shape),), source=operands[0].source)


def _cut(node: Node, start: int, end: int) -> Node:
    """Return a range of the last dimension."""
    shape = node.type.shape
    if (start, end) == (0, shape[-1]):
        return node
    attrs = {"slice": (*((0, n, 1) for n in shape[:-1]), (start, end, 1))}
    kind = (TensorType("f32", (*shape[:-1], end - start)),)
    return Node("slice", [node], kind, attrs, source=node.source)


def _whole(parts: _Parts, length: int) -> _Parts:
    """Complete the spectrum of a real signal: its second half is the first, reversed."""
    found = []
    for part in parts:
        *outer, half = part.type.shape
        rest = _cut(part, 1, length - half + 1)
        attrs = {"dimensions": (len(outer),)}
        back = Node("reverse", [rest], rest.results, attrs, source=part.source)
        if part is parts.imag:
            back = _op("negate", back.type.shape, back)
        zero = splat_node(float("-inf"), TensorType("f32"))
        still = [(0, 0, 0)] * len(outer)
        both = (
            padded(part, [*still, (0, length - half, 0)], zero, part.source),
            padded(back, [*still, (half, 0, 0)], zero, part.source),
        )
        found.append(_op("maximum", (*outer, length), *both))
    return _Parts(*found)


def _along(parts: _Parts, dim: int) -> _Parts:
    """Transform one dimension."""
    shape = parts.real.type.shape
    order = (*(d for d in range(len(shape)) if d != dim), dim)
    back = tuple(order.index(d) for d in range(len(shape)))
    moved = _Parts(*(transposed(part, order) for part in parts))
    return _Parts(*(transposed(part, back) for part in _last(moved)))


def _last(parts: _Parts) -> _Parts:
    """Transform the last dimension."""
    *outer, length = parts.real.type.shape
    if length <= DIRECT or length & (length - 1):
        return _product(parts, len(outer))
    first = FACTOR if length <= LONGEST else DIRECT
    second, lead = length // first, tuple(outer)
    parts = _Parts(*(reshape(part, (*lead, first, second)) for part in parts))
    # (…, second, first), turned by an angle for each pair.
    parts = _turned(_product(parts, len(lead)))
    swap = (*range(len(lead)), len(lead) + 1, len(lead))
    parts = _last(_Parts(*(transposed(part, swap) for part in parts)))
    return _Parts(*(reshape(transposed(part, swap), (*lead, length)) for part in parts))


def _product(parts: _Parts, dim: int) -> _Parts:
    """Multiply a dimension by cosines and sines, which become the last one: three products."""
    shape = parts.real.type.shape
    size = shape[dim]
    table = TensorType("f32", (size, size))
    angles = Node("iota", [], (table,), {"dimensions": (0,)}, source=parts.real.source)
    kept = (*(n for d, n in enumerate(shape) if d != dim), size)
    attrs = {"lhs_contracting_dims": (dim,), "rhs_contracting_dims": (0,)}
    no_batch: dict[str, tuple[int, ...]] = {"lhs_batch_dims": (), "rhs_batch_dims": ()}

    def by(left: Node, function: str) -> Node:
        operands = [left, _op(function, (size, size), angles)]
        kind = (TensorType("f32", kept),)
        return Node("dot", operands, kind, {**attrs, **no_batch}, source=left.source)

    both = by(_op("add", shape, *parts), "cosine")
    real = _op("subtract", kept, both, by(parts.imag, "sine"))
    return _Parts(real, _op("add", kept, both, by(parts.real, "sine")))


def _turned(parts: _Parts) -> _Parts:
    """Multiply by a complex number for each element of the last two dimensions."""
    shape = parts.real.type.shape
    small = TensorType("f32", shape[-2:])
    angles = Node("iota", [], (small,), {"dimensions": (0,)}, source=parts.real.source)
    dims = (len(shape) - 2, len(shape) - 1)
    cosine, sine = (
        spread(_op(function, small.shape, angles), dims, shape, parts.real.source)
        for function in ("cosine", "sine")
    )

    def times(part: Node, factor: Node) -> Node:
        return _op("multiply", shape, part, factor)

    return _Parts(
        _op("subtract", shape, times(parts.real, cosine), times(parts.imag, sine)),
        _op("add", shape, times(parts.real, sine), times(parts.imag, cosine)),
    )
