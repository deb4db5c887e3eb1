"""Reading HLO text, printing it, and trip counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from opcast.common.errors import DynamicShapeError, ProgramError
from opcast.features.ir.hlo_printer import print_hlo
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Op, Program, TensorType, WindowDim

F32 = jnp.float32


_STRUCT: Any = jax.ShapeDtypeStruct


def _spec(*shape: int, dtype: Any = F32) -> Any:
    return _STRUCT(shape, dtype)


def _one(line: str, before: str = "", header: str = "") -> Op:
    """The root of a module whose entry holds a few parameters and one line."""
    text = f"""HloModule m{header}

add {{
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}}

{before}

ENTRY main {{
  a = f32[8,4]{{1,0}} parameter(0)
  b = f32[4,8]{{1,0}} parameter(1)
  i = s32[] parameter(2)
  ROOT {line}
}}
"""
    program = parse_hlo(text)
    assert _plain(program) == parse_hlo(print_hlo(program))
    return program.entry_computation.root_op


def _plain(program: Program) -> Program:
    """The program without what the canonical text leaves out."""
    for computation in program.computations.values():
        for op in computation.ops:
            op.source = None
    program.origin = ""
    return program


def _loops(program: Program) -> list[int | None]:
    ops = [op for c in program.computations.values() for op in c.ops]
    return [op.attrs["trip_count"] for op in ops if op.opcode == "while"]


def _mlp(w: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w[0]) @ w[1]) ** 2)


def _conv(w: jax.Array, x: jax.Array) -> jax.Array:
    out = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(lax.reduce_window(out, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"))


def _scan(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.fori_loop(3, 17, lambda i, v: v * i + y, c), c

    return lax.scan(body, x, jnp.arange(7.0))[0]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (jax.grad(_mlp), ([_spec(32, 64), _spec(64, 16)], _spec(8, 32))),
    "conv": (jax.grad(_conv, (0, 1)), (_spec(3, 3, 4, 8), _spec(2, 16, 16, 4))),
    "scan": (_scan, (_spec(8),)),
    "sort": (lambda x: (jnp.sort(x, 0), lax.top_k(x, 3)), (_spec(16, 16),)),
    "branches": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * 2], x),
        (_spec(dtype=jnp.int32), _spec(8)),
    ),
    "random": (lambda k: jax.random.normal(k, (64,)), (_spec(2, dtype=jnp.uint32),)),
    "cholesky": (lambda a: jnp.linalg.cholesky(a @ a.T), (_spec(8, 8),)),
    "gather": (
        jax.grad(lambda t, i: jnp.sum(t[i] ** 2)),
        (_spec(50, 8), _spec(6, dtype=jnp.int32)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("optimised", [False, True])
def test_round_trip(name: str, optimised: bool) -> None:
    function, args = PROGRAMS[name]
    lowered = jax.jit(function).lower(*args)
    text = lowered.compile().as_text() if optimised else lowered.as_text(dialect="hlo")
    program = parse_hlo(str(text))
    printed = print_hlo(program)
    again = parse_hlo(printed)
    assert again == _plain(program)
    assert print_hlo(again) == printed
    assert program.is_scheduled == optimised
    if name == "scan":
        assert sorted(count or 0 for count in _loops(program)) == [7, 14]


def test_sources_are_lines_of_user_code() -> None:
    function, args = PROGRAMS["mlp"]
    program = parse_hlo(str(jax.jit(function).lower(*args).compile().as_text()))
    ops = [op for c in program.computations.values() for op in c.ops if op.source]
    dots = [op.source for op in ops if op.source and "dot_general" in op.source.op]
    first = _mlp.__code__.co_firstlineno
    assert dots
    assert {source.line for source in dots} == {first + 1}
    assert all(source.file.endswith("test_hlo_reader.py") for source in dots)


def test_frames_inside_frameworks_are_skipped() -> None:
    text = """HloModule m

FileNames
1 "/home/me/model.py"
2 "/env/lib/python3.11/site-packages/jax/_src/nn.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=31 end_line=31 column=4 end_column=5}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=4 end_column=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY main {
  a = f32[] parameter(0)
  b = f32[] tanh(a), metadata={op_name="jit(f)/tanh" stack_frame_id=2}
  ROOT c = f32[] sqrt(b), metadata={op_type="sqrt" op_name="s{q}" source_file="x.py" source_line=7}
}
"""
    ops = parse_hlo(text).entry_computation.ops
    assert ops[1].source == ("jit(f)/tanh", "/home/me/model.py", 31, -1)
    assert ops[2].source == ("s{q}", "x.py", 7, -1)


def test_header() -> None:
    text = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), \
{1}: (0, {}, must-alias) }, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}, \
replica_count=2, num_partitions=4

ENTRY %main.3 (x: f32[8,4]) -> f32[8,4] {
  ROOT %x = f32[8,4]{1,0} parameter(0), sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}
}
"""
    program = parse_hlo(text, "x.hlo")
    assert program.name == "jit_f"
    assert program.is_scheduled
    assert program.aliases == ((0, 2), (1, 0))
    assert (program.num_replicas, program.num_partitions) == (2, 4)
    assert (program.entry, program.origin) == ("main.3", "x.hlo")


def test_layouts_keep_only_their_order_and_memory_space() -> None:
    op = _one("r = f32[4,8]{0,1:T(8,128)(2,1)S(1)} copy(f32[4,8]{1,0:T(8,128)} %b)")
    assert op.type == TensorType("f32", (4, 8), (0, 1), 1)
    assert _one("r = f32[4,8]{1,0:T(8,128)S(5)} copy(b)").type == TensorType("f32", (4, 8), None, 5)
    assert _one("r = f32[]{:T(128)} copy(b)").type == TensorType("f32")


def test_memory_spaces_are_printed_and_read_back() -> None:
    lines = [
        "  p0 = f32[4,8]{1,0:S(1)} parameter(0)",
        "  c = f32[]{:S(1)} copy(p0)",
        "  ROOT r = (f32[4,8]{0,1:S(1)}, f32[4,8]) tuple(p0, p0)",
    ]
    text = "HloModule m\n\nENTRY e {\n" + "\n".join(lines) + "\n}\n"
    assert print_hlo(parse_hlo(text)) == text


def test_nested_tuples() -> None:
    op = _one("r = ((f32[8,4]{1,0}, s32[]), (), /*index=2*/f32[4,8]{0,1}) custom-call(a, b), "
              'custom_call_target="x"')  # fmt: skip
    assert op.is_tuple
    assert [str(t) for t in op.results] == ["f32[8,4]", "s32[]", "f32[4,8]"]
    assert op.attrs["nesting"] == "((**)()*)"


@pytest.mark.parametrize(
    ("line", "attrs"),
    [
        ("r = f32[8,8] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
         {"lhs_contracting_dims": (1,), "rhs_contracting_dims": (0,), "lhs_batch_dims": ()}),
        ("r = f32[4,2] slice(a), slice={[0:4], [0:4:2]}", {"slice": ((0, 4, 1), (0, 4, 2))}),
        ("r = f32[9,6] pad(a, i), padding=0_1x-1_0_1", {"padding": ((0, 1, 0), (-1, 0, 1))}),
        ("r = f32[2,4] dynamic-slice(a, i, i), dynamic_slice_sizes={2,4}",
         {"dynamic_slice_sizes": (2, 4)}),
        ("r = s32[5] iota(), iota_dimension=0", {"dimensions": (0,)}),
        ("r = pred[8,4] compare(a, a), direction=LT, type=TOTALORDER",
         {"direction": "LT", "type": "TOTALORDER"}),
        ("r = f32[16,4] concatenate(a, a), dimensions={0}", {"dimensions": (0,)}),
        ("r = f32[16,4] all-gather(a), channel_id=3, replica_groups=[2,2]<=[4]T(1,0), "
         "dimensions={0}, use_global_device_ids=true",
         {"dimension": 0, "replica_groups": ((0, 2), (1, 3)), "channel_id": 3,
          "use_global_device_ids": True}),
        ("r = f32[8,4] all-reduce(a), replica_groups=mesh['x'=2,'y'=2] {'x'}, to_apply=add",
         {"replica_groups": ((0, 2), (1, 3)), "channel_id": None}),
        ("r = f32[8,4] all-reduce(a), replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) "
         "{'x'}, to_apply=add", {"replica_groups": ((0, 1), (2, 3))}),
        ("r = f32[8,4] collective-permute(a), source_target_pairs={{0,1},{1,0}}",
         {"source_target_pairs": ((0, 1), (1, 0))}),
        ("r = c64[8,3] fft(a), fft_type=RFFT, fft_length={4}",
         {"fft_type": "RFFT", "fft_length": (4,)}),
        ('r = f32[8,4] custom-call(a), custom_call_target="a\\"b){,= c", api_version=API_V4, '
         'backend_config={"n":[1,{"k":"}"}]}',
         {"target": 'a"b){,= c', "backend_config": {"n": [1, {"k": "}"}]}}),
        ('r = f32[8,4] custom-call(a), custom_call_target="t", '
         'backend_config="{\\"alpha\\":1.5}"', {"backend_config": {"alpha": 1.5}}),
        ('r = f32[8,4] custom-call(a), custom_call_target="t", '
         "backend_config={uplo = 76 : ui8}", {"backend_config": "{uplo = 76 : ui8}"}),
        ("r = f32[8,4] add(a, a), frontend_attributes={k=\"{v\"}, control-predecessors={%b}",
         {"frontend_attributes": '{k="{v"}', "control-predecessors": "{%b}"}),
        ("r = f32[8,4] batch-norm-inference(a, a, a, a, a), epsilon=0.001, feature_index=1",
         {"epsilon": 0.001, "feature_index": 1}),
        ("r = f32[8,4] chlo.top_k(a), k=3, note=\"12\", empty=\"\"",
         {"k": 3, "note": "12", "empty": ""}),
    ],
)  # fmt: skip
def test_attributes(line: str, attrs: dict[str, Any]) -> None:
    found = _one(line).attrs
    assert {key: found.get(key) for key in attrs} == attrs


def test_convolution_window() -> None:
    op = _one(
        "r = f32[1,5,2] convolution(a, b), window={size=3 stride=2 pad=1_-1 lhs_dilate=2 "
        "rhs_dilate=3 rhs_reversal=1}, dim_labels=b0f_0io->b0f, feature_group_count=2"
    )
    assert op.attrs["window"] == (WindowDim(3, 2, 1, -1, 2, 3, True),)
    assert op.attrs["dim_labels"] == "b0f_0io->b0f"
    assert (op.attrs["feature_group_count"], op.attrs["batch_group_count"]) == (2, 1)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("f32[] constant(-1.5e-05)", -1.5e-05),
        ("f32[] constant(-inf)", float("-inf")),
        ("pred[] constant(true)", True),
        ("s32[3] constant({1, -2, 3})", [1, -2, 3]),
        ("s32[2,2] constant({ {1, 2},\n  {3, 4} })", [1, 2, 3, 4]),
        ("f32[3] constant({2, 2, 2})", 2.0),
        ("f32[64,64] constant({...})", None),
        ("c64[] constant((1, -2))", complex(1, -2)),
        ("c64[2] constant({(1, 0), (0, 1)})", [1 + 0j, 1j]),
        ("bf16[0] constant({})", None),
        ("f32[1,1,2] constant({ /*i0=0*/ { /*i1=0*/ {-0.5, 1} } })", [-0.5, 1.0]),
    ],
)
def test_constants(literal: str, value: Any) -> None:
    op = _one(f"r = {literal}")
    assert op.attrs["value"] == value
    assert type(op.attrs["value"]) is type(value)


def test_not_a_number_survives_the_round_trip() -> None:
    assert str(_one("r = f32[] constant(nan)").attrs["value"]) == "nan"


def test_indented_text_with_broken_lines() -> None:
    text = """
  HloModule m

  ENTRY %main {
    %x = f8e4m3fn[2,8]{1,0} parameter(0)
    %y = f8e4m3fn[8,4]{0,1} parameter(1)
    // what a person wrote
    %c = (f32[2,4]{1,0}, s8[64]{0})
      custom-call(f8e4m3fn[2,8]{1,0} %x, f8e4m3fn[8,4]{0,1} %y),
      custom_call_target="__cublas$lt$matmul$f8",
      backend_config={
        "gemm_backend_config":{"alpha_real":1,
          "beta":0}
      }
    ROOT %g = f32[2,4]{1,0} get-tuple-element(%c), index=0
  }
"""
    entry = parse_hlo(text).entry_computation
    assert [op.opcode for op in entry.ops[2:]] == ["custom-call", "get-tuple-element"]
    assert entry.ops[2].operands == (0, 1)
    config = {"gemm_backend_config": {"alpha_real": 1, "beta": 0}}
    assert entry.ops[2].attrs["backend_config"] == config


def test_typed_operands_without_percent_signs() -> None:
    op = _one("r = f32[8,8] dot(f32[8,4]{1,0} a, f32[4,8]{1,0} b), lhs_contracting_dims={1}")
    assert op.operands == (0, 1)


def test_memory_spaces_and_tiles_of_tpus() -> None:
    line = (
        "s = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)(4,1)S(1)}, u32[]{:S(2)}, "
        "u32[]{:S(2)}) collective-permute-start(a), channel_id=17, "
        'source_target_pairs={{0,15},{1,0}}, backend_config={"flag_configs":[]}'
    )
    op = _one(line)
    assert [str(t) for t in op.results] == ["f32[8,4]", "f32[8,4]", "u32[]", "u32[]"]
    assert op.attrs["source_target_pairs"] == ((0, 15), (1, 0))


def test_async_pairs() -> None:
    before = """wrapped {
  p = f32[8,4] parameter(0)
  ROOT c = f32[8,4] custom-call(p), custom_call_target="f"
}"""
    op = _one("s = ((f32[8,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(a), calls=wrapped", before)
    assert (op.opcode, op.called, len(op.results)) == ("async-start", ("wrapped",), 3)
    op = _one("s = ((f32[8,4]), f32[2,4], u32[]) slice-start(a), slice={[0:2], [0:4]}")
    assert op.attrs["slice"] == ((0, 2, 1), (0, 4, 1))
    op = _one("s = (f32[8,4], f32[16,4]) all-gather-start(a), replica_groups={{0,1}}, "
              "dimensions={0}")  # fmt: skip
    assert (op.attrs["dimension"], op.attrs["replica_groups"]) == (0, ((0, 1),))


#: Computations of a loop.
LOOP = """cond {
  p = f32[8,4] parameter(0)
  ROOT t = pred[] constant(false)
}

body {
  ROOT p.1 = f32[8,4] parameter(0)
}"""


def test_called_computations_are_ordered_by_role() -> None:
    op = _one("r = f32[8,4] while(a), body=body, condition=cond", LOOP)
    assert op.called == ("cond", "body")
    line = "r = f32[8,4] conditional(i, a, a), false_computation=cond, true_computation=body"
    assert _one(line, LOOP).called == ("body", "cond")


def test_stated_trip_count_wins() -> None:
    config = 'backend_config={"known_trip_count":{"n":"6"},"x":1}'
    op = _one(f"r = f32[8,4] while(a), condition=cond, body=body, {config}", LOOP)
    assert op.attrs["trip_count"] == 6
    assert op.attrs["backend_config"] == {"x": 1}


@pytest.mark.parametrize(
    ("direction", "first", "step", "bound", "trips"),
    [
        ("LT", 0, 1, 10, 10), ("LT", 3, 4, 12, 3), ("LE", 0, 1, 10, 11), ("GT", 10, -1, 0, 10),
        ("GE", 10, -3, 0, 4), ("NE", 0, 2, 10, 5), ("LT", 10, 1, 0, 0), ("LT", 0, 0, 10, None),
        ("NE", 0, 3, 10, None),
    ],
)  # fmt: skip
def test_trip_count(direction: str, first: int, step: int, bound: int, trips: int | None) -> None:
    text = f"""HloModule m

cmp {{
  x = s32[] parameter(0)
  y = s32[] parameter(1)
  ROOT r = pred[] compare(x, y), direction={direction}
}}

cond {{
  s = (s32[], f32[4]) parameter(0)
  n = s32[] constant({bound})
  k = s32[] get-tuple-element(s), index=0
  ROOT c = pred[] fusion(k, n), kind=kLoop, calls=cmp
}}

inc {{
  x.1 = s32[] parameter(0)
  one = s32[] constant({step})
  ROOT r.1 = s32[] add(one, x.1)
}}

body {{
  s.1 = (s32[], f32[4]) parameter(0)
  k.1 = s32[] get-tuple-element(s.1), index=0
  k.2 = s32[] copy(k.1)
  v = f32[4] get-tuple-element(s.1), index=1
  k.3 = s32[] fusion(k.2), kind=kLoop, calls=inc
  ROOT t = (s32[], f32[4]) tuple(k.3, v)
}}

ENTRY main {{
  a = f32[4] parameter(0)
  zero = s32[] constant({first})
  z = s32[] copy(zero)
  t.1 = (s32[], f32[4]) tuple(z, a)
  ROOT w = (s32[], f32[4]) while(t.1), condition=cond, body=body
}}
"""
    assert _loops(parse_hlo(text)) == [trips]


def test_data_dependent_loop_has_no_trip_count() -> None:
    def loop(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, x)

    text = jax.jit(loop).lower(_spec(4)).as_text(dialect="hlo")
    assert _loops(parse_hlo(text)) == [None]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", "0", "HloModule"),
        ("func.func @main() {\n}", "0", "HloModule"),
        ("HloModule m\n", "", "no computation"),
        ("HloModule m\n\nf {\n  a = f32[2] parameter(0)\n}\n\n", "", "no ENTRY"),
        ("HloModule m\n\nENTRY e {\n  a = f32[2] parameter(0)\n", "4", "ends within"),
        ("HloModule m\n\nENTRY e {\n  a = q7[2] parameter(0)\n}\n", "4", "q7"),
        ("HloModule m\n\nENTRY e {\n  a = f32[2] negate(b)\n}\n", "4", "unknown operand 'b'"),
        ("HloModule m\n\nENTRY e {\n  what is this\n}\n", "4", "what is this"),
        ("HloModule m\n\nENTRY e {\n  a = f32[2] iota(), x={\n}\n", "", "ends within"),
        ("HloModule m\n\nENTRY e {\n  a = f32[2] iota(),\n}\n", "", "cut off"),
        ("HloModule m\n\nENTRY e {\n  a = f32[2] call(), to_apply=g\n}\n", "", "g"),
    ],
)  # fmt: skip
def test_bad_text_names_the_line(text: str, line: str, what: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse_hlo(text, "bad.hlo")
    assert f"bad.hlo:{line}" in str(caught.value)
    assert what in str(caught.value)


def test_dynamic_shapes_have_their_own_error() -> None:
    with pytest.raises(DynamicShapeError):
        parse_hlo("HloModule m\n\nENTRY e {\n  a = f32[?,2] parameter(0)\n}\n")


def test_large_modules_are_read_fast() -> None:
    lines = ["  v0 = f32[64,64]{1,0} parameter(0)"]
    meta = 'metadata={op_name="jit(f)/jvp()/while/body/add" stack_frame_id=13}'
    lines += [
        f"  v{i} = f32[64,64]{{1,0}} add(v{i - 1}, v{i // 2}), {meta}" for i in range(1, 5000)
    ]
    text = "HloModule m\n\nENTRY e {\n" + "\n".join(lines) + "\n}\n"
    start = time.process_time()
    program = parse_hlo(text)
    # Far above what it takes (5 to 20 µs an instruction), so that a busy machine passes.
    assert time.process_time() - start < 1.0
    assert len(program.entry_computation.ops) == 5000


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("r = f32[8,4]{1,5} copy(a)", "does not order the dimensions"),
        ("r = f32[8,4]{0} copy(a)", "does not order the dimensions"),
        ("r = f32[8,4]{1,0} fusion(a), kind=kLoop", "r does not state which computation it calls"),
    ],
)
def test_layouts_and_calls_are_checked(line, what):
    with pytest.raises(ProgramError, match=what):
        _one(line)
