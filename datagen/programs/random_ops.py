"""Single ops and small idioms as steps of random programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...common.types import JaxObject
from .draws import FLOATS, indices, values
from .elementwise import CHAIN
from .random_values import HELD, Pool, Step, Value, motif
from .reductions import threefry_key
from .source import Arg, numpy_dtype


@motif(5.0)
def chain(pool: Pool, x: Value) -> Step:
    """Chain one to five unary ops that keep values small."""
    steps = [pool.draws.choice(CHAIN) for _ in range(pool.draws.integer(1, 5))]

    def function(v: jax.Array) -> jax.Array:
        for step in steps:
            v = step(v)
        return v

    return Step(function, (x,))


@motif(6.0, dtypes=HELD)
def combine(pool: Pool, x: Value) -> Step | None:
    """Combine two values of the same type, as in a residual connection."""
    inputs, args = pool.like(x)
    function: Any
    if x.is_float:
        function = pool.draws.choice(
            (
                lambda a, b: (a + b) * 0.7,
                lambda a, b: a - b * 0.5,
                lambda a, b: a * jnp.tanh(b),
                jnp.maximum,
                jnp.minimum,
                lambda a, b: a / (1 + jnp.abs(b)),
                lambda a, b: jnp.where(a > b, a, 0.5 * b),
            )
        )
    elif x.dtype == "s32":
        function = pool.draws.choice(
            # The remainder keeps integers small enough to serve as indices.
            (lambda a, b: jnp.abs(a + b) % 97, jnp.maximum, lambda a, b: a ^ b, lambda a, b: a & b)
        )
    elif x.dtype == "pred":
        function = pool.draws.choice((jnp.logical_and, jnp.logical_or, jnp.logical_xor))
    else:
        return None
    return Step(function, (x, *inputs), args, x.is_float)


@motif(2.5, rank=2)
def broadcast_combine(pool: Pool, x: Value) -> Step:
    """Combine a value with a row, column or scalar argument."""
    form = pool.draws.choice(("row", "column", "scalar"))
    shape = {"row": x.shape[-1:], "column": (*x.shape[:-1], 1), "scalar": ()}[form]
    function: Any = pool.draws.choice((lambda a, b: a * b, lambda a, b: a + b, jnp.maximum))
    return Step(function, (x,), (Arg(shape, x.dtype, "uniform", 0.3, 1.2),))


@motif(2.5, rank=1)
def reduction(pool: Pool, x: Value) -> Step | None:
    """Make a reduction over one or several dimensions, sometimes put back by a broadcast."""
    if x.size < 2:
        return None
    dims = tuple(d for d in range(x.rank) if pool.draws.flip(0.4)) or (x.rank - 1,)
    reducer: Any = pool.draws.choice((jnp.mean, jnp.max, jnp.min, jnp.var))
    if pool.draws.flip(0.3):
        return Step(lambda v: v - reducer(v, dims, keepdims=True), (x,))
    # The sum of n independent values grows with sqrt(n).
    scale = 1 / math.sqrt(math.prod(x.shape[d] for d in dims))
    if pool.draws.flip(0.3):
        return Step(lambda v: jnp.sum(v * scale, dims), (x,))
    return Step(lambda v: reducer(v, dims), (x,))


@motif(2.0, dtypes=HELD, rank=2)
def transpose(pool: Pool, x: Value) -> Step:
    """Make a permutation of dimensions."""
    order = [int(i) for i in pool.draws.rng.permutation(x.rank)]
    return Step(lambda v: jnp.transpose(v, order), (x,), smooth=x.is_float)


@motif(1.5, dtypes=HELD, rank=2)
def reshape(pool: Pool, x: Value) -> Step:
    """Make a merge of the leading dimensions, or a split of the last into heads."""
    factors = [f for f in (2, 4, 8, 16) if x.shape[-1] % f == 0]
    if factors and x.rank < 4 and pool.draws.flip():
        heads = pool.draws.choice(factors)
        split = (*x.shape[:-1], heads, x.shape[-1] // heads)
        return Step(lambda v: jnp.swapaxes(v.reshape(split), -2, -3), (x,), smooth=x.is_float)
    merged = (-1, *x.shape[2:])
    return Step(lambda v: v.reshape(merged), (x,), smooth=x.is_float)


@motif(2.0, dtypes=HELD)
def slicing(pool: Pool, x: Value) -> Step | None:
    """Make a static, strided or dynamic slice of one dimension."""
    wide = [d for d in range(x.rank) if x.shape[d] > 2]
    if not wide:
        return None
    axis = pool.draws.choice(wide)
    size = pool.draws.integer(max(1, x.shape[axis] // 4), x.shape[axis] - 1)
    start = pool.draws.integer(0, x.shape[axis] - size)
    form = pool.draws.choice(("static", "strided", "dynamic", "reverse"))
    if form == "dynamic":
        arg = indices((), x.shape[axis] - size + 1)
        return Step(
            lambda v, i: lax.dynamic_slice_in_dim(v, i, size, axis), (x,), (arg,), x.is_float
        )
    if form == "reverse":
        return Step(lambda v: lax.rev(v, (axis,)), (x,), smooth=x.is_float)
    stride = 2 if form == "strided" else 1
    return Step(
        lambda v: lax.slice_in_dim(v, start, start + size, stride, axis), (x,), smooth=x.is_float
    )


@motif(1.5, dtypes=HELD, rank=1)
def concatenate(pool: Pool, x: Value) -> Step:
    """Concatenate two or three values of the same type along a dimension."""
    inputs, args = pool.like(x)
    # A value that is read twice has two readers in one kernel.
    axis, again = pool.draws.integer(0, x.rank - 1), pool.draws.flip(0.2)

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([a, b, a] if again else [a, b], axis)

    return Step(function, (x, *inputs), args, x.is_float)


@motif(0.8, rank=1)
def padding(pool: Pool, x: Value) -> Step:
    """Put zeros around a value, or between its elements."""
    widths = [(pool.draws.integer(0, 2), pool.draws.integer(0, 2), 0) for _ in x.shape]
    # Interior padding: the gradient of a strided slice or convolution.
    if pool.draws.flip(0.15):
        widths[-1] = (0, 0, 1)
    zero = numpy_dtype(x.dtype).type(0)
    return Step(lambda v: lax.pad(v, zero, widths), (x,))


@motif(0.8, rank=2)
def cache_update(pool: Pool, x: Value) -> Step:
    """Write a value into a longer cache at a position that is an argument."""
    axis = pool.draws.integer(0, x.rank - 2)
    total = x.shape[axis] * pool.draws.choice((2, 4, 8))
    cache = values((*x.shape[:axis], total, *x.shape[axis + 1 :]), x.dtype)
    position = indices((), total - x.shape[axis] + 1)
    return Step(
        lambda v, c, i: lax.dynamic_update_slice_in_dim(c, v, i, axis), (x,), (cache, position)
    )


@motif(1.0, rank=2)
def scatter_add(pool: Pool, x: Value) -> Step:
    """Add rows of a value into a table, as the gradient of an embedding does."""
    # From tables where rows collide often to those where they hardly do.
    rows = pool.draws.choice((64, 1000, 8192))
    count, width = x.size // x.shape[-1], x.shape[-1]
    args = (values((rows, width), x.dtype), indices((count,), rows))
    return Step(lambda v, t, i: t.at[i].add(v.reshape(count, width) * 0.1, mode="drop"), (x,), args)


@motif(0.8, dtypes=HELD, rank=2)
def take_rows(pool: Pool, x: Value) -> Step | None:
    """Take rows of a value at given positions."""
    if x.shape[0] < 2:
        return None
    arg = indices((pool.draws.integer(1, 2 * x.shape[0]),), x.shape[0])
    return Step(lambda v, i: jnp.take(v, i, 0, mode="clip"), (x,), (arg,), x.is_float)


@motif(1.0)
def dropout(pool: Pool, x: Value) -> Step:
    """Drop elements by a key, with random bits of the device or of Threefry."""
    if pool.draws.flip():
        key = Arg((4,), "u32", "integer", 0, 2**32)

        def by_bits(v: jax.Array, state: jax.Array) -> jax.Array:
            generate: JaxObject = lax.rng_bit_generator
            bits = generate(state, v.shape, dtype=jnp.uint32)[1]
            # 7/8 of the 32-bit range is kept; 9/8 approximates the correction by 8/7.
            return jnp.where(bits < np.uint32(0xE0000000), v * 1.125, 0)

        return Step(by_bits, (x,), (key,))

    def by_key(v: jax.Array, data: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(threefry_key(data), 0.9, v.shape), v * 1.1, 0)

    return Step(by_key, (x,), (Arg((2,), "u32", "integer", 0, 2**32),))


@motif(1.0, dtypes=("f32",))
def adam(pool: Pool, x: Value) -> Step:
    """Make an Adam update whose gradient is a value."""

    def function(g: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-4), m, v

    args = (values(x.shape, "f32"), values(x.shape, "f32", 0.1))
    return Step(function, (x,), (*args, Arg(x.shape, "f32", "uniform", 0.1, 2.0)), False)


@motif(0.5, rank=1)
def cumulative(pool: Pool, x: Value) -> Step:
    """Make a running sum or maximum."""
    axis = pool.draws.integer(0, x.rank - 1)
    if pool.draws.flip(0.3):
        return Step(lambda v: lax.cummax(v, axis), (x,))
    scale = 1 / math.sqrt(x.shape[axis])
    return Step(lambda v: lax.cumsum(v * scale, axis), (x,))


@motif(0.8, rank=1, last=2)
def ordering(pool: Pool, x: Value) -> Step:
    """Make a sort, the largest elements, or the position of the largest."""
    form = pool.draws.choice(("sort", "argsort", "top_k", "argmax"))
    if form == "sort":
        return Step(lambda v: jnp.sort(v, -1), (x,))
    if form == "argsort":
        return Step(lambda v: jnp.argsort(v, -1), (x,), smooth=False)
    if form == "argmax":
        return Step(lambda v: lax.argmax(v, v.ndim - 1, jnp.int32), (x,), smooth=False)
    k = min(x.shape[-1], pool.draws.choice((1, 2, 8)))
    return Step(lambda v: tuple(lax.top_k(v, k)), (x,), smooth=False)


@motif(0.5, dtypes=(*FLOATS, "s32"), rank=1, most=2)
def one_hot_product(pool: Pool, x: Value) -> Step:
    """Multiply one-hot rows of integers with a table; floats are truncated to integers first."""
    classes, width = pool.draws.choice((8, 16, 64, 128)), pool.draws.choice((16, 64, 256))

    def function(v: jax.Array, t: jax.Array) -> jax.Array:
        ids = jnp.abs(v).astype(jnp.int32) % classes
        return jax.nn.one_hot(ids, classes, dtype=t.dtype) @ t

    return Step(function, (x,), (values((classes, width), "f32"),), False)


@motif(1.5, dtypes=HELD)
def convert(pool: Pool, x: Value) -> Step:
    """Make a change of the element type, as in mixed precision."""
    if x.dtype == "c64":
        return Step(lambda v: v.real * 0.5 + v.imag * 0.5, (x,), smooth=False)
    if not x.is_float:
        return Step(lambda v: v.astype(jnp.float32) * 0.01, (x,), smooth=False)
    if pool.draws.flip(0.2):
        # Quantised to 8 bits; values of about one use the range of 32 steps.
        return Step(
            lambda v: jnp.round(jnp.clip(v * 32, -127, 127)).astype(jnp.int8), (x,), smooth=False
        )
    target = numpy_dtype(pool.draws.dtype())
    return Step(lambda v: v.astype(target), (x,))


@motif(0.3)
def branch(pool: Pool, x: Value) -> Step:
    """Make a conditional by a scalar."""

    def function(v: jax.Array, flag: jax.Array) -> object:
        return lax.cond(flag > 0, lambda u: jnp.tanh(u), lambda u: u * 0.5, v)

    return Step(function, (x,), (Arg((), "s32", "integer", 0, 2),))


@motif(0.3, dtypes=("f32",), rank=1, last=4)
def spectrum(pool: Pool, x: Value) -> Step:
    """Make a Fourier transform of the last dimension."""
    # A unitary transform keeps the size of values.
    scale = x.shape[-1] ** -0.5
    return Step(lambda v: jnp.abs(jnp.fft.rfft(v * scale)), (x,), smooth=False)


@motif(0.3, dtypes=("f32",), rank=2, most=2, last=2)
def whiten(pool: Pool, x: Value) -> Step | None:
    """Factorise a Gram matrix (Cholesky) and solve with it."""
    # Factorisations are sequential: larger matrices would take most of a program's time.
    if x.shape[1] > 512:
        return None

    def function(v: jax.Array) -> jax.Array:
        # The identity keeps the matrix positive definite for any v.
        gram = v.T @ v / v.shape[0] + jnp.eye(v.shape[1])
        factor = lax.linalg.cholesky(gram)
        return lax.linalg.triangular_solve(factor, v, lower=True, transpose_a=True)

    return Step(function, (x,), smooth=False)
