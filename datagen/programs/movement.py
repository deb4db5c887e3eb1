"""Ops that move data: layouts, slices, padding, indexing by values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .draws import VOCABULARIES, WIDTHS, Draft, Draws, indices, values
from .source import Arg, numpy_dtype

#: Types that data movement also sees besides floats: tokens, quantised values, masks.
_EXTRA = ("s32", "s8", "pred")


def _dtype(draws: Draws) -> str:
    return draws.dtype(*_EXTRA) if draws.flip(0.12) else draws.dtype()


def _array(draws: Draws, copies: float, *ranks: int) -> Arg:
    return draws.array(copies, ranks=ranks, dtype=_dtype(draws))


def _part(draws: Draws, size: int) -> int:
    """Draw the size of a part of a dimension: half, a quarter, most of it, or any."""
    options = (size // 2, size // 4, size - 1, draws.integer(1, size))
    return max(1, draws.choice(options))


def broadcast(draws: Draws) -> Draft:
    """Draw a broadcast of any subset of the dimensions."""
    arg = _array(draws, 1.3, 2, 3, 4)
    kept = tuple(d for d in range(len(arg.shape)) if draws.flip(0.45))
    operand = values(tuple(arg.shape[d] for d in kept), arg.dtype)
    return Draft(lambda x: lax.broadcast_in_dim(x, arg.shape, kept), (operand,))


def transpose(draws: Draws) -> Draft:
    """Draw a transpose of the two minor dimensions, heads, image layouts, or any permutation."""
    arg = _array(draws, 2, 2, 2, 3, 4, 4, 5)
    rank = len(arg.shape)
    order = list(range(rank))
    form = draws.choice(("minor", "random", "heads", "image"))
    if form == "heads" and rank == 4:
        order = [0, 2, 1, 3]
    elif form == "image" and rank == 4:
        order = draws.choice(([0, 3, 1, 2], [0, 2, 3, 1]))
    elif form == "random" and rank > 2:
        order = [int(i) for i in draws.rng.permutation(rank)]
    # An identity would be removed by the compiler: swap the minor dimensions instead.
    if order == sorted(order):
        order[-2:] = order[:-3:-1]
    return Draft(lambda x: lax.transpose(x, order), (arg,), "".join(map(str, order)))


def reshape(draws: Draws) -> Draft:
    """Draw a reshape; half of the time behind a transpose, so that it copies."""
    arg = _array(draws, 3, 2, 3, 4)
    flat = (arg.shape[0], -1) if draws.flip() else (-1, arg.shape[-1])
    if draws.flip():
        return Draft(lambda x: jnp.reshape(x, flat), (arg,))
    return Draft(lambda x: jnp.reshape(jnp.swapaxes(x, 0, -1), (-1,)), (arg,), "copy")


def slice_op(draws: Draws) -> Draft:
    """Draw a slice of one or of all dimensions, sometimes strided."""
    arg = _array(draws, 2)
    shape = arg.shape
    axis = draws.integer(0, len(shape) - 1)
    starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
    for d in range(len(shape)):
        if d == axis or draws.flip(0.3):
            part = _part(draws, shape[d])
            starts[d] = draws.integer(0, shape[d] - part)
            limits[d] = starts[d] + part
            strides[d] = draws.choice((1, 1, 1, 2, 3))
    return Draft(lambda x: lax.slice(x, starts, limits, strides), (arg,))


def dynamic_slice(draws: Draws) -> Draft:
    """Draw a slice at positions that are arguments."""
    arg = _array(draws, 2)
    shape = arg.shape
    axis = draws.integer(0, len(shape) - 1)
    sizes = [_part(draws, n) if d == axis else n for d, n in enumerate(shape)]

    def function(x: jax.Array, start: jax.Array) -> jax.Array:
        starts = [start if d == axis else 0 for d in range(len(shape))]
        return lax.dynamic_slice(x, starts, sizes)

    return Draft(function, (arg, indices((), shape[axis] - sizes[axis] + 1)))


def dynamic_update_slice(draws: Draws) -> Draft:
    """Draw an update of a part, as of a key-value cache."""
    arg = _array(draws, 3)
    shape = arg.shape
    axis = draws.integer(0, len(shape) - 1)
    # A decoding step writes one position of a cache.
    part = 1 if draws.flip() else _part(draws, shape[axis])
    update = tuple(part if d == axis else n for d, n in enumerate(shape))

    def function(x: jax.Array, y: jax.Array, start: jax.Array) -> jax.Array:
        starts = [start if d == axis else 0 for d in range(len(shape))]
        return lax.dynamic_update_slice(x, y, starts)

    return Draft(function, (arg, values(update, arg.dtype), indices((), shape[axis] - part + 1)))


def pad(draws: Draws) -> Draft:
    """Draw padding with a low, high and sometimes an inner part; sometimes negative."""
    # Six copies: padding around and between elements may triple the result.
    arg = _array(draws, 6)
    config = []
    for size in arg.shape:
        if not draws.flip(0.6):
            config.append((0, 0, 0))
            continue
        low, high = draws.integer(0, 3), draws.integer(0, 3)
        # Negative padding cuts, as gradients of padded windows do.
        if size > 4 and draws.flip(0.1):
            low = -1
        config.append((low, high, 1 if draws.flip(0.15) else 0))
    zero = numpy_dtype(arg.dtype).type(0)
    return Draft(lambda x: lax.pad(x, zero, config), (arg,))


def concatenate(draws: Draws) -> Draft:
    """Draw a concatenation of two to six arrays of equal or different sizes."""
    dtype = _dtype(draws)
    count = draws.choice((2, 2, 2, 3, 4, 6))
    shape = draws.shape(draws.elements(dtype, 2 * count))
    axis = draws.integer(0, len(shape) - 1)
    args = []
    for _ in range(count):
        size = shape[axis] if draws.flip(0.7) else _part(draws, shape[axis])
        args.append(values((*shape[:axis], size, *shape[axis + 1 :]), dtype))
    return Draft(lambda *xs: lax.concatenate(xs, axis), tuple(args), f"{count}")


def reverse(draws: Draws) -> Draft:
    """Draw a reversal of one or more dimensions."""
    arg = _array(draws, 2)
    rank = len(arg.shape)
    dims = [d for d in range(rank) if draws.flip(0.4)] or [rank - 1]
    return Draft(lambda x: lax.rev(x, dims), (arg,))


def iota(draws: Draws) -> Draft:
    """Counting numbers along a dimension, alone or scaled by an argument."""
    dtype = draws.dtype("s32", draws.dtype())
    shape = draws.shape(draws.elements(dtype, 1.5))
    axis, kind = draws.integer(0, len(shape) - 1), numpy_dtype(dtype)
    if draws.flip(0.3):
        return Draft(lambda: lax.broadcasted_iota(kind, shape, axis), ())
    return Draft(lambda x: lax.broadcasted_iota(kind, shape, axis) * x, (values((), dtype, 0.01),))


def copy_tile(draws: Draws) -> Draft:
    """Draw a tiling or a repetition, as of heads that share keys."""
    arg = _array(draws, 8, 2, 3, 4)
    count, axis = draws.choice((2, 4)), draws.integer(0, len(arg.shape) - 1)
    if draws.flip():
        return Draft(lambda x: jnp.repeat(x, count, axis), (arg,), "repeat")
    return Draft(lambda x: jnp.tile(x, count), (arg,), "tile")


def _table(draws: Draws, dtype: str, share: float) -> tuple[int, int]:
    """Draw rows and width of a table within a share of the memory."""
    elements = draws.elements(dtype, 1 / share)
    if draws.flip():
        sizes = draws.closest(
            lambda: (draws.choice((*VOCABULARIES, *WIDTHS)), draws.choice(WIDTHS)),
            lambda s: s[0] * s[1],
            elements,
        )
        if sizes is not None:
            return sizes
    rows, width = draws.split(elements, 2, 3.0)
    return rows, width


def gather(draws: Draws) -> Draft:
    """Draw a gather: rows of a table, elements along a dimension, or windows."""
    dtype = draws.dtype()
    rows, width = _table(draws, dtype, 0.4)
    form = draws.weighted({"rows": 0.6, "along": 0.2, "columns": 0.1, "windows": 0.1})
    table = values((rows, width), dtype)
    if form == "along":
        picks = draws.size(1, max(1, width))
        arg = indices((rows, picks), width)
        return Draft(lambda x, i: jnp.take_along_axis(x, i, 1, mode="clip"), (table, arg), form)
    if form == "columns":
        arg = indices((max(1, width // 2),), width)
        return Draft(lambda x, i: jnp.take(x, i, 1, mode="clip"), (table, arg), form)
    # The result gets as much of the memory as the table.
    most = max(1, min(65536, int(draws.max_bytes * 0.4 / (4 * width))))
    count = draws.size(1, most)
    if form == "rows":
        # Each mode lowers to other code: clamped, masked, or unchecked indices.
        mode = draws.choice(("clip", "fill", "promise_in_bounds"))
        shape = (count,) if draws.flip() else draws.split(count, 2)
        return Draft(lambda x, i: x.at[i].get(mode=mode), (table, indices(shape, rows)), form)
    window = draws.integer(1, min(8, rows))
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))

    def windows(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.gather(x, i[:, None], numbers, (window, width), mode="clip")

    return Draft(windows, (table, indices((max(1, count // window),), rows - window + 1)), form)


def scatter(draws: Draws) -> Draft:
    """Draw a scatter: rows added to, written into or maximised with a table; or single elements."""
    dtype = draws.dtype()
    rows, width = _table(draws, dtype, 0.25)
    form = draws.weighted({"add": 0.6, "set": 0.2, "max": 0.1, "points": 0.1})
    # A scatter counts 600 of work per element (``cost``): half of the limit is used.
    most = max(1, min(16384, int(min(draws.max_bytes / 16, draws.max_flops / 1200) / width)))
    count = draws.size(1, most)
    table = values((rows, width), dtype)
    if form == "points":
        args = (table, indices((count,), rows), indices((count,), width), values((count,), dtype))
        return Draft(lambda x, i, j, y: x.at[i, j].add(y, mode="drop"), args, form)

    def function(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
        at = x.at[i]
        if form == "add":
            return at.add(y, mode="drop")
        return at.set(y, mode="drop") if form == "set" else at.max(y, mode="drop")

    args3 = (table, indices((count,), rows), values((count, width), dtype))
    return Draft(function, args3, form)


def one_hot(draws: Draws) -> Draft:
    """Draw one-hot rows, scaled by an argument."""
    dtype = draws.dtype()
    classes = draws.choice((10, 16, 100, 1000, 32, 128))
    count = max(1, draws.elements(dtype, 3) // classes)
    kind = numpy_dtype(dtype)

    # As jax.nn.one_hot lowers: iota, comparison, conversion.
    def function(i: jax.Array, scale: jax.Array) -> jax.Array:
        positions = lax.broadcasted_iota(jnp.int32, (count, classes), 1)
        return (i[:, None] == positions).astype(kind) * scale

    return Draft(function, (indices((count,), classes), Arg((), dtype)))
