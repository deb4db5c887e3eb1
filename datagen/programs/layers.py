"""Layers as functions of arrays, written once for single ops and for random programs.

The two samplers differ in how they draw shapes and arguments, not in what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: Real floating-point types, as HLO names.
FLOATS = ("f32", "bf16", "f16")
#: A layer: takes one array per argument, returns an array or a tuple of arrays.
Function: TypeAlias = Callable[..., "jax.Array"]


def gradient(function: Function, wanted: Sequence[int]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the vector-Jacobian product of a function by its ``wanted`` arguments.

    Returns:
        A function of the gradient of the function's result and then of the function's arguments.
    """

    def vector_jacobian(grad: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
        # A function of the wanted arguments alone: integers have no gradient.
        def partial(*floats: jax.Array) -> jax.Array:
            full = list(args)
            for index, value in zip(wanted, floats, strict=True):
                full[index] = value
            return function(*full)

        product: tuple[jax.Array, ...] = jax.vjp(partial, *(args[i] for i in wanted))[1](grad)
        return product

    return vector_jacobian


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


def convolve(
    x: jax.Array,
    w: jax.Array,
    layout: tuple[str, str, str],
    *,
    stride: int,
    padding: str,
    groups: int,
    dilation: int = 1,
) -> jax.Array:
    """Convolve with one stride and one dilation of the filter for all spatial dimensions."""
    spatial = x.ndim - 2
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * spatial,
        padding,
        rhs_dilation=(dilation,) * spatial,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


def pool(
    x: jax.Array, window: Sequence[int], strides: Sequence[int], padding: str, *, largest: bool
) -> jax.Array:
    """Return the largest element, or the sum, of each window."""
    kind = np.dtype(x.dtype).type
    # The gradient of a maximum needs the literal that JAX knows as its neutral element.
    start, reducer = (kind(-np.inf), lax.max) if largest else (kind(0), lax.add)
    result: jax.Array = lax.reduce_window(x, start, reducer, window, strides, padding)
    return result


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


def threefry_key(data: jax.Array) -> jax.Array:
    """Make a key of the counter-based generator Threefry (Salmon et al., SC 2011) of two words."""
    key: jax.Array = jax.random.wrap_key_data(data, impl="threefry2x32")
    return key
