"""Element-wise ATen operators in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .table import TABLE, Call, Operand, Scalar, aten

_T = TypeVar("_T")

#: Operators that JAX's NumPy has under their names.
_SAME_NAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "exp"),
    *("exp2", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2"),
    *("sign", "signbit", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
_UNARY: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(jnp, name) for name in _SAME_NAME},
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "hardsigmoid": lambda x: jax.nn.relu6(x + 3) / 6,
    "hardswish": lambda x: x * jax.nn.relu6(x + 3) / 6,
    "log_sigmoid_forward": jax.nn.log_sigmoid,
    "angle": jnp.angle,
    "sgn": jnp.sign,
    "conj_physical": jnp.conj,
    "logical_not": jnp.logical_not,
    "bitwise_not": jnp.bitwise_not,
}
_BINARY: dict[str, Callable[..., jax.Array]] = {
    "mul": jnp.multiply,
    "pow": jnp.power,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "atan2": jnp.arctan2,
    "fmod": jnp.fmod,
    "remainder": jnp.remainder,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
}
_COMPARE: dict[str, Callable[..., jax.Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
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


def _compare(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def translated(call: Call, x: Operand, y: Operand) -> jax.Array:
        return function(x, y)

    return translated


TABLE.update({f"aten.{name}": _unary(own) for name, own in _UNARY.items()})
TABLE.update({f"aten.{name}": _binary(own) for name, own in _BINARY.items()})
TABLE.update({f"aten.{name}": _compare(own) for name, own in _COMPARE.items()})


@aten("add")
def _add(call: Call, x: Operand, y: Operand, alpha: Scalar = 1) -> jax.Array:
    scaled = _typed(call, y) if alpha == 1 else _typed(call, y) * alpha
    return jnp.add(_typed(call, x), scaled)


@aten("sub")
def _sub(call: Call, x: Operand, y: Operand, alpha: Scalar = 1) -> jax.Array:
    scaled = _typed(call, y) if alpha == 1 else _typed(call, y) * alpha
    return jnp.subtract(_typed(call, x), scaled)


@aten("rsub")
def _rsub(call: Call, x: Operand, y: Operand, alpha: Scalar = 1) -> jax.Array:
    return _sub(call, y, x, alpha)


@aten("div")
def _div(call: Call, x: Operand, y: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(_typed(call, x), _typed(call, y))
    if not call.inexact:
        return lax.div(*jnp.broadcast_arrays(_typed(call, x), jnp.asarray(y, call.dtype)))
    quotient = jnp.divide(_typed(call, x), _typed(call, y))
    return jnp.trunc(quotient) if rounding_mode == "trunc" else quotient


@aten("floor_divide")
def _floor_divide(call: Call, x: Operand, y: Operand) -> jax.Array:
    return jnp.floor_divide(_typed(call, x), _typed(call, y))


@aten("where")
def _where(call: Call, chosen: jax.Array, x: Operand, y: Operand) -> jax.Array:
    return jnp.where(chosen, _typed(call, x), _typed(call, y))


@aten("masked_fill")
def _masked_fill(call: Call, x: jax.Array, mask: jax.Array, value: Operand) -> jax.Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@aten("clamp", "hardtanh")
def _clamp(
    call: Call, x: jax.Array, low: Operand | None = None, high: Operand | None = None
) -> jax.Array:
    return jnp.clip(_typed(call, x), _typed(call, low), _typed(call, high))


@aten("clamp_min")
def _clamp_min(call: Call, x: jax.Array, low: Operand) -> jax.Array:
    return jnp.maximum(_typed(call, x), _typed(call, low))


@aten("clamp_max")
def _clamp_max(call: Call, x: jax.Array, high: Operand) -> jax.Array:
    return jnp.minimum(_typed(call, x), _typed(call, high))


@aten("relu6")
def _relu6(call: Call, x: jax.Array) -> jax.Array:
    return jax.nn.relu6(x)


@aten("gelu")
def _gelu(call: Call, x: jax.Array, approximate: str = "none") -> jax.Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@aten("leaky_relu")
def _leaky_relu(call: Call, x: jax.Array, slope: float = 0.01) -> jax.Array:
    return jax.nn.leaky_relu(x, slope)


@aten("elu")
def _elu(
    call: Call, x: jax.Array, alpha: float = 1, scale: float = 1, inner: float = 1
) -> jax.Array:
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * inner) * (alpha * scale))


@aten("softplus")
def _softplus(call: Call, x: jax.Array, beta: float = 1, threshold: float = 20) -> jax.Array:
    smooth = jax.nn.softplus(jnp.minimum(x * beta, threshold)) / beta
    return jnp.where(x * beta > threshold, x, smooth)


@aten("prelu", "_prelu_kernel")
def _prelu(call: Call, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, x * weight)


@aten("glu")
def _glu(call: Call, x: jax.Array, dim: int = -1) -> jax.Array:
    return jax.nn.glu(x, dim)


@aten("view_as_complex", "view_as_complex_copy")
def _view_as_complex(call: Call, x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@aten("view_as_real", "view_as_real_copy")
def _view_as_real(call: Call, x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@aten("complex")
def _complex(call: Call, real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@aten("polar")
def _polar(call: Call, size: jax.Array, angle: jax.Array) -> jax.Array:
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@aten("_conj", "_conj_copy")
def _conj(call: Call, x: jax.Array) -> jax.Array:
    return jnp.conj(x)


@aten("real")
def _real(call: Call, x: jax.Array) -> jax.Array:
    return jnp.real(x)


@aten("imag")
def _imag(call: Call, x: jax.Array) -> jax.Array:
    return jnp.imag(x)


@aten("lerp")
def _lerp(call: Call, x: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    return x + (end - x) * weight


@aten("addcmul")
def _addcmul(call: Call, x: jax.Array, a: jax.Array, b: jax.Array, value: Scalar = 1) -> jax.Array:
    return x + a * b * value


@aten("addcdiv")
def _addcdiv(call: Call, x: jax.Array, a: jax.Array, b: jax.Array, value: Scalar = 1) -> jax.Array:
    return x + a / b * value


@aten("_to_copy")
def _to_copy(call: Call, x: jax.Array, **_: object) -> jax.Array:
    # PyTorch truncates floats, as JAX does; booleans are whatever is not zero.
    return x != 0 if call.dtype == jnp.bool_ else x.astype(call.dtype)


@aten(
    *("clone", "alias", "detach", "lift_fresh_copy", "contiguous", "detach_", "to", "type_as"),
    *("resolve_conj", "resolve_neg"),
)
def _same(call: Call, x: jax.Array, *_: object, **__: object) -> jax.Array:
    return x.astype(call.dtype)


@aten("copy")
def _copy(call: Call, x: jax.Array, other: jax.Array, *_: object) -> jax.Array:
    return jnp.broadcast_to(other, x.shape).astype(x.dtype)


def _stop_gradient(call: Call, x: jax.Array) -> jax.Array:
    return lax.stop_gradient(x)


TABLE["opcast.stop_gradient.default"] = _stop_gradient
