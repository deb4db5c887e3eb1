"""Arguments for a program that came without any: the right types and shapes, harmless values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...common.errors import ProfileError
from ...features.ir.dtypes import NUMPY_NAMES
from ...features.ir.program import TensorType
from .source import numpy_dtype

#: Integers stay below this, since programs use them as indices of unknown dimensions.
INTEGER_LIMIT = 8


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
        # The narrowest types hold less than the limit.
        top = min(INTEGER_LIMIT, 2 ** (int(dtype[1:]) - 1))
        return rng.integers(0, top, shape).astype(target)
    # Of the size of weights: chains of products neither overflow 16-bit types nor become denormal,
    # which would change their speed on a CPU.
    return (rng.standard_normal(shape, np.float32) * 0.1).astype(target)
