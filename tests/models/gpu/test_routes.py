"""What kernels are asked as on a GPU: the route, the product, and the memory traffic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.models.gpu.routes import (
    COLUMN_BYTES,
    CONV,
    LONG_ROWS,
    LONGEST_ROW,
    PASS,
    PRODUCT,
    TRANSPOSED,
    describe,
    irregular,
    products,
    traffic,
)

DEVICE = find_device("a100-sxm-80gb")


def kernel(body: str) -> Kernel:
    return kernel_from_ir(f"HloModule m\nENTRY e {{\n{body}\n}}\n")


DOT = kernel(
    "  a = bf16[64,16] parameter(0)\n  b = bf16[16,32] parameter(1)\n"
    "  ROOT r = bf16[64,32] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
)
CONVOLUTION = kernel(
    "  x = bf16[2,8,8,16] parameter(0)\n  w = bf16[3,3,16,32] parameter(1)\n"
    "  ROOT r = bf16[2,8,8,32] convolution(x, w), window={size=3x3 pad=1_1x1_1},\n"
    "    dim_labels=b01f_01io->b01f"
)
COPY = kernel("  a = f32[64,32] parameter(0)\n  ROOT r = f32[64,32] copy(a)")
TRANSPOSE = kernel(
    "  a = f32[64,32] parameter(0)\n  ROOT r = f32[32,64] transpose(a), dimensions={1,0}"
)


def test_each_kind_has_its_route() -> None:
    described = describe([DOT, CONVOLUTION, COPY, TRANSPOSE], DEVICE)
    assert described.route.tolist() == [PRODUCT, CONV, PASS, PASS]
    assert described.rate[:2].tolist() == ["bf16", "bf16"]
    assert not described.attention


def test_products_have_their_dimensions() -> None:
    described = describe([DOT, CONVOLUTION], DEVICE)
    plain, implicit = products(described, np.array([0, 1])).to_dict("records")
    assert [plain[c] for c in ("b", "m", "n", "k", "width", "times", "extra")] == [
        1, 64, 32, 16, 2.0, 1.0, 0.0,
    ]  # fmt: skip
    assert plain["moved"] == 2 * (64 * 16 + 16 * 32 + 64 * 32)
    # 2 images of 8 × 8 positions, 32 features, 3 × 3 taps of 16 channels
    assert [implicit[c] for c in ("m", "n", "k")] == [2 * 8 * 8, 32, 3 * 3 * 16]


def test_a_copy_streams_and_a_transpose_does_not() -> None:
    row = describe([COPY, TRANSPOSE], DEVICE).row
    passes = traffic(row)
    assert passes.moved.tolist() == [2 * 4 * 64 * 32] * 2
    assert passes.penalty[0] == 1.0
    assert passes.penalty[1] == pytest.approx(1.0 + TRANSPOSED)
    assert irregular(row).tolist() == [False, True]


def test_reductions_over_the_slow_dimension_take_longer() -> None:
    add = "HloModule m\ns {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n"
    add += "  ROOT z = f32[] add(x, y)\n}\nENTRY e {\n  a = f32[64,32] parameter(0)\n"
    add += "  c = f32[] constant(0)\n"
    column, row = (
        kernel_from_ir(
            f"{add}  ROOT r = f32[{size}] reduce(a, c), dimensions={{{dim}}}, to_apply=s\n}}\n"
        )
        for dim, size in ((0, 32), (1, 64))
    )
    slow, fast = traffic(describe([column, row], DEVICE).row).penalty
    # 64 · 32 elements, in 4 bytes each read and 32 sums written.
    moved = 4 * 64 * 32 + 4 * 32
    assert slow == pytest.approx(1.0 + COLUMN_BYTES * 64 * 32 / moved, rel=1e-3)
    assert fast == 1.0


def test_a_cache_is_written_as_fast_though_parts_of_a_product_are_summed_on_the_way() -> None:
    """A decoding step of a scan: four parts of a split product go into one layer of a cache."""
    text = """HloModule m
s {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
f {
  all = bf16[32,8,4096,1024] parameter(0)
  layer = bf16[1,8,4096,1024] parameter(1)
  parts = f32[4,8,1024] parameter(2)
  i = s32[] parameter(3)
  o = s32[] constant(0)
  zero = f32[] constant(0)
  sum = f32[8,1024] reduce(parts, zero), dimensions={0}, to_apply=s
  new = bf16[8,1024] convert(sum)
  token = bf16[1,8,1,1024] bitcast(new)
  grown = bf16[1,8,4096,1024] dynamic-update-slice(layer, token, o, o, i, o)
  ROOT out = bf16[32,8,4096,1024] dynamic-update-slice(all, grown, i, o, o, o)
}
ENTRY e {
  all = bf16[32,8,4096,1024] parameter(0)
  layer = bf16[1,8,4096,1024] parameter(1)
  parts = f32[4,8,1024] parameter(2)
  i = s32[] parameter(3)
  ROOT r = bf16[32,8,4096,1024] fusion(all, layer, parts, i), kind=kLoop, calls=f
}
"""
    found = traffic(describe([kernel_from_ir(text)], DEVICE).row)
    layer, summed = 2 * 8 * 4096 * 1024, 4 * 8 * 1024
    assert found.moved[0] == pytest.approx(2 * layer + 4 * summed, rel=1e-3)
    # Of the sums alone: the cache has 2,000 times as many elements, and the stack 32 times those.
    extra = COLUMN_BYTES * summed / (2 * layer)
    assert found.penalty[0] - 1.0 == pytest.approx(extra, rel=0.01)


def gradient_of_rows(length: int, arrays: int = 2) -> str:
    """A softmax's gradient: exponentials of rows less a number each, times others less another.

    With one array, it is a gate: the exponentials times the second number.
    """
    shape = f"bf16[64,{length}]"
    inputs = [f"bf16[64,{length}]"] * arrays + ["bf16[64]"] * 2
    inside = "".join(f"  i{n} = {kind} parameter({n})\n" for n, kind in enumerate(inputs))
    outside = "".join(f"  o{n} = {kind} parameter({n})\n" for n, kind in enumerate(inputs))
    names = ", ".join(f"o{n}" for n in range(len(inputs)))
    other = f"  e = {shape} subtract(i1, d)\n" if arrays == 2 else ""
    return (
        f"HloModule m\nf {{\n{inside}"
        f"  b = {shape} broadcast(i{arrays}), dimensions={{0}}\n"
        f"  d = {shape} broadcast(i{arrays + 1}), dimensions={{0}}\n"
        f"  s = {shape} subtract(i0, b)\n  c = {shape} exponential(s)\n{other}"
        f"  ROOT r = {shape} multiply(c, {'e' if other else 'd'})\n}}\nENTRY m {{\n{outside}"
        f"  ROOT r = {shape} fusion({names}), kind=kLoop, calls=f\n}}\n"
    )


def test_long_rows_of_a_softmax_gradient_are_read_again() -> None:
    kernels = [kernel_from_ir(gradient_of_rows(n)) for n in (4096, 128, 2 * LONGEST_ROW)]
    kernels.append(kernel_from_ir(gradient_of_rows(4096, arrays=1)))
    found = traffic(describe(kernels, DEVICE).row)
    # Three arrays of 64 rows of 2 bytes, and two numbers for each row.
    assert found.again[0] == pytest.approx(LONG_ROWS * (3 * 2 * 64 * 4096 + 2 * 2 * 64))
    assert found.again[1] == 0.0
    # Of longer rows no more bytes are read again than of the longest.
    assert found.again[2] == pytest.approx(LONG_ROWS * found.moved[2] / 2)
    assert found.again[3] == 0.0


ROWS = "f32[64,4096]"


def rows_reduced(lines: str, other: str = ROWS, written: str = "") -> str:
    """A sum over rows of 4096 elements; ``written``, an output that is written besides."""
    results, root = "f32[64]", "reduce(c, i), dimensions={1}, to_apply=add"
    body = f"  ROOT r = {results} {root}\n"
    if written:
        results = f"(f32[64], {written})"
        body = f"  s = f32[64] {root}\n  ROOT r = {results} tuple(s, c)\n"
    return (
        "HloModule m\nadd {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n"
        "  ROOT z = f32[] add(x, y)\n}\n"
        f"f {{\n  a = {ROWS} parameter(0)\n  b = {other} parameter(1)\n{lines}"
        f"  i = f32[] constant(0)\n{body}}}\n"
        f"ENTRY m {{\n  p = {ROWS} parameter(0)\n  q = {other} parameter(1)\n"
        f"  ROOT r = {results} fusion(p, q), kind=kInput, calls=f\n}}\n"
    )


@pytest.mark.parametrize(
    ("kernel", "again"),
    [
        (rows_reduced(f"  c = {ROWS} negate(a)\n", "f32[]"), False),
        (rows_reduced(f"  c = {ROWS} exponential(a)\n", "f32[]"), True),
        (rows_reduced(f"  c = {ROWS} multiply(a, b)\n"), True),
        # A vector is no second array, and what is written is held: a normalization streams.
        (
            rows_reduced(
                f"  d = {ROWS} broadcast(b), dimensions={{1}}\n  c = {ROWS} add(a, d)\n",
                "f32[4096]",
            ),
            False,
        ),
        (rows_reduced(f"  c = {ROWS} exponential(a)\n", "f32[]", written=ROWS), False),
    ],
    ids=["sum", "exponentials", "two arrays", "bias", "normalization"],
)
def test_which_sums_of_rows_stream(kernel: str, again: bool) -> None:
    found = traffic(describe([kernel_from_ir(kernel)], DEVICE).row)
    assert bool(found.again[0] > 0) is again


def test_holes_of_a_dilated_input_are_not_multiplied() -> None:
    # The gradient of a pointwise convolution of stride 2: three of four outputs have no partner.
    body = (
        "  a = bf16[8,16,16,64] parameter(0)\n  b = bf16[1,1,64,128] parameter(1)\n"
        "  ROOT r = bf16[8,31,31,128] convolution(a, b), window={{size=1x1 lhs_dilate={0}}},"
        " dim_labels=b01f_01io->b01f\n"
    )
    holes = kernel_from_ir("HloModule m\nENTRY e {\n" + body.format("2x2") + "}\n")
    rows = products(describe([holes], DEVICE), np.array([0]))
    assert rows["dense"].iloc[0] == pytest.approx(16 * 16 / (31 * 31))
    assert rows["run"].iloc[0] == 64
