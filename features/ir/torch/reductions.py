"""ATen operators that reduce, scan, sort or normalise along dimensions, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .table import TABLE, Call, Dims, as_dims, aten, enter, in_f32, plain

#: A weight or bias, if there is one.
_Parameter: TypeAlias = jax.Array | None
#: Values and indices.
_Pair: TypeAlias = tuple[jax.Array, jax.Array]


def _typed(call: Call, x: jax.Array) -> jax.Array:
    """Convert integers to the result's type; floats keep theirs, since XLA accumulates in f32."""
    return x.astype(call.dtype) if not jnp.issubdtype(x.dtype, jnp.inexact) else x


def _reduced(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def translated(
        call: Call, x: jax.Array, dims: Dims = None, keep: bool = False, **_: object
    ) -> jax.Array:
        return function(_typed(call, x), axis=as_dims(dims, x.ndim), keepdims=keep)

    return translated


enter({"sum": jnp.sum, "prod": jnp.prod, "mean": jnp.mean}, _reduced)
enter({"amax": jnp.max, "amin": jnp.min, "any": jnp.any}, _reduced)


def _extreme(
    best: Callable[..., jax.Array], place: Callable[..., jax.Array], other: Callable[..., jax.Array]
) -> Callable[..., jax.Array | _Pair]:
    def translated(
        call: Call, x: jax.Array, dim: int | jax.Array | None = None, keep: bool = False
    ) -> jax.Array | _Pair:
        if dim is None:
            return best(x)
        # With a tensor, the element-wise larger or smaller value.
        if isinstance(dim, jax.Array):
            return other(x, dim)
        return best(x, axis=dim, keepdims=keep), place(x, axis=dim, keepdims=keep)

    return translated


TABLE["aten.max"] = _extreme(jnp.max, jnp.argmax, jnp.maximum)
TABLE["aten.min"] = _extreme(jnp.min, jnp.argmin, jnp.minimum)


@aten("var")
def _var(
    call: Call,
    x: jax.Array,
    dims: Dims = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> jax.Array:
    own = 1 if correction is None else correction
    return jnp.var(in_f32(x), axis=as_dims(dims, x.ndim), correction=own, keepdims=keepdim)


@aten("var_mean")
def _var_mean(
    call: Call, x: jax.Array, dims: Dims = None, *, keepdim: bool = False, **own: float | None
) -> _Pair:
    mean = jnp.mean(x, axis=as_dims(dims, x.ndim), keepdims=keepdim)
    return _var(call, x, dims, keepdim=keepdim, **own), mean


@aten("linalg_vector_norm")
def _norm(
    call: Call, x: jax.Array, order: float = 2, dims: Dims = None, keep: bool = False, **_: object
) -> jax.Array:
    size = jnp.abs(in_f32(x))
    axes = as_dims(dims, x.ndim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=axes, keepdims=keep))
    if order == float("inf"):
        return jnp.max(size, axis=axes, keepdims=keep)
    if order == 0:
        return jnp.sum(size != 0, axis=axes, keepdims=keep).astype(size.dtype)
    return jnp.sum(size**order, axis=axes, keepdims=keep) ** (1.0 / order)


def _running(best: Callable[..., jax.Array]) -> Callable[..., _Pair]:
    def translated(call: Call, x: jax.Array, dim: int) -> _Pair:
        axis = dim % x.ndim
        found = best(x, axis=axis)
        place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        # The last of equal values, as in PyTorch.
        return found, lax.cummax(jnp.where(x == found, place, 0), axis=axis)

    return translated


TABLE["aten.cummax"] = _running(lax.cummax)
TABLE["aten.cummin"] = _running(lax.cummin)


@aten("median")
def _median(call: Call, x: jax.Array) -> jax.Array:
    # The lower of the two middle values, unlike NumPy.
    return jnp.sort(x.reshape(-1))[(x.size - 1) // 2]


@aten("median.dim")
def _median_along(call: Call, x: jax.Array, dim: int, keep: bool = False) -> _Pair:
    return _kthvalue(call, x, (x.shape[dim] - 1) // 2 + 1, dim, keep)


@aten("kthvalue")
def _kthvalue(call: Call, x: jax.Array, k: int, dim: int = -1, keep: bool = False) -> _Pair:
    place = jnp.take(jnp.argsort(x, axis=dim, stable=True), jnp.array([k - 1]), axis=dim)
    values = jnp.take_along_axis(x, place, axis=dim)
    return (values, place) if keep else (jnp.squeeze(values, dim), jnp.squeeze(place, dim))


@aten("_cdist_forward")
def _cdist(call: Call, a: jax.Array, b: jax.Array, p: float, mode: int | None) -> jax.Array:
    apart = jnp.abs(a[..., :, None, :] - b[..., None, :, :])
    return _norm(call, apart, p, -1)


@aten("sort.default", "sort.stable")
def _sort(
    call: Call, x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> _Pair:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@aten("topk")
def _topk(
    call: Call, x: jax.Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> _Pair:
    last = jnp.moveaxis(x, dim, -1)
    values, places = lax.top_k(last if largest else -last, k)
    found = values if largest else -values
    return jnp.moveaxis(found, -1, dim), jnp.moveaxis(places, -1, dim)


def _centred(x: jax.Array, axes: tuple[int, ...], eps: float) -> tuple[jax.Array, ...]:
    """Return normalised values, means and reciprocal deviations over dimensions, in f32."""
    own = in_f32(x)
    mean = jnp.mean(own, axis=axes, keepdims=True)
    scale = lax.rsqrt(jnp.var(own, axis=axes, keepdims=True) + eps)
    return (own - mean) * scale, mean, scale


def _affine(x: jax.Array, weight: _Parameter, bias: _Parameter) -> jax.Array:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _along(parameter: jax.Array, rank: int) -> jax.Array:
    """Broadcast a per-channel parameter (second dimension) over the other dimensions."""
    return parameter.reshape((1, -1) + (1,) * (rank - 2))


def _by_channel(x: jax.Array, weight: _Parameter, bias: _Parameter) -> jax.Array:
    own = None if weight is None else _along(weight, x.ndim)
    return _affine(x, own, None if bias is None else _along(bias, x.ndim))


@aten("native_layer_norm")
def _layer_norm(
    call: Call, x: jax.Array, shape: Sequence[int], weight: _Parameter, bias: _Parameter, eps: float
) -> tuple[jax.Array, ...]:
    found, mean, scale = _centred(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    return _affine(found, weight, bias).astype(x.dtype), mean, scale


@aten("rms_norm")
def _rms_norm(
    call: Call,
    x: jax.Array,
    shape: Sequence[int],
    weight: _Parameter = None,
    eps: float | None = None,
) -> jax.Array:
    own = in_f32(x)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    floor = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    scale = lax.rsqrt(jnp.mean(own * own, axis=axes, keepdims=True) + floor)
    return _affine(own * scale, weight, None).astype(x.dtype)


@aten("native_group_norm")
def _group_norm(
    call: Call,
    x: jax.Array,
    weight: _Parameter,
    bias: _Parameter,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, ...]:
    grouped, mean, scale = _centred(x.reshape(n, groups, -1), (2,), eps)
    found = _by_channel(grouped.reshape(x.shape), weight, bias)
    return found.astype(x.dtype), mean.reshape(n, groups), scale.reshape(n, groups)


@aten("_native_batch_norm_legit_no_training")
def _batch_norm(
    call: Call,
    x: jax.Array,
    weight: _Parameter,
    bias: _Parameter,
    mean: jax.Array,
    var: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    rank = x.ndim
    scale = lax.rsqrt(_along(in_f32(var), rank) + eps)
    found = _by_channel((in_f32(x) - _along(mean, rank)) * scale, weight, bias)
    empty = jnp.zeros((0,), jnp.float32)
    return found.astype(x.dtype), empty, empty


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_alone(
    call: Call,
    x: jax.Array,
    weight: _Parameter,
    bias: _Parameter,
    train: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Normalise by the batch's moments and return these as well, shape ``(channels,)`` each."""
    found, mean, scale = _centred(x, (0, *range(2, x.ndim)), eps)
    out = _by_channel(found, weight, bias).astype(x.dtype)
    return out, mean.reshape(-1), scale.reshape(-1)


@aten("_native_batch_norm_legit_functional")
def _batch_norm_train(
    call: Call,
    x: jax.Array,
    weight: _Parameter,
    bias: _Parameter,
    mean: jax.Array,
    var: jax.Array,
    train: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Normalise by the batch's moments, and update the running moments."""
    if not train:
        same = _batch_norm(call, x, weight, bias, mean, var, momentum, eps)
        return (*same, mean, var)
    out, own, scale = _batch_norm_alone(call, x, weight, bias, train, momentum, eps)
    count = x.size // x.shape[1]
    # The running variance is unbiased, unlike the variance used for normalisation.
    spread = (1.0 / (scale * scale) - eps) * (count / max(count - 1, 1))
    moved = [
        (old * (1 - momentum) + momentum * new).astype(old.dtype)
        for old, new in ((mean, own), (var, spread))
    ]
    return out, own, scale, *(lax.stop_gradient(m) for m in moved)


enter(
    {
        "argmax": lambda x, dim=None, keep=False: jnp.argmax(x, axis=dim, keepdims=keep),
        "argmin": lambda x, dim=None, keep=False: jnp.argmin(x, axis=dim, keepdims=keep),
        "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, axis=dim % x.ndim),
        "_softmax": lambda x, dim, *_: jax.nn.softmax(in_f32(x), axis=dim),
        "_log_softmax": lambda x, dim, *_: jax.nn.log_softmax(in_f32(x), axis=dim),
    },
    plain,
)
enter(
    {
        "cumsum": lambda call, x, dim, **_: jnp.cumsum(x, axis=dim, dtype=call.dtype),
        "cumprod": lambda call, x, dim, **_: jnp.cumprod(x, axis=dim, dtype=call.dtype),
    }
)


@aten("histc")
def _histc(call: Call, x: jax.Array, bins: int = 100, low: float = 0, high: float = 0) -> jax.Array:
    values = x.astype(jnp.float32).reshape(-1)
    # Equal bounds select the data's range; the last bin includes its upper bound.
    least, most = (low, high) if low != high else (values.min(), values.max())
    place = jnp.clip(jnp.floor((values - least) * bins / (most - least)), 0, bins - 1)
    inside = (values >= least) & (values <= most)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(inside, place.astype(jnp.int32), bins)]
    return counts.add(1, mode="drop").astype(call.dtype)
