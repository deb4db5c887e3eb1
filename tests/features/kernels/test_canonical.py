"""Canonical modules of single instructions: what they keep, and what they leave out."""

from __future__ import annotations

from opcast.features.ir.hlo_printer import print_hlo
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.canonical import canonical_attrs, canonical_body, control_body

TEXT = """HloModule step, replica_count=4

second {
  b = f32[8] parameter(1)
  a = f32[8]{0:S(1)} parameter(0)
  ROOT s = f32[8] subtract(a, b)
}

ENTRY main {
  x = f32[8]{0:S(1)} parameter(0)
  y = f32[8] parameter(1)
  f = f32[8] fusion(x, y), kind=kLoop, calls=second, frontend_attributes={k="v"}
  g = f32[8] fusion(x, x), kind=kLoop, calls=second, backend_config={"tile":[8,128]}
  c = f32[8] all-reduce(y), replica_groups={}, to_apply=sum
  ROOT t = (f32[8], f32[8], f32[8]) tuple(f, g, c)
}
"""
SUM = """
sum {
  u = f32[] parameter(0)
  v = f32[] parameter(1)
  ROOT w = f32[] add(u, v)
}
"""


def text_of(name: str) -> str:
    program = parse_hlo(TEXT.replace("\nENTRY", SUM + "\nENTRY"))
    entry = program.entry_computation
    op = next(op for op in entry.ops if op.name == name)
    return print_hlo(canonical_body(op, [entry.ops[i] for i in op.operands], program))


def test_a_fusion():
    assert text_of("f") == (
        "HloModule kernel\n\n"
        "c0 {\n"
        # Parameters come in order, and memory spaces are those of the operands alone.
        "  v0 = f32[8] parameter(0)\n"
        "  v1 = f32[8] parameter(1)\n"
        "  ROOT v2 = f32[8] subtract(v0, v1)\n"
        "}\n\n"
        "ENTRY main {\n"
        "  p0 = f32[8]{0:S(1)} parameter(0)\n"
        "  p1 = f32[8] parameter(1)\n"
        "  ROOT r = f32[8] fusion(p0, p1), calls=c0, kind=kLoop\n"
        "}\n"
    )


def test_equal_operands_share_a_parameter_and_tiles_are_left_out():
    text = text_of("g")
    assert "fusion(p0, p0), calls=c0, kind=kLoop\n" in text and "tile" not in text


def test_an_empty_list_of_groups_stands_for_all_replicas():
    assert "replica_groups={{0,1,2,3}}" in text_of("c")


def test_attributes_that_decide_what_is_computed():
    program = parse_hlo(TEXT.replace("\nENTRY", SUM + "\nENTRY"))
    op = program.entry_computation.ops[3]
    op.attrs["backend_config"] = {
        "gemm_backend_config": {"epilogue": "BIAS", "selected_algorithm": 3},
        "custom_call_config": "x" * 300,
        "outer_dimension_partitions": ["4"],
        "wait_on_operation_queues": [1],
    }
    config = canonical_attrs(op)["backend_config"]
    assert config.pop("custom_call_config").startswith("sha256-")
    assert config == {
        "gemm_backend_config": {"epilogue": "BIAS"},
        "outer_dimension_partitions": ["4"],
    }


def test_control_reads_one_flag():
    assert "ROOT r = pred[] while(p0)" in print_hlo(control_body("while"))
