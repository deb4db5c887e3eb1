"""Single XLA operations that published tables lack, as JAX functions with their arguments.

Gradients are derived by JAX, so that XLA fuses them as in training steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ...common.errors import ProfileError

if TYPE_CHECKING:
    import jax

Array: TypeAlias = "jax.Array"
#: Shape, type by JAX's name, and for integers the end of their range.
Arg: TypeAlias = tuple[tuple[int, ...], str, int]
Op: TypeAlias = tuple[Callable[..., object], list[Arg]]


def _gradient(function: Callable[..., Array], wrt: Sequence[int]) -> Callable[..., object]:
    """Only the gradient, for a cotangent that is the last argument."""

    def gradient(*args: Array) -> object:
        import jax

        *inputs, cotangent = args

        def of(*chosen: Array) -> Array:
            whole = list(inputs)
            for place, value in zip(wrt, chosen, strict=True):
                whole[place] = value
            return function(*whole)

        _, pull = jax.vjp(of, *(inputs[i] for i in wrt))
        return pull(cotangent)

    return gradient


def rope(a: Array, angle: Array) -> Array:
    """Apply rotary embeddings to the pairs of halves of the last dimension."""
    import jax.numpy as jnp

    low, high = jnp.split(a, 2, axis=-1)
    cos, sin = jnp.cos(angle).astype(a.dtype), jnp.sin(angle).astype(a.dtype)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def rms_norm(a: Array, g: Array, epsilon: float = 1e-6) -> Array:
    """RMS norm over the last dimension, in f32."""
    import jax
    import jax.numpy as jnp

    f = a.astype(jnp.float32)
    return (f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + epsilon)).astype(a.dtype) * g


def cross_entropy(a: Array, labels: Array) -> Array:
    """Mean cross-entropy of logits, in f32."""
    import jax
    import jax.numpy as jnp

    logs = jax.nn.log_softmax(a.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[..., None], -1).mean()


def convolve(a: Array, w: Array, stride: int = 1, groups: int = 1) -> Array:
    """Convolve images with channels last."""
    import jax

    return jax.lax.conv_general_dilated(
        a,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _elementwise(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    import jax
    import jax.numpy as jnp

    x: Arg = (tuple(shape), dtype, 0)
    row: Arg = (tuple(shape[-1:]), dtype, 0)

    def adamw(w: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
        g32 = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g32, 0.999 * v + 0.001 * g32 * g32
        return (w - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * w)).astype(w.dtype), m, v

    wide: Arg = (tuple(shape), "float32", 0)
    angle: Arg = ((*tuple(shape[:-1]), shape[-1] // 2), "float32", 0)
    return {
        "add": (lambda a, b: a + b, [x, x]),
        "bias_gelu": (lambda a, b: jax.nn.gelu(a + b), [x, row]),
        "swiglu": (lambda a, b: jax.nn.silu(a) * b, [x, x]),
        "swiglu_grad": (_gradient(lambda a, b: jax.nn.silu(a) * b, (0, 1)), [x, x, x]),
        "rope": (rope, [x, angle]),
        "adamw": (adamw, [wide, x, wide, wide]),
        "cast": (
            lambda a: a.astype(jnp.float32) if dtype != "float32" else a.astype(jnp.bfloat16),
            [x],
        ),
        "one_hot": (
            lambda i: jax.nn.one_hot(i, shape[-1], dtype=dtype),
            [(tuple(shape[:-1]), "int32", shape[-1])],
        ),
        "random_bits": (
            lambda k: jax.random.bernoulli(jax.random.wrap_key_data(k), 0.9, tuple(shape)),
            [((2,), "uint32", 2**31)],
        ),
    }


def _rows(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    import jax
    import jax.numpy as jnp

    x: Arg = (tuple(shape), dtype, 0)
    row: Arg = (tuple(shape[-1:]), dtype, 0)

    def layer_norm(a: Array, g: Array, b: Array) -> Array:
        f = a.astype(jnp.float32)
        centred = f - f.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        return (centred * scale).astype(a.dtype) * g + b

    labels: Arg = (tuple(shape[:-1]), "int32", shape[-1])
    softmax = jax.nn.softmax
    return {
        "sum_rows": (lambda a: a.sum(-1), [x]),
        "sum_columns": (lambda a: a.sum(0), [x]),
        "sum_all": (lambda a: a.sum(), [x]),
        "mean_variance": (lambda a: (a.mean(-1), a.var(-1)), [x]),
        "argmax": (lambda a: a.argmax(-1), [x]),
        "logsumexp": (lambda a: jax.nn.logsumexp(a, -1), [x]),
        "softmax": (softmax, [x]),
        "softmax_grad": (_gradient(softmax, (0,)), [x, x]),
        "layer_norm": (layer_norm, [x, row, row]),
        "layer_norm_grad": (_gradient(layer_norm, (0, 1, 2)), [x, row, row, x]),
        "rms_norm": (rms_norm, [x, row]),
        "rms_norm_grad": (_gradient(rms_norm, (0, 1)), [x, row, x]),
        "cross_entropy": (cross_entropy, [x, labels]),
        "cross_entropy_grad": (
            lambda a, i: jax.grad(lambda v: cross_entropy(v, i))(a),
            [x, labels],
        ),
        "cumsum": (lambda a: jnp.cumsum(a, -1), [x]),
        "sort": (lambda a: jnp.sort(a, -1), [x]),
        "argsort": (lambda a: jnp.argsort(a, -1), [x]),
        "top_k": (lambda a: jax.lax.top_k(a, min(8, shape[-1])), [x]),
        "reverse": (lambda a: a[:, ::-1], [x]),
        "pad": (lambda a: jnp.pad(a, ((0, 0), (3, 5))), [x]),
    }


def _movement(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    import jax
    import jax.numpy as jnp

    x: Arg = (tuple(shape), dtype, 0)
    rows, columns = shape[0], shape[-1]
    # An eighth as many indices as rows, like a batch of tokens into a vocabulary.
    index: Arg = ((max(1, rows // 8),), "int32", rows)
    picked: Arg = ((max(1, rows // 8), columns), dtype, 0)
    return {
        "transpose": (lambda a: a.T.copy(), [x]),
        "transpose_heads": (
            lambda a: a.reshape(rows, -1, min(64, columns)).transpose(1, 0, 2).copy(),
            [x],
        ),
        "gather_rows": (lambda a, i: a[i], [x, index]),
        "scatter_add": (lambda a, i, u: a.at[i].add(u), [x, index, picked]),
        "update_slice": (
            lambda a, u, i: jax.lax.dynamic_update_slice(a, u, (i[0], jnp.int32(0))),
            [x, picked, ((1,), "int32", max(1, rows // 2))],
        ),
        "concatenate": (lambda a, b: jnp.concatenate([a, b], -1), [x, x]),
    }


def _attention(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    """Batched products of attention; the shape is batch, heads, length, head."""
    import jax
    import jax.numpy as jnp

    batch, heads, length, head = shape
    x: Arg = (tuple(shape), dtype, 0)
    scores: Arg = ((batch, heads, length, length), dtype, 0)

    def attention(q: Array, k: Array, v: Array) -> Array:
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(head))
        mask = jnp.tril(jnp.ones((length, length), bool))
        p = jax.nn.softmax(jnp.where(mask, s.astype(jnp.float32), -1e9)).astype(q.dtype)
        return jnp.einsum("bhqk,bhkd->bhqd", p, v)

    return {
        "qk": (lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), [x, x]),
        "pv": (lambda p, v: jnp.einsum("bhqk,bhkd->bhqd", p, v), [scores, x]),
        "dk": (lambda s, q: jnp.einsum("bhqk,bhqd->bhkd", s, q), [scores, x]),
        "attention": (attention, [x, x, x]),
        "attention_grad": (_gradient(attention, (0, 1, 2)), [x, x, x, x]),
    }


def _convolution(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    """Convolutions; the shape is batch, size, channels in, channels out, kernel, stride, groups."""
    batch, size, cin, cout, kernel, stride, groups = shape
    image: Arg = ((batch, size, size, cin), dtype, 0)
    weight: Arg = ((kernel, kernel, cin // groups, cout), dtype, 0)
    out: Arg = ((batch, -(-size // stride), -(-size // stride), cout), dtype, 0)

    conv = partial(convolve, stride=stride, groups=groups)
    return {
        "conv": (conv, [image, weight]),
        "conv_data_grad": (_gradient(conv, (0,)), [image, weight, out]),
        "conv_filter_grad": (_gradient(conv, (1,)), [image, weight, out]),
    }


def _products(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    """Matrix products; the shape is m, n, k, and for ``ragged_dot`` also the groups."""
    import jax
    import jax.numpy as jnp

    m, n, k, *groups = shape
    # Products of narrow types accumulate in wide ones.
    out = {"int8": jnp.int32, "float8_e4m3fn": jnp.bfloat16, "float8_e5m2": jnp.bfloat16}.get(dtype)
    found: dict[str, Op] = {
        "dot": (
            lambda a, b: jax.lax.dot(a, b, preferred_element_type=out),
            [((m, k), dtype, 0), ((k, n), dtype, 0)],
        ),
        # Weights in PyTorch's layout.
        "dot_nt": (
            lambda a, b: jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=out
            ),
            [((m, k), dtype, 0), ((n, k), dtype, 0)],
        ),
    }
    if groups:
        count = groups[0]
        sizes = jnp.full((count,), m // count, jnp.int32)
        found["ragged_dot"] = (
            lambda a, b: jax.lax.ragged_dot(a, b, sizes),
            [((m, k), dtype, 0), ((count, k, n), dtype, 0)],
        )
    return found


def _linear_algebra(shape: Sequence[int], dtype: str) -> dict[str, Op]:
    import jax.numpy as jnp

    x: Arg = (tuple(shape), dtype, 0)
    own: dict[str, Op] = {
        "svd": (lambda a: jnp.linalg.svd(a, full_matrices=False), [x]),
        "qr": (jnp.linalg.qr, [x]),
        "eigh": (lambda a: jnp.linalg.eigh(a + a.swapaxes(-1, -2)), [x]),
        "fft": (jnp.fft.fft, [x]),
        "fft2": (jnp.fft.fft2, [x]),
        "rfft": (jnp.fft.rfft, [x]),
    }
    return own


#: Operations by group: a plan's ``op`` is ``rows.softmax``.
_GROUPS: Mapping[str, Callable[[Sequence[int], str], dict[str, Op]]] = {
    "elementwise": _elementwise,
    "rows": _rows,
    "movement": _movement,
    "attention": _attention,
    "convolution": _convolution,
    "products": _products,
    "linear_algebra": _linear_algebra,
}


def operation(name: str, shape: Sequence[int], dtype: str) -> Op:
    """Create an operation.

    Args:
        name: Group and name, such as ``rows.softmax``.
        shape: Dimensions, as each group defines them.
        dtype: Element type by JAX's name.

    Raises:
        ProfileError: There is no such operation.
    """
    group, _, own = name.partition(".")
    known = _GROUPS[group](shape, dtype) if group in _GROUPS else {}
    if own not in known:
        raise ProfileError(f"no operation {name!r}", hint=f"known: {', '.join(known or _GROUPS)}")
    return known[own]
