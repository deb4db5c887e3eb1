"""Reductions, windows, scans, sorting, and the few ops of linear algebra, FFT and random bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...common.types import JaxObject
from .draws import BATCHES, CHANNELS, IMAGES, Draft, Draws, Function, struct, values
from .source import Arg, numpy_dtype

_REDUCERS: dict[str, Function] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "mean": jnp.mean,
}


def _reduced_dims(draws: Draws, rank: int) -> tuple[int, ...]:
    # Twice as often along the minor dimension: softmax and normalisations reduce there.
    form = draws.choice(("minor", "minor", "major", "middle", "all", "all_but_last", "any"))
    if form == "minor":
        return (rank - 1,)
    if form == "major":
        return (0,)
    if form == "middle":
        return (rank // 2,)
    if form == "all_but_last" and rank > 1:
        return tuple(range(rank - 1))
    if form == "any":
        dims = tuple(d for d in range(rank) if draws.flip())
        return dims or (rank - 1,)
    return tuple(range(rank))


def _factors(arg: Arg) -> Arg:
    # About one: a product of thousands of normal values is zero or infinite.
    return Arg(arg.shape, arg.dtype, "uniform", 0.9, 1.1)


def reduce(draws: Draws) -> Draft:
    """Draw a reduction over minor, major, middle or all dimensions."""
    form = draws.weighted(
        {
            "sum": 0.45,
            "mean": 0.1,
            "max": 0.2,
            "min": 0.05,
            "prod": 0.05,
            "logical": 0.05,
            "square": 0.1,
        }
    )
    arg = draws.array(1.3, dtype=draws.dtype("s32") if form == "max" and draws.flip(0.2) else "")
    dims = _reduced_dims(draws, len(arg.shape))
    if form == "prod":
        arg = _factors(arg)
    if form == "logical":
        any_or_all: Function = draws.choice((jnp.any, jnp.all))
        return Draft(lambda x: any_or_all(x, dims), (values(arg.shape, "pred"),), form)
    if form == "square":
        return Draft(lambda x: jnp.mean(x * x, dims), (arg,), form)
    reducer = _REDUCERS[form]
    return Draft(lambda x: reducer(x, dims), (arg,), form)


def argmax(draws: Draws) -> Draft:
    """Draw an argmax or argmin, a reduction of two operands."""
    arg = draws.array(1.5, 200, (1, 2, 3))
    axis = draws.integer(0, len(arg.shape) - 1)
    function = lax.argmax if draws.flip(0.7) else lax.argmin
    return Draft(lambda x: function(x, axis, np.int32), (arg,))


def moments(draws: Draws) -> Draft:
    """Draw two reductions of one array, as in normalisations."""
    arg = draws.array(2.2, ranks=(2, 3, 4))
    dims = _reduced_dims(draws, len(arg.shape))
    return Draft(lambda x: (jnp.sum(x, dims), jnp.sum(x * x, dims)), (arg,))


def _image(draws: Draws, copies: float, work: float) -> tuple[int, ...]:
    elements = draws.elements("f32", copies, work)
    shape = draws.closest(
        lambda: (
            draws.choice(BATCHES),
            draws.choice(IMAGES),
            draws.choice(IMAGES),
            draws.choice(CHANNELS),
        ),
        lambda dims: float(math.prod(dims)),
        elements,
    )
    return shape or (1, 8, 8, 3)


def _window(draws: Draws) -> tuple[int, int, str]:
    # Pooling of VGG, of ResNet's stem, of Inception, and less common ones.
    kernel, stride = draws.choice(((2, 2), (3, 2), (3, 1), (3, 3), (5, 1)))
    return kernel, stride, draws.choice(("SAME", "VALID"))


def pool(
    x: jax.Array, window: Sequence[int], strides: Sequence[int], padding: str, *, largest: bool
) -> jax.Array:
    """Return the largest element, or the sum, of each window."""
    kind = np.dtype(x.dtype).type
    # The gradient of a maximum needs the literal that JAX recognises as its neutral element.
    start, reducer = (kind(-np.inf), lax.max) if largest else (kind(0), lax.add)
    result: jax.Array = lax.reduce_window(x, start, reducer, window, strides, padding)
    return result


def reduce_window(draws: Draws) -> Draft:
    """Draw a pooling of images by sum or maximum."""
    dtype = draws.dtype()
    kernel, stride, padding = _window(draws)
    # 100 of work for each element of each window, as in ``cost``.
    shape = _image(draws, 2.5, 100.0 * kernel * kernel / stride / stride)
    dims, strides = (1, kernel, kernel, 1), (1, stride, stride, 1)
    # NCHW, as programs exported from PyTorch have it.
    if draws.flip(0.3):
        shape = (shape[0], shape[3], shape[1], shape[2])
        dims, strides = (1, 1, kernel, kernel), (1, 1, stride, stride)
    largest = draws.flip()
    return Draft(
        lambda x: pool(x, dims, strides, padding, largest=largest),
        (values(shape, dtype),),
        "max" if largest else "sum",
    )


def select_and_scatter(draws: Draws) -> Draft:
    """Draw the gradient of a maximum pooling."""
    kernel, stride, padding = _window(draws)
    shape = _image(draws, 4, 300.0 * kernel * kernel / stride / stride)
    dims, strides = (1, kernel, kernel, 1), (1, stride, stride, 1)

    def largest(x: jax.Array) -> jax.Array:
        return pool(x, dims, strides, padding, largest=True)

    out = jax.eval_shape(largest, struct(shape, "f32")).shape

    def function(x: jax.Array, grad: jax.Array) -> object:
        return jax.vjp(largest, x)[1](grad)[0]

    return Draft(function, (Arg(shape, "f32"), Arg(tuple(out), "f32")))


def sort(draws: Draws) -> Draft:
    """Draw a sort of one to three operands along any dimension; stable or not."""
    operands = draws.choice((1, 1, 2, 3))
    dtype = draws.dtype("s32") if draws.flip(0.2) else ""
    # 400 per comparison (``cost``) and some 15 comparisons per element.
    first = draws.array(2 * operands, 6000.0, (1, 1, 2, 2, 3), dtype)
    axis, stable = draws.integer(0, len(first.shape) - 1), draws.flip()
    if operands == 1:
        return Draft(lambda x: lax.sort(x, dimension=axis, is_stable=stable), (first,))
    rest = [values(first.shape, draws.dtype("s32", "f32")) for _ in range(operands - 1)]

    def function(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return lax.sort(xs, dimension=axis, is_stable=stable, num_keys=1)

    return Draft(function, (first, *rest), f"{operands}")


def top_k(draws: Draws) -> Draft:
    """Draw a selection of the largest elements of each row."""
    arg = draws.array(2, 600, (1, 2, 2, 3))
    k = min(arg.shape[-1], draws.choice((1, 2, 5, 8, 32, 64)))
    return Draft(lambda x: lax.top_k(x, k), (arg,), f"{k}")


def cumulative(draws: Draws) -> Draft:
    """Draw a cumulative sum, product, maximum or log-sum-exp along any dimension."""
    arg = draws.array(4, 1000, (1, 2, 3))
    axis, backward = draws.integer(0, len(arg.shape) - 1), draws.flip(0.2)
    form = draws.weighted({"sum": 0.6, "prod": 0.1, "max": 0.15, "logsumexp": 0.15})
    function: Function = {
        "sum": lax.cumsum,
        "prod": lax.cumprod,
        "max": lax.cummax,
        "logsumexp": lax.cumlogsumexp,
    }[form]
    arg = _factors(arg) if form == "prod" else replace(arg, high=0.1)
    return Draft(lambda x: function(x, axis=axis, reverse=backward), (arg,), form)


def associative_scan(draws: Draws) -> Draft:
    """Draw a linear recurrence ``h[t] = a[t] h[t-1] + b[t]``, as in state-space models."""
    arg = draws.array(12, 1000, (2, 3), "f32")
    axis = max(0, len(arg.shape) - 2)

    def function(a: jax.Array, b: jax.Array) -> object:
        def combine(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return lax.associative_scan(combine, (a, b), axis=axis)[1]

    # Decays below one keep the recurrence stable.
    return Draft(function, (Arg(arg.shape, "f32", "uniform", 0.5, 0.99), arg))


def fft(draws: Draws) -> Draft:
    """Draw a Fourier transform: complex, real, or inverse; of one or two dimensions."""
    elements = draws.elements("c64", 4, 1000)
    # Powers of two, composites and a prime (31): libraries take different paths for each.
    length = draws.choice((16, 31, 64, 100, 128, 256, 384, 512, 1000, 1024, 2048, 4096))
    length = max(2, min(length, elements))
    form = draws.choice(("fft", "ifft", "rfft", "irfft", "fft2"))
    if form == "fft2":
        side = max(2, min(256, int(elements**0.5)))
        images = (max(1, elements // side**2), side, side)
        return Draft(jnp.fft.fft2, (Arg(images, "c64"),), form)
    shape = (max(1, elements // length), length)
    function: Function = {
        "fft": jnp.fft.fft,
        "ifft": jnp.fft.ifft,
        "rfft": jnp.fft.rfft,
        "irfft": jnp.fft.irfft,
    }[form]
    return Draft(lambda x: function(x), (Arg(shape, "f32" if form == "rfft" else "c64"),), form)


def _square(draws: Draws, copies: float, work: float) -> tuple[int, ...]:
    # Work grows with n^3, memory with n^2; what is left of both goes into the batch.
    n = draws.size(2, max(2, int(min(1024, (draws.max_bytes / 4 / copies) ** 0.5))))
    n = min(n, max(2, int((draws.max_flops / work) ** (1 / 3))))
    batch = max(1.0, min(draws.max_bytes / (4 * copies * n * n), draws.max_flops / work / n**3))
    count = round(draws.log_uniform(1, min(64.0, batch)))
    return (n, n) if count == 1 else (count, n, n)


def cholesky(draws: Draws) -> Draft:
    """Draw a Cholesky decomposition of one or several matrices."""
    shape = _square(draws, 6, 10)
    return Draft(lambda x: lax.linalg.cholesky(x), (Arg(shape, "f32", "spd"),))


def triangular_solve(draws: Draws) -> Draft:
    """Draw a solution with a triangular matrix on the left or right."""
    shape = _square(draws, 6, 20)
    left, transposed = draws.flip(0.7), draws.flip(0.3)
    right = draws.choice((shape[-1], 1, max(1, shape[-1] // 2)))
    other = (*shape[:-2], shape[-1], right) if left else (*shape[:-2], right, shape[-1])

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.linalg.triangular_solve(a, b, left_side=left, lower=True, transpose_a=transposed)

    return Draft(function, (Arg(shape, "f32", "triangular"), Arg(other, "f32")))


def rng_bit_generator(draws: Draws) -> Draft:
    """Draw a generator of random integers of 8 to 32 bits from a state."""
    dtype = draws.dtype("u32", "u32", "u8", "u16")
    shape = draws.shape(draws.elements("u32", 2.5, 1600))
    kind = numpy_dtype(dtype)
    generate: JaxObject = lax.rng_bit_generator
    state = Arg((4,), "u32", "integer", 0, 2**32)
    return Draft(lambda s: generate(s, shape, dtype=kind), (state,))


def threefry_key(data: jax.Array) -> jax.Array:
    """Make a key of the counter-based generator Threefry (Salmon et al., SC 2011) of two words."""
    key: jax.Array = jax.random.wrap_key_data(data, impl="threefry2x32")
    return key


def threefry(draws: Draws) -> Draft:
    """Draw a generator of random numbers from a key, as ``jax.random`` writes it."""
    # Threefry has 20 rounds of additions, rotations and exclusive ors on each pair of words.
    shape = draws.shape(draws.elements("f32", 10, 4000))
    draw: Any = draws.choice((jax.random.uniform, jax.random.normal, jax.random.bernoulli))
    key = Arg((2,), "u32", "integer", 0, 2**32)

    def function(data: jax.Array) -> object:
        return draw(threefry_key(data), shape=shape)

    return Draft(function, (key,))


def recur(xs: jax.Array, w: jax.Array, first: jax.Array) -> jax.Array:
    """Run an Elman network over the leading dimension: ``h[t] = tanh(h[t-1] w + x[t])``."""

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + x)
        return h, h

    states: jax.Array = lax.scan(cell, first, xs)[1]
    return states


def repeat(x: jax.Array, w: jax.Array, trips: int) -> jax.Array:
    """Apply a layer ``tanh(x w)`` in a counted loop."""
    result: jax.Array = lax.fori_loop(0, trips, lambda _, h: jnp.tanh(h @ w), x)
    return result


def while_loop(draws: Draws) -> Draft:
    """Draw a short counted loop: of an element-wise step, a product, or a scan over rows."""
    trips = draws.choice((2, 4, 8, 16, 32))
    form = draws.choice(("elementwise", "product", "scan"))
    if form == "elementwise":
        shape = draws.shape(draws.elements("f32", 4, 80.0 * trips))

        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(x) * 0.9 + 0.01

        return Draft(lambda x: lax.fori_loop(0, trips, step, x), (Arg(shape, "f32"),), form)
    # A product of width x width in every trip, and a handful of such arrays in f32.
    most = min((draws.max_flops / 2 / trips) ** (1 / 3), (draws.max_bytes / 64) ** 0.5)
    width = draws.size(4, max(4, int(min(1024.0, most))))
    rows = draws.size(1, max(1, width))
    weight = Arg((width, width), "f32", high=1 / math.sqrt(width))
    if form == "product":
        return Draft(lambda x, w: repeat(x, w, trips), (Arg((rows, width), "f32"), weight), form)
    rows = max(1, min(rows, int(draws.max_bytes / (16 * trips * width))))

    def scan(xs: jax.Array, w: jax.Array) -> jax.Array:
        return recur(xs, w, jnp.zeros((rows, width)))

    return Draft(scan, (Arg((trips, rows, width), "f32"), weight), form)
