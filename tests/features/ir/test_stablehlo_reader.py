from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import DynamicShapeError, ProgramError
from opcast.features.ir.mlir.bindings import walk_ops
from opcast.features.ir.program import Program, TensorType, WindowDim
from opcast.features.ir.stablehlo_reader import parse

from ...support.stablehlo import func, only, ops_of, read_mlir

DATA = Path(__file__).parents[1] / "data"


def lowered(function: Any, *args: Any, debug: bool = False) -> Program:
    text = jax.jit(function).lower(*args).as_text(debug_info=debug)
    return read_mlir(text, "f.mlir")


@pytest.fixture(scope="module")
def everything() -> Program:
    path = DATA / "all_ops.mlir"
    return read_mlir(path.read_text(), str(path))


# One row per op of the specification whose opcode differs from its name, and the notable others.
@pytest.mark.parametrize(
    ("source", "opcode"),
    [
        ("stablehlo.dot_general", "dot"),
        ("stablehlo.dot", "dot"),
        ("stablehlo.broadcast_in_dim", "broadcast"),
        ("stablehlo.broadcast", "broadcast"),
        ("stablehlo.case", "conditional"),
        ("stablehlo.if", "conditional"),
        ("stablehlo.create_token", "after-all"),
        ("stablehlo.composite", "call"),
        ("stablehlo.optimization_barrier", "opt-barrier"),
        ("stablehlo.exponential", "exponential"),
        ("stablehlo.exponential_minus_one", "exponential-minus-one"),
        ("stablehlo.log_plus_one", "log-plus-one"),
        ("stablehlo.cbrt", "cbrt"),
        ("stablehlo.shift_left", "shift-left"),
        ("stablehlo.shift_right_logical", "shift-right-logical"),
        ("stablehlo.round_nearest_afz", "round-nearest-afz"),
        ("stablehlo.rng_bit_generator", "rng-bit-generator"),
        ("stablehlo.batch_norm_training", "batch-norm-training"),
        ("stablehlo.dynamic_update_slice", "dynamic-update-slice"),
        ("chlo.erfc", "chlo.erfc"),
        ("mhlo.erf", "erf"),
        ("sdy.sharding_constraint", "sdy.sharding_constraint"),
        ("foreign.op", "foreign.op"),
    ],
)
def test_opcodes(everything: Program, source: str, opcode: str) -> None:
    found = [
        op.opcode
        for c in everything.computations.values()
        for op in c.ops
        if op.source and op.source.op == source and op.opcode != "get-tuple-element"
    ]
    assert set(found) == {opcode}


def test_every_op_of_the_file_is_read(everything: Program) -> None:
    text = (DATA / "all_ops.mlir").read_text()
    read = {op.source.line for c in everything.computations.values() for op in c.ops if op.source}
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.startswith("    %")]
    assert set(lines) <= read
    assert len(lines) > 110


def test_program_facts(everything: Program) -> None:
    assert everything.name == "all_ops"
    assert (everything.num_replicas, everything.num_partitions) == (1, 8)
    assert everything.meshes == {"mesh": {"x": 4, "y": 2}}
    assert everything.aliases == ((0, 0),)
    names = [op.name for c in everything.computations.values() for op in c.ops]
    assert len(names) == len(set(names))
    order = list(everything.computations)
    for name, computation in everything.computations.items():
        for op in computation.ops:
            assert all(order.index(callee) < order.index(name) for callee in op.called)
            assert all(i < len(computation.ops) for i in op.operands)


def test_attributes(everything: Program) -> None:
    def of(opcode: str, number: int = 0) -> dict[str, Any]:
        return ops_of(everything, opcode)[number].attrs

    assert of("dot")["operand_precision"] == ("highest", "default")
    assert of("dot", 2) == {
        "lhs_contracting_dims": (2,),
        "rhs_contracting_dims": (2,),
        "lhs_batch_dims": (0,),
        "rhs_batch_dims": (0,),
    }
    convolution = of("convolution")
    assert convolution["window"] == (WindowDim(5, stride=2, pad_low=2, pad_high=1),)
    assert convolution["dim_labels"] == "b0f_0io->b0f"
    assert of("reduce-window")["window"] == (WindowDim(1), WindowDim(3, 2, 1, 1))
    assert of("slice")["slice"] == ((0, 4, 1), (1, 8, 2))
    assert of("pad")["padding"] == ((1, 2, 0), (0, 3, 1))
    assert of("dynamic-slice")["dynamic_slice_sizes"] == (2, 3)
    assert of("broadcast", 1)["dimensions"] == (1, 2)
    assert of("concatenate")["dimensions"] == (1,)
    assert of("iota")["dimensions"] == (1,)
    assert of("gather")["slice_sizes"] == (1, 8)
    assert of("gather")["offset_dims"] == (1,)
    assert of("scatter")["scatter_dims_to_operand_dims"] == (0,)
    assert of("fft") == {"fft_type": "FFT", "fft_length": (8,)}
    assert of("rng")["distribution"] == "rng_uniform"
    assert of("rng-bit-generator")["algorithm"] == "rng_three_fry"
    assert of("custom-call") == {"target": "unheard_of", "backend_config": 'opaque } > " text'}
    assert of("custom-call", 1)["backend_config"] == {"alpha": 2, "mode": "fast"}
    assert of("all-reduce")["channel_id"] == 3
    assert of("all-reduce")["use_global_device_ids"] is True
    # Mesh x=4, y=2, row-major: device = 2 x + y; groups along y are neighbours.
    assert of("all-gather")["replica_groups"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert of("collective-permute")["source_target_pairs"] == ((0, 1), (1, 0))


def test_constants(everything: Program) -> None:
    values = [op.attrs["value"] for op in ops_of(everything, "constant")]
    assert [-math.inf, 1.5] in values
    assert [1 + 2j, 3 + 4j] in values
    assert 1.0 in values  # a splat
    assert [4, 8] in values
    assert True in values


def test_values_captured_by_regions_become_operands(everything: Program) -> None:
    entry = everything.entry_computation
    loop = only(everything, "while")
    assert len(loop.results) == 2
    captured = entry.ops[loop.operands[2]]
    assert captured.opcode == "abs"
    for name in loop.called:
        parameters = everything.computations[name].parameters
        assert [p.attrs["index"] for p in parameters] == [0, 1, 2]
        assert parameters[2].type == TensorType("f32", (4, 8))
    branch = ops_of(everything, "conditional")[0]
    assert [len(everything.computations[name].parameters) for name in branch.called] == [2, 2]


def test_multi_result_ops_are_read_through_get_tuple_element() -> None:
    body = """%s:2 = "stablehlo.sort"(%x, %x) <{dimension = 0 : i64}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):
      %m = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %m : tensor<i1>
    }) : (tensor<8xf32>, tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>)
    %y = stablehlo.add %s#1, %s#1 : tensor<8xf32>
    return %y, %s#0 : tensor<8xf32>, tensor<8xf32>"""
    program = read_mlir(func(body, result="(tensor<8xf32>, tensor<8xf32>)"))
    entry = program.entry_computation
    assert [op.opcode for op in entry.ops] == [
        "parameter", "sort", "get-tuple-element", "add", "get-tuple-element", "tuple",
    ]  # fmt: skip
    assert entry.ops[1].is_tuple
    assert entry.ops[2].attrs == {"index": 1}
    assert entry.root_op.operands == (3, 4)


def test_types() -> None:
    args = (
        "%a: tensor<3xi4>, %b: tensor<2xui8>, %c: tensor<2xcomplex<f64>>, %d: !stablehlo.token, "
        "%e: tensor<5xf8E5M2>, %f: tensor<i1>, %x: tensor<8xf32>"
    )
    program = read_mlir(func("return %x : tensor<8xf32>", args))
    types = [op.type for op in program.entry_computation.parameters]
    assert [str(t) for t in types] == [
        "s4[3]", "u8[2]", "c128[2]", "token[]", "f8e5m2[5]", "pred[]", "f32[8]",
    ]  # fmt: skip
    assert types[0].nbytes == 2  # 3 × 4 bits, packed


def test_quantised_types_are_their_storage() -> None:
    program = read_mlir((DATA / "quantised.mlir").read_text(), "q.mlir")
    dot = only(program, "dot")
    assert [str(program.entry_computation.ops[i].type) for i in dot.operands] == [
        "s8[4,8]",
        "s8[8,2]",
    ]
    assert str(dot.type) == "s32[4,2]"
    quantise = only(program, "stablehlo.uniform_quantize")
    assert quantise.source is not None
    assert (quantise.source.op, quantise.source.line) == ("stablehlo.uniform_quantize", 2)


def test_manual_computation_is_a_call() -> None:
    text = """
    sdy.mesh @mesh = <["x"=2]>
    func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
      %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>]
          out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%a: tensor<4xf32>) {
        %1 = stablehlo.tanh %a : tensor<4xf32>
        sdy.return %1 : tensor<4xf32>
      } : (tensor<8xf32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }"""
    program = read_mlir(text)
    (name,) = only(program, "call").called
    assert program.computations[name].root_op.type.shape == (4,)


X = jax.ShapeDtypeStruct((4,), "float32")


def test_sources_are_the_users_lines() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x) + jnp.tanh(x)

    line = f.__code__.co_firstlineno + 1
    program = lowered(f, X, debug=True)
    source = only(program, "tanh").source
    assert source is not None
    assert source.op == "stablehlo.tanh"
    assert (Path(source.file).name, source.line) == (Path(__file__).name, line)
    root = only(program, "sqrt").source  # inside a library function that the line calls
    assert root is not None
    assert (Path(root.file).name, root.line) == (Path(__file__).name, line)


def test_sources_without_locations_are_lines_of_the_text() -> None:
    text = jax.jit(jnp.tanh).lower(X).as_text()
    source = only(read_mlir(text, "dir/f.mlir"), "tanh").source
    assert source is not None
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "stablehlo.tanh" in line)
    assert (source.file, source.line) == ("dir/f.mlir", number)


def test_source_index_is_the_position_in_walk_order(everything: Program) -> None:
    path = DATA / "all_ops.mlir"
    module = parse(path.read_text())
    names = [op.name for op in walk_ops(module)]
    assert names[0] == "builtin.module"
    for computation in everything.computations.values():
        for op in computation.ops:
            if op.source is not None:
                assert names[op.source.index] == op.source.op


@pytest.mark.parametrize(
    ("body", "op"),
    [
        (
            "%s = stablehlo.constant dense<8> : tensor<1xi32>\n"
            "%y = stablehlo.dynamic_reshape %x, %s : (tensor<8xf32>, tensor<1xi32>) "
            "-> tensor<8xf32>\nreturn %y : tensor<8xf32>",
            "stablehlo.dynamic_reshape",
        ),
        (
            "%i = stablehlo.constant dense<1> : tensor<1xi32>\n"
            "%y = stablehlo.real_dynamic_slice %x, %i, %i, %i : (tensor<8xf32>, tensor<1xi32>, "
            "tensor<1xi32>, tensor<1xi32>) -> tensor<?xf32>\nreturn %x : tensor<8xf32>",
            "stablehlo.real_dynamic_slice",
        ),
        (
            "\n%y = stablehlo.custom_call @f(%x) : (tensor<8xf32>) -> tensor<?x4xf32>\n"
            "return %x : tensor<8xf32>",
            "stablehlo.custom_call",
        ),
    ],
)
def test_dynamic_shapes_are_refused_by_name_and_line(body: str, op: str) -> None:
    with pytest.raises(DynamicShapeError) as caught:
        read_mlir(func(body), "d.mlir")
    assert op in caught.value.what
    assert caught.value.where == "d.mlir:3"
    assert "static" in caught.value.hint


def test_dynamic_arguments_are_refused() -> None:
    text = func("return %x : tensor<?xf32>", "%x: tensor<?xf32>", "tensor<?xf32>")
    with pytest.raises(DynamicShapeError, match=r"argument 0 of main .*tensor<\?xf32>"):
        read_mlir(text, "d.mlir")


def test_calls_and_recursion() -> None:
    program = lowered(lambda x: jax.jit(jnp.tanh)(x) + jax.jit(jnp.tanh)(x * 2), X)
    calls = ops_of(program, "call")
    assert len(calls) == 2
    assert len({op.called for op in calls}) == 1
    text = func(
        "%y = func.call @main(%x) : (tensor<8xf32>) -> tensor<8xf32>\nreturn %y : tensor<8xf32>"
    )
    with pytest.raises(ProgramError, match="calls itself"):
        read_mlir(text)


@pytest.mark.parametrize("text", ["module {}", "func.func private @main(tensor<f32>)"])
def test_modules_without_a_body(text: str) -> None:
    with pytest.raises(ProgramError):
        read_mlir(text, "m.mlir")


def test_unstructured_control_flow_is_refused() -> None:
    body = (
        '"cf.br"(%x)[^b] : (tensor<8xf32>) -> ()\n^b(%y: tensor<8xf32>):\nreturn %y : tensor<8xf32>'
    )
    with pytest.raises(ProgramError, match="structured"):
        read_mlir(func(body), "m.mlir")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.fft.fft(x),
        lambda x: jnp.cbrt(x),
        lambda x: jax.scipy.special.erfc(x),
        lambda x: jax.lax.switch(x[0].astype(int), [jnp.sin, jnp.cos, jnp.tanh], x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: x.astype("int32") << 2 >> 1,
        lambda x: jnp.convolve(x, x),
        lambda x: jnp.sort(x)[jnp.argsort(x)],
        lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
        lambda x: jnp.linalg.eigh(jnp.outer(x, x)),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: jax.lax.associative_scan(jnp.add, x),
        lambda x: x.at[jnp.array([0, 2])].add(1.0),
    ],
)
def test_programs_that_others_choke_on(function: Any) -> None:
    program = lowered(function, X)
    assert program.entry_computation.root >= 0
    for computation in program.computations.values():
        indices = [p.attrs["index"] for p in computation.parameters]
        assert indices == list(range(len(indices)))
