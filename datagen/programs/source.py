"""A program: its StableHLO, and values for its arguments, also for programs without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...common.errors import ProfileError
from ...features.ir.program import NUMPY_NAMES, PARTS, TensorType

Kind = Literal["normal", "uniform", "integer", "spd", "triangular"]

#: Random values drawn per argument; longer arguments repeat them, since drawing a value costs more
#: than many kernels spend on it. Not a power of two, so that rows of an array differ.
_BLOCK = 2**20 + 7
#: Integers stay below this, since programs use them as indices of unknown dimensions.
INTEGER_LIMIT = 8


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy type of an HLO element type such as ``bf16``, ``s32`` or ``pred``.

    Raises:
        TypeError: There is no such type.
    """
    import ml_dtypes

    name = NUMPY_NAMES.get(dtype, dtype)
    kind: np.dtype = np.dtype(getattr(ml_dtypes, name, name))
    return kind


@dataclass(frozen=True)
class Arg:
    """Type and distribution of one argument.

    Attributes:
        shape: Dimensions.
        dtype: HLO element type.
        kind: ``normal`` (mean 0, standard deviation ``high``), ``uniform`` and ``integer`` (both in
            ``[low, high)``), ``spd`` (positive definite matrices) or ``triangular`` (lower
            triangular, well conditioned).
        low: Smallest value.
        high: End of the range, or the standard deviation.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "normal"
    low: float = 0.0
    high: float = 1.0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw a value of this argument."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if self.kind in ("spd", "triangular"):
            return self._matrices(rng)
        block = self._values(rng, min(count, _BLOCK))
        if self.dtype in PARTS:
            block = block + 1j * self._values(rng, min(count, _BLOCK))
        return np.resize(block.astype(numpy_dtype(self.dtype)), self.shape)

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.kind == "integer":
            return rng.integers(int(self.low), int(self.high), count)
        if self.kind == "uniform":
            values = rng.random(count, np.float32)
            return np.asarray(self.low + values * (self.high - self.low), np.float32)
        return rng.standard_normal(count, np.float32) * np.float32(self.high)

    def _matrices(self, rng: np.random.Generator) -> np.ndarray:
        n = self.shape[-1]
        # A dominant diagonal bounds the condition number without the cost of a product.
        matrix = rng.standard_normal((n, n), np.float32) * np.float32(0.2 / np.sqrt(n))
        matrix = np.tril(matrix) if self.kind == "triangular" else (matrix + matrix.T) / 2
        matrix = (matrix + np.eye(n, dtype=np.float32)).astype(numpy_dtype(self.dtype))
        # One matrix for the whole batch: times do not depend on its values.
        return np.array(np.broadcast_to(matrix, self.shape))


@dataclass(frozen=True)
class ProgramSource:
    """A program to compile and measure.

    Attributes:
        name: Readable name, not unique.
        family: ``op:<opcode>`` or ``random``.
        mlir: StableHLO text.
        args: Arguments of ``main`` in order.
        est_bytes: Estimated device memory in bytes: the largest sum of values alive at one time,
            without fusion.
        est_flops: Estimated number of floating-point operations.
    """

    name: str
    family: str
    mlir: str
    args: tuple[Arg, ...] = field(repr=False)
    est_bytes: float
    est_flops: float

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Values for all parameters of ``main`` in order; integers lie within valid ranges.

        Args:
            seed: Seed of all values.
        """
        rng = np.random.default_rng(seed)
        return [arg.draw(rng) for arg in self.args]


def random_arguments(types: Sequence[TensorType], seed: int = 0) -> list[np.ndarray]:
    """Draw arrays of the given types: small normal floats, integers in ``[0, 8)``, booleans.

    Args:
        types: Parameter types in order.
        seed: Seed of the values.

    Raises:
        ProfileError: A type has no NumPy equivalent, such as a token.
    """
    rng = np.random.default_rng(seed)
    return [_one(t, rng) for t in types]


def _one(type_: TensorType, rng: np.random.Generator) -> np.ndarray:
    dtype = type_.dtype
    if dtype not in NUMPY_NAMES:
        raise ProfileError(
            f"an argument of type {dtype} cannot be made up", hint="give the arguments yourself"
        )
    if dtype == "pred":
        return Arg(type_.shape, dtype, "integer", 0, 2).draw(rng)
    if dtype[0] in "su":
        # The narrowest types hold less than the limit.
        top = min(INTEGER_LIMIT, 2 ** (int(dtype[1:]) - 1))
        return Arg(type_.shape, dtype, "integer", 0, top).draw(rng)
    # As large as typical weights: chains of products neither overflow 16-bit types nor become
    # denormal, which would change their speed on a CPU.
    return Arg(type_.shape, dtype, high=1.0 if dtype in PARTS else 0.1).draw(rng)
