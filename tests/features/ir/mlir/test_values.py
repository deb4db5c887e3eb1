"""MLIR attribute values as text, read into Python values."""

from __future__ import annotations

import math

import pytest

from opcast.features.ir.mlir.values import Raw, Symbol, read_literal, read_value
from opcast.features.ir.program import TensorType


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 : i64", 7),
        ("-3", -3),
        ("1.500000e+00 : f32", 1.5),
        ("true", True),
        ("unit", True),
        ('"a\\22b\\5Cc"', 'a"b\\c'),  # two hexadecimal digits are a byte
        ('"tab\\09 new\\0A"', "tab\t new\n"),
        ("array<i64: 1, -2>", (1, -2)),
        ("array<i64>", ()),
        ("dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>", ((0, 1), (2, 3))),
        ("dense<5> : tensor<2xi64>", (5, 5)),
        ("dense<true> : tensor<i1>", True),
        ('dense<"0x0100000002000000"> : tensor<2xi32>', (1, 2)),  # little-endian words
        ("[1 : i32, @f]", (1, "f")),
        ('{a = 1 : i32, "b c" = [2], d}', {"a": 1, "b c": (2,), "d": True}),
        ("#stablehlo<comparison_direction LT>", "LT"),
        ("#stablehlo.channel_handle<handle = 3, type = 1>", {"handle": 3, "type": 1}),
        ("#stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>", None),
        ("dense<1.0> : tensor<2xf32>", None),
        ("affine_map<(d0) -> (d0)>", None),
    ],
)
def test_read_value(text, expected):
    assert read_value(text) == (Raw(text) if expected is None else expected)


def test_references_are_told_from_strings():
    assert isinstance(read_value("@main"), Symbol)
    assert read_value('@outer::@"inner name"') == "inner name"
    assert not isinstance(read_value('"main"'), Symbol)


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("dense<1> : tensor<4xi32>", "s32", 1),
        ("dense<[1, 2]> : tensor<2xi32>", "s32", [1, 2]),
        ("dense<[2.5, 2.5]> : tensor<2xf32>", "f32", 2.5),
        ("dense<[true, false]> : tensor<2xi1>", "pred", [True, False]),
        ("dense<0x7F800000> : tensor<f32>", "f32", math.inf),
        ("dense<0xFF80> : tensor<bf16>", "bf16", -math.inf),
        ("dense<0x7C00> : tensor<f16>", "f16", math.inf),
        ("dense<0x38> : tensor<f8E4M3FN>", "f8e4m3fn", 1.0),  # exponent 7 of bias 7
        ("dense<(1.0, 2.0)> : tensor<complex<f32>>", "c64", 1 + 2j),
        ("dense<__elided__> : tensor<99xf32>", "f32", None),
        ('dense<"0x00"> : tensor<1xi8>', "s8", None),
        ("splat", "f32", None),
    ],
)
def test_read_literal(text, dtype, expected):
    assert read_literal(text, TensorType(dtype)) == expected


def test_every_nan_of_a_constant_is_the_same_object():
    text = "dense<[0x7FC00000, 0x7FC00001]> : tensor<2xf32>"
    assert read_literal(text, TensorType("f32", (2,))) is math.nan


@pytest.mark.parametrize(("count", "kept"), [(64, True), (65, False)])
def test_long_constants_keep_no_value(count, kept):
    values = list(range(count))
    text = f"dense<{values}> : tensor<{count}xi32>"
    assert read_literal(text, TensorType("s32", (count,))) == (values if kept else None)
