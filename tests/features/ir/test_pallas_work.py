"""Work of Pallas kernels, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.gpu import attention

import opcast
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.pallas_work import kernel_work
from opcast.features.ir.platforms import platform_of
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.lowering.lower import lower

BF16, F32 = jnp.bfloat16, jnp.float32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "eqns"):
                yield from calls(getattr(inner, "jaxpr", inner))


def work(function, *args, streams=False):
    """Work of the only kernel of a function."""
    (eqn,) = calls(jax.make_jaxpr(function)(*args).jaxpr)
    return kernel_work(eqn.params, streams=streams)


def blocked_product(x, y):
    """Blocks of 128 × 256 · 256 × 128, added up over the last axis of the grid."""

    def kernel(x_ref, y_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            sum_ref[...] = jnp.exp(jnp.zeros_like(sum_ref))

        sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = sum_ref[...].astype(o_ref.dtype)

    (m, k), (_, n) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        out_shape=struct(m, n, dtype=x.dtype),
        grid=(m // 128, n // 128, k // 256),
        in_specs=[
            pl.BlockSpec((128, 256), lambda i, j, k: (i, k)),
            pl.BlockSpec((256, 128), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((128, 128), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((128, 128), F32)],
    )(x, y)


def test_a_product_in_blocks():
    m, k, n = 512, 1024, 384
    args = struct(m, k, dtype=BF16), struct(k, n, dtype=BF16)
    found = work(blocked_product, *args, streams=True)
    steps = (m // 128) * (n // 128) * (k // 256)
    # Two FLOPs of each multiply-add, and one to add each step's block to the sum.
    assert found.flops == 2 * m * k * n + steps * 128 * 128
    # exp of each block of the result, at the first of its steps alone.
    assert found.transcendentals == m * n
    # Each step needs other blocks of both operands; a block of the result is written once.
    assert found.bytes == 2 * (steps * 128 * 256 * 2 + m * n)
    # Caches hold what is read again.
    assert work(blocked_product, *args).bytes == 2 * (m * k + k * n + m * n)


def test_blocks_that_stay_are_not_moved_again():
    def f(x, w):
        def kernel(x_ref, w_ref, o_ref):
            o_ref[...] = x_ref[...] * w_ref[...]

        rows = pl.BlockSpec((8, 512), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(64,),
            in_specs=[rows, pl.BlockSpec((1, 512), lambda i: (0, 0))],
            out_specs=rows,
        )(x, w)

    found = work(f, struct(512, 512), struct(1, 512), streams=True)
    assert found == (512 * 512, 0, 4 * (2 * 512 * 512 + 512))


@pytest.mark.parametrize(
    ("trips", "ran"),
    # Over a grid of 8: as often as the index says, from it down to 0, and always the same.
    [
        (lambda i: (0, i), sum(range(8))),
        (lambda i: (i, 8), sum(8 - i for i in range(8))),
        (lambda i: (0, (i + 1) // 2), sum((i + 1) // 2 for i in range(8))),
        (lambda i: (2, 5), 8 * 3),
    ],
)
def test_loops_run_as_often_as_the_grid_says(trips, ran):
    def f(x):
        def kernel(x_ref, o_ref):
            def body(_, carry):
                return carry + jnp.exp(x_ref[...])

            o_ref[...] = jax.lax.fori_loop(*trips(pl.program_id(0)), body, jnp.zeros((16, 128)))

        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(8,),
            in_specs=[pl.BlockSpec((16, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((16, 128), lambda i: (i, 0)),
        )(x)

    found = work(f, struct(128, 128))
    assert found.transcendentals == found.flops == ran * 16 * 128


def test_branches_in_loops_are_taken_where_they_would_be():
    """Of 64 trips every fourth; a branch by data counts as its costliest."""

    def f(x):
        def kernel(x_ref, o_ref):
            def body(i, carry):
                carry = jax.lax.cond(i < 16, jnp.exp, lambda c: c, carry)
                return jax.lax.cond(carry[0, 0] > 0, lambda c: c + 1.0, lambda c: c, carry)

            o_ref[...] = jax.lax.fori_loop(0, 64, body, x_ref[...])

        return pl.pallas_call(kernel, out_shape=x)(x)

    found = work(f, struct(8, 128))
    assert (found.transcendentals, found.flops) == (16 * 1024, 64 * 1024)


def ragged(lengths, x, **options):
    """A loop whose length is data."""

    def kernel(lengths_ref, x_ref, o_ref):
        o_ref[...] = jax.lax.fori_loop(
            0, lengths_ref[0], lambda _, c: c + x_ref[...], jnp.zeros((8, 128))
        )

    block = pl.BlockSpec((8, 128), lambda i, n: (0, 0))
    spec = pltpu.PrefetchScalarGridSpec(1, (1,), in_specs=[block], out_specs=block)
    return pl.pallas_call(kernel, out_shape=x, grid_spec=spec, **options)(lengths, x)


def test_what_depends_on_data_is_not_known():
    args = struct(4, dtype=jnp.int32), struct(8, 128)
    assert work(ragged, *args) is None
    # Unless the kernel states it.
    stated = pl.CostEstimate(flops=7, transcendentals=3, bytes_accessed=5)
    assert work(lambda *a: ragged(*a, cost_estimate=stated), *args) == (7, 3, 5)


def causal(q, k, v):
    return attention.mha(q, k, v, segment_ids=None, causal=True)


@pytest.mark.parametrize("device", ["h100-sxm", "mi300x"])
def test_attention_of_pallas_is_above_its_floor(device):
    b, s, h, d = 2, 1024, 8, 64
    q = struct(b, s, h, d, dtype=BF16)
    spec = find_device(device)
    source = read_program(causal, q, q, q, platform=platform_of(spec))
    (kernel,) = lower(source, "fused", device=spec, cache=False).kernels
    # Of s / 128 blocks of keys, a block of queries sees those up to its own: 4.5 of 8. Two products
    # of each block; the softmax adds less than a tenth.
    products = 4 * b * h * s * s * d * 4.5 / 8
    assert products < kernel.flops < 1.1 * products
    assert kernel.bytes == 4 * b * s * h * d * 2
    # Its text alone says so, as datasets keep it.
    assert kernel_from_ir(kernel.ir).flops == kernel.flops
    found = opcast.predict(source, device=spec, lowering="fused")
    assert found.latency_us > products / spec.peak_flops["bf16"] * 1e6
    # The same by cuDNN is no slower than by an estimate that says so five times.
    backward = jax.grad(lambda *a: causal(*a).astype(F32).sum(), (0, 1, 2))
    step = opcast.predict(backward, q, q, q, device=spec, lowering="fused")
    # Backward has five products of the same sizes, and Pallas computes the scores twice.
    assert sum(k.flops for k in step.kernels) > 3.5 * products


def test_a_saved_function_keeps_what_was_counted(tmp_path):
    x = struct(512, 512, dtype=BF16)
    saved = opcast.save(blocked_product, x, x, path=tmp_path / "f.mlir", device="tpu-v5e")
    (kernel,) = lower(saved, "op", cache=False).kernels
    assert kernel.flops == work(blocked_product, x, x, streams=True).flops
    assert (
        opcast.predict(saved, device="tpu-v5e", lowering="op").latency_us
        >= 2 * 512**3 / 197e12 * 1e6
    )


def test_the_compiler_passes_on_what_was_counted():
    text = """HloModule m, is_scheduled=true
ENTRY main {
  p0 = bf16[512,512]{1,0} parameter(0)
  ROOT r = f32[512,512]{1,0} custom-call(p0, p0), custom_call_target="__gpu$xla.gpu.triton",
    frontend_attributes={kernel_metadata={},opcast_work="268435456 3 5000000"}
}"""
    (kernel,) = lower(text, "xla", cache=False).kernels
    assert (kernel.flops, kernel.transcendentals, kernel.bytes) == (268435456, 3, 5000000)
    assert kernel_from_ir(kernel.ir).bytes == 5000000


def test_the_rules_of_jax_are_as_before():
    x = struct(512, 512, dtype=BF16)
    call = pl.pallas_call(lambda a, o: None, out_shape=x, compiler_params=triton.CompilerParams())
    read_program(lambda x: call(x), x, platform=platform_of(find_device("h100-sxm")))
    text = jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text and "opcast_work" not in text
