"""ATen operators that create, view, move or look up values, in JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .table import Call, Operand, Scalar, Translation, aten, enter, plain

#: Index of an array in one dimension.
_Place = slice | int | jax.Array

#: PyTorch's numbers for modes of embedding bags; 0 is a sum.
_MEAN, _MAX = 1, 2


@aten("cat")
def _cat(call: Call, parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    # PyTorch allows an empty vector to be concatenated with anything.
    full = [p.astype(call.dtype) for p in parts if p.shape != (0,)] or list(parts)
    return jnp.concatenate(full, dim)


@aten("unfold")
def _unfold(call: Call, x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    own = dim % x.ndim
    starts = np.arange(0, x.shape[own] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=own)
    return jnp.moveaxis(windows, own + 1, -1)


def _at(x: jax.Array, dim: int, place: _Place) -> tuple[_Place, ...]:
    return (slice(None),) * (dim % x.ndim) + (place,)


def _range(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[_Place, ...]:
    """Return the index for a slice of a dimension; arguments as in ``aten.slice``."""
    # PyTorch's "to the end" is the largest int64.
    size = x.shape[dim]
    stop = size if end is None or end >= size else end
    return _at(x, dim, slice(start or 0, stop, step))


@aten("index")
def _index(call: Call, x: jax.Array, places: Sequence[jax.Array | None]) -> jax.Array:
    if any(p is not None and p.dtype == jnp.bool_ for p in places):
        raise NotImplementedError("the shape of what a mask selects depends on its values")
    return x[tuple(slice(None) if p is None else p for p in places)]


@aten("index_put")
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


def _leading(x: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    """Return the part of an array that an index of a smaller shape covers."""
    return x[
        tuple(slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape))
    ]


def _covered(new: jax.Array, index: jax.Array) -> jax.Array:
    """Return the part of new values for which an index has entries."""
    return new[tuple(slice(0, n) for n in index.shape)]


def _grid(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = index
    return tuple(grid)


@aten("scatter.src", "scatter.value")
def _scatter(call: Call, x: jax.Array, dim: int, index: jax.Array, new: Operand) -> jax.Array:
    values = _covered(new, index) if isinstance(new, jax.Array) else new
    return x.at[_grid(x, dim, index)].set(values)


#: Reductions of :func:`_scatter_reduce` with their neutral values; a mean is a sum that is divided
#: afterwards.
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
    # Elements without new values stay.
    return jnp.where(count > 0, total / jnp.maximum(count, 1), total).astype(x.dtype)


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
    """Return sums, means or maxima of each bag's rows; a bag extends to the next offset."""
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
    # Indices of bags are kept only for gradients; the translation rejects unpacking them.
    return (total,)


def _pairs(x: jax.Array, pads: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding of every dimension; PyTorch lists pairs from the last dimension on."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


@aten("constant_pad_nd")
def _pad(call: Call, x: jax.Array, pads: Sequence[int], value: Scalar = 0) -> jax.Array:
    widths = [(low, high, 0) for low, high in _pairs(x, pads)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), widths)


@aten("arange")
def _arange(
    call: Call, first: float, end: float | None = None, step: float = 1, **_: object
) -> jax.Array:
    start, stop = (0, first) if end is None else (first, end)
    return jnp.arange(start, stop, step).astype(call.dtype)


@aten("full", "full_like")
def _full(call: Call, *given: Operand | list[int], **_: object) -> jax.Array:
    value = given[-1]
    assert not isinstance(value, list), "sizes come before the value"
    return jnp.full(call.shape, value, call.dtype)


@aten("randint", "randint.low", "randint_like")
def _randint(call: Call, *bounds: object, **_: object) -> jax.Array:
    numbers = [b for b in bounds if isinstance(b, int)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    return jax.random.randint(call.key(), call.shape, low, high, call.dtype)


enter(
    {
        "permute permute_copy": jnp.transpose,
        "slice slice_copy": lambda x, *at, **named: x[_range(x, *at, **named)],
        "slice_scatter": lambda x, new, *at, **named: x.at[_range(x, *at, **named)].set(
            new.astype(x.dtype)
        ),
        "repeat": jnp.tile,
        "flip": jnp.flip,
        "roll": lambda x, shifts, dims=(): jnp.roll(
            x, tuple(shifts) if dims else shifts[0], tuple(dims) or None
        ),
        "diagonal": jnp.diagonal,
        "split_with_sizes": lambda x, sizes, dim=0: jnp.split(
            x, np.cumsum(sizes)[:-1].tolist(), dim
        ),
        "select select_copy": lambda x, dim, index: x[_at(x, dim, index % x.shape[dim])],
        "index_select": lambda x, dim, index: jnp.take(x, index, axis=dim, mode="clip"),
        "embedding": lambda table, index, *_, **__: jnp.take(table, index, axis=0, mode="clip"),
        "gather": lambda x, dim, index, **_: jnp.take_along_axis(
            _leading(x, index, dim), index, axis=dim, mode="clip"
        ),
        "scatter_add": lambda x, dim, index, new: x.at[_grid(x, dim, index)].add(
            _covered(new, index)
        ),
        "bucketize.Tensor bucketize.Scalar": lambda x, bounds, *, right=False, **_: (
            jnp.searchsorted(bounds, jnp.asarray(x), side="right" if right else "left")
        ),
    },
    plain,
)
#: Functions of the call and the operator's own arguments.
_OF_CALL: dict[str, Translation] = {
    "view view_copy": lambda call, x, *_: (
        x.reshape(call.shape) if x.dtype == call.dtype else x.view(call.dtype)
    ),
    "expand": lambda call, x, *_, **__: jnp.broadcast_to(x, call.shape),
    "squeeze unsqueeze": lambda call, x, *_: x.reshape(call.shape),
    "empty empty_permuted new_empty_strided": lambda call, *_, **__: jnp.zeros(
        call.shape, call.dtype
    ),
    "scalar_tensor": lambda call, value, **_: jnp.asarray(value, call.dtype),
    "rand rand_like": lambda call, *_, **__: jax.random.uniform(call.key(), call.shape, call.dtype),
    "randn randn_like": lambda call, *_, **__: jax.random.normal(
        call.key(), call.shape, call.dtype
    ),
    "randperm": lambda call, count, **_: jax.random.permutation(call.key(), count),
    "bernoulli.p bernoulli": lambda call, x, p=None, **_: jax.random.bernoulli(
        call.key(), x if p is None else p, call.shape
    ),
}
enter(_OF_CALL)
