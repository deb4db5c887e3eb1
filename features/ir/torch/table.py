"""The table of ATen operators that are translated, and what each is told about its call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

#: A translated operator: its call, then the operator's own arguments with arrays for tensors.
Translation = Callable[..., Any]
#: Translations by the operator's name, with or without its overload.
TABLE: dict[str, Translation] = {}


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        shape: Shape of its (first) result.
        dtype: Element type of its (first) result.
        key: Returns a fresh key for random numbers.
    """

    shape: tuple[int, ...]
    dtype: Any
    key: Callable[[], jax.Array]

    @property
    def inexact(self) -> bool:
        """Whether the result is of floating point."""
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))


def aten(*names: str) -> Callable[[Translation], Translation]:
    """Enter a function into the table under names of operators, such as ``add`` or ``max.dim``."""

    def enter(function: Translation) -> Translation:
        for name in names:
            TABLE[f"aten.{name}"] = function
        return function

    return enter


def find(target: str) -> Translation | None:
    """Find the translation of ``aten.add.Tensor``: of this overload, else of the operator."""
    return TABLE.get(target) or TABLE.get(target.rpartition(".")[0])


def as_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers; all of them if none are given."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    given = [dims] if isinstance(dims, int) else dims
    return tuple(d % max(rank, 1) for d in given)


def in_f32(x: jax.Array) -> jax.Array:
    """The array in at least 32 bits, in which PyTorch's kernels accumulate."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
