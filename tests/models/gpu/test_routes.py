"""What kernels are asked as on a GPU: the route, the product, and the memory traffic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.models.gpu.routes import (
    COLUMN_REDUCED,
    CONV,
    PASS,
    PRODUCT,
    TRANSPOSED,
    describe,
    irregular,
    products,
    traffic,
)


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
    described = describe([DOT, CONVOLUTION, COPY, TRANSPOSE])
    assert described.route.tolist() == [PRODUCT, CONV, PASS, PASS]
    assert described.rate[:2].tolist() == ["bf16", "bf16"]
    assert not described.attention


def test_products_have_their_dimensions() -> None:
    described = describe([DOT, CONVOLUTION])
    plain, implicit = products(described, np.array([0, 1])).to_dict("records")
    assert [plain[c] for c in ("b", "m", "n", "k", "width", "times", "extra")] == [
        1, 64, 32, 16, 2.0, 1.0, 0.0,
    ]  # fmt: skip
    assert plain["moved"] == 2 * (64 * 16 + 16 * 32 + 64 * 32)
    # 2 images of 8 × 8 positions, 32 features, 3 × 3 taps of 16 channels
    assert [implicit[c] for c in ("m", "n", "k")] == [2 * 8 * 8, 32, 3 * 3 * 16]


def test_a_copy_streams_and_a_transpose_does_not() -> None:
    row = describe([COPY, TRANSPOSE]).row
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
    slow, fast = traffic(describe([column, row]).row).penalty
    assert (slow, fast) == (pytest.approx(1.0 + COLUMN_REDUCED), 1.0)
