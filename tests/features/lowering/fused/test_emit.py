"""Clusters written back as a program, on programs small enough to work out by hand."""

from __future__ import annotations

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Computation, Program
from opcast.features.kernels.extract import extract_kernels
from opcast.features.lowering.fused.clusters import Clusters
from opcast.features.lowering.fused.emit import ComputationWriter, Emitter
from opcast.features.lowering.fused.graph import build_graph


def emitted(text: str, fuse: str = "", into: str = "") -> Program:
    """A program, with the kernel of one opcode fused into that of another if they are given."""
    origin = parse_hlo("HloModule m\n" + text)
    clusters = Clusters(build_graph(origin))
    by_opcode = {c.root.opcode: c for c in clusters.all()}
    if fuse:
        clusters.absorb(by_opcode[fuse], [by_opcode[into]])
    emitter = Emitter(origin)
    emitter.add(ComputationWriter(emitter, clusters, {}).write("main"))
    return emitter.program


def listed(computation: Computation) -> list[tuple[str, tuple[int, ...]]]:
    return [(op.opcode, op.operands) for op in computation.ops]


CHAIN = """
ENTRY main {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  s = f32[8] add(x, y)
  ROOT e = f32[8] exponential(s)
}
"""


def test_a_lone_op_is_wrapped() -> None:
    program = emitted(CHAIN)
    main = program.entry_computation
    assert program.is_scheduled and main.root == len(main.ops) - 1
    assert listed(main) == [
        ("parameter", ()),
        ("parameter", ()),
        ("fusion", (0, 1)),
        ("fusion", (2,)),
    ]
    names = [op.name.split(".")[0] for op in main.ops[2:]]
    assert names == ["wrapped_add", "wrapped_exponential"]


def test_a_cluster_is_one_fusion_with_its_parameters() -> None:
    program = emitted(CHAIN, "add", "exponential")
    fusion = program.entry_computation.ops[-1]
    assert fusion.opcode == "fusion" and fusion.attrs["kind"] == "kLoop"
    assert fusion.name.startswith("loop_exponential_fusion")
    body = program.computations[fusion.called[0]]
    # Each parameter stands before its first reader.
    assert listed(body) == [
        ("parameter", ()),
        ("parameter", ()),
        ("add", (0, 1)),
        ("exponential", (2,)),
    ]
    (kernel,) = [k for k in extract_kernels(program)[0] if k.takes_time]
    # Two arrays of 8 floats in, one out.
    assert kernel.kind == "fusion" and kernel.bytes == 3 * 8 * 4


def test_roots_that_share_a_kernel_are_elements_of_its_result() -> None:
    origin = parse_hlo(
        "HloModule m\nENTRY main {\n  x = f32[8] parameter(0)\n  e = f32[8] exponential(x)\n"
        "  n = f32[8] negate(x)\n  ROOT both = (f32[8], f32[8]) tuple(e, n)\n}"
    )
    clusters = Clusters(build_graph(origin))
    first, second = clusters.all()
    clusters.merge(first, second)
    emitter = Emitter(origin)
    main = ComputationWriter(emitter, clusters, {}).write("main")
    assert listed(main) == [
        ("parameter", ()),
        ("fusion", (0,)),
        ("get-tuple-element", (1,)),
        ("get-tuple-element", (1,)),
        ("tuple", (2, 3)),
    ]
    body = emitter.program.computations[main.ops[1].called[0]]
    assert [op.opcode for op in body.ops] == ["parameter", "exponential", "negate", "tuple"]


def test_a_value_read_twice_is_one_parameter() -> None:
    program = emitted("ENTRY main {\n  x = f32[8] parameter(0)\n  ROOT s = f32[8] add(x, x)\n}")
    fusion = program.entry_computation.ops[-1]
    assert fusion.operands == (0,)
    assert listed(program.computations[fusion.called[0]]) == [("parameter", ()), ("add", (0, 0))]


def test_constants_are_written_where_they_are_read() -> None:
    program = emitted(
        "ENTRY main {\n  x = f32[] parameter(0)\n  c = f32[] constant(2)\n"
        "  ROOT s = f32[] multiply(x, c)\n}"
    )
    fusion = program.entry_computation.ops[-1]
    assert fusion.operands == (0,)
    opcodes = [op.opcode for op in program.computations[fusion.called[0]].ops]
    assert sorted(opcodes) == ["constant", "multiply", "parameter"]


def test_a_reshape_between_kernels_is_a_view() -> None:
    program = emitted(
        "ENTRY main {\n  x = f32[8] parameter(0)\n  a = f32[8] exponential(x)\n"
        "  r = f32[2,4] reshape(a)\n  ROOT t = f32[4,2] transpose(r), dimensions={1,0}\n}"
    )
    opcodes = [op.opcode for op in program.entry_computation.ops]
    assert "reshape" not in opcodes
    last = program.entry_computation.ops[-1]
    assert last.attrs["kind"] == "kInput"
    kernels = [k for k in extract_kernels(program)[0] if k.takes_time]
    # The exponential, and the transpose, which reads the bitcast of its result.
    assert len(kernels) == 2 and opcodes.count("fusion") == 2


def test_library_calls_stay_as_they_are_and_several_outputs_are_a_tuple() -> None:
    program = emitted(
        "ENTRY main {\n  x = f32[4,5] parameter(0)\n  w = f32[5,7] parameter(1)\n"
        "  y = f32[4,7] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  n = f32[4,7] negate(y)\n  ROOT both = (f32[4,7], f32[4,7]) tuple(y, n)\n}"
    )
    main = program.entry_computation
    assert listed(main) == [
        ("parameter", ()),
        ("parameter", ()),
        ("dot", (0, 1)),
        ("fusion", (2,)),
        ("tuple", (2, 3)),
    ]
    assert main.ops[-1].is_tuple


def test_reducers_are_taken_along() -> None:
    program = emitted(
        "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n"
        "ENTRY main {\n  x = f32[4,5] parameter(0)\n  z = f32[] constant(0)\n"
        "  ROOT r = f32[4] reduce(x, z), dimensions={1}, to_apply=sum\n}"
    )
    assert "sum" in program.computations
    fusion = program.entry_computation.ops[-1]
    assert fusion.attrs["kind"] == "kInput"
    assert program.computations[fusion.called[0]].ops[-1].called == ("sum",)
