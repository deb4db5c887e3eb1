"""Single ops and small idioms as steps of random programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .draws import indices, values
from .elementwise import CHAIN
from .layers import FLOATS, threefry_key
from .random_layers import Motif
from .random_values import Pool, Step, Value
from .source import Arg, numpy_dtype


def chain(pool: Pool, x: Value) -> Step | None:
    """Chain one to five unary ops that keep values small."""
    if not x.is_float:
        return None
    steps = [pool.draws.choice(CHAIN) for _ in range(pool.draws.integer(1, 5))]

    def function(v: jax.Array) -> jax.Array:
        for step in steps:
            v = step(v)
        return v

    return Step(function, (x,))


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


def broadcast_combine(pool: Pool, x: Value) -> Step | None:
    """Combine a value with a row, column or scalar argument."""
    if not x.is_float or x.rank < 2:
        return None
    form = pool.draws.choice(("row", "column", "scalar"))
    shape = {"row": x.shape[-1:], "column": (*x.shape[:-1], 1), "scalar": ()}[form]
    function: Any = pool.draws.choice((lambda a, b: a * b, lambda a, b: a + b, jnp.maximum))
    return Step(function, (x,), (Arg(shape, x.dtype, "uniform", 0.3, 1.2),))


def reduction(pool: Pool, x: Value) -> Step | None:
    """Make a reduction over one or several dimensions, sometimes put back by a broadcast."""
    if not x.is_float or x.rank < 1 or x.size < 2:
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


def transpose(pool: Pool, x: Value) -> Step | None:
    """Make a permutation of dimensions."""
    if x.rank < 2:
        return None
    order = [int(i) for i in pool.draws.rng.permutation(x.rank)]
    return Step(lambda v: jnp.transpose(v, order), (x,), smooth=x.is_float)


def reshape(pool: Pool, x: Value) -> Step | None:
    """Make a merge of the leading dimensions, or a split of the last into heads."""
    if x.rank < 2:
        return None
    factors = [f for f in (2, 4, 8, 16) if x.shape[-1] % f == 0]
    if factors and x.rank < 4 and pool.draws.flip():
        heads = pool.draws.choice(factors)
        split = (*x.shape[:-1], heads, x.shape[-1] // heads)
        return Step(lambda v: jnp.swapaxes(v.reshape(split), -2, -3), (x,), smooth=x.is_float)
    merged = (-1, *x.shape[2:])
    return Step(lambda v: v.reshape(merged), (x,), smooth=x.is_float)


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


def concatenate(pool: Pool, x: Value) -> Step | None:
    """Concatenate two or three values of the same type along a dimension."""
    if x.rank < 1:
        return None
    inputs, args = pool.like(x)
    # A value that is read twice has two readers in one kernel.
    axis, again = pool.draws.integer(0, x.rank - 1), pool.draws.flip(0.2)

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([a, b, a] if again else [a, b], axis)

    return Step(function, (x, *inputs), args, x.is_float)


def padding(pool: Pool, x: Value) -> Step | None:
    """Put zeros around a value, or between its elements."""
    if not x.is_float or x.rank < 1:
        return None
    widths = [(pool.draws.integer(0, 2), pool.draws.integer(0, 2), 0) for _ in x.shape]
    # Interior padding: the gradient of a strided slice or convolution.
    if pool.draws.flip(0.15):
        widths[-1] = (0, 0, 1)
    zero = numpy_dtype(x.dtype).type(0)
    return Step(lambda v: lax.pad(v, zero, widths), (x,))


def cache_update(pool: Pool, x: Value) -> Step | None:
    """Write a value into a longer cache at a position that is an argument."""
    if x.rank < 2 or not x.is_float:
        return None
    axis = pool.draws.integer(0, x.rank - 2)
    total = x.shape[axis] * pool.draws.choice((2, 4, 8))
    cache = values((*x.shape[:axis], total, *x.shape[axis + 1 :]), x.dtype)
    position = indices((), total - x.shape[axis] + 1)
    return Step(
        lambda v, c, i: lax.dynamic_update_slice_in_dim(c, v, i, axis), (x,), (cache, position)
    )


def scatter_add(pool: Pool, x: Value) -> Step | None:
    """Add rows of a value into a table, as the gradient of an embedding does."""
    if not x.is_float or x.rank < 2:
        return None
    # From tables where rows collide often to those where they hardly do.
    rows = pool.draws.choice((64, 1000, 8192))
    count, width = x.size // x.shape[-1], x.shape[-1]
    args = (values((rows, width), x.dtype), indices((count,), rows))
    return Step(lambda v, t, i: t.at[i].add(v.reshape(count, width) * 0.1, mode="drop"), (x,), args)


def take_rows(pool: Pool, x: Value) -> Step | None:
    """Take rows of a value at given positions."""
    if x.rank < 2 or x.shape[0] < 2:
        return None
    arg = indices((pool.draws.integer(1, 2 * x.shape[0]),), x.shape[0])
    return Step(lambda v, i: jnp.take(v, i, 0, mode="clip"), (x,), (arg,), x.is_float)


def dropout(pool: Pool, x: Value) -> Step | None:
    """Drop elements by a key, with random bits of the device or of Threefry."""
    if not x.is_float:
        return None
    if pool.draws.flip():
        key = Arg((4,), "u32", "integer", 0, 2**32)

        def by_bits(v: jax.Array, state: jax.Array) -> jax.Array:
            generate: Any = lax.rng_bit_generator
            bits = generate(state, v.shape, dtype=jnp.uint32)[1]
            # 7/8 of the 32-bit range is kept; 9/8 approximates the correction by 8/7.
            return jnp.where(bits < np.uint32(0xE0000000), v * 1.125, 0)

        return Step(by_bits, (x,), (key,))

    def by_key(v: jax.Array, data: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(threefry_key(data), 0.9, v.shape), v * 1.1, 0)

    return Step(by_key, (x,), (Arg((2,), "u32", "integer", 0, 2**32),))


def adam(pool: Pool, x: Value) -> Step | None:
    """Make an Adam update whose gradient is a value."""
    if x.dtype != "f32":
        return None

    def function(g: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-4), m, v

    args = (values(x.shape, "f32"), values(x.shape, "f32", 0.1))
    return Step(function, (x,), (*args, Arg(x.shape, "f32", "uniform", 0.1, 2.0)), False)


def cumulative(pool: Pool, x: Value) -> Step | None:
    """Make a running sum or maximum."""
    if not x.is_float or x.rank < 1:
        return None
    axis = pool.draws.integer(0, x.rank - 1)
    if pool.draws.flip(0.3):
        return Step(lambda v: lax.cummax(v, axis), (x,))
    scale = 1 / math.sqrt(x.shape[axis])
    return Step(lambda v: lax.cumsum(v * scale, axis), (x,))


def ordering(pool: Pool, x: Value) -> Step | None:
    """Make a sort, the largest elements, or the position of the largest."""
    if not x.is_float or x.rank < 1 or x.shape[-1] < 2:
        return None
    form = pool.draws.choice(("sort", "argsort", "top_k", "argmax"))
    if form == "sort":
        return Step(lambda v: jnp.sort(v, -1), (x,))
    if form == "argsort":
        return Step(lambda v: jnp.argsort(v, -1), (x,), smooth=False)
    if form == "argmax":
        return Step(lambda v: lax.argmax(v, v.ndim - 1, jnp.int32), (x,), smooth=False)
    k = min(x.shape[-1], pool.draws.choice((1, 2, 8)))
    return Step(lambda v: tuple(lax.top_k(v, k)), (x,), smooth=False)


def one_hot_product(pool: Pool, x: Value) -> Step | None:
    """Multiply one-hot rows of integers with a table; floats are truncated to integers first."""
    if x.rank not in (1, 2) or x.dtype not in ("s32", *FLOATS):
        return None
    classes, width = pool.draws.choice((8, 16, 64, 128)), pool.draws.choice((16, 64, 256))

    def function(v: jax.Array, t: jax.Array) -> jax.Array:
        ids = jnp.abs(v).astype(jnp.int32) % classes
        return jax.nn.one_hot(ids, classes, dtype=t.dtype) @ t

    return Step(function, (x,), (values((classes, width), "f32"),), False)


def convert(pool: Pool, x: Value) -> Step | None:
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


def branch(pool: Pool, x: Value) -> Step | None:
    """Make a conditional by a scalar."""
    if not x.is_float:
        return None

    def function(v: jax.Array, flag: jax.Array) -> Any:
        return lax.cond(flag > 0, lambda u: jnp.tanh(u), lambda u: u * 0.5, v)

    return Step(function, (x,), (Arg((), "s32", "integer", 0, 2),))


def spectrum(pool: Pool, x: Value) -> Step | None:
    """Make a Fourier transform of the last dimension."""
    if x.dtype != "f32" or x.rank < 1 or x.shape[-1] < 4:
        return None
    # A unitary transform keeps the size of values.
    scale = x.shape[-1] ** -0.5
    return Step(lambda v: jnp.abs(jnp.fft.rfft(v * scale)), (x,), smooth=False)


def whiten(pool: Pool, x: Value) -> Step | None:
    """Factorise a Gram matrix (Cholesky) and solve with it."""
    # Factorisations are sequential: larger matrices would take most of a program's time.
    if x.dtype != "f32" or x.rank != 2 or not 2 <= x.shape[1] <= 512:
        return None

    def function(v: jax.Array) -> jax.Array:
        # The identity keeps the matrix positive definite for any v.
        gram = v.T @ v / v.shape[0] + jnp.eye(v.shape[1])
        factor = lax.linalg.cholesky(gram)
        return lax.linalg.triangular_solve(factor, v, lower=True, transpose_a=True)

    return Step(function, (x,), smooth=False)


#: Ops with their weights: element-wise ops and reductions first, as in real models (engineering
#: choice).
OPS: dict[Motif, float] = {
    chain: 5.0,
    combine: 6.0,
    broadcast_combine: 2.5,
    reduction: 2.5,
    transpose: 2.0,
    reshape: 1.5,
    slicing: 2.0,
    concatenate: 1.5,
    padding: 0.8,
    cache_update: 0.8,
    scatter_add: 1.0,
    take_rows: 0.8,
    dropout: 1.0,
    adam: 1.0,
    cumulative: 0.5,
    ordering: 0.8,
    one_hot_product: 0.5,
    convert: 1.5,
    branch: 0.3,
    spectrum: 0.3,
    whiten: 0.3,
}
