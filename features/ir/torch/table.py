"""The table of ATen translations, with the element-wise operators.

Each translation receives its :class:`Call`; other operators are in the neighbouring modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: A number among an operator's arguments.
Scalar: TypeAlias = bool | int | float | complex
#: An operand of element-wise operators: an array for a tensor, or a number.
Operand: TypeAlias = jax.Array | Scalar
#: Dimensions that an operator covers; ``None`` for all.
Dims: TypeAlias = int | Sequence[int] | None
#: Results of an operator: one tensor or several; those that JAX does not compute are omitted.
Result: TypeAlias = jax.Array | Sequence[jax.Array | None]
#: A translated operator: takes its call, then the operator's arguments with arrays for tensors.
Translation: TypeAlias = Callable[..., Result]
_F = TypeVar("_F", bound=Translation)
_R = TypeVar("_R", bound=Result)
_T = TypeVar("_T")
#: Translations by the operator's name, with or without its overload.
TABLE: dict[str, Translation] = {}
#: Factorisations and solvers outside ``linalg``, and in it; exceptions below.
_SOLVERS = (
    *("aten.cholesky", "aten.triangular_solve", "aten.geqrf", "aten.ormqr", "aten.orgqr"),
    *("aten.lu_", "aten._linalg", "aten.linalg_"),
)
_NO_SOLVERS = ("aten.linalg_vector_norm", "aten.linalg_cross")


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        shape: Shape of its (first) result.
        dtype: Element type of its (first) result.
        key: Returns a fresh key for random numbers.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    key: Callable[[], jax.Array]

    @property
    def inexact(self) -> bool:
        """Whether the result is a floating-point array."""
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))


def aten(*names: str) -> Callable[[_F], _F]:
    """Register a function under names of operators, such as ``add`` or ``max.dim``."""

    def enter(function: _F) -> _F:
        for name in names:
            TABLE[f"aten.{name}"] = function
        return function

    return enter


def enter(
    functions: Mapping[str, Callable[..., _R]],
    kind: Callable[[Callable[..., _R]], Translation] | None = None,
) -> None:
    """Register functions in the table.

    Args:
        functions: Functions by operator names, several of them separated by spaces.
        kind: Converts a function of JAX to a translation: :func:`plain`, or one that casts the
            operands. By default the functions are translations already.
    """
    for names, function in functions.items():
        aten(*names.split())(kind(function) if kind else function)


def plain(function: Callable[..., Result]) -> Translation:
    """Translate an operator by a function of the operator's arguments."""

    def translated(call: Call, *args: object, **kwargs: object) -> Result:
        return function(*args, **kwargs)

    return translated


def find(target: str) -> Translation | None:
    """Find the translation of an overload such as ``aten.add.Tensor``, else of the operator."""
    return TABLE.get(target) or TABLE.get(target.rpartition(".")[0])


def as_dims(dims: Dims, rank: int) -> tuple[int, ...]:
    """Return dimensions as non-negative numbers; all of them if none are given."""
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        return tuple(range(rank))
    return tuple(d % max(rank, 1) for d in given)


def in_f32(x: jax.Array) -> jax.Array:
    """Widen an array to at least 32 bits, in which PyTorch's kernels accumulate."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def is_solver(name: str) -> bool:
    """Return whether an operator is a factorisation or solver, which no model predicts."""
    return name.startswith(_SOLVERS) and not name.startswith(_NO_SOLVERS)


#: Operators with the same name in JAX's NumPy.
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
    # Operators of Python that some decompositions leave.
    **{f"__{name}__": getattr(jnp, f"bitwise_{name}") for name in ("and", "or", "xor")},
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
}
#: Functions of an operator's arguments, in PyTorch's order.
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
        # Integers become floats first, since JAX would choose the type by its own rules. The result
        # of a complex operand may be real.
        cast = call.inexact and not jnp.iscomplexobj(x)
        return function(x.astype(call.dtype) if cast else x)

    return translated


def _typed(call: Call, x: _T) -> _T | jax.Array:
    """Cast an operand to the result's type: in PyTorch a 0-d tensor does not widen others."""
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


@aten("rsub")
def _rsub(call: Call, x: Operand, y: Operand, alpha: float = 1) -> jax.Array:
    return jnp.subtract(_typed(call, y), jnp.multiply(_typed(call, x), alpha))


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


#: Functions of the call and the operator's own arguments.
_OF_CALL: dict[str, Translation] = {
    "where": lambda call, chosen, x, y: jnp.where(chosen, _typed(call, x), _typed(call, y)),
    # PyTorch truncates floats, as JAX does; booleans are true for any nonzero value.
    "_to_copy": lambda call, x, **_: x != 0 if call.dtype == jnp.bool_ else x.astype(call.dtype),
    "clone alias detach_ lift_fresh_copy": lambda call, x, *_, **__: x.astype(call.dtype),
}
enter(_OF_CALL)
