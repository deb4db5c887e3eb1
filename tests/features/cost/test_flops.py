"""FLOPs and transcendentals against XLA's own cost analysis, and by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from opcast.features.cost.flops import Cost, kernel_cost, op_cost
from opcast.features.ir.hlo_reader import parse_hlo

from ...support.costs import program_cost

F32 = jnp.float32
Case = tuple[Callable[..., Any], tuple[Any, ...]]


_STRUCT: Any = jax.ShapeDtypeStruct


def _spec(*shape: int, dtype: Any = F32) -> Any:
    return _STRUCT(shape, dtype)


def _dot(contracting: Any, batch: Any) -> Callable[..., Any]:
    return lambda a, b: lax.dot_general(a, b, (contracting, batch))


def _gradient(function: Callable[..., Any], which: Any = (0, 1)) -> Callable[..., Any]:
    return jax.grad(lambda *args: jnp.sum(function(*args) ** 2), which)


_MATMUL = _dot(((1,), (0,)), ((), ()))
_BATCHED = _dot(((2,), (1,)), ((0,), (0,)))
DOTS: dict[str, Case] = {
    "matmul": (_MATMUL, (_spec(8, 16), _spec(16, 32))),
    "matmul gradients": (_gradient(_MATMUL), (_spec(8, 16), _spec(16, 32))),
    "matrix vector": (_dot(((1,), (0,)), ((), ())), (_spec(8, 16), _spec(16))),
    "inner": (_dot(((0,), (0,)), ((), ())), (_spec(16), _spec(16))),
    "outer": (_dot(((), ()), ((), ())), (_spec(5), _spec(6))),
    "batched": (_BATCHED, (_spec(4, 8, 16), _spec(4, 16, 6))),
    "batched gradients": (_gradient(_BATCHED), (_spec(4, 8, 16), _spec(4, 16, 6))),
    "two contracted": (_dot(((1, 2), (2, 0)), ((), ())), (_spec(3, 4, 5), _spec(5, 7, 4))),
    "two batches": (_dot(((3,), (2,)), ((0, 1), (1, 0))), (_spec(2, 3, 4, 5), _spec(3, 2, 5, 6))),
    "bf16": (_MATMUL, (_spec(8, 16, dtype=jnp.bfloat16), _spec(16, 32, dtype=jnp.bfloat16))),
    "int8": (_MATMUL, (_spec(8, 16, dtype=jnp.int8), _spec(16, 32, dtype=jnp.int8))),
    "einsum": (
        lambda a, b: jnp.einsum("bhqd,bkhd->bhqk", a, b), (_spec(2, 3, 4, 5), _spec(2, 6, 3, 5)),
    ),
}  # fmt: skip


def _max_pool(x: jax.Array) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def _layer_norm(x: jax.Array) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


PROGRAMS: dict[str, Case] = {
    "elementwise": (lambda a, b: (a + b) * a - b / a, (_spec(9, 7), _spec(9, 7))),
    "compare select": (lambda a, b: jnp.where(a > b, a, b), (_spec(9, 7), _spec(9, 7))),
    "integers": (
        lambda a: ((a << 2) ^ (a >> 1)) & ~a | lax.population_count(a),
        (_spec(100, dtype=jnp.int32),),
    ),
    "remainder": (lambda a: a % 7 + lax.clz(a), (_spec(100, dtype=jnp.int32),)),
    "transcendentals": (
        lambda a: jnp.exp(a) + jnp.log1p(a) + jnp.tanh(a) + jnp.sin(a) + lax.rsqrt(a),
        (_spec(100),),
    ),
    "cbrt pow atan2": (lambda a: lax.cbrt(a) + a**2.5 + jnp.atan2(a, a), (_spec(100),)),
    "softmax": (jax.nn.softmax, (_spec(10, 100),)),
    "softmax gradient": (_gradient(jax.nn.softmax, 0), (_spec(10, 100),)),
    "gelu": (jax.nn.gelu, (_spec(10, 100),)),
    "gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), (_spec(10, 100),)),
    "layer norm": (_layer_norm, (_spec(10, 100),)),
    "reduce": (lambda x: (x.sum(0), x.max(), jnp.argmax(x, 1)), (_spec(10, 100),)),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), (_spec(10, 100),)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (_spec(4, 50),)),
    "max pool": (_max_pool, (_spec(2, 9, 9, 4),)),
    "max pool gradient": (_gradient(_max_pool, 0), (_spec(2, 8, 8, 4),)),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1)), (_spec(30, 20),)),
    "scatter": (lambda x, i: x.at[i].add(1.0), (_spec(50, 4), _spec(7, dtype=jnp.int32))),
    "gather": (lambda x, i: x[i] * 2, (_spec(50, 4), _spec(7, dtype=jnp.int32))),
    "random": (lambda k: jax.random.normal(k, (500,)), (_spec(2, dtype=jnp.uint32),)),
    "loop once": (lambda x: lax.fori_loop(0, 9, lambda i, c: c @ c, x), (_spec(8, 8),)),
    "branches": (
        lambda i, x: lax.switch(i, [jnp.sin, lambda v: v + v * v, lambda v: v], x),
        (_spec(dtype=jnp.int32), _spec(100)),
    ),
    "slices": (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 4)) + lax.rev(x[:3], (0,)),
        (_spec(9, 4), _spec(dtype=jnp.int32)),
    ),
}


def _agree(cost: Cost, xla: Any) -> None:
    assert cost.flops == pytest.approx(max(0.0, xla.get("flops", 0.0)), rel=0.01)
    assert cost.transcendentals == pytest.approx(xla.get("transcendentals", 0.0), rel=0.01)


@pytest.mark.parametrize("name", [*DOTS, *PROGRAMS])
def test_agrees_with_xla(name: str) -> None:
    function, args = (DOTS | PROGRAMS)[name]
    lowered = jax.jit(function).lower(*args)
    program = parse_hlo(str(lowered.as_text(dialect="hlo")))
    _agree(program_cost(program, loops=False), lowered.cost_analysis())


@pytest.mark.parametrize(
    "name", ["batched gradients", "softmax gradient", "max pool gradient", "scatter", "loop once"]
)
def test_agrees_with_xla_on_optimised_programs(name: str) -> None:
    function, args = (DOTS | PROGRAMS)[name]
    compiled = jax.jit(function).lower(*args).compile()
    cost = program_cost(parse_hlo(str(compiled.as_text())), loops=False)
    _agree(cost, compiled.cost_analysis())


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: jnp.cumsum(x, 1), (8, 4096)),
        (lambda x: lax.cummax(x, 0, reverse=True), (4096, 8)),
    ],
)
def test_long_running_sums_cost_what_the_compilers_tree_does(
    function: Callable[..., Any], shape: tuple[int, int]
) -> None:
    lowered = jax.jit(function).lower(_spec(*shape))
    written = program_cost(parse_hlo(str(lowered.as_text(dialect="hlo"))))
    compiled = program_cost(parse_hlo(str(lowered.compile().as_text())))
    # In 8 rows of 4,096 it takes 17 steps an element, not 4,095.
    assert written.flops == 17 * 8 * 4096
    assert written.flops == pytest.approx(compiled.flops, rel=0.15)


@pytest.mark.parametrize("optimised", [False, True])
def test_loops_multiply(optimised: bool) -> None:
    def inner(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return lax.fori_loop(0, 5, lambda i, v: jnp.dot(v, v), c), None

    lowered = jax.jit(lambda x: lax.scan(inner, x, None, length=7)[0]).lower(_spec(32, 32))
    text = lowered.compile().as_text() if optimised else lowered.as_text(dialect="hlo")
    program = parse_hlo(str(text))
    dots = 7 * 5 * 2 * 32**3
    # Counters add a few FLOPs to each of the 35 iterations.
    assert program_cost(program).flops == pytest.approx(dots, rel=1e-3)
    assert program_cost(program, loops=False).flops == pytest.approx(2 * 32**3, rel=1e-3)


def _root(line: str, parameters: str = "", called: str = "") -> Cost:
    declared = "".join(
        f"  {chr(97 + i)} = {t} parameter({i})\n" for i, t in enumerate(parameters.split())
    )
    text = f"HloModule m\n\n{called}\n\nENTRY main {{\n{declared}  ROOT r = {line}\n}}\n"
    return kernel_cost(parse_hlo(text))


@pytest.mark.parametrize(
    ("line", "parameters", "flops"),
    [
        # 5 N log2 N for 10 transforms of 64 points; half of it if one side is real.
        ("c64[10,64] fft(a), fft_type=FFT, fft_length={64}", "c64[10,64]", 10 * 5 * 64 * 6),
        ("c64[10,33] fft(a), fft_type=RFFT, fft_length={64}", "f32[10,64]", 10 * 2.5 * 64 * 6),
        ("f32[10,64] fft(a), fft_type=IRFFT, fft_length={64}", "c64[10,33]", 10 * 2.5 * 64 * 6),
        ("c64[3,8,16] fft(a), fft_type=FFT, fft_length={8,16}", "c64[3,8,16]", 3 * 5 * 128 * 7),
        # n³/3 for each of 2 matrices; n²·m for each of 2 solves.
        ("f32[2,64,64] cholesky(a), lower=true", "f32[2,64,64]", 2 * 64**3 / 3),
        ("f32[2,64,8] triangular-solve(a, b), left_side=true", "f32[2,64,64] f32[2,64,8]",
         2 * 64 * 64 * 8),
        # A heap of 7 takes 3 comparisons for each of 8·1000 elements.
        ("(f32[8,7], s32[8,7]) topk(a), k=7", "f32[8,1000]", 8000 * 3),
        ("f32[16,6] ragged-dot(a, b, c), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
         "f32[16,5] f32[3,5,6] s32[3]", 2 * 16 * 6 * 5),
        ("f32[8,4] all-reduce(a), replica_groups={{0,1}}", "f32[8,4]", 32),
        ("f32[16,4] all-gather(a), replica_groups={{0,1}}, dimensions={0}", "f32[8,4]", 0),
        ("s32[10] shift-right-logical(a, a)", "s32[10]", 10),
        ("f32[10] some-future-op(a)", "f32[10]", 10),
    ],
)  # fmt: skip
def test_by_hand(line: str, parameters: str, flops: float) -> None:
    assert _root(line, parameters).flops == pytest.approx(flops)


CUSTOM = 'custom-call({0}), custom_call_target="{1}"'
GEMM = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}'
)
WINDOW = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"


@pytest.mark.parametrize(
    ("line", "parameters", "flops"),
    [
        ("(f32[8,32], s8[1024]) " + CUSTOM.format("a, b", "__cublas$gemm") + ", " + GEMM,
         "f32[16,8] f32[16,32]", 2 * 8 * 32 * 16),
        ("bf16[8,32] " + CUSTOM.format("a, b, c", "__cublas$lt$matmul"),
         "bf16[8,16] bf16[16,32] bf16[32]", 2 * 8 * 32 * 16),
        ("f32[4,8,32] " + CUSTOM.format("a, b", "__onednn$matmul"),
         "f32[4,8,16] f32[4,16,32]", 2 * 4 * 8 * 32 * 16),
        ("f32[4,8,32] " + CUSTOM.format("a, b", "__onednn$matmul"),
         "f32[4,8,16] f32[16,32]", 2 * 4 * 8 * 32 * 16),
        ("(f32[4,8], s32[4,8]) " + CUSTOM.format("a", "TopK"), "f32[4,100]", 400 * 4),
        ("(f32[8,8], s32[]) " + CUSTOM.format("a", "lapack_spotrf_ffi"), "f32[8,8]", 8**3 / 3),
        ("f32[8,4] " + CUSTOM.format("a, b", "lapack_strsm_ffi"), "f32[8,8] f32[8,4]", 8 * 8 * 4),
        ("(f32[3,8,8], s32[3,8], s32[3]) " + CUSTOM.format("a", "cusolver_getrf_ffi"),
         "f32[3,8,8]", 3 * 2 * 8**3 / 3),
        ("(f32[8,8], f32[8], s32[]) " + CUSTOM.format("a", "lapack_ssyevd_ffi"), "f32[8,8]",
         9 * 8**3),
        ("(f32[8,8], f32[8]) " + CUSTOM.format("a", "Eigh"), "f32[8,8]", 9 * 8**3),
        ("c64[10,64] " + CUSTOM.format("a", "DuccFft"), "c64[10,64]", 10 * 5 * 64 * 6),
        # Of complex numbers: four real products each.
        ("(c64[8,32], s8[1024]) " + CUSTOM.format("a, b", "__cublas$gemm") + ", " + GEMM,
         "c64[16,8] c64[16,32]", 4 * 2 * 8 * 32 * 16),
        ("(c64[8,8], s32[]) " + CUSTOM.format("a", "cusolver_potrf_ffi"), "c64[8,8]",
         4 * 8**3 / 3),
    ],
)  # fmt: skip
def test_library_calls(line: str, parameters: str, flops: float) -> None:
    cost = _root(line, parameters)
    assert cost.flops == pytest.approx(flops)
    assert cost.bytes_in > 0
    assert cost.bytes_out > 0


@pytest.mark.parametrize(
    ("target", "result", "parameters"),
    [
        ("__cudnn$convForward", "f32[2,9,9,16]", "f32[2,9,9,8] f32[3,3,8,16]"),
        ("__cudnn$convBackwardInput", "f32[2,9,9,8]", "f32[2,9,9,16] f32[3,3,8,16]"),
        ("__cudnn$convBackwardFilter", "f32[3,3,8,16]", "f32[2,9,9,8] f32[2,9,9,16]"),
    ],
)
def test_library_convolutions(target: str, result: str, parameters: str) -> None:
    line = f"({result}, u8[100]) {CUSTOM.format('a, b', target)}, {WINDOW}"
    # 9 outputs with 3 taps, less one padded position at each border: 25 pairs per dimension.
    assert _root(line, parameters).flops == 2 * 2 * 25 * 25 * 8 * 16


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float32])
def test_complex_products_count_their_real_ones(dtype: Any) -> None:
    """XLA counts one, whatever the type."""
    times = 4 if dtype == jnp.complex64 else 1
    lowered = jax.jit(_MATMUL).lower(_spec(8, 16, dtype=dtype), _spec(16, 4, dtype=dtype))
    ours = program_cost(parse_hlo(str(lowered.as_text(dialect="hlo"))))
    assert ours.flops == times * 2 * 8 * 4 * 16 == times * lowered.cost_analysis()["flops"]
    solve = _root("c64[8,4] triangular-solve(a, b), lower=true, left_side=true",
                  "c64[8,8] c64[8,4]")  # fmt: skip
    assert solve.flops == 4 * 8 * 8 * 4
    assert _root("c64[8,8] cholesky(a)", "c64[8,8]").flops == pytest.approx(4 * 8**3 / 3)


CHLO_FUNCTIONS = ("erf", "erf_inv", "erfc", "lgamma", "digamma", "asinh", "acosh", "sinh", "atan")


@pytest.mark.parametrize("name", CHLO_FUNCTIONS)
def test_chlo_ops_cost_what_xla_expands_them_to(name: str) -> None:
    lowered = jax.jit(getattr(lax, name)).lower(_spec(1000))
    if f"chlo.{name}" not in lowered.as_text():
        pytest.skip("this version of JAX expands the op itself")
    xla = lowered.cost_analysis()
    _agree(_root(f"f32[1000] chlo.{name}(a)", "f32[1000]"), xla)


def test_fusion_sums_what_it_holds() -> None:
    called = """add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}

f {
  p = f32[8,16] parameter(0)
  q = f32[16,4] parameter(1)
  d = f32[8,4] dot(p, q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  e = f32[8,4] exponential(d)
  z = f32[] constant(0)
  ROOT r.1 = f32[8] reduce(e, z), dimensions={1}, to_apply=add
}"""
    cost = _root("f32[8] fusion(a, b), kind=kLoop, calls=f", "f32[8,16] f32[16,4]", called)
    assert cost == Cost(2 * 8 * 4 * 16 + 8 * 3, 32, 4 * (8 * 16 + 16 * 4), 4 * 8)


def test_unknown_trip_count_counts_once() -> None:
    def loop(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, x)

    program = parse_hlo(str(jax.jit(loop).lower(_spec(4)).as_text(dialect="hlo")))
    # 4 products in the body; 3 additions and a comparison in the condition.
    assert program_cost(program).flops == 4 + 3 + 1


def test_bytes_of_a_cost_are_both_ways() -> None:
    assert Cost(1, 2, 3, 4).bytes == 7


def test_empty_arrays_cost_nothing() -> None:
    text = (
        "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT s = f32[] add(x, y)\n}"
    )
    cost = _root("f32[3] reduce(a, b), dimensions={1}, to_apply=add", "f32[3,0] f32[]", text)
    assert cost == Cost(0, 0, 4, 12)


def test_every_op_of_a_train_step_has_a_finite_cost() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.sum(jnp.abs(jnp.fft.rfft(jax.nn.gelu(out), axis=1)))

    text = jax.jit(jax.grad(loss)).lower(_spec(3, 4, 8), _spec(2, 32, 4)).compile().as_text()
    program = parse_hlo(str(text))
    for computation in program.computations.values():
        for op in computation.ops:
            cost = op_cost(op, computation, program)
            assert min(cost.flops, cost.transcendentals, cost.bytes_in, cost.bytes_out) >= 0


def test_kernel_cost_is_fast() -> None:
    lines = ["  p = f32[64,64] parameter(0)"]
    lines += [f"  v{i} = f32[64,64] add({'p' if i == 0 else f'v{i - 1}'}, p)" for i in range(10)]
    body = "f {\n" + "\n".join(lines) + "\n}"
    text = f"HloModule m\n\n{body}\n\nENTRY e {{\n  a = f32[64,64] parameter(0)\n"
    program = parse_hlo(text + "  ROOT r = f32[64,64] fusion(a), kind=kLoop, calls=f\n}\n")
    start = time.process_time()
    for _ in range(1000):
        kernel_cost(program)
    # About 20 µs on an idle core; the limit lets a busy one pass.
    assert time.process_time() - start < 0.5
