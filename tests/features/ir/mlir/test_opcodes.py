"""Names of MLIR ops as HLO opcodes, and quantised programs in storage types."""

from __future__ import annotations

import pytest

from opcast.features.ir.mlir.opcodes import (
    hlo_opcode,
    is_quantised,
    op_kind,
    original_name,
    with_storage_types,
)


@pytest.mark.parametrize(
    ("name", "opcode"),
    [
        ("stablehlo.dot_general", "dot"),
        ("stablehlo.dynamic_update_slice", "dynamic-update-slice"),
        ("stablehlo.case", "conditional"),
        ("mhlo.fusion", "call"),
        ("func.call", "call"),
        ("stablehlo.uniform_quantize", "stablehlo.uniform_quantize"),
        ("chlo.erf_inv", "chlo.erf_inv"),
    ],
)
def test_opcode(name, opcode):
    assert hlo_opcode(name) == opcode


def test_facts_by_name():
    assert op_kind("stablehlo.return").is_terminator
    assert op_kind("cf.br").is_unstructured
    assert op_kind("stablehlo.dynamic_reshape").is_dynamic
    assert op_kind("stablehlo.custom_call").may_call and not op_kind("stablehlo.add").may_call
    # Ops of unknown dialects may call anything.
    assert op_kind("mine.op").may_call


def test_quantised_types_become_their_storage_integers():
    text = (
        "%1 = stablehlo.uniform_quantize %0 : (tensor<2xf32>) -> "
        "tensor<2x!quant.uniform<u8:f32, 0.5:3>>\n"
        "%2 = stablehlo.add %1, %1 : tensor<2x!quant.uniform<i8:f32:0, {0.1,0.2}>>"
    )
    assert is_quantised(text) and not is_quantised("tensor<2xi8>")
    plain = with_storage_types(text)
    assert "tensor<2xui8>" in plain and "tensor<2xi8>" in plain and "!quant" not in plain
    assert plain.count("\n") == 1  # lines stay where they were
    assert original_name("quantised_storage.uniform_quantize") == "stablehlo.uniform_quantize"
    assert original_name("stablehlo.add") == "stablehlo.add"
