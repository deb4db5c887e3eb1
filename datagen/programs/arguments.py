"""Arguments for a program that came without any: right types and shapes, harmless values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...common.errors import ProfileError
from ...features.ir.dtypes import NUMPY_NAMES
from ...features.ir.program import TensorType
from .source import numpy_dtype

#: Integers stay below this, since programs use them as indices of dimensions not known here.
INTEGER_LIMIT = 8


def random_arguments(types: Sequence[TensorType], seed: int = 0) -> list[np.ndarray]:
    """Arrays of the given types: small normal floats, integers in ``[0, 8)``, random booleans.

    Args:
        types: Parameter types in order.
        seed: Seed of the values.

    Raises:
        ProfileError: A type has no NumPy equivalent, such as a token.
    """
    rng = np.random.default_rng(seed)
    return [_one(t, rng) for t in types]


def _one(type_: TensorType, rng: np.random.Generator) -> np.ndarray:
    dtype, shape = type_.dtype, type_.shape
    if dtype == "pred":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("c64", "c128"):
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        return np.asarray(values, np.complex64 if dtype == "c64" else np.complex128)
    if dtype not in NUMPY_NAMES:
        raise ProfileError(
            f"an argument of type {dtype} cannot be made up", hint="give the arguments yourself"
        )
    target = numpy_dtype(dtype)
    if dtype[0] in "su":
        top = min(INTEGER_LIMIT, 2 ** (int(dtype[1:]) - 1))
        return rng.integers(0, top, shape).astype(target)
    return (rng.standard_normal(shape, np.float32) * 0.1).astype(target)
