"""Types, attributes and constants of HLO text, one notation at a time."""

from __future__ import annotations

import math

import pytest

from opcast.features.ir.hlo_attributes import (
    ATTRIBUTE,
    read_attribute,
    read_backend_config,
    read_literal,
    read_type,
    read_value,
    unquote,
)
from opcast.features.ir.program import TensorType, WindowDim


@pytest.mark.parametrize(
    ("text", "leaf"),
    [
        ("f32[]", TensorType("f32")),
        ("f32[8,128]{1,0}", TensorType("f32", (8, 128))),  # row-major is the default
        ("f32[8,128]{0,1}", TensorType("f32", (8, 128), (0, 1))),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", TensorType("bf16", (8, 128), None, 1)),
        ("s4[16]{0:E(4)}", TensorType("s4", (16,))),
    ],
)
def test_array_types(text, leaf):
    assert read_type(text) == ((leaf,), False, "")


def test_tuples_keep_their_nesting_only_where_they_nest():
    leaves, is_tuple, nesting = read_type("(s32[], f32[2]{0})")
    assert (len(leaves), is_tuple, nesting) == (2, True, "")
    leaves, is_tuple, nesting = read_type("(s32[], (f32[2]{0}, pred[]))")
    assert (len(leaves), is_tuple, nesting) == (3, True, "(*(**))")
    assert read_type("()") == ((), True, "")


@pytest.mark.parametrize("text", ["f33[2]", "f32[?]", "f32[2,2]{1,1}", "(f32[2]", "nonsense"])
def test_texts_that_are_not_types(text):
    with pytest.raises(ValueError, match=r"type|dimension"):
        read_type(text)


def test_attributes_split_at_commas_outside_of_brackets_and_strings():
    text = ', a={1,2}, window={size=3x3 pad=1_1x1_1}, name="x, y={", sub=b01f_01io->b01f, f=%c.1'
    assert [m.groups() for m in ATTRIBUTE.finditer(text)] == [
        ("a", "{1,2}"),
        ("window", "{size=3x3 pad=1_1x1_1}"),
        ("name", '"x, y={"'),
        ("sub", "b01f_01io->b01f"),
        ("f", "%c.1"),
    ]


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("slice", "{[0:8:2], [1:4]}", ((0, 8, 2), (1, 4, 1))),
        ("padding", "0_0x1_2_3", ((0, 0, 0), (1, 2, 3))),
        ("source_target_pairs", "{{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("custom_call_target", '"a\\"b"', 'a"b'),
        (
            "window",
            "{size=3x1 stride=2x1 pad=1_0x0_0 rhs_dilate=1x4 rhs_reversal=0x1}",
            (WindowDim(3, 2, 1, 0), WindowDim(1, rhs_dilation=4, reversal=True)),
        ),
        ("window", "{}", ()),
        ("dim_labels", "bf_io->bf", "bf_io->bf"),
        ("other", "true", True),
        ("other", "-3", -3),
        ("other", "2.5e-1", 0.25),
        ("other", "{}", ()),
        ("other", "{1, 2}", (1, 2)),
        ("other", "{{0},{1,2}}", ((0,), (1, 2))),
        ("other", "SAME", "SAME"),
    ],
)
def test_read_attribute(key, text, expected):
    assert read_attribute(key, text) == expected


def test_a_window_needs_one_value_for_each_dimension():
    with pytest.raises(ValueError, match="different rank"):
        read_attribute("window", "{size=3x3 stride=2}")


def test_escapes_of_strings():
    assert unquote(r'"a\n\t\x41\101\\"') == "a\n\tAA\\"


def test_backend_configurations_are_dictionaries_where_they_are_json():
    assert read_backend_config('"{\\"a\\": [1]}"') == {"a": [1]}
    assert read_backend_config('{"a": 1}') == {"a": 1}
    assert read_backend_config('"opaque bytes"') == "opaque bytes"
    assert read_backend_config("{broken") == "{broken"


def test_numbers_that_are_not_integers():
    assert read_value("inf") == math.inf and read_value("-inf") == -math.inf
    assert math.isnan(read_value("nan"))


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("3", "s32", 3),
        ("{1, 2}", "s32", [1, 2]),
        ("{ {1, 1}, {1, 1} }", "f32", 1.0),  # a splat
        ("{1, 1.0}", "f32", [1.0, 1.0]),  # told by its text
        ("{true, false}", "pred", [True, False]),
        ("(1, -2)", "c64", 1 - 2j),
        ("{...}", "f32", None),
        ("", "f32", None),
    ],
)
def test_read_literal(text, dtype, expected):
    assert read_literal(text, TensorType(dtype)) == expected


def test_literals_with_an_element_that_is_not_a_number_are_refused():
    with pytest.raises(ValueError, match="invalid literal"):
        read_literal("x", TensorType("s32"))


def test_long_literals_keep_no_value_but_long_splats_do():
    shape = TensorType("s32", (65,))
    assert read_literal("{" + ", ".join(map(str, range(65))) + "}", shape) is None
    assert read_literal("{" + ", ".join(["7"] * 65) + "}", shape) == 7
