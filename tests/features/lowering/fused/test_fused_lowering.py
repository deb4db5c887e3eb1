"""Kernels of the lowering ``fused`` on small programs, with bytes computed by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import LoweringError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.process import CompileSettings

from ...fused_programs import recurrence

F32, BF16 = jnp.float32, jnp.bfloat16
H100 = find_device("h100-sxm")


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


#: Products are the libraries' alone.
LIBRARIES = CompileSettings(flags={"xla_gpu_enable_triton_gemm": False})


def fused(function, *arguments, device=H100, settings=None):
    text = jax.jit(function).lower(*arguments).as_text(debug_info=True)
    return lower(text, "fused", device=device, settings=settings)


def working(lowered):
    return [k for k in lowered.kernels if k.takes_time]


def kinds(lowered):
    return [k.kind for k in working(lowered)]


def opcodes(kernel):
    return [op.opcode for op in kernel.inner.ops]


def test_a_chain_of_elementwise_ops_is_one_kernel():
    found = fused(lambda x, y: jnp.tanh(x + y) * 2.0 - y, spec(1024, 512), spec(1024, 512))
    (kernel,) = working(found)
    size = 1024 * 512 * 4
    assert (kernel.kind, kernel.bytes_in, kernel.bytes_out) == ("fusion", 2 * size, size)
    assert kernel.flops == 3 * 1024 * 512
    assert kernel.transcendentals == 1024 * 512


def test_the_result_says_which_lowering_it_is():
    found = fused(lambda x: x + 1.0, spec(8, 8))
    assert (found.lowering, found.target, found.memory_source) == ("fused", "h100-sxm", "liveness")


def test_kernels_point_to_ops_and_lines():
    found = fused(lambda x: jnp.exp(x) + 1.0, spec(64, 64))
    (kernel,) = working(found)
    assert {s.op for s in kernel.sources} >= {"stablehlo.exponential", "stablehlo.add"}
    assert all(s.file.endswith("test_fused_lowering.py") and s.line for s in kernel.sources)


def test_a_product_takes_bias_and_relu_along():
    found = fused(
        lambda x, w, b: jnp.maximum(x @ w + b, 0.0), spec(4096, 256), spec(256, 512), spec(512)
    )
    (kernel,) = working(found)
    assert kernel.kind == "gemm"
    assert kernel.bytes_in == 4 * (4096 * 256 + 256 * 512 + 512)
    assert kernel.bytes_out == 4 * 4096 * 512
    assert kernel.flops == 2 * 4096 * 256 * 512 + 2 * 4096 * 512


def test_a_residual_is_added_by_the_product_that_comes_before():
    def block(x, w, v):
        return x + jnp.maximum(x @ w, 0.0) @ v

    arguments = spec(8192, 512), spec(512, 512), spec(512, 512)
    # An argument may not be overwritten, so the library adds to a copy of it.
    for settings, expected in ((LIBRARIES, {"copy", "fusion", "gemm"}), (None, {"gemm"})):
        found = working(fused(block, *arguments, settings=settings))
        products = [k for k in found if k.kind == "gemm"]
        assert len(products) == 2 and {k.kind for k in found} == expected
        assert products[-1].bytes_in == 4 * (8192 * 512 + 512 * 512 + 8192 * 512)


def test_gelu_belongs_to_the_product_if_nothing_else_reads_its_input():
    arguments = spec(4096, 256), spec(256, 512), spec(512)
    gelu = lambda x, w, b: jax.nn.gelu(x @ w + b)  # noqa: E731
    assert kinds(fused(gelu, *arguments, settings=LIBRARIES)) == ["gemm"]
    # A generated product takes in nothing that several ops read.
    assert kinds(fused(gelu, *arguments)) == ["gemm", "fusion"]


def test_transposed_operands_cost_nothing():
    found = fused(lambda x, w: x.T @ w.T, spec(256, 4096), spec(512, 256))
    assert kinds(found) == ["gemm"]


def test_heads_are_transposed_before_a_batched_product():
    found = fused(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        spec(8, 128, 4, 64), spec(8, 128, 4, 64),
    )  # fmt: skip
    assert kinds(found) == ["copy", "copy", "gemm"]
    assert working(found)[-1].op.type.shape == (32, 128, 128)


def test_products_that_share_an_operand_are_one():
    def qkv(x, q, k, v):
        return jnp.sin(x @ q), jnp.sin(x @ k), jnp.sin(x @ v)

    arguments = spec(512, 256), *[spec(256, 256)] * 3
    found = fused(qkv, *arguments)
    gemms = [k for k in working(found) if k.kind == "gemm"]
    (gemm,) = gemms
    assert gemm.flops == 2 * 512 * 256 * 768
    # It joins the weights itself; libraries need a kernel for that.
    assert gemm.bytes_in == 4 * (512 * 256 + 256 * 768)
    joined = working(fused(qkv, *arguments, settings=LIBRARIES))[0]
    assert (joined.kind, joined.bytes_out) == ("copy", 4 * 256 * 768)


def test_softmax_is_one_kernel_that_reads_its_input_once():
    found = fused(lambda x: jax.nn.softmax(x * 0.5), spec(4096, 1024))
    (kernel,) = working(found)
    size = 4096 * 1024 * 4
    assert (kernel.kind, kernel.bytes_in, kernel.bytes_out) == ("reduce", size, size)


def test_softmax_takes_three_kernels_where_the_gpu_is_too_old_for_it():
    found = fused(
        lambda x: jax.nn.softmax(x * 0.5), spec(4096, 1024), device=find_device("v100-pcie")
    )
    assert kinds(found) == ["reduce", "reduce", "fusion"]
    size = 4096 * 1024 * 4
    assert [k.bytes_in for k in working(found)][:2] == [size, size + 4096 * 4]


def test_two_sums_over_one_array_read_it_once():
    found = fused(lambda x: (x.sum(1), (x * x).sum(1)), spec(1024, 2048))
    (kernel,) = working(found)
    assert kernel.bytes_in == 1024 * 2048 * 4
    assert kernel.bytes_out == 2 * 1024 * 4


def test_an_array_that_others_read_is_a_second_result():
    def both(x):
        y = jnp.tanh(x) * x
        return y, y.sum(1)

    found = fused(both, spec(1024, 2048))
    (kernel,) = working(found)
    assert kernel.op.is_tuple
    assert kernel.bytes_in == 1024 * 2048 * 4
    assert kernel.bytes_out == 1024 * 2048 * 4 + 1024 * 4


def test_a_reduction_takes_what_comes_before_it_but_not_after():
    found = fused(lambda x: jnp.sqrt(jnp.exp(x).sum(1)) * 3.0, spec(1024, 2048))
    assert kinds(found) == ["reduce", "fusion"]
    assert "exponential" in opcodes(working(found)[0])


def test_long_reductions_take_two_steps():
    found = fused(lambda x: x.sum(1), spec(16, 32_000))
    assert kinds(found) == ["reduce", "reduce"]
    # 128 is the power of two below √32000, and divides it.
    assert working(found)[0].op.type.shape == (16, 128)


def test_reductions_of_a_length_without_factors_are_padded():
    found = fused(lambda x: x.sum(1), spec(16, 30_522))
    # Of 128 … 174 parts, 131 of 233 elements need the least padding: one element.
    assert working(found)[0].op.type.shape == (16, 131)
    assert "pad" in opcodes(working(found)[0])


def test_small_products_with_a_vector_are_reductions():
    found = fused(lambda x, v: (x + 1.0) @ v, spec(1024, 256), spec(256))
    (kernel,) = working(found)
    assert kernel.kind == "reduce"
    assert kernel.bytes_in == 4 * (1024 * 256 + 256)


def test_sixteen_bit_products_of_libraries_are_padded_to_multiples_of_eight():
    arguments = spec(64, 128, dtype=BF16), spec(128, 1001, dtype=BF16)
    # Triton's products, from compute capability 8.0 on, mask what is left over.
    assert kinds(fused(lambda x, w: x @ w, *arguments)) == ["gemm"]
    found = fused(lambda x, w: x @ w, *arguments, device=find_device("v100-sxm"))
    assert kinds(found) == ["copy", "gemm", "copy"]
    assert working(found)[1].op.type.shape == (64, 1008)


def test_filters_are_transposed_for_a_convolution():
    found = fused(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        spec(8, 32, 32, 64), spec(3, 3, 64, 128),
    )  # fmt: skip
    assert kinds(found) == ["copy", "conv"]
    conv = working(found)[1]
    assert conv.flops == pytest.approx(2 * 8 * 32 * 32 * 128 * 64 * 9, rel=0.1)
    assert conv.bytes_in == 4 * (8 * 32 * 32 * 64 + 9 * 64 * 128)


def test_a_loop_multiplies_its_kernels():
    def power(x, w):
        return jax.lax.fori_loop(0, 10, lambda _, y: jnp.tanh(y @ w), x)

    found = fused(power, spec(256, 256), spec(256, 256))
    inside = [k for k in working(found) if k.scope]
    assert {k.multiplicity for k in inside} == {10.0}
    # As compiled: the counter, the product in parts, their sum with tanh.
    assert sorted(k.kind for k in inside) == ["fusion", "gemm", "reduce"]
    assert sum(k.multiplicity * k.flops for k in inside if k.kind == "gemm") == 10 * 2 * 256**3


def test_swapped_state_of_a_loop_is_copied():
    def swap(x, y):
        return jax.lax.fori_loop(0, 4, lambda _, s: (s[1], s[0]), (x, y))

    found = fused(swap, spec(128, 128), spec(128, 128))
    copies = [k for k in working(found) if k.scope and k.kind == "copy"]
    assert len(copies) == 3  # two values change places by way of a third
    assert all(k.bytes == 2 * 128 * 128 * 4 for k in copies)


def _sum_beside(s):
    less = s[0] - 0.1
    return less, s[1] * (less * less).sum()


@pytest.mark.parametrize(
    ("step", "elements", "copies"),
    [
        (lambda s: (jnp.tanh(s[0]),), 1, 0),
        (lambda s: (s[0] * 1.1, s[0] + s[1]), 2, 0),  # the sum is made first
        (_sum_beside, 2, 0),
        (lambda s: (jnp.roll(s[0], 1, 0) + s[0],), 1, 1),  # reads other elements than it writes
        (lambda s: (s[0].T * 2,), 1, 1),
        (lambda s: (s[0] + s[1], s[0] + s[1]), 2, 1),
        (lambda s: (s[1], s[0] * 1.1), 2, 2),  # either would overwrite what the other one needs
        (lambda s: (s[1], s[0] + s[1]), 2, 2),
    ],
)
def test_state_that_a_loop_cannot_overwrite_is_copied(step, elements, copies):
    """As many copies as XLA's compiler for an H100 leaves in these bodies (JAX 0.10.2)."""

    def loop(*state):
        return jax.lax.fori_loop(0, 8, lambda _, s: step(s), state)

    state = [spec(64, 64)] * elements
    inside = [k for k in working(fused(loop, *state)) if k.multiplicity == 8]
    assert [k.opcode for k in inside].count("copy") == copies


def test_state_that_changes_places_is_copied_op_by_op_too():
    def loop(x, y):
        return jax.lax.fori_loop(0, 8, lambda _, s: (s[1], s[0] * 1.1), (x, y))

    text = jax.jit(loop).lower(spec(64, 64), spec(64, 64)).as_text()
    inside = [k for k in lower(text, "op", device=H100).kernels if k.multiplicity == 8]
    assert [k.opcode for k in inside].count("copy") == 2


def test_an_update_in_place_writes_only_the_update():
    def update(x, y, i):
        return jax.lax.dynamic_update_slice(x * 2.0, jnp.exp(y), (i, 0))

    found = fused(update, spec(4096, 512), spec(1, 512), spec(dtype=jnp.int32))
    kernel = next(k for k in working(found) if "dynamic-update-slice" in opcodes(k))
    assert "exponential" in opcodes(kernel)
    assert kernel.bytes_out == 512 * 4


def test_both_branches_are_seen_and_the_costlier_counts():
    def choose(p, x, w):
        return jax.lax.cond(p, lambda: x @ w, lambda: x)

    found = fused(choose, spec(dtype=jnp.bool_), spec(512, 512), spec(512, 512))
    assert "gemm" in kinds(found)
    assert any("conditional" in note for note in found.notes)


def two_loops(x, w):
    def rows(i, h):
        return jax.lax.fori_loop(0, 5, lambda j, g: jnp.tanh(g @ w) + g, h)

    return jax.lax.fori_loop(0, 3, rows, x)


def sorted_again(x):
    def body(state):
        i, a, b = state
        a, b = jax.lax.sort((a, b), num_keys=1)
        return i + 1, b, a

    return jax.lax.while_loop(lambda state: state[0] < 7, body, (0, x, x + 1.0))


def two_of_three(i, x, w):
    return jax.lax.switch(
        i, [lambda x, w: x @ w, lambda x, w: jnp.sin(x), lambda x, w: x @ w @ w], x, w
    )


@pytest.mark.parametrize(
    ("function", "arguments", "flops"),
    [
        (recurrence, (spec(16, 32, 128), spec(128, 128), spec(128, 128)), 16 * 4 * 32 * 128**2),
        (two_loops, (spec(64, 64), spec(64, 64)), 15 * 2 * 64**3),
        (sorted_again, (spec(1000),), 0),
        (two_of_three, (spec(dtype=jnp.int32), spec(64, 64), spec(64, 64)), 2 * 2 * 64**3),
    ],
)
def test_loops_and_branches_of_hlo_become_the_kernels_of_stablehlo(function, arguments, flops):
    """HLO's bodies take one tuple and each branch its own operand, StableHLO's a list."""
    lowered = jax.jit(function).lower(*arguments)
    ours, other = (lower(lowered.as_text(how), "fused", device=H100) for how in ("hlo", None))
    assert products(ours) == pytest.approx(flops, rel=0.01)
    keys = [[(k.kind, k.multiplicity, k.flops, k.bytes) for k in f.kernels] for f in (ours, other)]
    assert keys[0] == keys[1]
    assert ours.peak_memory_bytes == other.peak_memory_bytes
    assert products(lower(lowered.as_text("hlo"), "op")) == flops


def products(found):
    return sum(k.flops * k.multiplicity for k in found.kernels if k.kind == "gemm")


NESTED = """HloModule nested

body {
  state = (s32[], (f32[64,64], f32[64,64]), s32[]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  pair = (f32[64,64], f32[64,64]) get-tuple-element(state), index=1
  x = f32[64,64] get-tuple-element(pair), index=0
  w = f32[64,64] get-tuple-element(pair), index=1
  bound = s32[] get-tuple-element(state), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  y = f32[64,64] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  after = (f32[64,64], f32[64,64]) tuple(y, w)
  ROOT out = (s32[], (f32[64,64], f32[64,64]), s32[]) tuple(next, after, bound)
}

condition {
  state = (s32[], (f32[64,64], f32[64,64]), s32[]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  bound = s32[] get-tuple-element(state), index=2
  ROOT less = pred[] compare(i, bound), direction=LT
}

ENTRY main {
  pair = (f32[64,64], f32[64,64]) parameter(0)
  zero = s32[] constant(0)
  nine = s32[] constant(9)
  start = (s32[], (f32[64,64], f32[64,64]), s32[]) tuple(zero, pair, nine)
  loop = (s32[], (f32[64,64], f32[64,64]), s32[]) while(start), condition=condition, body=body
  last = (f32[64,64], f32[64,64]) get-tuple-element(loop), index=1
  ROOT y = f32[64,64] get-tuple-element(last), index=0
}
"""


def test_a_loop_over_tuples_of_tuples_reads_each_array():
    found = lower(NESTED, "fused", device=H100)
    gemms = [k for k in working(found) if k.kind == "gemm"]
    assert [(k.multiplicity, k.flops, k.bytes) for k in gemms] == [(9, 2 * 64**3, 3 * 4 * 64**2)]
    # The counter and the first array are copied: no iteration changes the second. So is a product,
    # which cannot overwrite what it reads.
    copies = [(k.multiplicity, k.bytes) for k in working(found) if k.kind == "copy"]
    assert sorted(copies) == [(1, 2 * 4), (1, 2 * 4 * 64**2), (9, 2 * 4 * 64**2)]


def test_collectives_stay_as_they_are():
    text = """
    module @m attributes {mhlo.num_replicas = 4 : i32} {
      func.func public @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {
        %0 = stablehlo.add %a, %a : tensor<64x64xf32>
        %1 = "stablehlo.all_reduce"(%0) ({
        ^bb0(%x: tensor<f32>, %y: tensor<f32>):
          %s = stablehlo.add %x, %y : tensor<f32>
          stablehlo.return %s : tensor<f32>
        }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}
          : (tensor<64x64xf32>) -> tensor<64x64xf32>
        %2 = stablehlo.multiply %1, %1 : tensor<64x64xf32>
        return %2 : tensor<64x64xf32>
      }
    }"""
    found = lower(text, "fused", device=H100)
    assert kinds(found) == ["fusion", "collective", "fusion"]
    assert working(found)[2].operands == (1,)


def test_without_a_device_an_h100_is_assumed():
    text = jax.jit(lambda x: x + 1.0).lower(spec(8)).as_text()
    found = lower(text, "fused")
    assert (len(found.kernels), found.target) == (1, "gpu")


def test_a_device_that_is_no_gpu_is_noted():
    found = fused(lambda x: x + 1.0, spec(8), device=find_device("tpu-v4"))
    assert any("GPU" in note for note in found.notes)


def test_an_optimised_program_is_refused():
    compiled = jax.jit(lambda x: x + 1.0).lower(spec(8)).compile().as_text()
    with pytest.raises(LoweringError, match="optimised already"):
        lower(compiled, "fused")


def test_a_partitioned_program_without_collectives_is_noted():
    text = jax.jit(lambda x: x + 1.0).lower(spec(8)).as_text()
    text = text.replace("mhlo.num_partitions = 1", "mhlo.num_partitions = 4")
    assert any("partitioned over 4" in note for note in lower(text, "fused").notes)


def test_reading_again_gives_the_same_kernels():
    text = jax.jit(lambda x, w: jax.nn.softmax(x @ w)).lower(spec(64, 64), spec(64, 64)).as_text()
    source = read_program(text)
    first, second = (lower(source, "fused", device=H100) for _ in range(2))
    assert [k.hash for k in first.kernels] == [k.hash for k in second.kernels]


@pytest.mark.parametrize("device", ["h100-sxm", "tpu-v5p", "cpu"])
def test_what_is_computed_again_behind_a_barrier_takes_its_time(device):
    def layer(x, w, v):
        return x + jnp.sin(x @ w) @ v

    def gradient(block):
        def loss(weights, x):
            for w, v in weights:
                x = block(x, w, v)
            return (x * x).sum()

        return jax.grad(loss)

    weights = [(spec(64, 128), spec(128, 64))] * 2
    target = find_device(device) if device != "cpu" else None
    plain, again = (
        fused(gradient(block), weights, spec(32, 64), device=target)
        for block in (layer, jax.checkpoint(layer))
    )

    def flops(lowered):
        return sum(k.flops for k in lowered.kernels if k.kind == "gemm")

    # Forward two products a layer, backward twice that but for the gradient of the input; the
    # first product of each layer is computed again, 2 x 32 x 64 x 128 FLOPs.
    product = 2 * 32 * 64 * 128
    assert flops(plain) == pytest.approx((4 + 7) * product, rel=0.02)
    assert flops(again) == pytest.approx((4 + 7 + 2) * product, rel=0.02)


def test_a_barrier_itself_is_no_kernel_and_hands_on_nested_values():
    def stages(x, y):
        a, (b, c) = jax.lax.optimization_barrier((jnp.sin(x), (jnp.cos(y), x)))
        return a + b, jax.lax.optimization_barrier(c * 2.0)

    found = fused(stages, spec(256, 256), spec(256, 256))
    size = 256 * 256 * 4
    # Sine and cosine stay apart from their sum.
    assert sum(k.bytes for k in working(found)) == (2 + 2 + 3 + 2) * size
    assert not any(k.opcode == "opt-barrier" for k in working(found))


HOST = replace(H100, name="host", platform="cpu")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_cpu_is_given_the_convolution_that_its_library_takes(layout, dtype):
    """XLA:CPU runs other layouts than ``b01f_01io->b01f`` as scalar loops, 100 times slower."""

    def loss(x, w):
        kinds = (layout, "HWIO", layout)
        made = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=kinds)
        return jax.nn.relu(made).sum()

    images = spec(*((2, 16, 16, 8) if layout == "NHWC" else (2, 8, 16, 16)), dtype=dtype)
    found = fused(jax.grad(loss, (0, 1)), images, spec(3, 3, 8, 32, dtype=dtype), device=HOST)
    convs = [k for k in working(found) if k.kind == "conv"]
    # Forward, and the gradients of images and filters, each alone: 2 FLOPs a tap, without pads.
    assert [opcodes(k).count("convolution") for k in convs] == [1, 1, 1]
    assert all(k.opcode == "convolution" and k.dtype == "f32" for k in convs)
    for kernel in convs:
        assert kernel.inner.root_op.attrs["dim_labels"] == "b01f_01io->b01f"
    taps = (3 * 16 - 2) ** 2 * 2 * 8 * 32
    assert convs[0].flops == 2 * taps


def test_a_cpu_finds_the_largest_in_one_call():
    found = fused(lambda x: jax.lax.top_k(x, 8), spec(16, 1000), device=HOST)
    (kernel,) = working(found)
    assert (kernel.opcode, kernel.kind) == ("custom-call", "sort")
    assert kernel.bytes == 16 * 1000 * 4 + 16 * 8 * (4 + 4)


@pytest.mark.parametrize("columns", [(), (32,)])
def test_a_cpu_multiplies_by_vectors_and_bf16_in_its_library(columns):
    """Both as XLA:CPU compiles them (JAX 0.10.2): converted to f32 by kernels of their own."""
    m, k = 256, 512
    n = columns[0] if columns else 1
    found = fused(jnp.matmul, spec(m, k), spec(k, *columns), device=HOST)
    assert kinds(found) == ["gemm"]
    halves = fused(jnp.matmul, spec(m, k, dtype=BF16), spec(k, *columns, dtype=BF16), device=HOST)
    product = next(kernel for kernel in working(halves) if kernel.kind == "gemm")
    assert (product.dtype, product.bytes) == ("f32", 4 * (m * k + k * n + m * n))
    passes = sorted(kernel.bytes for kernel in working(halves) if kernel.kind != "gemm")
    assert passes == sorted((2 + 4) * size for size in (m * k, k * n, m * n))


def test_a_cpu_computes_elements_of_bf16_in_f32():
    (kernel,) = working(fused(jnp.exp, spec(64, 256, dtype=BF16), device=HOST))
    assert opcodes(kernel)[-3:] == ["convert", "exponential", "convert"]


def test_a_cpu_reduces_in_its_library_each_result_alone():
    """As XLA:CPU compiles them (JAX 0.10.2) for two cores: nothing is split, and nothing shared."""

    def reduced(x):
        return x.min(0), jnp.exp(x).sum(0), jnp.argmax(x, 0), x * 2

    found = fused(reduced, spec(8192, 2048), device=replace(HOST, core_count=2))
    library = {"fusion_config": {"kind": "__ynn_fusion"}}
    halves = {"outer_dimension_partitions": ["2"]}
    ways = [(k.op.attrs["kind"], k.op.config()) for k in working(found) if k.bytes > 1 << 20]
    assert ways == [("kCustom", library)] * 2 + [("kLoop", halves)] * 2


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda x: x + 1, 1024),
        (jnp.exp, 1024),
        (lambda x: x.T, 1024),
    ],
)
def test_a_cpu_splits_loops_from_two_parts_on(function, least):
    """Rows of 64 from which XLA:CPU (JAX 0.10.2) splits for two cores."""
    host = replace(HOST, core_count=2)
    for rows, parts in ((least - 1, {}), (least, {"outer_dimension_partitions": ["2"]})):
        (kernel,) = working(fused(function, spec(rows, 64), device=host))
        assert kernel.op.config() == parts
