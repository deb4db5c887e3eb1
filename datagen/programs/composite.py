"""Small groups of ops that every model has: normalisations, softmax, activations, updates.

The arguments of ``draws.elements`` are the arrays that are alive at a time and the work per
element; both are rough, since oversized drafts are drawn again (see ``single_op.sample_op``).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from .dense import matrix_sizes
from .draws import (
    FLOATS,
    HEAD_WIDTHS,
    HEADS,
    LENGTHS,
    Draft,
    Draws,
    Function,
    gradient,
    indices,
    positive,
    struct,
    values,
)
from .source import Arg, numpy_dtype

#: Activations whose expansions differ: rational functions, exponentials, piecewise linear ones.
_ACTIVATIONS = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "hard_swish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "leaky_relu": jax.nn.leaky_relu,
}


def normalize(
    x: jax.Array, dims: int | tuple[int, ...], epsilon: float, *, centred: bool
) -> jax.Array:
    """Apply layer norm (Ba et al. 2016), or RMS norm if not ``centred`` (Zhang, Sennrich 2019).

    Args:
        x: Values in f32.
        dims: Dimensions of one group.
        epsilon: Added to the mean square.
        centred: Whether the mean is subtracted first.
    """
    if centred:
        x = x - jnp.mean(x, dims, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, dims, keepdims=True) + epsilon)


def with_gradient(draws: Draws, draft: Draft, probability: float = 0.35) -> Draft:
    """Return the draft, or with some probability its gradient by its floating-point arguments."""
    if not draws.flip(probability):
        return draft
    wanted = [i for i, arg in enumerate(draft.args) if arg.dtype in FLOATS]
    like = [struct(a.shape, a.dtype) for a in draft.args]
    out = jax.eval_shape(draft.function, *like)
    grad_dtype = next(d for d in FLOATS if numpy_dtype(d) == out.dtype)
    grad = Arg(tuple(out.shape), grad_dtype)
    function = gradient(draft.function, wanted)
    return Draft(function, (grad, *draft.args), f"{draft.note}-grad".lstrip("-"))


def softmax(draws: Draws) -> Draft:
    """Draw a softmax or log-softmax over the last, sometimes another dimension."""
    arg = draws.array(6, 100)
    # Models normalise the minor dimension; a share of others covers reductions along the major one.
    axis = -1 if draws.flip(0.85) else 0
    function = jax.nn.softmax if draws.flip(0.75) else jax.nn.log_softmax
    return with_gradient(draws, Draft(lambda x: function(x, axis), (arg,)))


def layer_norm(draws: Draws) -> Draft:
    """Draw a layer or RMS normalisation in f32 with scale and bias."""
    arg = draws.array(7, 120, ranks=(2, 3, 3), held="f32")
    rms, kind = draws.flip(), numpy_dtype(arg.dtype)

    def function(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        y = normalize(x.astype(jnp.float32), -1, 1e-5, centred=not rms)
        return (y * scale + (0 if rms else bias)).astype(kind)

    small = Arg(arg.shape[-1:], "f32")
    draft = Draft(function, (arg, small, small), "rms" if rms else "layer")
    return with_gradient(draws, draft)


def batch_norm(draws: Draws) -> Draft:
    """Draw a normalisation over all but one dimension, with an activation."""
    arg = draws.array(7, 120, ranks=(4,), dtype="f32")
    shape = arg.shape
    # NHWC, the layout of flax, twice as often as NCHW.
    axis = draws.choice((3, 3, 1))
    dims = tuple(d for d in range(4) if d != axis)
    side = tuple(shape[d] if d == axis else 1 for d in range(4))

    def function(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        mean = jnp.mean(x, dims, keepdims=True)
        # One pass over the input, as frameworks write it; rounding may make it negative, hence the
        # clip below.
        variance = jnp.mean(x * x, dims, keepdims=True) - mean * mean
        normal = (x - mean) * lax.rsqrt(jnp.maximum(variance, 0) + 1e-3)
        return jax.nn.relu(normal * scale.reshape(side) + bias.reshape(side))

    small = Arg((shape[axis],), "f32")
    return with_gradient(draws, Draft(function, (arg, small, small)))


def activation(draws: Draws) -> Draft:
    """Draw an activation, with a bias half of the time."""
    arg = draws.array(6, 120, ranks=(2, 3, 4))
    name = draws.choice(sorted(_ACTIVATIONS))
    function = _ACTIVATIONS[name]
    if draws.flip():
        return with_gradient(draws, Draft(lambda a: function(a), (arg,), name))
    args = (arg, values(arg.shape[-1:], arg.dtype))
    return with_gradient(draws, Draft(lambda a, b: function(a + b), args, f"bias-{name}"))


def gated(draws: Draws) -> Draft:
    """Draw a gated linear unit without its products."""
    arg = draws.array(7, 100, ranks=(2, 3))
    gate = draws.choice((jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid))
    return with_gradient(draws, Draft(lambda x, y: gate(x) * y, (arg, arg)))


def cross_entropy(draws: Draws) -> Draft:
    """Draw the mean cross-entropy of logits and labels."""
    arg = draws.array(6, 120, ranks=(2,), held="f32")

    def function(logits: jax.Array, labels: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], 1, mode="clip"))

    labels = indices(arg.shape[:1], arg.shape[1])
    return with_gradient(draws, Draft(function, (arg, labels)), 0.5)


def optimizer_update(draws: Draws) -> Draft:
    """Draw an Adam, momentum or plain gradient step of one tensor."""
    p = draws.array(9, 150, ranks=(1, 2, 4), dtype="f32")
    # Adam twice as often: nearly all transformers are trained with it.
    form = draws.choice(("adam", "adam", "momentum", "sgd"))
    m = replace(p, high=0.1)
    if form == "sgd":
        return Draft(lambda w, d, rate: w - rate * d, (p, p, positive((), "f32")), form)
    if form == "momentum":

        def momentum(w: jax.Array, d: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            v = 0.9 * v + d
            return w - 0.01 * v, v

        return Draft(momentum, (p, p, m), form)

    def adam(
        w: jax.Array, d: jax.Array, v: jax.Array, s: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, ...]:
        v, s = 0.9 * v + 0.1 * d, 0.999 * s + 0.001 * d * d
        v_hat, s_hat = v / (1 - 0.9**step), s / (1 - 0.999**step)
        return w - 1e-3 * (v_hat / (jnp.sqrt(s_hat) + 1e-8) + 0.01 * w), v, s

    # From 1 on: the bias correction divides by 1 - beta^step.
    step = Arg((), "f32", "uniform", 1, 100)
    return Draft(adam, (p, p, m, positive(p.shape, "f32"), step), form)


def rope(draws: Draws) -> Draft:
    """Draw a rotary embedding of heads."""
    dtype = draws.dtype()
    elements = draws.elements("f32", 8, 150)
    sizes = draws.closest(
        lambda: (1, draws.choice(LENGTHS), draws.choice(HEADS), draws.choice(HEAD_WIDTHS)),
        lambda s: s[0] * s[1] * s[2] * s[3],
        elements,
    )
    _, length, heads, width = sizes or (1, 4, 1, 32)
    batch = max(1, elements // (length * heads * width))
    kind = numpy_dtype(dtype)

    def function(x: jax.Array, positions: jax.Array) -> jax.Array:
        # Base and layout of RoFormer (Su et al. 2021), halves rotated against each other.
        rates = 10000.0 ** (-jnp.arange(width // 2, dtype=jnp.float32) * 2 / width)
        angles = positions[:, None, None].astype(jnp.float32) * rates
        left, right = jnp.split(x.astype(jnp.float32), 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
        return turned.astype(kind)

    args = (values((batch, length, heads, width), dtype), indices((length,), 4096))
    return with_gradient(draws, Draft(function, args), 0.2)


def dropout(draws: Draws) -> Draft:
    """Draw a dropout whose random bits are an argument."""
    arg = draws.array(5, 80, ranks=(2, 3, 4), held="f32")

    def function(x: jax.Array, bits: jax.Array) -> jax.Array:
        # 230 of 256: nine tenths are kept.
        return jnp.where(bits < 230, x / jnp.asarray(0.9, x.dtype), jnp.zeros((), x.dtype))

    bits = Arg(arg.shape, "u8", "integer", 0, 256)
    return with_gradient(draws, Draft(function, (arg, bits)), 0.3)


def attention(draws: Draws) -> Draft:
    """Scaled dot-product attention of several heads, causal or not."""
    dtype = draws.dtype()
    flops = draws.log_uniform(1e5, draws.max_flops) / 2

    def propose() -> tuple[int, int, int, int]:
        heads, width = draws.choice(HEADS), draws.choice(HEAD_WIDTHS)
        return draws.choice((1, 1, 2, 4, 8, 16)), heads, draws.choice(LENGTHS), width

    def cost(sizes: tuple[int, int, int, int]) -> float:
        batch, heads, length, width = sizes
        scores = float(batch * heads * length * length)
        # Scores and the values computed from them take about 20 bytes per element, softmax and mask
        # about 160 of work (engineering estimates).
        fits = scores * 20 + 16.0 * batch * heads * length * width < draws.max_bytes
        return scores * (4 * width + 160) if fits else float("inf")

    batch, heads, length, width = draws.closest(propose, cost, flops) or (1, 2, 8, 32)
    causal = draws.flip()
    spec = (
        ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd")
        if draws.flip()
        else ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd")
    )
    shape = (batch, length, heads, width) if spec[0][2] == "h" else (batch, heads, length, width)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum(spec[0], q, k) * (width**-0.5)
        if causal:
            allowed = jnp.tril(jnp.ones((length, length), bool))
            # Not minus infinity: the softmax of a fully masked row would be NaN. f16 holds 1e4.
            scores = jnp.where(allowed, scores, jnp.asarray(-1e4, scores.dtype))
        return jnp.einsum(spec[1], jax.nn.softmax(scores, -1), v)

    return with_gradient(draws, Draft(function, (values(shape, dtype),) * 3), 0.25)


def linear(draws: Draws) -> Draft:
    """Draw a product with bias and activation."""
    m, n, k = matrix_sizes(draws)
    dtype = draws.dtype()
    name = draws.choice(("relu", "gelu", "none"))
    function: Function = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "none": lambda x: x}[name]
    args = (values((m, k), dtype), values((k, n), dtype, k**-0.5), values((n,), dtype))
    return with_gradient(draws, Draft(lambda x, w, b: function(x @ w + b), args, name), 0.3)
