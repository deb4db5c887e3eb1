"""Conversion of parsed MLIR modules: regions, captured values, calls and several results."""

from __future__ import annotations

import pytest

from opcast.common.errors import DynamicShapeError, ProgramError
from opcast.features.ir.mlir.bindings import parse_module
from opcast.features.ir.mlir.reader import ModuleReader
from opcast.features.ir.program import Program


def read(text: str) -> Program:
    module = parse_module(text)
    with module.context:
        return ModuleReader(module, "model.mlir").read()


def opcodes(program: Program, name: str) -> list[str]:
    return [op.opcode for op in program.computations[name].ops]


def test_values_captured_by_a_region_become_operands_and_parameters():
    program = read(
        """
        func.func @main(%x: tensor<4xf32>, %flag: tensor<i1>) -> tensor<4xf32> {
          %y = stablehlo.negate %x : tensor<4xf32>
          %r = "stablehlo.if"(%flag) ({
            stablehlo.return %y : tensor<4xf32>
          }, {
            %z = stablehlo.add %x, %y : tensor<4xf32>
            stablehlo.return %z : tensor<4xf32>
          }) : (tensor<i1>) -> tensor<4xf32>
          return %r : tensor<4xf32>
        }
        """
    )
    main = program.entry_computation
    branch = main.root_op
    assert branch.opcode == "conditional"
    # The condition (parameter 1), then what either branch captures: y (op 2) and x (parameter 0).
    assert branch.operands == (1, 2, 0)
    first, second = (program.computations[name] for name in branch.called)
    for computation in (first, second):
        assert [op.attrs["index"] for op in computation.parameters] == [0, 1]
    assert first.root_op.attrs == {"index": 0}
    added = second.root_op
    assert [second.ops[i].attrs["index"] for i in added.operands] == [1, 0]


def test_functions_are_read_once_and_callees_come_first():
    program = read(
        """
        func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
          %a = call @half(%x) : (tensor<2xf32>) -> tensor<2xf32>
          %b = call @half(%a) : (tensor<2xf32>) -> tensor<2xf32>
          return %b : tensor<2xf32>
        }
        func.func private @half(%x: tensor<2xf32>) -> tensor<2xf32> {
          %y = stablehlo.abs %x : tensor<2xf32>
          return %y : tensor<2xf32>
        }
        func.func private @unused() { return }
        """
    )
    assert list(program.computations) == ["half", "main"]
    assert opcodes(program, "main") == ["parameter", "call", "call"]
    calls = program.entry_computation.ops[1:]
    assert [call.called for call in calls] == [("half",), ("half",)]
    # Walk index: module 0, main 1, calls 2 and 3.
    assert [call.source.index for call in calls] == [2, 3]
    assert program.computations["half"].root_op.source.index == 6


def test_results_of_one_op_are_read_through_get_tuple_element():
    program = read(
        """
        func.func @main(%x: tensor<4xi32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xi32>) {
          %0:2 = "stablehlo.sort"(%x, %y) ({
          ^bb0(%a: tensor<i32>, %b: tensor<i32>, %c: tensor<f32>, %d: tensor<f32>):
            %lt = stablehlo.compare LT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %lt : tensor<i1>
          }) {dimension = 0 : i64}
              : (tensor<4xi32>, tensor<4xf32>) -> (tensor<4xi32>, tensor<4xf32>)
          return %0#1, %0#0 : tensor<4xf32>, tensor<4xi32>
        }
        """
    )
    ops = program.entry_computation.ops
    assert [op.opcode for op in ops[2:]] == ["sort"] + ["get-tuple-element"] * 2 + ["tuple"]
    assert ops[2].is_tuple and [t.dtype for t in ops[2].results] == ["s32", "f32"]
    assert [op.attrs["index"] for op in ops[3:5]] == [1, 0]
    assert [t.dtype for t in program.entry_computation.root_op.results] == ["f32", "s32"]


def test_module_attributes_aliases_and_meshes():
    program = read(
        """
        module @step attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 4 : i32} {
          sdy.mesh @mesh = <["x"=2, "y"=2]>
          func.func @main(%x: tensor<f32>, %y: tensor<f32> {tf.aliasing_output = 0 : i32})
              -> tensor<f32> {
            return %y : tensor<f32>
          }
        }
        """
    )
    assert (program.name, program.num_replicas, program.num_partitions) == ("step", 2, 4)
    assert program.aliases == ((0, 1),)
    assert program.meshes == {"mesh": {"x": 2, "y": 2}}


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (
            "func.func @main(%x: tensor<?xf32>) { return }",
            DynamicShapeError,
            "dynamic shape",
        ),
        (
            "func.func @a() { return } func.func @b() { return }",
            ProgramError,
            "no function @main",
        ),
        (
            "func.func @main() { call @main() : () -> () return }",
            ProgramError,
            "calls itself",
        ),
        (
            "func.func private @f()  func.func @main() { call @f() : () -> () return }",
            ProgramError,
            "has no body",
        ),
        (
            "func.func @main() { cf.br ^bb1 ^bb1: return }",
            ProgramError,
            "several blocks",
        ),
    ],
)
def test_programs_that_cannot_be_represented_are_refused(body, error, words):
    with pytest.raises(error, match=words):
        read(body)
