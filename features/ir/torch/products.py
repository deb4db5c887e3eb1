"""ATen's products, convolutions, pooling, attention and losses in JAX."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..jax_function import LOWERED_FOR
from .table import Call, Scalar, Translation, aten, enter, plain

#: Largest head size of cuDNN's attention forward and backward on every supported chip (NVIDIA,
#: cuDNN frontend, "Attention").
_CUDNN_HEAD = 128
#: Lowest compute capability × 10 with cuDNN's fused attention (NVIDIA, cuDNN support matrix).
_CUDNN_LEAST = 80


enter(
    {
        "mm bmm matmul": jnp.matmul,
        "einsum": lambda equation, operands, **_: jnp.einsum(equation, *operands),
    },
    plain,
)


@aten("linear")
def _linear(
    call: Call, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    product = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + bias


@aten("addmm", "addmv")
def _addmm(
    call: Call, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    product = jnp.matmul(a, b)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


@aten("convolution")
def _convolution(
    call: Call,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    space = weight.ndim - 2
    stride, padding, dilation, extra = (
        tuple(s) * (space if len(s) == 1 else 1)
        for s in (stride, padding, dilation, output_padding)
    )
    batched = x if x.ndim == weight.ndim else x[None]
    letters = "DHW"[-space:]
    layout = (f"NC{letters}", f"OI{letters}", f"NC{letters}")

    def forward(image: jax.Array) -> jax.Array:
        # In a transposed one, output padding has no counterpart in the input.
        pads = [(p, p - e) for p, e in zip(padding, extra, strict=True)]
        return lax.conv_general_dilated(image, weight, stride, pads, None, dilation, layout, groups)

    if transposed:
        # The gradient of a convolution with respect to its input, in a form that XLA recognises.
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sides = [
            (n - 1) * s - 2 * p + r + e
            for n, s, p, r, e in zip(batched.shape[2:], stride, padding, reach, extra, strict=True)
        ]
        outer = (batched.shape[0], weight.shape[1] * groups, *sides)
        image = jax.ShapeDtypeStruct(outer, batched.dtype)
        (found,) = jax.linear_transpose(forward, image)(batched)
    else:
        found = forward(batched)
    if bias is not None:
        found = found + bias.reshape((-1,) + (1,) * space)
    return found if x.ndim == weight.ndim else found[0]


def _window(
    x: jax.Array, sizes: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]:
    """Return window, strides and padding over all dimensions of an array."""
    space = len(sizes)
    strides = tuple(stride or sizes)
    strides = strides * (space if len(strides) == 1 else 1)
    before = tuple(padding) * (space if len(padding) == 1 else 1)
    pads = []
    for n, size, step, pad in zip(x.shape[-space:], sizes, strides, before, strict=True):
        more = 0
        if ceil:
            over = (n + 2 * pad - size) % step
            # The last window starts inside the input or its left padding.
            starts = -(-(n + 2 * pad - size) // step) * step
            more = step - over if over and starts < n + pad else 0
        pads.append((pad, pad + more))
    lead = x.ndim - space
    return (1,) * lead + tuple(sizes), (1,) * lead + strides, [(0, 0)] * lead + pads


@aten("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    call: Call,
    x: jax.Array,
    sizes: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> tuple[jax.Array, ...]:
    if any(d != 1 for d in dilation):
        raise NotImplementedError("a dilated maximum pooling")
    window, strides, pads = _window(x, sizes, stride, padding, ceil)
    least = -np.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    # A NumPy value: JAX differentiates a maximum only if it sees the initial value.
    found = lax.reduce_window(x, np.array(least, x.dtype), lax.max, window, strides, pads)
    # A forward pass never reads the indices; the translation rejects unpacking them.
    return (found,)


@aten("avg_pool2d", "avg_pool3d")
def _avg_pool(
    call: Call,
    x: jax.Array,
    sizes: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    count_pad: bool = True,
    divisor: int | None = None,
) -> jax.Array:
    window, strides, pads = _window(x, sizes, stride, padding, ceil)
    total = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, strides, pads)
    if divisor or (count_pad and not ceil) or not any(map(sum, pads)):
        return total / (divisor or math.prod(sizes))
    one = jnp.ones(x.shape[-len(sizes) :], x.dtype)
    lead = x.ndim - len(sizes)
    if count_pad:
        before = (tuple(padding) * len(sizes))[: len(sizes)]
        one = jnp.pad(one, [(p, p) for p in before], constant_values=1)
        pads = [(0, high - low) for low, high in pads]
    own = lax.reduce_window(
        one, np.zeros((), x.dtype), lax.add, window[lead:], strides[lead:], pads[lead:]
    )
    return total / own


@aten("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d")
def _adaptive_avg_pool(call: Call, x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Average parts of each dimension: part ``i`` is from floor(i·n/s) to ceil((i+1)·n/s)."""
    found = x
    for dim, size in zip(range(x.ndim - len(sizes), x.ndim), sizes, strict=True):
        n = x.shape[dim]
        if n % size == 0:
            parts = found.reshape(*found.shape[:dim], size, n // size, *found.shape[dim + 1 :])
            found = jnp.mean(parts, axis=dim + 1)
            continue
        ends = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
        means = [
            jnp.mean(lax.slice_in_dim(found, low, high, axis=dim), axis=dim) for low, high in ends
        ]
        found = jnp.stack(means, dim)
    return found


@aten("upsample_bilinear2d")
def _bilinear(call: Call, x: jax.Array, size: object, corners: bool, *_: object) -> jax.Array:
    if not corners:
        return jax.image.resize(x, call.shape, "linear", antialias=False)
    found = x
    for dim in (2, 3):
        n, m = x.shape[dim], call.shape[dim]
        # The first and last points of both grids coincide.
        place = np.arange(m) * ((n - 1) / max(m - 1, 1))
        low = np.minimum(place.astype(np.int32), max(n - 2, 0))
        share = (place - low).astype(np.float32).reshape((-1,) + (1,) * (3 - dim))
        a, b = (jnp.take(found, at, axis=dim) for at in (low, np.minimum(low + 1, n - 1)))
        found = a + (b - a) * jnp.asarray(share, found.dtype)
    return found


def _smooth(method: str) -> Translation:
    def translated(call: Call, x: jax.Array, size: object, corners: bool, *_: object) -> jax.Array:
        if corners:
            raise NotImplementedError("antialiased resizing with align_corners")
        return jax.image.resize(x, call.shape, method, antialias=True)

    return translated


enter({f"_upsample_bi{method}2d_aa": _smooth(method) for method in ("linear", "cubic")})


#: Divisor of a transform by PyTorch's number: none, the root of its size, its size.
_NORMS: dict[int, Literal["backward", "ortho", "forward"]] = {
    0: "backward",
    1: "ortho",
    2: "forward",
}


@aten("_fft_r2c")
def _fft_r2c(call: Call, x: jax.Array, dims: Sequence[int], norm: int, onesided: bool) -> jax.Array:
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=tuple(dims), norm=_NORMS[norm])


@aten("_fft_c2c")
def _fft_c2c(call: Call, x: jax.Array, dims: Sequence[int], norm: int, forward: bool) -> jax.Array:
    if forward:
        return jnp.fft.fftn(x, axes=tuple(dims), norm=_NORMS[norm])
    # PyTorch numbers normalisation by the transform's own sign, NumPy's inverse by the forward one.
    return jnp.fft.ifftn(x, axes=tuple(dims), norm=_NORMS[2 - norm])


@aten("_fft_c2r")
def _fft_c2r(call: Call, x: jax.Array, dims: Sequence[int], norm: int, last: int) -> jax.Array:
    sizes = [x.shape[d] for d in dims[:-1]] + [last]
    return jnp.fft.irfftn(x, s=sizes, axes=tuple(dims), norm=_NORMS[2 - norm])


@aten("native_dropout")
def _dropout(call: Call, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, ...]:
    if not train or p == 0.0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(call.key(), 1.0 - p, x.shape)
    return jnp.where(kept, x / (1.0 - p) if p < 1.0 else 0.0, 0.0).astype(x.dtype), kept


@aten("scaled_dot_product_attention")
def _attention(
    call: Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Attention over (…, heads, positions, size); cuDNN's on NVIDIA GPUs where supported.

    Dropout of the scores, which cuDNN would draw inside its kernel, is written out.
    """
    if q.ndim == 3:
        # Without a head dimension: a single head.
        q, k, v = (a[:, None] for a in (q, k, v))
    flat = [a.reshape(-1, *a.shape[-3:]) for a in (q, k, v)]
    # JAX has positions before heads.
    queries, keys, values = (jnp.swapaxes(a, 1, 2) for a in flat)
    size, width = q.shape[-1], v.shape[-1]
    own = 1.0 / math.sqrt(size) if scale is None else scale
    if dropout or width != size:
        written = _written_out(call, queries, keys, values, _mask(mask), own, causal, dropout)
        return jnp.swapaxes(written, 1, 2).reshape(call.shape)
    shaped = _mask(mask)
    boolean = shaped is not None and shaped.dtype == jnp.bool_
    seen, bias = (shaped, None) if boolean else (None, shaped)

    def by(implementation: Literal["cudnn", "xla"]) -> jax.Array:
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            bias,
            seen,
            scale=own,
            is_causal=causal,
            implementation=implementation,
        )

    found: jax.Array | None = None
    platform = LOWERED_FOR.get()
    cuda = jax.default_backend() == "gpu" if platform is None else platform.name == "cuda"
    # Ampere and later; a GPU of unknown generation is assumed to be one of these.
    cuda = cuda and (platform is None or (platform.capability or _CUDNN_LEAST) >= _CUDNN_LEAST)
    # cuDNN rejects masks that broadcast, empty sequences, and odd lengths in the backward pass.
    lengths = (queries.shape[1], keys.shape[1])
    narrow = q.dtype in (jnp.bfloat16, jnp.float16) and size <= _CUDNN_HEAD
    if cuda and narrow and mask is None and all(n and n % 2 == 0 for n in lengths):
        # JAX checks for cuDNN and the GPU's generation while tracing.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            found = by("cudnn")
    if found is None:
        found = by("xla")
    return jnp.swapaxes(found, 1, 2).reshape(call.shape)


def _mask(mask: jax.Array | None) -> jax.Array | None:
    """Reshape a mask to (batch, heads, queries, keys); dimensions of size one broadcast."""
    if mask is None:
        return None
    if mask.ndim > 4:
        return mask.reshape(-1, *mask.shape[-3:])
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _written_out(
    call: Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    scale: float,
    causal: bool,
    dropout: float,
) -> jax.Array:
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, groups, axis=2) if groups > 1 else a for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    if causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    if mask is not None:
        boolean = mask.dtype == jnp.bool_
        scores = jnp.where(mask, scores, -jnp.inf) if boolean else scores + mask
    shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if dropout:
        shares = _dropout(call, shares, dropout, True)[0]
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)
