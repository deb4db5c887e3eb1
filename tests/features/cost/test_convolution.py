"""Convolution FLOPs against XLA's own cost analysis, and against counting by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from opcast.features.cost.convolution import conv_flops, read_dim_labels, valid_positions
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import TensorType, WindowDim

from ...support.costs import program_cost

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")

#: name: input shape, kernel shape, dimension numbers, options of conv_general_dilated.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, dict[str, Any]]] = {
    "nhwc same": ((2, 14, 14, 8), (3, 3, 8, 16), NHWC, {"padding": "SAME"}),
    "nhwc valid": ((2, 14, 14, 8), (3, 3, 8, 16), NHWC, {"padding": "VALID"}),
    "nhwc strided": (
        (2, 15, 13, 8),
        (3, 3, 8, 16),
        NHWC,
        {"padding": "SAME", "window_strides": (2, 2)},
    ),
    "nhwc 7x7 stride 2": (
        (1, 32, 32, 3),
        (7, 7, 3, 16),
        NHWC,
        {"padding": [(3, 3), (3, 3)], "window_strides": (2, 2)},
    ),
    "1x1": ((2, 9, 9, 8), (1, 1, 8, 16), NHWC, {"padding": "VALID"}),
    "1x1 stride 3": (
        (2, 9, 9, 8),
        (1, 1, 8, 16),
        NHWC,
        {"padding": "VALID", "window_strides": (3, 3)},
    ),
    "nchw": ((2, 8, 14, 10), (16, 8, 3, 3), NCHW, {"padding": "SAME"}),
    "nchw strided": (
        (2, 8, 14, 10),
        (16, 8, 3, 5),
        NCHW,
        {"padding": "SAME", "window_strides": (2, 1)},
    ),
    "1d": ((2, 33, 4), (5, 4, 6), ("NWC", "WIO", "NWC"), {"padding": "SAME"}),
    "1d strided": (
        (2, 4, 33),
        (6, 4, 5),
        ("NCW", "OIW", "NCW"),
        {"padding": [(2, 1)], "window_strides": (3,)},
    ),
    "3d": (
        (1, 6, 7, 8, 3),
        (3, 3, 3, 3, 4),
        ("NDHWC", "DHWIO", "NDHWC"),
        {"padding": "SAME", "window_strides": (1, 2, 1)},
    ),
    "rhs dilated": (
        (2, 16, 16, 4),
        (3, 3, 4, 8),
        NHWC,
        {"padding": "SAME", "rhs_dilation": (2, 3)},
    ),
    "lhs dilated": (
        (2, 8, 8, 4),
        (3, 3, 4, 8),
        NHWC,
        {"padding": [(1, 2), (2, 1)], "lhs_dilation": (2, 3)},
    ),
    "both dilated, strided": (
        (1, 11, 9, 4),
        (3, 2, 4, 8),
        NHWC,
        {
            "padding": [(4, 2), (1, 3)],
            "lhs_dilation": (3, 2),
            "rhs_dilation": (2, 3),
            "window_strides": (2, 3),
        },
    ),
    "feature groups": (
        (2, 10, 10, 8),
        (3, 3, 2, 16),
        NHWC,
        {"padding": "SAME", "feature_group_count": 4},
    ),
    "depthwise": (
        (2, 10, 10, 8),
        (3, 3, 1, 8),
        NHWC,
        {"padding": "SAME", "feature_group_count": 8},
    ),
    "depthwise x2 strided": (
        (2, 10, 10, 8),
        (3, 3, 1, 16),
        NHWC,
        {"padding": "SAME", "feature_group_count": 8, "window_strides": (2, 2)},
    ),
    "batch groups": (
        (8, 10, 10, 4),
        (3, 3, 4, 8),
        NHWC,
        {"padding": "SAME", "batch_group_count": 4},
    ),
    "negative padding": ((2, 12, 12, 4), (3, 3, 4, 8), NHWC, {"padding": [(-1, -2), (0, 1)]}),
    "kernel larger than input": ((1, 4, 4, 2), (9, 9, 2, 3), NHWC, {"padding": [(6, 6), (6, 6)]}),
}
STRUCT: Any = jax.ShapeDtypeStruct
MODES = ("forward", "input gradient", "filter gradient")


def _lowered(case: str, mode: str) -> Any:
    shape, kernel, numbers, options = CASES[case]
    options = {"window_strides": (1,) * (len(shape) - 2), **options}

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    args = [STRUCT(s, jnp.float32) for s in (shape, kernel)]
    if mode == "forward":
        return jax.jit(conv).lower(*args)
    out = jax.eval_shape(conv, *args)
    which = 0 if mode == "input gradient" else 1

    def gradient(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
        found: jax.Array = jax.vjp(conv, x, w)[1](g)[which]
        return found

    return jax.jit(gradient).lower(*args, STRUCT(out.shape, jnp.float32))


@pytest.mark.parametrize(("case", "mode"), list(product(CASES, MODES)))
def test_agrees_with_xla(case: str, mode: str) -> None:
    lowered = _lowered(case, mode)
    cost = program_cost(parse_hlo(str(lowered.as_text(dialect="hlo"))))
    assert cost.flops == pytest.approx(lowered.cost_analysis().get("flops", 0.0), rel=0.01)


def test_padding_is_not_counted() -> None:
    # 4 outputs, 3 taps, one padded position at each border: 4·3 − 2 = 10 products.
    assert valid_positions(4, 4, WindowDim(3, pad_low=1, pad_high=1)) == 10


def test_holes_are_not_counted() -> None:
    # Dilated input x0 _ x1 _ x2 (5 positions), 3 taps, 3 outputs: positions 0-2, 1-3, 2-4
    # hold 2, 1 and 2 values.
    assert valid_positions(3, 3, WindowDim(3, lhs_dilation=2)) == 5


def test_counts_equal_enumeration() -> None:
    values = product((1, 5, 8), (1, 3, 4), (1, 2, 3), (-1, 0, 2), (1, 2, 3), (1, 2, 3), (1, 6, 11))
    for size, kernel, stride, low, hole, gap, out in values:
        window = WindowDim(kernel, stride, low, 0, hole, gap)
        expected = 0
        for o, k in product(range(out), range(kernel)):
            position = o * stride + k * gap - low
            expected += 0 <= position <= (size - 1) * hole and position % hole == 0
        assert valid_positions(size, out, window) == expected, window


def test_input_gradient_of_strided_convolution_costs_what_forward_does() -> None:
    # Each forward product x·w has one product g·w in the input gradient; counting the holes of
    # the dilated gradient as well would give about four times as much here.
    forward = _lowered("nhwc 7x7 stride 2", "forward")
    gradient = _lowered("nhwc 7x7 stride 2", "input gradient")
    costs = [
        program_cost(parse_hlo(str(x.as_text(dialect="hlo")))).flops for x in (forward, gradient)
    ]
    assert costs[0] == costs[1]


def test_layout_labels_are_obeyed() -> None:
    # N=2, C=8, H=14, W=10, O=16, 1x1 kernel: 2·2·16·8·140 FLOPs, in either order.
    expected = 2 * 2 * 16 * 8 * 140
    window = (WindowDim(1), WindowDim(1))
    nchw = [TensorType("f32", s) for s in ((2, 8, 14, 10), (16, 8, 1, 1), (2, 16, 14, 10))]
    nhwc = [TensorType("f32", s) for s in ((2, 14, 10, 8), (1, 1, 8, 16), (2, 14, 10, 16))]
    assert conv_flops(nchw[0], nchw[1], nchw[2], window, "bf01_oi01->bf01") == expected
    assert conv_flops(nhwc[0], nhwc[1], nhwc[2], window, "b01f_01io->b01f") == expected


def test_labels_with_extra_letters_are_positions() -> None:
    dims = read_dim_labels("f01b_i01o->01bf")
    assert (dims.lhs_batch, dims.lhs_feature, dims.lhs_spatial) == (3, 0, (1, 2))
    assert (dims.rhs_input, dims.rhs_output) == (0, 3)
    assert (dims.out_batch, dims.out_feature, dims.out_spatial) == (2, 3, (0, 1))


def test_long_windows_are_counted_fast() -> None:
    # A global convolution of a million points with a million taps, all in "same" padding:
    # n taps over n outputs reach n² − 2 · (1 + … ) pairs; the closed form for pad n/2 is 3n²/4.
    n = 1_000_000
    found = valid_positions(n, n, WindowDim(n, pad_low=n // 2, pad_high=n // 2 - 1))
    assert found == pytest.approx(0.75 * n * n, rel=1e-5)
