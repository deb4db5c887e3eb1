"""At which rate, and as how many products, a matrix product counts."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.precision import Arithmetic, arithmetic
from opcast.features.ir.program import DTYPE_BITS
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.lowering.lower import lower
from opcast.features.lowering.op import lower_op
from opcast.features.table.columns import INDEX
from opcast.features.table.roofline import least_seconds, roofline
from opcast.features.table.row import rows

DOT = """HloModule kernel

ENTRY main {{
  p0 = f32[4096,4096]{{1,0}} parameter(0)
  p1 = f32[4096,4096]{{1,0}} parameter(1)
  ROOT r = f32[4096,4096]{{1,0}} dot(p0, p1), {dims}{more}
}}
"""
FLOPS = 2.0 * 4096**3
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("dtype", "attrs", "way"),
    [
        ("bf16", {}, ("bf16",)),
        ("f64", {"operand_precision": "{highest,highest}"}, ("f64",)),
        ("f32", {}, ("tf32",)),
        ("f32", {"operand_precision": ("high", "default")}, ("tf32",)),
        ("f32", {"operand_precision": ("highest", "highest")}, ("f32",)),
        ("f32", {"operand_precision": "{highest,highest}"}, ("f32",)),
        ("f32", {"algorithm": "dot_tf32_tf32_f32"}, ("tf32",)),
        ("f32", {"algorithm": "dot_tf32_tf32_f32_x3"}, ("tf32", 3)),
        ("f32", {"algorithm": "dot_f32_f32_f32"}, ("f32",)),
        ("f32", {"algorithm": "dot_bf16_bf16_f32"}, ("bf16",)),
        ("f32", {"algorithm": "dot_bf16_bf16_f32_x9"}, ("bf16", 9)),
        # It decides alone.
        ("f32", {"algorithm": "dot_bf16_bf16_f32_x3", "operand_precision": ("highest",) * 2},
         ("bf16", 3)),
        ("f8e5m2", {"algorithm": "dot_any_f8_any_f8_f32_fast_accum"}, ("f8e5m2",)),
        ("f32", {"backend_config": {"gemm_backend_config": {"precision_config": {
            "operand_precision": ["HIGHEST", "HIGHEST"], "algorithm": "ALG_UNSET"}}}}, ("f32",)),
        ("f32", {"backend_config": {"gemm_backend_config": {"precision_config": {
            "operand_precision": ["DEFAULT", "DEFAULT"], "algorithm": "ALG_UNSET"}}}}, ("tf32",)),
        ("f32", {"backend_config": {"gemm_backend_config": {"precision_config": {
            "algorithm": "ALG_DOT_BF16_BF16_F32_X6"}}}}, ("bf16", 6)),
        # Complex numbers are pairs, whose parts follow the same rules.
        ("c64", {}, ("tf32", 1, 2)),
        ("c64", {"operand_precision": ("highest", "highest")}, ("f32", 1, 2)),
        ("c128", {}, ("f64", 1, 2)),
    ],
)  # fmt: skip
def test_rate_and_passes(dtype: str, attrs: dict[str, Any], way: tuple[Any, ...]) -> None:
    assert arithmetic(dtype, attrs) == Arithmetic(*way)


#: As JAX 0.10 writes algorithms.
ALGORITHM = (
    ", algorithm = <lhs_precision_type = {0}, rhs_precision_type = {0}, accumulation_type = f32, "
    "lhs_component_count = 1, rhs_component_count = 1, num_primitive_operations = {1}, "
    "allow_imprecise_accumulation = false>"
)
STABLEHLO = """func.func @main(%a: tensor<8192x8192x{0}>, %b: tensor<8192x8192x{0}>)
    -> tensor<8192x8192x{0}> {{
  %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]{1}
    : (tensor<8192x8192x{0}>, tensor<8192x8192x{0}>) -> tensor<8192x8192x{0}>
  return %c : tensor<8192x8192x{0}>
}}
"""


@pytest.mark.parametrize(
    ("dtype", "more", "times", "tflops"),
    [
        ("f32", ALGORITHM.format("bf16", 1), 1, 989.4),
        ("f32", ALGORITHM.format("bf16", 6), 6, 989.4),
        ("f32", ALGORITHM.format("tf32", 3), 3, 494.7),
        ("f32", ALGORITHM.format("f32", 1), 1, 66.9),
        ("complex<f32>", "", 4, 494.7),
        ("complex<f64>", "", 4, 66.9),
    ],
)
def test_an_h100_takes_each_product_at_the_rate_of_its_types(
    dtype: str, more: str, times: int, tflops: float
) -> None:
    (kernel,) = lower_op(read_program(STABLEHLO.format(dtype, more))).kernels
    assert kernel.flops == times * 2.0 * 8192**3
    least = roofline([kernel], find_device("h100-sxm")).latency_s
    assert least == pytest.approx(times * 2.0 * 8192**3 / (tflops * 1e12))


@pytest.mark.parametrize("lowering", ["op", "fused", "xla"])
@pytest.mark.parametrize(
    ("asked", "passes"), [("default", 1), ("high", 3), ("highest", 6), ("default,high", 3)]
)
def test_a_tpu_takes_precise_products_in_passes_of_bf16(
    lowering: str, asked: str, passes: int
) -> None:
    asked = asked if "," in asked else f"{asked},{asked}"
    text = DOT.format(dims=DIMS, more=f", operand_precision={{{asked}}}")
    if lowering == "xla":  # as its compiler leaves it
        text = text.replace("HloModule kernel", "HloModule kernel, is_scheduled=true")
    source = read_program(text)
    v5e = find_device("tpu-v5e")
    (kernel,) = [k for k in lower(source, lowering, device=v5e).kernels if k.kind == "gemm"]
    assert kernel.flops == passes * FLOPS
    # v5e: 197 TFLOP/s in bf16.
    least = least_seconds([kernel], v5e)[0]
    assert least == pytest.approx(passes * FLOPS / 197e12, rel=1e-6)
    # The program is left as it was: a GPU takes one product.
    (other,) = [k for k in lower(source, lowering, device="h100-sxm").kernels if k.kind == "gemm"]
    assert other.flops == FLOPS


@pytest.mark.parametrize(
    ("device", "left", "right", "result", "rate"),
    [
        # As compiled for an H100 and an A100 (JAX 0.10).
        ("h100-sxm", "s4", "s4", "s32", "s32"),
        ("h100-sxm", "s8", "s4", "s32", "s32"),
        ("h100-sxm", "s8", "s8", "s32", "s8"),
        ("h100-sxm", "f4e2m1fn", "f4e2m1fn", "bf16", "bf16"),
        ("h100-sxm", "f8e4m3fn", "f8e4m3fn", "bf16", "f8e4m3fn"),
        ("a100-sxm-80gb", "f8e4m3fn", "f8e4m3fn", "bf16", "bf16"),
        # A TPU's compiler is another one.
        ("tpu-v6e", "s4", "s4", "s32", "s4"),
    ],
)
def test_products_op_by_op_are_at_the_rate_that_they_are_widened_to(
    device: str, left: str, right: str, result: str, rate: str
) -> None:
    source = read_program(f"""HloModule m
ENTRY main {{
  x = {left}[4096,4096] parameter(0)
  w = {right}[4096,4096] parameter(1)
  ROOT y = {result}[4096,4096] dot(x, w), {DIMS}
}}
""")
    spec = find_device(device)
    (kernel,) = lower_op(source, spec).kernels
    assert roofline([kernel], spec).compute_s == pytest.approx(FLOPS / spec.matrix_peak(rate))
    # What is read stays narrow.
    assert kernel.bytes_in == 4096**2 * (DTYPE_BITS[left] + DTYPE_BITS[right]) / 8


def test_a_product_of_several_is_described_as_one_real_product() -> None:
    """A complex one has twice the rows and twice the contraction, passes only the latter."""
    bf16_x3 = DOT.format(dims=DIMS, more=", algorithm=dot_bf16_bf16_f32_x3")
    table = rows([kernel_from_ir(bf16_x3), kernel_from_ir(
        DOT.format(dims=DIMS, more="").replace("f32[", "c64[")
    )])  # fmt: skip
    names = ("gemm_m", "gemm_n", "gemm_k", "gemm_lhs_bytes", "gemm_rhs_bytes", "dense_flops")
    n, size = 4096, 4096**2
    assert [table[0, INDEX[name]] for name in names] == [n, n, 3 * n, 6 * size, 6 * size, 3 * FLOPS]
    assert [table[1, INDEX[name]] for name in names] == [
        *(2 * n, n, 2 * n), 16 * size, 8 * size, 4 * FLOPS,
    ]  # fmt: skip


def test_the_roofline_counts_tf32_where_there_is_a_unit() -> None:
    default = kernel_from_ir(DOT.format(dims=DIMS, more=""))
    highest = kernel_from_ir(DOT.format(dims=DIMS, more=", operand_precision={highest,highest}"))
    a100, v100 = find_device("a100-sxm-80gb"), find_device("v100-sxm")
    fast, exact = roofline([default, highest], a100).latency_s
    assert fast == pytest.approx(FLOPS / 156e12)
    assert exact == pytest.approx(FLOPS / 19.49e12)
    old = roofline([default, highest], v100).latency_s
    assert old[0] == old[1] == pytest.approx(FLOPS / v100.matrix_peak("f32"))


def test_a_device_without_the_rate_takes_that_of_f32() -> None:
    table = {"s32": 1.0, "f32": 2.0, "bf16": 4.0}
    levels = (MemoryLevel(1e9, 1e9),)
    device = DeviceSpec("d", "cpu", table, table, levels, 1e-6)
    assert device.matrix_peak("tf32") == 2.0
