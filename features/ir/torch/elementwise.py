"""Element-wise ATen operators in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .table import TABLE, Call, Operand, Scalar, Translation, aten, enter, plain

_T = TypeVar("_T")

#: Operators that JAX's NumPy has under their names.
_SAME_NAME = (
    *("abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil"),
    *("cos", "cosh", "exp", "exp2", "expm1", "floor", "isinf", "isnan", "log", "log10", "log1p"),
    *("log2", "logical_not", "reciprocal", "round", "sign", "signbit", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
)
_UNARY: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(jnp, name) for name in _SAME_NAME},
    "neg": jnp.negative,
    "rsqrt": lax.rsqrt,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
}
_SAME_BINARY = (
    *("bitwise_and", "bitwise_or", "bitwise_xor", "fmod", "logical_and", "logical_or"),
    *("logical_xor", "maximum", "minimum", "remainder"),
)
_BINARY: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(jnp, name) for name in _SAME_BINARY},
    "mul": jnp.multiply,
    "pow": jnp.power,
    "atan2": jnp.arctan2,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
}
#: Functions of an operator's own arguments, in PyTorch's order.
_PLAIN: dict[str, Callable[..., jax.Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "leaky_relu": jax.nn.leaky_relu,
    "view_as_complex view_as_complex_copy": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real view_as_real_copy": lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1),
    "complex": lambda real, imag: lax.complex(*jnp.broadcast_arrays(real, imag)),
    "polar": lambda size, angle: lax.complex(size * jnp.cos(angle), size * jnp.sin(angle)),
    "_conj _conj_copy": jnp.conj,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "copy": lambda x, other, *_: jnp.broadcast_to(other, x.shape).astype(x.dtype),
}


def _unary(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def translated(call: Call, x: jax.Array) -> jax.Array:
        # Integers become floats first: JAX would choose the type by its own rules. The result
        # of a complex operand may be real.
        cast = call.inexact and not jnp.iscomplexobj(x)
        return function(x.astype(call.dtype) if cast else x)

    return translated


def _typed(call: Call, x: _T) -> _T | jax.Array:
    """An operand in the result's type: in PyTorch a tensor of no dimensions widens nothing."""
    return x.astype(call.dtype) if isinstance(x, jax.Array) else x


def _binary(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def translated(call: Call, x: Operand, y: Operand) -> jax.Array:
        if call.dtype == jnp.bool_:
            return function(jnp.asarray(x), jnp.asarray(y))
        return function(_typed(call, x), _typed(call, y))

    return translated


def _scaled(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def translated(call: Call, x: Operand, y: Operand, alpha: Scalar = 1) -> jax.Array:
        other = _typed(call, y)
        return function(_typed(call, x), other if alpha == 1 else other * alpha)

    return translated


enter(_UNARY, _unary)
enter(_BINARY, _binary)
enter({"add": jnp.add, "sub": jnp.subtract}, _scaled)
enter(_PLAIN, plain)
TABLE["opcast.stop_gradient.default"] = plain(lax.stop_gradient)


@aten("div")
def _div(call: Call, x: Operand, y: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(_typed(call, x), _typed(call, y))
    if not call.inexact:
        return lax.div(*jnp.broadcast_arrays(_typed(call, x), jnp.asarray(y, call.dtype)))
    quotient = jnp.divide(_typed(call, x), _typed(call, y))
    return jnp.trunc(quotient) if rounding_mode == "trunc" else quotient


@aten("clamp", "hardtanh")
def _clamp(
    call: Call, x: jax.Array, low: Operand | None = None, high: Operand | None = None
) -> jax.Array:
    return jnp.clip(_typed(call, x), _typed(call, low), _typed(call, high))


@aten("elu")
def _elu(
    call: Call, x: jax.Array, alpha: float = 1, scale: float = 1, inner: float = 1
) -> jax.Array:
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * inner) * (alpha * scale))


#: Functions of the call, and of the operator's own arguments.
_OF_CALL: dict[str, Translation] = {
    "where": lambda call, chosen, x, y: jnp.where(chosen, _typed(call, x), _typed(call, y)),
    # PyTorch truncates floats, as JAX does; booleans are whatever is not zero.
    "_to_copy": lambda call, x, **_: x != 0 if call.dtype == jnp.bool_ else x.astype(call.dtype),
    "clone alias detach_ lift_fresh_copy": lambda call, x, *_, **__: x.astype(call.dtype),
}
enter(_OF_CALL)
