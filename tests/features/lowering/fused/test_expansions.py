"""Ops without a kernel are spelled out as XLA's expanders do: its kernels, bytes and FLOPs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower

#: Rows, contracted and columns of ragged products, and their groups.
M, K, N, GROUPS = 512, 256, 128, 4
H100, TPU = find_device("h100-sxm"), find_device("tpu-v5e")


def kernels_of(function, *shapes, device=H100, lowering="fused"):
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    platform = "tpu" if device is TPU else "cuda"
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return lower(read_program(text), lowering=lowering, device=device)


def ragged(lhs_contracting, rhs_contracting, batch, ragged, groups):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=((lhs_contracting, rhs_contracting), (batch, batch)),
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=groups,
    )
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


#: The three modes: what is ragged is a free dimension, the sum, or the batch.
MODES = {
    "rows": (ragged((1,), (1,), (), 0, [0]), ((M, K), (GROUPS, K, N)), 2 * M * K * N, GROUPS),
    "sum": (ragged((0,), (0,), (), 0, []), ((M, K), (M, N)), 2 * M * K * N, GROUPS),
    "batch": (ragged((2,), (1,), (0,), 0, []), ((8, M, K), (8, K, N)), 8 * 2 * M * K * N, 1),
}


@pytest.mark.parametrize("mode", MODES)
def test_ragged_products_count_their_rows_once_and_are_computed_for_every_group(mode):
    function, (lhs, rhs), flops, times = MODES[mode]
    shapes = ((lhs, jnp.bfloat16), (rhs, jnp.bfloat16), ((GROUPS,), jnp.int32))
    # As written, without a device; then as a GPU without a kernel for them runs them.
    (op,) = kernels_of(function, *shapes, lowering="op", device=None).kernels
    assert (op.kind, op.opcode, op.flops) == ("gemm", "ragged-dot", flops)
    for lowering in ("op", "fused"):
        found = kernels_of(function, *shapes, lowering=lowering)
        assert sum(k.flops for k in found.kernels if k.kind == "gemm") == times * flops
        assert any("every group" in note for note in found.notes)


def test_weights_of_groups_stay_in_place():
    function, (lhs, rhs), _, _ = MODES["rows"]
    shapes = ((lhs, jnp.bfloat16), (rhs, jnp.bfloat16), ((GROUPS,), jnp.int32))
    # As compiled for an H100: no kernel turns them.
    weights = 2 * GROUPS * K * N
    turned = [k for k in kernels_of(function, *shapes).kernels if k.bytes_in == weights]
    assert not turned


@pytest.mark.parametrize("lowering", ["op", "fused"])
def test_what_a_caller_keeps_is_copied_before_it_is_overwritten(lowering):
    def write(cache, new):
        return lax.dynamic_update_slice(cache, new, (7, 0))

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 256), (1, 256))]
    moved = []
    for donated in ((), (0,)):
        text = jax.jit(write, donate_argnums=donated).lower(*args).as_text()
        found = lower(read_program(text), lowering=lowering, device=H100)
        moved.append(sum(k.bytes * k.multiplicity for k in found.kernels))
    # A copy reads and writes 4 MiB; of what is donated one row is written.
    assert moved[0] - moved[1] == 2 * 4 * 4096 * 256
    assert moved[1] < 4000


def test_largest_elements_without_a_kernel_are_sorted_op_by_op_too():
    def opcodes(count):
        found = kernels_of(lambda x: lax.top_k(x, count), ((64, 4096), jnp.float32), lowering="op")
        return {kernel.opcode for kernel in found.kernels}

    assert opcodes(8) == {"custom-call"}
    assert "sort" in opcodes(50)


def test_a_tpu_multiplies_ragged_rows_as_they_are():
    function, (lhs, rhs), flops, _ = MODES["rows"]
    shapes = ((lhs, jnp.bfloat16), (rhs, jnp.bfloat16), ((GROUPS,), jnp.int32))
    (kernel,) = kernels_of(function, *shapes, device=TPU).kernels
    assert kernel.flops == flops
    # Each group's weights are read whole.
    assert kernel.bytes_in == 2 * (M * K + GROUPS * K * N) + 4 * GROUPS


@pytest.mark.parametrize(
    ("scan", "shape", "axis", "kernels"),
    [
        # Kernels of XLA for an H100 (JAX 0.10): ends of 16, ends of those …, sums.
        (lax.cumsum, (4096, 16384), 1, 6),
        (lax.cumsum, (4096, 16384), 0, 5),
        (lax.cumprod, (512, 2048), 1, 3),
        (lax.cummax, (512, 200), 1, 2),
        (lax.cumsum, (1_000_000,), 0, 5),
        (lax.cumlogsumexp, (512, 2048), 1, 5),
    ],
)
def test_scans_are_trees(scan, shape, axis, kernels):
    fused = kernels_of(lambda x: scan(x, axis=axis), (shape, jnp.float32)).kernels
    assert len(fused) == kernels
    moved, own = sum(k.bytes for k in fused), 4 * jnp.zeros(shape).size
    # The array is read twice and written once or twice; a sixteenth, and so on, too.
    assert 3 * own <= moved <= 4.5 * own


def test_a_short_scan_and_a_sliding_window_stay_one_kernel():
    for function in (
        lambda x: lax.cumsum(x, axis=1),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 8), (1, 1), "SAME"),
    ):
        (kernel,) = kernels_of(function, ((64, 16), jnp.float32)).kernels
        assert kernel.bytes == 2 * 4 * 64 * 16


def test_scans_run_backwards():
    forward, backward = (
        kernels_of(lambda x, r=r: lax.cumsum(x, axis=1, reverse=r), ((64, 2000), jnp.float32))
        for r in (False, True)
    )
    assert [k.bytes for k in forward.kernels] == [k.bytes for k in backward.kernels]


@pytest.mark.parametrize(
    ("dtype", "count", "rows", "target"),
    [
        (jnp.float32, 16, 1024, "__gpu$TopK"),
        (jnp.bfloat16, 8, 4096, "__gpu$TopK"),
        (jnp.float32, 17, 1024, ""),
        (jnp.float32, 8, 1023, ""),
        (jnp.float16, 8, 4096, ""),
    ],
)
def test_few_of_long_rows_have_a_kernel_and_the_rest_is_sorted(dtype, count, rows, target):
    fused = kernels_of(lambda x: lax.top_k(x, count), ((8, rows), dtype)).kernels
    assert fused[0].kind == "sort"
    assert fused[0].op.attrs.get("target", "") == target
    # Values and positions are sorted whole, then cut.
    assert len(fused) == (1 if target else 3)
    width = jnp.dtype(dtype).itemsize
    assert fused[0].bytes_in == 8 * rows * width
    assert fused[0].bytes_out == 8 * (count if target else rows) * (width + 4)


def test_approximate_selection_sorts_where_the_target_has_none():
    fused = kernels_of(lambda x: lax.approx_max_k(x, 8), ((8, 4096), jnp.float32)).kernels
    assert [k.kind for k in fused] == ["sort", "copy", "copy"]


def test_stable_sorts_carry_positions():
    (kernel,) = kernels_of(jnp.sort, ((64, 1000), jnp.float32)).kernels
    assert (kernel.kind, kernel.bytes_in, kernel.bytes_out) == ("sort", 256_000, 512_000)


def test_the_gradient_of_a_padded_pool_is_written_once():
    def pool(x):
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME").sum()

    fused = kernels_of(jax.grad(pool), ((8, 112, 112, 64), jnp.float32)).kernels
    # XLA's three kernels for an H100: zeros, the search, the scatter.
    assert [k.kind for k in fused] == ["copy", "reduce", "gather_scatter"]
    assert fused[0].bytes_out == 4 * 8 * 112 * 112 * 64


def test_a_scatter_of_one_slice_is_an_update_in_place():
    """As compiled for an H100: no copy of the loop's state, whose memory the caller gives up."""
    rows, width = 64, 4096

    def filled(stack, row):
        def body(i, stack):
            return stack.at[i].set(stack[i] * row)

        return lax.fori_loop(0, rows, body, stack)

    shapes = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((width,), "f4")
    for donated, copies in (((0,), 0), ((), 1)):
        text = jax.jit(filled, donate_argnums=donated).trace(*shapes)
        text = text.lower(lowering_platforms=("cuda",)).as_text()
        found = lower(read_program(text), lowering="fused", device=H100).kernels
        row = 4 * width
        (update,) = [k for k in found if k.multiplicity == rows and k.bytes > 2 * row]
        # The row of the stack and the factor are read.
        assert update.bytes_out == row
        assert update.bytes == pytest.approx(3 * row, abs=64)
        assert len([k for k in found if k.bytes == 2 * rows * row]) == copies


def test_a_cpu_scatters_bf16_into_the_whole_array_in_f32():
    """As XLA:CPU compiles it; eight such updates of 64 MiB took 190 ms where bf16 moves in 1."""
    count = 1 << 20

    def scattered(table, rows, places):
        return table.at[places].set(rows)

    shapes = ((count,), jnp.bfloat16), ((64,), jnp.bfloat16), ((64,), jnp.int32)
    cpu = find_device("cpu-i9-10940x")
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    text = jax.jit(scattered, donate_argnums=0).lower(*args).as_text()
    found = lower(read_program(text), lowering="fused", device=cpu).kernels
    # To f32 and back: 2 + 4 bytes of each element, twice.
    assert sum(k.bytes for k in found) == pytest.approx(12 * count, rel=0.01)
