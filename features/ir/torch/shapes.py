"""ATen operators that make, view, move or look up values, in JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .table import Call, Operand, Scalar, as_dims, aten

#: What an array is indexed with in one dimension.
_Place = slice | int | jax.Array

#: Modes of bags of embeddings by PyTorch's numbers; 0 is a sum.
_MEAN, _MAX = 1, 2


@aten("view", "_unsafe_view", "reshape", "view_copy", "unflatten", "flatten")
def _view(call: Call, x: jax.Array, *_: object) -> jax.Array:
    if x.dtype != call.dtype:
        return x.view(call.dtype)
    return x.reshape(call.shape)


@aten("permute", "permute_copy")
def _permute(call: Call, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, as_dims(list(dims), x.ndim) if dims else ())


@aten("transpose", "transpose_copy")
def _transpose(call: Call, x: jax.Array, a: int, b: int) -> jax.Array:
    return jnp.swapaxes(x, a, b)


@aten("t", "t_copy", "numpy_T")
def _t(call: Call, x: jax.Array) -> jax.Array:
    return x.T


@aten("expand", "expand_copy")
def _expand(call: Call, x: jax.Array, *_: object, **__: object) -> jax.Array:
    return jnp.broadcast_to(x, call.shape)


@aten("squeeze", "squeeze_copy", "unsqueeze", "unsqueeze_copy")
def _reshaped(call: Call, x: jax.Array, *_: object) -> jax.Array:
    return x.reshape(call.shape)


@aten("repeat")
def _repeat(call: Call, x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(repeats))


@aten("repeat_interleave.self_int")
def _repeat_interleave(
    call: Call, x: jax.Array, count: int, dim: int | None = None, **_: object
) -> jax.Array:
    return jnp.repeat(x, count, axis=dim)


@aten("cat", "concat")
def _cat(call: Call, parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    # An empty vector joins anything in PyTorch.
    full = [p.astype(call.dtype) for p in parts if p.shape != (0,)] or list(parts)
    return jnp.concatenate(full, dim)


@aten("stack")
def _stack(call: Call, parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack([p.astype(call.dtype) for p in parts], dim)


@aten("split_with_sizes", "split_with_sizes_copy")
def _split_sizes(call: Call, x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


@aten("split.Tensor")
def _split(call: Call, x: jax.Array, size: int, dim: int = 0) -> list[jax.Array]:
    return jnp.split(x, list(range(size, x.shape[dim], size)), dim)


@aten("chunk")
def _chunk(call: Call, x: jax.Array, count: int, dim: int = 0) -> list[jax.Array]:
    return _split(call, x, -(-x.shape[dim] // count), dim)


@aten("unbind")
def _unbind(call: Call, x: jax.Array, dim: int = 0) -> list[jax.Array]:
    return [jnp.squeeze(part, dim) for part in jnp.split(x, x.shape[dim], dim)]


@aten("unfold", "unfold_copy")
def _unfold(call: Call, x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    own = dim % x.ndim
    starts = np.arange(0, x.shape[own] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=own)
    return jnp.moveaxis(windows, own + 1, -1)


def _at(x: jax.Array, dim: int, place: _Place) -> tuple[_Place, ...]:
    return (slice(None),) * (dim % x.ndim) + (place,)


def _range(
    x: jax.Array, dim: int, start: int | None, end: int | None, step: int
) -> tuple[_Place, ...]:
    # PyTorch's "to the end" is the largest int64.
    size = x.shape[dim]
    stop = size if end is None or end >= size else end
    return _at(x, dim, slice(start or 0, stop, step))


@aten("slice", "slice_copy")
def _slice(
    call: Call,
    x: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    return x[_range(x, dim, start, end, step)]


@aten("slice_scatter")
def _slice_scatter(
    call: Call,
    x: jax.Array,
    new: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    return x.at[_range(x, dim, start, end, step)].set(new.astype(x.dtype))


@aten("select", "select_copy")
def _select(call: Call, x: jax.Array, dim: int, index: int) -> jax.Array:
    return x[_at(x, dim, index % x.shape[dim])]


@aten("select_scatter")
def _select_scatter(call: Call, x: jax.Array, new: jax.Array, dim: int, index: int) -> jax.Array:
    return x.at[_at(x, dim, index)].set(new.astype(x.dtype))


@aten("narrow")
def _narrow(call: Call, x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    return x[_range(x, dim, start, start + length, 1)]


@aten("index_select")
def _index_select(call: Call, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=dim, mode="clip")


@aten("index", "_unsafe_index")
def _index(call: Call, x: jax.Array, places: Sequence[jax.Array | None]) -> jax.Array:
    if any(p is not None and p.dtype == jnp.bool_ for p in places):
        raise NotImplementedError("the shape of what a mask selects depends on its values")
    return x[tuple(slice(None) if p is None else p for p in places)]


@aten("index_put", "_unsafe_index_put")
def _index_put(
    call: Call,
    x: jax.Array,
    places: Sequence[jax.Array | None],
    new: jax.Array,
    accumulate: bool = False,
) -> jax.Array:
    at = tuple(slice(None) if p is None else p for p in places)
    masks = [p for p in places if p is not None and p.dtype == jnp.bool_]
    if masks:
        if new.size != 1 or accumulate or len(places) > 1:
            raise NotImplementedError("how many values a mask takes depends on its values")
        mask = masks[0].reshape(masks[0].shape + (1,) * (x.ndim - masks[0].ndim))
        return jnp.where(mask, new.astype(x.dtype), x)
    target = x.at[at]
    return target.add(new.astype(x.dtype)) if accumulate else target.set(new.astype(x.dtype))


@aten("gather")
def _gather(call: Call, x: jax.Array, dim: int, index: jax.Array, **_: object) -> jax.Array:
    return jnp.take_along_axis(_leading(x, index, dim), index, axis=dim, mode="clip")


def _leading(x: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    """The part that an index of a smaller shape reaches."""
    return x[
        tuple(slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape))
    ]


def _covered(new: jax.Array, index: jax.Array) -> jax.Array:
    """The part of new values that an index has places for."""
    return new[tuple(slice(0, n) for n in index.shape)]


def _grid(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = index
    return tuple(grid)


@aten("scatter.src", "scatter.value")
def _scatter(call: Call, x: jax.Array, dim: int, index: jax.Array, new: Operand) -> jax.Array:
    values = _covered(new, index) if isinstance(new, jax.Array) else new
    return x.at[_grid(x, dim, index)].set(values)


@aten("scatter_add")
def _scatter_add(call: Call, x: jax.Array, dim: int, index: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[_grid(x, dim, index)].add(_covered(new, index))


#: Reductions of :func:`_scatter_reduce`: how values meet, and what changes none; a mean is a sum,
#: divided afterwards.
_SCATTERS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -np.inf, "amin": np.inf}


@aten("scatter_reduce.two")
def _scatter_reduce(
    call: Call,
    x: jax.Array,
    dim: int,
    index: jax.Array,
    new: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    grid, values = _grid(x, dim, index), _covered(new, index)
    least = _SCATTERS[reduce]
    if not jnp.issubdtype(x.dtype, jnp.inexact) and np.isinf(least):
        limits = jnp.iinfo(x.dtype)
        least = limits.min if least < 0 else limits.max
    start = x if include_self else x.at[grid].set(jnp.asarray(least, x.dtype))
    own = start.at[grid]
    if reduce == "prod":
        return own.multiply(values)
    if reduce in ("amax", "amin"):
        return own.max(values) if reduce == "amax" else own.min(values)
    total = own.add(values)
    if reduce == "sum":
        return total
    count = jnp.full(x.shape, int(include_self)).at[grid].add(1)
    # What no value meets stays.
    return jnp.where(count > 0, total / jnp.maximum(count, 1), total).astype(x.dtype)


@aten("bucketize.Tensor", "bucketize.Scalar")
def _bucketize(
    call: Call, x: Operand, bounds: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return jnp.searchsorted(bounds, jnp.asarray(x), side="right" if right else "left")


@aten("index_add")
def _index_add(
    call: Call, x: jax.Array, dim: int, index: jax.Array, new: jax.Array, alpha: Scalar = 1
) -> jax.Array:
    return x.at[_at(x, dim, index)].add((new * alpha).astype(x.dtype))


@aten("embedding")
def _embedding(
    call: Call, table: jax.Array, index: jax.Array, *_: object, **__: object
) -> jax.Array:
    return jnp.take(table, index, axis=0, mode="clip")


@aten("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    call: Call,
    table: jax.Array,
    index: jax.Array,
    offsets: jax.Array,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: jax.Array | None = None,
    last: bool = False,
    padding: int = -1,
) -> tuple[jax.Array, ...]:
    """Sums, means or maxima of the rows of each bag; a bag is from its offset to the next one."""
    bags = call.shape[0]
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(index.shape[0]), side="right") - 1
    rows = jnp.take(table, index, axis=0, mode="clip")
    counted = (index != padding)[:, None] if padding >= 0 else jnp.ones((1, 1), bool)
    if mode == _MAX:
        least = jnp.where(counted, rows, jnp.finfo(rows.dtype).min)
        most = jax.ops.segment_max(least, bag, bags, indices_are_sorted=True)
        return (jnp.where(most > jnp.finfo(rows.dtype).min, most, 0),)
    rows = jnp.where(counted, rows if weights is None else rows * weights[:, None], 0)
    total = jax.ops.segment_sum(rows, bag, bags, indices_are_sorted=True)
    if mode == _MEAN:
        ones = jnp.broadcast_to(counted[:, 0], index.shape).astype(total.dtype)
        size = jax.ops.segment_sum(ones, bag, bags, indices_are_sorted=True)
        total = total / jnp.maximum(size, 1)[:, None]
    # Which bag a row belongs to is kept for gradients; the translation refuses to unpack it.
    return (total,)


@aten("flip")
def _flip(call: Call, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, tuple(dims))


@aten("roll")
def _roll(call: Call, x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@aten("diagonal", "diagonal_copy")
def _diagonal(call: Call, x: jax.Array, offset: int = 0, a: int = 0, b: int = 1) -> jax.Array:
    return jnp.diagonal(x, offset, a, b)


@aten("tril")
def _tril(call: Call, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(x, diagonal)


@aten("triu")
def _triu(call: Call, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(x, diagonal)


def _pairs(x: jax.Array, pads: Sequence[int]) -> list[tuple[int, int]]:
    """Padding of every dimension; PyTorch lists pairs from the last dimension on."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


@aten("constant_pad_nd")
def _pad(call: Call, x: jax.Array, pads: Sequence[int], value: Scalar = 0) -> jax.Array:
    widths = [(low, high, 0) for low, high in _pairs(x, pads)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), widths)


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflect(call: Call, x: jax.Array, pads: Sequence[int]) -> jax.Array:
    return jnp.pad(x, _pairs(x, pads), mode="reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replicate(call: Call, x: jax.Array, pads: Sequence[int]) -> jax.Array:
    return jnp.pad(x, _pairs(x, pads), mode="edge")


@aten("arange")
def _arange(
    call: Call, first: float, end: float | None = None, step: float = 1, **_: object
) -> jax.Array:
    start, stop = (0, first) if end is None else (first, end)
    return jnp.arange(start, stop, step).astype(call.dtype)


@aten("full", "full_like", "new_full")
def _full(call: Call, *given: Operand | list[int], **_: object) -> jax.Array:
    value = given[-1]
    assert not isinstance(value, list), "sizes come before the value"
    return jnp.full(call.shape, value, call.dtype)


@aten(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty",
    "empty_like",
    "new_empty",
    "empty_permuted",
    "new_empty_strided",
)
def _zeros(call: Call, *_: object, **__: object) -> jax.Array:
    return jnp.zeros(call.shape, call.dtype)


@aten("ones", "ones_like", "new_ones")
def _ones(call: Call, *_: object, **__: object) -> jax.Array:
    return jnp.ones(call.shape, call.dtype)


@aten("fill")
def _fill(call: Call, x: jax.Array, value: Operand) -> jax.Array:
    return jnp.full(call.shape, value, call.dtype)


@aten("scalar_tensor")
def _scalar(call: Call, value: Scalar, **_: object) -> jax.Array:
    return jnp.asarray(value, call.dtype)


@aten("eye")
def _eye(call: Call, *_: object, **__: object) -> jax.Array:
    rows, columns = call.shape
    return jnp.eye(rows, columns, dtype=call.dtype)


@aten("linspace")
def _linspace(call: Call, start: float, end: float, steps: int, **_: object) -> jax.Array:
    return jnp.linspace(start, end, steps, dtype=call.dtype)


@aten("rand", "rand_like")
def _rand(call: Call, *_: object, **__: object) -> jax.Array:
    return jax.random.uniform(call.key(), call.shape, call.dtype)


@aten("randn", "randn_like")
def _randn(call: Call, *_: object, **__: object) -> jax.Array:
    return jax.random.normal(call.key(), call.shape, call.dtype)


@aten("randint", "randint.low", "randint_like")
def _randint(call: Call, *bounds: object, **_: object) -> jax.Array:
    numbers = [b for b in bounds if isinstance(b, int)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    return jax.random.randint(call.key(), call.shape, low, high, call.dtype)


@aten("randperm")
def _randperm(call: Call, count: int, **_: object) -> jax.Array:
    return jax.random.permutation(call.key(), count).astype(call.dtype)


@aten("bernoulli.p", "bernoulli")
def _bernoulli(call: Call, x: jax.Array, p: Operand | None = None, **_: object) -> jax.Array:
    return jax.random.bernoulli(call.key(), x if p is None else p, call.shape).astype(call.dtype)
