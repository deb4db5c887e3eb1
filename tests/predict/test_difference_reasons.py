"""What changed, in words, of kernels and of whole programs."""

from __future__ import annotations

import pytest

from opcast.features.ir.reader import read_program
from opcast.predict.matched_kernels import kernel_reasons, program_reasons

from .test_matched_kernels import piece


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([], [piece("a", opcode="copy")], ("copy added",)),
        ([piece("a", opcode="copy")], [], ("copy removed",)),
        (
            [piece("a", flops=100)],
            [piece("b", flops=60), piece("c", flops=40)],
            ("fusion broken: 1 → 2 kernels", "+100 B moved"),
        ),
        (
            [piece("a", dtype="bf16")],
            [piece("b", dtype="f32", moved=100)],
            ("bf16 widened to f32", "+100 B moved"),
        ),
        ([piece("a", dtype="f32")], [piece("b", dtype="bf16")], ("f32 narrowed to bf16",)),
        ([piece("a", flops=100)], [piece("b", flops=150)], ("+50% FLOPs",)),
        (
            [piece("a", times=4)],
            [piece("a", times=6)],
            ("4 → 6 kernels", "+50% FLOPs", "+200 B moved"),
        ),
        ([piece("a")], [piece("b")], ("written in another way",)),
    ],
)  # fmt: skip
def test_kernels(old, new, said):
    assert kernel_reasons(old, new) == said


HLO = """HloModule m, num_partitions=2

add {{ a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b) }}

ENTRY e {{
  x = {dtype}[{rows},64] parameter(0)
  w = {dtype}[64,64] parameter(1)
  d = {dtype}[{rows},64] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {more}
}}
"""


def program(dtype="bf16", rows=8, more="ROOT t = {dtype}[{rows},64] tanh(d)"):
    text = HLO.format(dtype=dtype, rows=rows, more=more.format(dtype=dtype, rows=rows))
    return read_program(text).program


def test_programs():
    assert program_reasons(program(), program()) == ()
    assert program_reasons(program(), program(rows=16)) == (
        "recompilation: argument 0 bf16[8,64] → bf16[16,64]",
    )
    widened = program_reasons(program(), program("f32"))
    assert widened == (
        "recompilation: argument 0 bf16[8,64] → f32[8,64] and 1 more",
        "ops: 1 dot bf16 → f32, 1 tanh bf16 → f32",
    )
