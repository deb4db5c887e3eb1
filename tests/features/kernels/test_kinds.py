"""Kinds of kernels from opcodes, targets and fused computations."""

from __future__ import annotations

import pytest

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Op
from opcast.features.kernels.kernel import (
    is_attention,
    is_collective,
    is_free,
    kernel_kind,
    target_kind,
)

FUSION = """HloModule m

body {{
  a = f32[8,8] parameter(0)
  b = f32[8,8] parameter(1)
  i = s32[] parameter(2)
  {lines}
}}

ENTRY main {{
  x = f32[8,8] parameter(0)
  y = f32[8,8] parameter(1)
  z = s32[] parameter(2)
  ROOT r = {result} fusion(x, y, z), kind=kLoop, calls=body
}}
"""


@pytest.mark.parametrize(
    ("result", "lines", "kind"),
    [
        ("f32[8,8]", "ROOT c = f32[8,8] add(a, b)", "fusion"),
        ("f32[8,8]", "ROOT c = f32[8,8] transpose(a), dimensions={1,0}", "copy"),
        (
            "f32[8,8]",
            "p = f32[8,8] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
            "ROOT c = f32[8,8] add(p, b)",
            "gemm",
        ),
        (
            "f32[8,8]",
            "p = f32[8,8] convolution(a, b), dim_labels=bf_io->bf\nROOT c = f32[8,8] add(p, b)",
            "gemm",  # without spatial dimensions, as TPUs write products
        ),
        # The slice has 8 elements, and nothing larger is computed.
        (
            "f32[1,8]",
            "ROOT c = f32[1,8] dynamic-slice(a, i, i), dynamic_slice_sizes={1,8}",
            "gather_scatter",
        ),
        # The sum has 64 elements, the slice of it 8.
        (
            "f32[1,8]",
            "s = f32[8,8] add(a, b)\n"
            "ROOT c = f32[1,8] dynamic-slice(s, i, i), dynamic_slice_sizes={1,8}",
            "fusion",
        ),
    ],
)
def test_kind_of_a_fusion(result, lines, kind):
    program = parse_hlo(FUSION.format(result=result, lines=lines))
    assert kernel_kind(program.entry_computation.root_op, program) == kind


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("__cublas$gemm", "gemm"),
        ("__cudnn$convForward", "conv"),
        ("__cudnn$fmhaSoftmax", "gemm"),
        ("TopK", "sort"),
        ("lapack_spotrf_ffi", "custom_call"),
        ("te_convert_layout", "custom_call"),
    ],
)
def test_kind_of_a_custom_call(target, kind):
    assert target_kind(target) == kind


def test_fused_attention_is_told_from_other_products():
    call = {"target": "__cudnn$fmhaSoftmaxBackward"}
    assert is_attention(Op("a", "custom-call", attrs=call))
    assert not is_attention(Op("g", "custom-call", attrs={"target": "__cublas$gemm"}))
    # The name of an instruction says nothing.
    assert not is_attention(Op("attention", "dot"))


def test_collectives_with_their_starts_and_ends():
    assert is_collective("all-reduce") and is_collective("all-gather-start")
    assert is_collective("collective-permute-done") and is_collective("send")
    assert not is_collective("copy-start")


def test_what_runs_no_code():
    assert is_free(Op("p", "parameter")) and is_free(Op("b", "bitcast"))
    assert is_free(Op("s", "custom-call", attrs={"target": "Sharding"}))
    assert not is_free(Op("c", "copy"))
