"""Peak memory from lifetimes: hand-computed programs, and the compiler's own figures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.reader import read_program
from opcast.features.kernels.memory import entry_bytes, memory_over_time, peak_memory

from .test_extract import conv_step, mlp_step, spec

F32 = jnp.float32
KB = 256 * 4


def module(body: str, header: str = "") -> str:
    return f"HloModule m, is_scheduled=true{header}\n\nENTRY main {{\n{body}\n}}\n"


def test_a_chain_reuses_buffers():
    # a is argument, t1 dies where t2 is made: products cannot run in place, so two live at once.
    text = module("""
  a = f32[16,16] parameter(0)
  t1 = f32[16,16] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t2 = f32[16,16] dot(t1, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t3 = f32[16,16] dot(t2, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[16,16] dot(t3, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}""")
    # Argument, result, and two temporaries (t1 with t2, or t2 with t3).
    assert peak_memory(parse_hlo(text)) == 4 * KB


def test_elementwise_ops_run_in_place():
    text = module("""
  a = f32[256] parameter(0)
  t1 = f32[256] negate(a)
  t2 = f32[256] exponential(t1)
  t3 = f32[256] negate(t2)
  ROOT r = f32[1] slice(t3), slice={[0:1]}""")
    # Argument and one temporary; the result has 4 bytes.
    assert peak_memory(parse_hlo(text)) == 2 * KB + 4


def test_a_value_that_is_read_later_keeps_its_buffer():
    text = module("""
  a = f32[256] parameter(0)
  t1 = f32[256] negate(a)
  t2 = f32[256] exponential(t1)
  t3 = f32[256] negate(t2)
  t4 = f32[256] add(t1, t3)
  ROOT r = f32[1] slice(t4), slice={[0:1]}""")
    assert peak_memory(parse_hlo(text)) == 3 * KB + 4


@pytest.mark.parametrize(
    ("start", "done", "state"),
    [
        ("(f32[256], f32[256], u32[]) copy-start(t)", "copy-done(s)", 4),
        (
            "(f32[256], f32[256], u32[], u32[]) collective-permute-start(t),"
            " source_target_pairs={{0,1},{1,0}}",
            "collective-permute-done(s)",
            8,
        ),
    ],
)
def test_what_an_asynchronous_op_makes_lives_until_it_is_read(start, done, state):
    text = module(f"""
  a = f32[256] parameter(0)
  t = f32[256] negate(a)
  s = {start}
  d = f32[256] {done}
  u = f32[256] exponential(a)
  v = f32[256] add(d, u)
  ROOT r = f32[1] slice(v), slice={{[0:1]}}""")
    profile = memory_over_time(parse_hlo(text))
    beside = [now - profile.resident for now in profile.bytes]
    # t; t and d with the state of the transfer until it is done; d and u; u and v in place of d; v.
    two = 2 * KB + state
    assert beside == [0, KB, two, two, two, two, KB]


def test_donated_arguments_count_once():
    body = """
  a = f32[256] parameter(0)
  ROOT r = f32[256] negate(a)"""
    assert peak_memory(parse_hlo(module(body))) == 2 * KB
    donated = ", input_output_alias={ {}: (0, {}, may-alias) }"
    assert peak_memory(parse_hlo(module(body, donated))) == KB


def test_a_loop_adds_its_bodys_own_peak():
    text = """HloModule m, is_scheduled=true

body {
  s = (s32[], f32[16,16]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[16,16] get-tuple-element(s), index=1
  one = s32[] constant(1)
  t = f32[16,16] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  u = f32[16,16] dot(t, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  j = s32[] add(i, one)
  ROOT o = (s32[], f32[16,16]) tuple(j, u)
}

cond {
  s = (s32[], f32[16,16]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(9)
  ROOT c = pred[] compare(i, n), direction=LT
}

ENTRY main {
  a = f32[16,16] parameter(0)
  z = s32[] constant(0)
  b = f32[16,16] copy(a)
  k = s32[] copy(z)
  t = (s32[], f32[16,16]) tuple(k, b)
  w = (s32[], f32[16,16]) while(t), condition=cond, body=body
  ROOT r = f32[16,16] get-tuple-element(w), index=1
}
"""
    # Argument; the state, which is the result; t of the body; and the counter's four bytes. The
    # condition's flag of one byte lives while the body does not.
    assert peak_memory(parse_hlo(text)) == 3 * KB + 4


def scan(x, w):
    def body(c, _):
        c = jnp.tanh(c @ w)
        return c, c

    return jax.lax.scan(body, x, None, length=20)


WIDE = [spec(256, 256)] * 4
PROGRAMS = {
    "mlp": (mlp_step, (WIDE, spec(1024, 256), spec(1024, 256)), ()),
    "mlp donated": (mlp_step, (WIDE, spec(1024, 256), spec(1024, 256)), (0,)),
    "scan": (scan, (spec(256, 256), spec(256, 256)), ()),
    "scan gradient": (
        jax.grad(lambda x, w: scan(x, w)[0].sum(), argnums=1),
        (spec(256, 256), spec(256, 256)),
        (),
    ),
    "conv": (conv_step, (spec(3, 3, 16, 32), spec(3, 3, 32, 32), spec(8, 32, 32, 16)), ()),
    "cumulative sum": (
        lambda x: jnp.sin(x) * 2 + jnp.cumsum(x, axis=1),
        (spec(512, 512),),
        (),
    ),
    "sort": (lambda x: jnp.sort(x, axis=1)[:, ::-1], (spec(512, 512),), ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_within_ten_percent_of_the_compiler(name):
    function, args, donated = PROGRAMS[name]
    compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile()
    stats = compiled.memory_analysis()
    stated = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
    assert peak_memory(parse_hlo(compiled.as_text())) == pytest.approx(stated, rel=0.10)


def test_memory_over_time_rises_to_the_peak_and_falls():
    text = module("""
  a = f32[16,16] parameter(0)
  t1 = f32[16,16] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t2 = f32[16,16] dot(t1, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[16,16] dot(t2, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}""")
    profile = memory_over_time(parse_hlo(text))
    assert profile.names == ("a", "t1", "t2", "r")
    assert profile.resident == 2 * KB
    # Beside argument and result: nothing, t1, t1 with t2, t2.
    assert profile.bytes == (2 * KB, 3 * KB, 4 * KB, 3 * KB)
    assert max(profile.bytes) == peak_memory(parse_hlo(text))


def test_functions_count_where_they_are_called():
    # jnp.cumsum, jnp.fft.fft and their like are functions of their own in StableHLO.
    text = """
func.func private @inner(%x: tensor<256xf32>, %y: tensor<512xf32>)
    -> (tensor<256xf32>, tensor<16xf32>) {
  %0 = stablehlo.exponential %x : tensor<256xf32>
  %1 = stablehlo.slice %y [0:16] : (tensor<512xf32>) -> tensor<16xf32>
  return %0, %1 : tensor<256xf32>, tensor<16xf32>
}
func.func @main(%x: tensor<256xf32>, %y: tensor<512xf32>) -> (RETURNS) {
  %0:2 = call @inner(%x, %y) : (tensor<256xf32>, tensor<512xf32>)
    -> (tensor<256xf32>, tensor<16xf32>)
  return RESULTS : RETURNS
}"""
    both = text.replace("RESULTS", "%0#0, %0#1").replace(
        "RETURNS", "tensor<256xf32>, tensor<16xf32>"
    )
    second = text.replace("RESULTS", "%0#1").replace("RETURNS", "tensor<16xf32>")
    # Both arguments are read once, the second as far as it is cut out, and the results are written.
    assert entry_bytes(read_program(both).program) == KB + 16 * 4 + KB + 16 * 4
    assert entry_bytes(read_program(second).program) == KB + 16 * 4 + 16 * 4
    # As XLA:CPU parts a kernel over threads.
    parted = """HloModule m, is_scheduled=true

parallel {
  p = f32[256] parameter(0)
  ROOT t = f32[256] negate(p)
}

ENTRY main {
  a = f32[256] parameter(0)
  ROOT c = f32[256] call(a), to_apply=parallel
}
"""
    assert entry_bytes(parse_hlo(parted)) == 2 * KB
