"""Facts of kernels: equal work is found again whatever its names, other work is not."""

from __future__ import annotations

import math

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Op, Program
from opcast.features.kernels.canonical import (
    KernelFacts,
    ProgramFacts,
    Signatures,
    control_facts,
    facts_of_ir,
)

TEXT = """HloModule m

body {{
  {a} = f32[8,4] parameter(0)
  {b} = f32[8,4] parameter(1)
  ROOT {c} = f32[8,4] {opcode}({a}, {b})
}}

ENTRY main {{
  x = f32[8,4] parameter(0)
  y = f32[8,4] parameter(1)
  ROOT {root} = f32[8,4] fusion({operands}), kind=kLoop, calls=body{attributes}
}}
"""


def program(
    names: str = "abc", opcode: str = "add", operands: str = "x, y", attributes: str = ""
) -> Program:
    a, b, c = names
    text = TEXT.format(
        a=a,
        b=b,
        c=c,
        root=f"fusion.{names}",
        opcode=opcode,
        operands=operands,
        attributes=attributes,
    )
    return parse_hlo(text)


def facts(of: Program) -> KernelFacts:
    entry = of.entry_computation
    root = entry.root_op
    return ProgramFacts(of).of(root, [entry.ops[i] for i in root.operands])


def test_facts_of_one_fusion():
    own = facts(program())
    assert own.kind == "fusion"
    # 32 additions; two operands and one result of 32 f32.
    assert (own.cost.flops, own.cost.bytes_in, own.cost.bytes_out) == (32.0, 256.0, 128.0)
    assert len(own.hash) == 16
    assert facts_of_ir(own.ir) is own


def test_names_and_places_do_not_matter():
    own = facts(program())
    assert facts(program("uvw")) is own
    assert facts(program(attributes=', metadata={op_name="jit(f)/add"}')) is own
    assert facts(program(attributes=', frontend_attributes={k="v"}')).hash == own.hash


def test_what_is_computed_matters():
    own = facts(program())
    assert facts(program(opcode="subtract")).hash != own.hash
    once = facts(program(operands="x, x"))
    # Read once, used twice: one parameter in the text, and the body still has two.
    assert once.hash != own.hash and once.ir.count("parameter(1)") == 1


def test_control_has_no_work_of_its_own():
    loop = control_facts("while")
    assert loop.kind == "control" and loop.cost.bytes == loop.cost.flops == 0
    assert control_facts("while") is loop
    assert control_facts("conditional").hash != loop.hash


def test_signatures_tell_apart_values_that_python_calls_equal():
    of = program()
    entry = of.entry_computation

    def key(value: object) -> object:
        op = Op("r", "custom-call", (0,), entry.ops[0].results, {"value": value})
        return Signatures(of, {}).of(op, entry.ops[:1])

    assert key(1) != key(True) and key(0.0) != key(-0.0)
    assert key(math.nan) == key(math.nan)
    assert key([1, 2]) == key([1, 2]) and key([1, 2]) != key([2, 1])


def test_signatures_number_computations_by_content():
    ids: dict[object, int] = {}
    numbers = []
    for names, opcode in (("abc", "add"), ("xyz", "add"), ("abc", "multiply")):
        of = program(names, opcode)
        root = of.entry_computation.root_op
        numbers.append(Signatures(of, ids).of(root, of.entry_computation.ops[:2])[3])
    assert numbers == [(0,), (0,), (1,)]
