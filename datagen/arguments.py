"""Arguments for a program that came without any: right types and shapes, harmless values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..features.errors import ProfileError
from ..features.ir import TensorType

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
    target = _numpy_dtype(dtype)
    if dtype[0] in "su":
        top = min(INTEGER_LIMIT, 2 ** (int(dtype[1:]) - 1))
        return rng.integers(0, top, shape).astype(target)
    return (rng.standard_normal(shape, np.float32) * 0.1).astype(target)


def _numpy_dtype(dtype: str) -> np.dtype:
    import ml_dtypes

    short = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
    name = short.get(dtype)
    if name is None and dtype[0] in "su":
        name = ("int" if dtype[0] == "s" else "uint") + dtype[1:]
    if name is None and dtype.startswith(("f8", "f4", "f6")):
        name = f"float{dtype[1]}_{dtype[2:]}"
    if name is None:
        raise ProfileError(
            f"an argument of type {dtype} cannot be made up", hint="give the arguments yourself"
        )
    return np.dtype(getattr(ml_dtypes, name, name))
