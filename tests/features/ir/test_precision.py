"""At which rate products of f32 count."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.program import matrix_rate
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.table.roofline import roofline

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
    ("dtype", "attrs", "rate"),
    [
        ("bf16", {}, "bf16"),
        ("f64", {"operand_precision": "{highest,highest}"}, "f64"),
        ("f32", {}, "tf32"),
        ("f32", {"operand_precision": ("high", "default")}, "tf32"),
        ("f32", {"operand_precision": ("highest", "highest")}, "f32"),
        ("f32", {"operand_precision": "{highest,highest}"}, "f32"),
        ("f32", {"algorithm": "dot_tf32_tf32_f32"}, "tf32"),
        ("f32", {"algorithm": "dot_f32_f32_f32"}, "f32"),
        ("f32", {"algorithm": "dot_bf16_bf16_f32_x3"}, "bf16"),
        ("f32", {"backend_config": {"gemm_backend_config": {"precision_config": {
            "operand_precision": ["HIGHEST", "HIGHEST"], "algorithm": "ALG_UNSET"}}}}, "f32"),
        ("f32", {"backend_config": {"gemm_backend_config": {"precision_config": {
            "operand_precision": ["DEFAULT", "DEFAULT"], "algorithm": "ALG_UNSET"}}}}, "tf32"),
    ],
)  # fmt: skip
def test_rate(dtype: str, attrs: dict[str, Any], rate: str) -> None:
    assert matrix_rate(dtype, attrs) == rate


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
