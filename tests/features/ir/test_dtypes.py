"""Number formats: widths, families, and names in other systems that agree with each other."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from opcast.features.ir.program import (
    DTYPE_BITS,
    DTYPE_CODE,
    FAMILIES,
    HLO_NAMES,
    NUMPY_NAMES,
    dtype_family,
)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        ("f64", "float"),
        ("bf16", "half"),
        ("f8e5m2", "float8"),
        ("f4e2m1fn", "float8"),
        ("s4", "integer"),
        ("u64", "integer"),
        ("pred", "pred"),
        ("c64", "complex"),
        ("token", "none"),
    ],
)
def test_family_of_each_kind_of_type(dtype, family):
    assert FAMILIES[dtype_family(dtype)] == family


def test_codes_are_positions_that_saved_rows_hold():
    codes = [DTYPE_CODE[d] for d in ("pred", "s8", "bf16", "f32", "opaque", "tf32")]
    assert codes == [0, 7, 26, 28, 33, 34]


def test_numpy_names_have_the_width_of_the_hlo_type():
    for dtype, name in NUMPY_NAMES.items():
        kind = np.dtype(getattr(ml_dtypes, name, name))
        # NumPy keeps an element of a sub-byte type in a byte of its own.
        assert kind.itemsize == max(DTYPE_BITS[dtype] // 8, 1), dtype
    assert HLO_NAMES["bfloat16"] == "bf16" and HLO_NAMES["float8_e4m3fn"] == "f8e4m3fn"
    assert HLO_NAMES["uint8"] == "u8" and "token" not in NUMPY_NAMES
