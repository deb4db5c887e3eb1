"""Elementwise ops: unary, binary with every broadcast, comparisons, conversions, fused chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from .draws import DATA, FLOATS, Draft, Draws, indices, positive, values
from .source import Arg, numpy_dtype

_INTEGER = ("s32", "s8", "u8", "u32", "s16")

#: Functions of the tables that jax.lax does not have.
_OWN: dict[str, Callable[..., jax.Array]] = {
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "reciprocal": lambda x: 1 / x,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "relu": lambda x: jnp.maximum(x, 0),
}


def _ops(kind: str) -> dict[str, tuple[Callable[..., jax.Array], str, float]]:
    return {
        name: (_OWN.get(name) or getattr(lax, function), domain, work)
        for name, (function, domain, work) in DATA[kind].items()
    }


#: Ops by StableHLO name: function, domain of the operands, and work per element.
UNARY, BINARY = _ops("unary"), _ops("binary")
#: Steps that map values of about one to values of about one.
CHAIN: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jnp.tanh,
    jax.nn.relu,
    jax.nn.sigmoid,
    jnp.sin,
    lambda x: x * x * 0.1,
    lambda x: x * 0.5 + 0.1,
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    lambda x: x / (1 + jnp.abs(x)),
    lambda x: jnp.log1p(jnp.abs(x)),
    lambda x: jnp.clip(x, -3.0, 3.0),
    lambda x: jnp.where(x > 0, x, 0.01 * x),
)


def _operand(shape: tuple[int, ...], dtype: str, domain: str) -> Arg:
    # Short of the ends of the domain, where inverse functions diverge.
    if domain == "unit":
        return Arg(shape, dtype, "uniform", -0.9, 0.9)
    # Fewer than the bits of the narrowest type: larger shifts are undefined.
    if domain == "shift":
        return Arg(shape, dtype, "integer", 0, 7)
    if domain == "positive" and dtype[0] not in "su":
        return positive(shape, dtype)
    if domain == "positive":
        return Arg(shape, dtype, "integer", 1, 100)
    return values(shape, dtype)


def _dtype(draws: Draws, domain: str) -> str:
    if domain in ("integer", "shift"):
        return draws.dtype(*_INTEGER)
    # Integer arithmetic: counters and indices, s32 most often.
    if domain == "both" and draws.flip(0.2):
        return draws.dtype("s32", "s32", "u32", "s8", "s16")
    return draws.dtype()


def unary(name: str, draws: Draws) -> Draft:
    """Draw a unary op on one array."""
    function, domain, work = UNARY[name]
    arg = draws.array(2, work, dtype=_dtype(draws, domain))
    return Draft(lambda x: function(x), (_operand(arg.shape, arg.dtype, domain),))


def binary(name: str, draws: Draws) -> Draft:
    """Draw a binary op on equal shapes, or with a scalar, a row, a column or an inner part."""
    function, domain, work = BINARY[name]
    # Four copies: two operands, the broadcast one and the result.
    arg = draws.array(4, work, dtype=_dtype(draws, domain))
    shape, dtype = arg.shape, arg.dtype
    # "channel" broadcasts along dimension 1, where NCHW has its channels.
    form = draws.weighted({"same": 0.6, "scalar": 0.1, "row": 0.15, "column": 0.1, "channel": 0.05})
    kept = _kept_dims(form, len(shape))
    small = tuple(shape[d] for d in kept)

    def apply(x: jax.Array, y: jax.Array) -> jax.Array:
        return function(x, y if form == "same" else lax.broadcast_in_dim(y, shape, kept))

    args = (_operand(shape, dtype, domain), _operand(small, dtype, domain))
    return Draft(apply, args, form)


def _kept_dims(form: str, rank: int) -> tuple[int, ...]:
    """Return the dimensions of the result that the second operand has."""
    if form == "same":
        return tuple(range(rank))
    if form == "scalar":
        return ()
    if form == "row":
        return (rank - 1,)
    return tuple(range(rank - 1)) if form == "column" else (min(1, rank - 1),)


def compare(draws: Draws) -> Draft:
    """Draw a comparison in one of six directions."""
    arg = draws.array(3, dtype=draws.dtype("s32") if draws.flip(0.25) else "")
    function = draws.choice((lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge))
    return Draft(lambda x, y: function(x, y), (arg, arg))


def select(draws: Draws) -> Draft:
    """Draw a choice by an array of booleans, or by a comparison with a scalar."""
    arg = draws.array(4, dtype=draws.dtype("s32") if draws.flip(0.1) else "")
    if draws.flip(0.3):
        return Draft(lambda a, b: jnp.where(a > 0, a, b), (arg, arg), "compare")
    return Draft(lambda p, a, b: lax.select(p, a, b), (values(arg.shape, "pred"), arg, arg))


def clamp(draws: Draws) -> Draft:
    """Draw a clamp between scalars or arrays."""
    arg = draws.array(4)
    bound = positive(arg.shape if draws.flip(0.3) else (), arg.dtype)
    args = (bound, replace(arg, high=3.0), bound)
    return Draft(lambda low, x, high: lax.clamp(-low, x, high), args)


def convert(draws: Draws) -> Draft:
    """Draw a conversion between element types, 8-bit floats included."""
    # Twice the sampler's own types: conversions among them are the most frequent.
    pool = (*FLOATS, *FLOATS, "s32", "s8", "u8", "pred", "f8e4m3fn", "f8e5m2")
    source = draws.choice(pool)
    target = draws.choice([d for d in pool if d != source])
    arg = draws.array(dtype=source, held="f32")
    out = numpy_dtype(target)
    return Draft(lambda x: lax.convert_element_type(x, out), (arg,), f"{source}-{target}")


def bitcast_convert(draws: Draws) -> Draft:
    """Draw a reinterpretation of bits, followed by an op that uses them as random generators do."""
    dtype, target = draws.choice((("f32", "u32"), ("bf16", "u16"), ("f16", "u16"), ("s32", "u32")))
    arg = draws.array(dtype=dtype)
    out = numpy_dtype(target)

    # Alone it would compile to nothing: the bits are only renamed.
    def function(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, out) >> 3

    return Draft(function, (arg,))


def complex_op(draws: Draws) -> Draft:
    """Draw an op on complex numbers: building, taking apart, arithmetic."""
    z = draws.array(4, 60, dtype="c64")
    form = draws.choice(("complex", "real", "multiply", "abs", "exp", "rotate"))
    x = Arg(z.shape, "f32")
    if form == "complex":
        return Draft(lambda a, b: lax.complex(a, b), (x, x), form)
    if form in ("multiply", "rotate"):
        if form == "multiply":
            return Draft(lambda a, b: a * b, (z, z), form)
        return Draft(lambda a, b: lax.real(a * lax.conj(b)), (z, z), form)
    function = {"real": lambda a: lax.real(a) + lax.imag(a), "abs": lax.abs, "exp": lax.exp}[form]
    return Draft(lambda a: function(a), (z,), form)


def fused(draws: Draws) -> Draft:
    """Draw a chain of element-wise ops on one to five arrays, which compilers fuse."""
    dtype = draws.dtype()
    # Up to 14 ops: longer chains are rare in fused kernels of models.
    n_args, length = draws.integer(1, 5), draws.integer(2, 14)
    shape = draws.shape(draws.elements(dtype, n_args + 2, 20.0 * length))
    steps = [draws.choice(CHAIN) for _ in range(length)]
    merges = [draws.choice((jnp.add, jnp.multiply, jnp.maximum, jnp.subtract)) for _ in steps]
    # Where in the chain each further array enters; a quarter of them are rows (biases, scales).
    where = sorted(draws.integer(0, length - 1) for _ in range(n_args - 1))
    row = [bool(shape) and draws.flip(0.25) for _ in range(n_args - 1)]

    def function(x: jax.Array, *others: jax.Array) -> jax.Array:
        for position, step in enumerate(steps):
            for other, at in zip(others, where, strict=True):
                if at == position:
                    x = merges[position](x, other)
            x = step(x)
        return x

    others = [values(shape[-1:] if r else shape, dtype) for r in row]
    return Draft(function, (values(shape, dtype), *others), f"{length}")


def mask(draws: Draws) -> Draft:
    """Draw a causal or a padding mask: iota, compare, select."""
    arg = draws.array(3, ranks=(2, 3, 4))
    shape = arg.shape
    if draws.flip():

        def causal(x: jax.Array) -> jax.Array:
            rows = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
            columns = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
            return jnp.where(rows >= columns, x, jnp.asarray(-1e4, x.dtype))

        return Draft(causal, (arg,), "causal")

    def padding(x: jax.Array, lengths: jax.Array) -> jax.Array:
        columns = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        limit = lax.broadcast_in_dim(lengths, shape, (0,))
        return jnp.where(columns < limit, x, jnp.zeros((), x.dtype))

    return Draft(padding, (arg, indices(shape[:1], shape[-1])), "padding")
