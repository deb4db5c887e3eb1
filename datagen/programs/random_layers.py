"""Layers of networks as steps of random programs: products, norms, attention, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .composite import normalize
from .dense import convolve
from .draws import CHANNELS, WIDTHS, indices, values
from .random_values import HELD, Pool, Step, Value, motif
from .reductions import pool as pool_windows
from .reductions import recur, repeat
from .source import Arg, numpy_dtype

ACTIVATIONS: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jax.nn.relu,
    jax.nn.gelu,
    jax.nn.silu,
    jnp.tanh,
    jax.nn.sigmoid,
    jax.nn.elu,
    lambda x: x,
)


def _width(pool: Pool, like: int) -> int:
    """Draw an output width near the input's, or the same, so that residuals find partners."""
    # Feed-forward blocks widen by about four and narrow again.
    if pool.draws.flip(0.4):
        return like
    near = [w for w in WIDTHS if like / 4.5 <= w <= like * 4.5]
    return pool.draws.choice(near) if near else pool.draws.integer(1, 4 * like)


def _weight(shape: tuple[int, ...], fan_in: int, dtype: str) -> Arg:
    return Arg(shape, dtype, high=1 / math.sqrt(max(1, fan_in)))


@motif(5.0, rank=1, last=2)
def linear(pool: Pool, x: Value) -> Step:
    """Make a product with a weight, a bias and an activation."""
    k, n = x.shape[-1], _width(pool, x.shape[-1])
    act, with_bias = pool.draws.choice(ACTIVATIONS), pool.draws.flip(0.6)
    weight = _weight((k, n), k, x.dtype)
    if not with_bias:
        return Step(lambda v, w: act(v @ w), (x,), (weight,))
    return Step(lambda v, w, b: act(v @ w + b), (x,), (weight, Arg((n,), x.dtype, high=0.1)))


@motif(1.0, rank=2, last=2)
def gated_mlp(pool: Pool, x: Value) -> Step:
    """Make a gated feed-forward block with a residual."""
    k, n = x.shape[-1], _width(pool, x.shape[-1])
    args = (_weight((k, n), k, x.dtype),) * 2 + (_weight((n, k), n, x.dtype),)
    act = pool.draws.choice(ACTIVATIONS[:3])
    # 0.7, about 1/sqrt(2), keeps the variance of a sum of two values.
    return Step(lambda v, a, b, c: (v + (act(v @ a) * (v @ b)) @ c) * 0.7, (x,), args)


@motif(1.0, rank=2, last=2)
def similarity(pool: Pool, x: Value) -> Step:
    """Make a product of two values over their last dimension, batched over all but two."""
    inputs, args = pool.like(x)
    scale = x.shape[-1] ** -0.5
    return Step(lambda a, b: jnp.einsum("...md,...nd->...mn", a, b) * scale, (x, *inputs), args)


@motif(3.0, rank=2, last=2)
def norm(pool: Pool, x: Value) -> Step:
    """Make a layer, RMS or batch normalisation."""
    form = pool.draws.choice(("layer", "rms", "batch"))
    dims = tuple(range(x.rank - 1)) if form == "batch" else (x.rank - 1,)
    kind = numpy_dtype(x.dtype)

    def function(v: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        y = normalize(v.astype(jnp.float32), dims, 1e-2, centred=form != "rms")
        return (y * scale + bias).astype(kind)

    small = x.shape[-1:]
    return Step(function, (x,), (Arg(small, "f32", "uniform", 0.5, 1.5), Arg(small, "f32")))


@motif(1.5, rank=1)
def softmax(pool: Pool, x: Value) -> Step:
    """Make a softmax or log-softmax over the last or another dimension."""
    axis = -1 if pool.draws.flip(0.8) else pool.draws.integer(0, x.rank - 1)
    if pool.draws.flip(0.8):
        return Step(lambda v: jax.nn.softmax(v, axis), (x,))
    return Step(lambda v: jax.nn.log_softmax(v, axis) * 0.1, (x,))


@motif(3.0, rank=3, most=3)
def attention(pool: Pool, x: Value) -> Step | None:
    """Make a block of self-attention with heads of 32 to 128, causal or not."""
    batch, length, width = x.shape
    heads_of = [h for h in (32, 48, 64, 96, 128) if width % h == 0]
    if not heads_of:
        return None
    head = pool.draws.choice(heads_of)
    heads, causal = width // head, pool.draws.flip()
    # Four query heads per key-value head, as in Llama 3 8B.
    grouped = heads % 4 == 0 and pool.draws.flip(0.3)
    kv_heads = heads // 4 if grouped else heads
    inner = kv_heads * head

    def function(
        v: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array
    ) -> jax.Array:
        q = (v @ wq).reshape(batch, length, kv_heads, heads // kv_heads, head)
        k = (v @ wk).reshape(batch, length, kv_heads, head)
        u = (v @ wv).reshape(batch, length, kv_heads, head)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32) * head**-0.5
        if causal:
            rows = lax.broadcasted_iota(jnp.int32, (length, length), 0)
            columns = lax.broadcasted_iota(jnp.int32, (length, length), 1)
            scores = jnp.where(rows >= columns, scores, -1e4)
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights, u)
        return (v + mixed.reshape(batch, length, width) @ wo) * 0.7

    shapes = ((width, width), (width, inner), (width, inner), (width, width))
    return Step(function, (x,), tuple(_weight(s, width, x.dtype) for s in shapes))


@motif(4.0, rank=3, most=4)
def convolution(pool: Pool, x: Value) -> Step:
    """Make a plain, strided or depthwise convolution with scale, bias and activation."""
    spatial, channels = x.rank - 2, x.shape[-1]
    form = pool.draws.weighted({"plain": 0.6, "strided": 0.25, "depthwise": 0.15})
    kernel = pool.draws.choice((1, 3, 3, 5))
    kernel = kernel if min(x.shape[1:-1]) >= kernel else 1
    near = [c for c in CHANNELS if channels / 3 <= c <= channels * 3] or [channels]
    out = channels if form == "depthwise" or pool.draws.flip(0.3) else pool.draws.choice(near)
    groups = channels if form == "depthwise" else 1
    stride = 2 if form == "strided" else 1
    act = pool.draws.choice(ACTIVATIONS[:3])
    layout = ("NWC", "WIO", "NWC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
    w_shape = (kernel,) * spatial + (channels // groups, out)

    def function(v: jax.Array, w: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        y = convolve(v, w, layout, stride=stride, padding="SAME", groups=groups)
        return act(y * scale + bias)

    weight = _weight(w_shape, math.prod(w_shape[:-1]), x.dtype)
    scale = Arg((out,), x.dtype, "uniform", 0.5, 1.5)
    return Step(function, (x,), (weight, scale, Arg((out,), x.dtype, high=0.1)))


@motif(2.0, rank=4, most=4)
def pooling(pool: Pool, x: Value) -> Step | None:
    """Make a maximum or average pooling of images, or of everything."""
    if min(x.shape[1:3]) < 3:
        return None
    form = pool.draws.choice(("max", "mean", "global"))
    if form == "global":
        return Step(lambda v: jnp.mean(v, (1, 2)), (x,))
    size, stride = pool.draws.choice(((2, 2), (3, 2), (3, 1)))
    dims, strides = (1, size, size, 1), (1, stride, stride, 1)
    if form == "max":
        return Step(lambda v: pool_windows(v, dims, strides, "SAME", largest=True), (x,))
    return Step(lambda v: pool_windows(v, dims, strides, "SAME", largest=False) / size**2, (x,))


@motif(0.6, rank=3)
def squeeze_excite(pool: Pool, x: Value) -> Step:
    """Make a gate per channel from the mean over all positions."""
    c, dims = x.shape[-1], tuple(range(1, x.rank - 1))
    # A reduction of 4, as in EfficientNet and MobileNetV3 (16 in the original).
    inner = max(1, c // 4)

    def function(v: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        gate = jax.nn.relu(jnp.mean(v, dims, keepdims=True) @ a) @ b
        return v * jax.nn.sigmoid(gate)

    return Step(
        function, (x,), (_weight((c, inner), c, x.dtype), _weight((inner, c), inner, x.dtype))
    )


@motif(1.5, dtypes=HELD)
def embedding(pool: Pool, x: Value) -> Step | None:
    """Look up rows of a table for integers of the pool or for new ones."""
    rows = pool.draws.choice((100, 1000, 8192, 32000))
    width = x.shape[-1] if x.rank and x.shape[-1] <= 4096 else 64
    dtype = x.dtype if x.is_float else pool.draws.dtype()
    table = values((rows, width), dtype)
    if x.dtype == "s32" and x.rank in (1, 2):
        return Step(lambda i, t: jnp.take(t, i % rows, 0, mode="clip"), (x,), (table,))
    if x.rank < 2 or not x.is_float or x.shape[-1] != width:
        return None
    arg = indices(x.shape[:-1], rows)
    return Step(lambda v, i, t: v + jnp.take(t, i, 0, mode="clip"), (x,), (arg, table))


@motif(0.7, rank=2, most=3, last=2)
def recurrence(pool: Pool, x: Value) -> Step:
    """Make a recurrent layer over the leading dimension, or a loop of a small layer."""
    k = x.shape[-1]
    weight = _weight((k, k), k, x.dtype)
    if x.rank == 3 and 2 <= x.shape[0] <= 64:
        return Step(lambda v, w: recur(v, w, jnp.zeros_like(v[0])), (x,), (weight,))
    trips = pool.draws.choice((2, 4, 8))
    return Step(lambda v, w: repeat(v, w, trips), (x,), (weight,))


@motif(0.5, rank=2, most=3, last=2)
def cross_entropy(pool: Pool, x: Value) -> Step:
    """Make the mean cross-entropy of logits and labels."""
    classes = x.shape[-1]

    def function(v: jax.Array, labels: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(v.astype(jnp.float32).reshape(-1, classes))
        picked = jnp.take_along_axis(logs, labels.reshape(-1, 1), 1, mode="clip")
        return -jnp.mean(picked)

    return Step(function, (x,), (indices(x.shape[:-1], classes),))
