"""Random sizes, shapes and types: half of them log-uniform, half as in real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from ...common.files import own_data
from .source import Arg, numpy_dtype

T = TypeVar("T")
_struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
#: Real floating-point types, as HLO names; f64 is left out, since models hardly use it.
FLOATS = ("f32", "bf16", "f16")
#: A layer: takes one array per argument, returns an array or a tuple of arrays.
Function: TypeAlias = Callable[..., "jax.Array"]

DATA: Any = own_data("datagen/programs/programs.toml")
"""Sizes, element-wise ops and works, as the file describes them."""


def _sizes(name: str) -> tuple[int, ...]:
    return tuple(DATA["sizes"][name])


WIDTHS, CHANNELS, IMAGES = map(_sizes, ("widths", "channels", "images"))
BATCHES, LENGTHS, VOCABULARIES = map(_sizes, ("batches", "lengths", "vocabularies"))
HEADS, HEAD_WIDTHS = map(_sizes, ("heads", "head_widths"))
_COMMON = tuple(sorted({*WIDTHS, *CHANNELS, *IMAGES, *BATCHES, *LENGTHS, *VOCABULARIES}))
#: Smallest target number of elements: below it every kernel takes the same time.
_FEW = 512
#: Proposals, of which the nearest to the target size is taken; few, so that sizes stay varied.
_TRIES = 16


@dataclass(frozen=True)
class Draft:
    """A program that has not been traced yet.

    Attributes:
        function: Takes one array per argument.
        args: Its arguments.
        note: Part of its name that identifies the variant.
    """

    function: Callable[..., Any]
    args: tuple[Arg, ...]
    note: str = ""


@dataclass(frozen=True)
class Draws:
    """Random decisions within limits.

    Attributes:
        rng: Source of all randomness.
        max_bytes: Memory that a program may need.
        max_flops: Work that a program may do, in FLOPs of a matrix product.
    """

    rng: np.random.Generator
    max_bytes: float
    max_flops: float

    def flip(self, probability: float = 0.5) -> bool:
        """True with the given probability."""
        return bool(self.rng.random() < probability)

    def choice(self, options: Sequence[T]) -> T:
        """Draw one of the options."""
        return options[int(self.rng.integers(len(options)))]

    def weighted(self, weights: Mapping[T, float]) -> T:
        """Draw a key in proportion to its weight."""
        keys, values = list(weights), np.fromiter(weights.values(), float)
        return keys[int(self.rng.choice(len(keys), p=values / values.sum()))]

    def integer(self, low: int, high: int) -> int:
        """Draw uniformly from ``[low, high]``."""
        return int(self.rng.integers(low, high + 1))

    def log_uniform(self, low: float, high: float) -> float:
        """Draw log-uniformly between two positive numbers."""
        return math.exp(self.rng.uniform(math.log(low), math.log(max(low, high))))

    def size(self, low: int, high: int, common: Sequence[int] = _COMMON) -> int:
        """Draw a dimension in ``[low, high]``: half of the time a common one, else log-uniform."""
        fitting = [n for n in common if low <= n <= high]
        if fitting and self.flip():
            return self.choice(fitting)
        return min(high, max(low, round(self.log_uniform(low, max(low, high)))))

    def dtype(self, *among: str) -> str:
        """Draw a floating-point type, f32 most often, or one of the given types."""
        if among:
            return self.choice(among)
        return self.weighted({d: 3.0 if d == "f32" else 1.0 for d in FLOATS})

    def elements(self, dtype: str, copies: float = 2.0, work: float = 20.0) -> int:
        """Draw a number of elements, log-uniformly.

        Args:
            dtype: Element type.
            copies: Arrays of that many elements that the program needs at a time.
            work: Work per element, in FLOPs of a matrix product.
        """
        most = self.max_bytes / (copies * max(1, numpy_dtype(dtype).itemsize))
        most = min(most, self.max_flops / work)
        return max(1, int(self.log_uniform(min(_FEW, most / 4 + 1), max(most, 1))))

    def array(
        self,
        copies: float = 2.0,
        work: float = 20.0,
        ranks: Sequence[int] = (),
        dtype: str = "",
        held: str = "",
    ) -> Arg:
        """Draw an argument of moderate values: its type, a number of elements, a shape.

        Args:
            copies: Arrays of that many elements that the program needs at a time.
            work: Work per element, in FLOPs of a matrix product.
            ranks: Allowed numbers of dimensions; 1 to 4 if not given.
            dtype: Its element type; a floating-point type of the sampler if not given.
            held: Element type of the other arrays; its own if not given.
        """
        dtype = dtype or self.dtype()
        return values(self.shape(self.elements(held or dtype, copies, work), *ranks), dtype)

    def split(self, elements: float, rank: int, concentration: float = 1.5) -> tuple[int, ...]:
        """Draw ``rank`` dimensions whose product is about ``elements``, never above it.

        Args:
            elements: Target product.
            rank: Number of dimensions.
            concentration: Parameter of the Dirichlet distribution that splits the logarithm of the
                product; higher values make the dimensions more equal.
        """
        parts = self.rng.dirichlet([concentration] * rank) * math.log(max(1.0, elements))
        dims = [max(1, int(math.exp(part))) for part in parts]
        # Vector units and tiles favour multiples of 8; both sides of that boundary are wanted.
        if self.flip(0.3):
            dims = [n // 8 * 8 if n >= 16 else n for n in dims]
        return tuple(dims)

    def shape(self, elements: int, *ranks: int) -> tuple[int, ...]:
        """Draw a shape of at most about ``elements`` elements.

        Args:
            elements: Target product.
            *ranks: Allowed numbers of dimensions; 1 to 4 if not given.
        """
        allowed = ranks or (1, 2, 3, 4)
        if self.flip():
            nearest = self.closest(
                lambda: self.model_shape(self.choice(allowed)), _product, elements
            )
            if nearest is not None:
                return nearest
        return self.split(elements, self.choice(allowed))

    def model_shape(self, rank: int) -> tuple[int, ...]:
        """Draw a shape as in real models: tokens, heads, images, tables."""
        batch, length, width = self.choice(BATCHES), self.choice(LENGTHS), self.choice(WIDTHS)
        if rank == 0:
            return ()
        if rank == 1:
            return (self.choice((width, width * length, 2 ** self.integer(6, 25))),)
        if rank == 2:
            rows = self.choice((batch, length, width, batch * length, self.choice(VOCABULARIES)))
            return (rows, width)
        if rank == 3:
            return (batch, length, width)
        if self.flip():
            heads, last = self.choice(HEADS), self.choice((length, self.choice(HEAD_WIDTHS)))
            dims = (batch, heads, length, last) if self.flip() else (batch, length, heads, last)
        else:
            side, channels = self.choice(IMAGES), self.choice(CHANNELS)
            nhwc = (batch, side, side, channels)
            dims = nhwc if self.flip(0.7) else (batch, channels, side, side)
        return dims + (2,) * (rank - 4)

    def closest(
        self, propose: Callable[[], T], measure: Callable[[T], float], target: float
    ) -> T | None:
        """The nearest of several proposals that do not exceed the target, else None."""
        proposals = [propose() for _ in range(_TRIES)]
        sized = [(measure(p), i) for i, p in enumerate(proposals)]
        fitting = [entry for entry in sized if entry[0] <= target]
        return proposals[max(fitting)[1]] if fitting else None


def _product(shape: tuple[int, ...]) -> float:
    return float(math.prod(shape))


def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """A type for JAX, without a value."""
    return _struct(shape, numpy_dtype(dtype))


def positive(shape: tuple[int, ...], dtype: str) -> Arg:
    """Argument with values between 0.1 and 2: safe for division and logarithms."""
    return Arg(shape, dtype, "uniform", 0.1, 2.0)


def values(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Arg:
    """Argument with moderate values of any type: normal floats, small integers, booleans."""
    if dtype == "pred":
        return Arg(shape, dtype, "integer", 0, 2)
    if dtype[0] in "su":
        return Arg(shape, dtype, "integer", 0 if dtype[0] == "u" else -8, 9)
    return Arg(shape, dtype, "normal", high=scale)


def indices(shape: tuple[int, ...], bound: int) -> Arg:
    """An int32 argument of indices in ``[0, bound)``."""
    return Arg(shape, "s32", "integer", 0, max(1, bound))


def gradient(function: Function, wanted: Sequence[int]) -> Callable[..., tuple[jax.Array, ...]]:
    """Vector-Jacobian product of a function by its ``wanted`` arguments.

    Returns:
        A function of the gradient of the function's result, followed by the function's arguments.
    """

    def vector_jacobian(grad: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
        # A function of only the wanted arguments: integers have no gradient.
        def partial(*floats: jax.Array) -> jax.Array:
            full = list(args)
            for index, value in zip(wanted, floats, strict=True):
                full[index] = value
            return function(*full)

        product: tuple[jax.Array, ...] = jax.vjp(partial, *(args[i] for i in wanted))[1](grad)
        return product

    return vector_jacobian
