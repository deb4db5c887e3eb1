"""MLIR types as text, read into the IR's types."""

from __future__ import annotations

import pytest

from opcast.features.ir.mlir.values import DynamicDimensionError, read_types, split_top
from opcast.features.ir.program import TensorType


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor<8x128xf32>", TensorType("f32", (8, 128))),
        ("tensor<bf16>", TensorType("bf16")),
        ("tensor<0x3xi64>", TensorType("s64", (0, 3))),
        ("tensor<4xi1>", TensorType("pred", (4,))),
        ("tensor<4xui8>", TensorType("u8", (4,))),
        ("tensor<4xi5>", TensorType("s8", (4,))),  # the next wider storage
        ("tensor<2xcomplex<f64>>", TensorType("c128", (2,))),
        ("tensor<2xf8E4M3FN>", TensorType("f8e4m3fn", (2,))),
        ("tensor<2xtf32>", TensorType("f32", (2,))),
        ("tensor<3x!quant.uniform<u8:f32, 0.1>>", TensorType("u8", (3,))),
        ("tensor<3x5xf32, #stablehlo.bounds<3, 5>>", TensorType("f32", (3, 5))),
        ("vector<16xf16>", TensorType("f16", (16,))),
        ("index", TensorType("s64")),
        ("!stablehlo.token", TensorType("token")),
        ("!llvm.ptr", TensorType("opaque")),
    ],
)
def test_a_single_type(text, expected):
    assert read_types(text) == ((expected,), False)


def test_tuples_are_flattened_to_their_leaves():
    leaves, is_tuple = read_types("tuple<tensor<2xf32>, tuple<tensor<i32>, !stablehlo.token>>")
    assert is_tuple
    assert [str(leaf) for leaf in leaves] == ["f32[2]", "s32[]", "token[]"]
    assert read_types("!mhlo.async_bundle<tensor<2xf32>, tensor<i32>>")[1]


@pytest.mark.parametrize("text", ["tensor<?x3xf32>", "tensor<*xf32>"])
def test_sizes_that_are_not_static_are_refused(text):
    with pytest.raises(DynamicDimensionError):
        read_types(text)


def test_split_outside_of_brackets_strings_and_arrows():
    assert split_top('a<1, 2>, "x, y", [b, 0]x[c]->[d]') == ["a<1, 2>", '"x, y"', "[b, 0]x[c]->[d]"]
    assert split_top("k = [1, 2]", "=") == ["k", "[1, 2]"]
    assert split_top("") == []
    assert split_top("a,") == ["a", ""]
