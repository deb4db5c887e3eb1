import numpy as np
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.programs.source import INTEGER_LIMIT, random_arguments
from opcast.features.ir.program import TensorType


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("f64", "float64"),
        ("s32", "int32"), ("u8", "uint8"), ("s4", "int4"), ("pred", "bool"), ("c64", "complex64"),
        ("f8e4m3fn", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_each_type_has_its_numpy_type_and_shape(dtype, expected):
    (array,) = random_arguments([TensorType(dtype, (3, 5))])
    assert array.dtype.name == expected
    assert array.shape == (3, 5)


def test_integers_are_small_indices_and_seed_decides():
    types = [TensorType("s32", (100,)), TensorType("f32", (4,))]
    first, second = random_arguments(types, 1), random_arguments(types, 1)
    assert first[0].min() >= 0
    assert first[0].max() < INTEGER_LIMIT
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[1], random_arguments(types, 2)[1])


def test_a_token_cannot_be_made_up():
    with pytest.raises(ProfileError, match="token"):
        random_arguments([TensorType("token")])
