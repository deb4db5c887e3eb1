"""The table of ATen operators that are translated, and what each is told about its call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

#: A number among an operator's arguments.
Scalar: TypeAlias = bool | int | float | complex
#: An operand of element-wise operators: an array for a tensor, or a number.
Operand: TypeAlias = jax.Array | Scalar
#: Dimensions that an operator goes over; nothing for all of them.
Dims: TypeAlias = int | Sequence[int] | None
#: What an operator gives: a tensor, or several; those that JAX does not compute are left out.
Result: TypeAlias = jax.Array | Sequence[jax.Array | None]
#: A translated operator: its call, then the operator's own arguments with arrays for tensors.
Translation: TypeAlias = Callable[..., Result]
_F = TypeVar("_F", bound=Translation)
_R = TypeVar("_R", bound=Result)
#: Translations by the operator's name, with or without its overload.
TABLE: dict[str, Translation] = {}
#: Factorisations and solvers that are not called ``linalg``, and the reductions that are.
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
    """Enter a function into the table under names of operators, such as ``add`` or ``max.dim``."""

    def enter(function: _F) -> _F:
        for name in names:
            TABLE[f"aten.{name}"] = function
        return function

    return enter


def enter(
    functions: Mapping[str, Callable[..., _R]],
    kind: Callable[[Callable[..., _R]], Translation] | None = None,
) -> None:
    """Enter functions into the table.

    Args:
        functions: Functions by the operators' names, several of them separated by spaces.
        kind: Makes a function of JAX a translation: :func:`plain`, or what gives the operands
            their types. By default the functions are translations already.
    """
    for names, function in functions.items():
        aten(*names.split())(kind(function) if kind else function)


def plain(function: Callable[..., Result]) -> Translation:
    """Translate an operator by a function of the operator's own arguments."""

    def translated(call: Call, *args: object, **kwargs: object) -> Result:
        return function(*args, **kwargs)

    return translated


def find(target: str) -> Translation | None:
    """Find the translation of ``aten.add.Tensor``: of this overload, else of the operator."""
    return TABLE.get(target) or TABLE.get(target.rpartition(".")[0])


def as_dims(dims: Dims, rank: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers; all of them if none are given."""
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        return tuple(range(rank))
    return tuple(d % max(rank, 1) for d in given)


def in_f32(x: jax.Array) -> jax.Array:
    """The array in at least 32 bits, in which PyTorch's kernels accumulate."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def is_solver(name: str) -> bool:
    """Whether an operator is a factorisation or a solver, whose time nothing predicts either."""
    return name.startswith(_SOLVERS) and not name.startswith(_NO_SOLVERS)
