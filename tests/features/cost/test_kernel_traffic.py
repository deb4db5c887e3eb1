"""Memory traffic of a kernel by array, and what of it stays on a TPU's chip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.features.cost.bytes import array_traffic, on_chip_bytes
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program import TensorType
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.features.lowering.lower import lower
from opcast.features.table.columns import INDEX
from opcast.features.table.roofline import least_seconds, roofline
from opcast.features.table.row import kernel_row
from opcast.features.table.table import feature_names, feature_table
from opcast.features.table.tpu import (
    base_seconds,
    tiles,
    tpu_feature_names,
    tpu_feature_table,
    tpu_parts,
    tpu_rows,
)

from ..kernel_texts import reducing

FUSION = """HloModule kernel

c0 {
  v0 = f32[64,256] parameter(0)
  v1 = f32[8,256] parameter(1)
  v2 = s32[] parameter(2)
  v3 = s32[] constant(0)
  v4 = f32[8,256] dynamic-slice(v0, v2, v3), dynamic_slice_sizes={8,256}
  v5 = f32[8,256] add(v4, v1)
  v6 = bf16[8,256] convert(v5)
  ROOT v7 = (f32[8,256], bf16[8,256]) tuple(v5, v6)
}

ENTRY main {
  p0 = f32[64,256] parameter(0)
  p1 = f32[8,256]{1,0:S(1)} parameter(1)
  p2 = s32[] parameter(2)
  ROOT r = (f32[8,256], bf16[8,256]{1,0:S(1)}) fusion(p0, p1, p2), calls=c0, kind=kLoop
}
"""
PIECE = 8 * 256 * 4  # bytes of the slice, of the addend and of the first result


@pytest.fixture(name="kernel")
def _kernel() -> Kernel:
    return kernel_from_ir(FUSION)


def test_each_array_has_the_bytes_that_are_touched_of_it(kernel: Kernel) -> None:
    entry = kernel.body.entry_computation
    read, written = array_traffic(entry.root_op, entry, kernel.body)
    assert [moved for _, moved in read] == [PIECE, PIECE, 4]
    assert [moved for _, moved in written] == [PIECE, PIECE / 2]
    assert sum(moved for _, moved in read) == kernel.bytes_in
    assert (on_chip_bytes(read), on_chip_bytes(written)) == (PIECE, PIECE / 2)


def test_a_bare_instruction_shares_its_bytes_out_by_size() -> None:
    line = "ROOT r = f32[4,8] add(p0, p1)"
    text = f"""HloModule kernel

ENTRY main {{
  p0 = f32[4,8]{{1,0:S(1)}} parameter(0)
  p1 = f32[4,8] parameter(1)
  {line}
}}
"""
    kernel = kernel_from_ir(text)
    entry = kernel.body.entry_computation
    read, written = array_traffic(entry.root_op, entry, kernel.body)
    assert [moved for _, moved in read] == [128, 128]
    assert on_chip_bytes(read) == 128
    assert on_chip_bytes(written) == 0


def test_on_chip_bytes_are_in_the_row_and_in_no_feature_of_other_platforms(kernel: Kernel) -> None:
    row = kernel_row(kernel)
    assert row[INDEX["on_chip_in"]] == PIECE
    assert row[INDEX["on_chip_out"]] == PIECE / 2
    plain = kernel_from_ir(FUSION.replace("{1,0:S(1)}", ""))
    gpu = find_device("a100-sxm-80gb")
    assert plain.hash != kernel.hash
    assert np.array_equal(feature_table([kernel], gpu).X, feature_table([plain], gpu).X)
    assert roofline([kernel], gpu).memory_s == roofline([plain], gpu).memory_s


def test_a_tpus_memory_time_is_that_of_arrays_in_main_memory(kernel: Kernel) -> None:
    tpu = find_device("tpu-v5e")
    assert roofline([kernel], tpu).memory_s[0] == pytest.approx((2 * PIECE + 4) / tpu.bandwidth)
    plain = kernel_from_ir(FUSION.replace("{1,0:S(1)}", ""))
    assert roofline([plain], tpu).memory_s[0] == pytest.approx((3.5 * PIECE + 4) / tpu.bandwidth)
    assert least_seconds([kernel], tpu)[0] <= least_seconds([plain], tpu)[0]


@pytest.mark.parametrize(
    ("shape", "layout", "lanes", "sublanes", "outer", "elements"),
    [
        ((), None, 1, 1, 1, 128),
        ((5,), None, 5, 1, 1, 128),
        ((1500,), None, 1500, 1, 1, 2048),
        ((8, 128), None, 128, 8, 1, 1024),
        ((9, 129), None, 129, 9, 1, 16 * 256),
        ((3, 129), None, 129, 3, 1, 4 * 256),  # four rows, not eight
        ((64, 1), None, 1, 64, 1, 64 * 128),
        ((64, 1), (0, 1), 64, 1, 1, 128),
        ((2, 3, 5, 7), (0, 1, 2, 3), 2, 3, 35, 35 * 4 * 128),
    ],
)
def test_arrays_are_padded_to_tiles(
    shape: tuple[int, ...], layout: tuple[int, ...] | None, lanes: int, sublanes: int, outer: int,
    elements: int,
) -> None:  # fmt: skip
    found = tiles(TensorType("bf16", shape, layout))
    assert found[:3] == (lanes, sublanes, outer)
    assert found.padded_bytes == 2 * elements


def test_parts_of_a_tpus_kernel(kernel: Kernel) -> None:
    tpu = replace(find_device("tpu-v3"), floor=1e-6)
    rows = kernel_row(kernel)[None, :]
    parts = tpu_parts(rows, tpu_rows([kernel]), tpu)
    # The scalar is padded to 128 words.
    main = 2 * PIECE + 128 * 4
    assert parts["main"][0] == pytest.approx(main / tpu.bandwidth)
    # Registers hold 1024 words; half-width ones are counted as if they were words.
    registers = 3 * PIECE / 4096 + 512 / 4096 + 2 * (PIECE / 2) / 4096
    near_rate = 4 * tpu.vector_peak("f32")
    assert parts["registers"][0] == pytest.approx(8 * registers * 4096 / near_rate)
    assert parts["compute"][0] == pytest.approx(2 * 8 * 256 / tpu.vector_peak("f32"))
    assert parts["start"][0] == 1e-6
    total = max(parts["main"][0], parts["registers"][0]) + parts["compute"][0] + 1e-6
    assert base_seconds(parts)[0] == pytest.approx(total)


def test_tpu_features_follow_those_of_every_platform(kernel: Kernel) -> None:
    tpu = find_device("tpu-v5e")
    table = tpu_feature_table([kernel], tpu)
    assert table.names == (*feature_names(), *tpu_feature_names())
    assert table.X.shape == (1, len(table.names))
    assert np.isfinite(table.X).all()
    value = dict(zip(table.names, table.X[0].tolist(), strict=True))
    assert value["near_share_in"] == pytest.approx(PIECE / (2 * PIECE + 512), rel=1e-3)
    assert value["near_share_out"] == pytest.approx(1 / 3, rel=1e-3)
    assert value["largest_near"] == 0.0
    assert value["padding_out"] == pytest.approx(0.0, abs=1e-6)


def test_a_batch_of_products_written_as_a_convolution_is_a_batch() -> None:
    # XLA:TPU writes f32[16,8,32] · f32[16,32,64] so: each output meets one position of the window.
    kernel = kernel_from_ir("""HloModule kernel

ENTRY main {
  p0 = f32[16,8,32] parameter(0)
  p1 = f32[16,32,64] parameter(1)
  ROOT r = f32[16,8,64] convolution(p0, p1), dim_labels=0bf_0io->0bf, \
window={size=16 stride=15 lhs_dilate=16}
}
""")
    row = kernel_row(kernel)
    sizes = [row[INDEX[f"gemm_{name}"]] for name in ("batch", "m", "n", "k")]
    assert sizes == [16, 8, 64, 32]
    assert kernel.flops == 2 * 16 * 8 * 64 * 32
    assert row[INDEX["matmul_flops"]] == kernel.flops
    assert row[INDEX["dense_flops"]] == kernel.flops


def test_where_a_reduction_reduces() -> None:
    text = reducing(
        "p0 = f32[4,16,256]{LAYOUT} parameter(0)",
        "p1 = f32[] parameter(1)",
        "ROOT r = f32[16] reduce(p0, p1), to_apply=c0, dimensions={0,2}",
    )
    names = ("log_reduced_lanes", "log_reduced_sublanes", "log_reduced_outer")
    for layout, sizes in (("2,1,0", (256, 0, 4)), ("2,0,1", (256, 4, 0)), ("1,0,2", (0, 4, 256))):
        kernel = kernel_from_ir(text.replace("LAYOUT", layout))
        table = tpu_feature_table([kernel], find_device("tpu-v3"))
        found = [table.X[0, table.names.index(name)] for name in names]
        assert found == pytest.approx([np.log2(1 + size) for size in sizes], rel=1e-6)


def test_a_reshape_of_two_layouts_is_a_pass_over_the_array_on_a_tpu() -> None:
    kernel = kernel_from_ir("""HloModule kernel

ENTRY main {
  p0 = f32[32,256] parameter(0)
  ROOT r = f32[32,2,128] reshape(p0)
}
""")
    tpu = find_device("tpu-v3")
    parts = tpu_parts(kernel_row(kernel)[None, :], tpu_rows([kernel]), tpu)
    # Rows of two are padded to two sublanes: no more than the array itself.
    assert parts["main"][0] == pytest.approx(2 * 32 * 256 * 4 / tpu.bandwidth)
    assert kernel.bytes == 0.0


def test_no_kernel_is_slower_than_its_slowest_unit_at_least() -> None:
    kernel = kernel_from_ir("""HloModule kernel

c0 {
  v0 = f32[512,512] parameter(0)
  v1 = f32[512,512] parameter(1)
  v2 = f32[512,512] dot(v0, v1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT v3 = f32[512,512] tanh(v2)
}

ENTRY main {
  p0 = f32[512,512]{1,0:S(1)} parameter(0)
  p1 = f32[512,512]{1,0:S(1)} parameter(1)
  ROOT r = f32[512,512]{1,0:S(1)} fusion(p0, p1), calls=c0, kind=kOutput
}
""")
    tpu = find_device("tpu-v5e")
    products = 2 * 512**3 / tpu.matrix_peak("tf32")
    assert least_seconds([kernel], tpu)[0] == pytest.approx(products)
    # The roofline adds them up, sixteen operations for each tanh.
    vector = 16 * 512 * 512 / tpu.vector_peak("f32")
    assert roofline([kernel], tpu).latency_s[0] == pytest.approx(products + vector)


def test_angles_are_dear_on_a_tpu() -> None:
    text = """HloModule kernel

ENTRY main {
  p0 = f32[64,256] parameter(0)
  ROOT r = f32[64,256] OP(p0)
}
"""
    tpu = find_device("tpu-v3")
    seconds = {}
    for name in ("cosine", "tanh"):
        kernel = kernel_from_ir(text.replace("OP", name))
        parts = tpu_parts(kernel_row(kernel)[None, :], tpu_rows([kernel]), tpu)
        seconds[name] = parts["compute"][0] * tpu.vector_peak("f32") / (64 * 256)
    assert seconds == pytest.approx({"cosine": 216, "tanh": 16})


def test_a_fusion_inside_reads_one_layer_of_a_stack():
    """As TPUs write a scanned layer's product: the slice is in a fusion of its own."""
    text = """HloModule m, is_scheduled=true
slice {
  v0 = bf16[24,64,128]{2,1,0} parameter(0)
  v1 = s32[] parameter(1)
  v2 = s32[] constant(0)
  v3 = bf16[1,64,128]{2,1,0} dynamic-slice(v0, v1, v2, v2), dynamic_slice_sizes={1,64,128}
  ROOT v4 = bf16[64,128]{1,0} bitcast(v3)
}
product {
  v5 = bf16[24,64,128]{2,1,0} parameter(0)
  v6 = s32[] parameter(1)
  v7 = bf16[32,64]{1,0} parameter(2)
  v8 = bf16[64,128]{1,0} fusion(v5, v6), kind=kLoop, calls=slice
  ROOT v9 = bf16[32,128]{1,0} convolution(v7, v8), dim_labels=bf_io->bf
}
ENTRY main {
  p0 = bf16[24,64,128]{2,1,0} parameter(0)
  p1 = s32[] parameter(1)
  p2 = bf16[32,64]{1,0} parameter(2)
  ROOT r = bf16[32,128]{1,0} fusion(p0, p1, p2), kind=kOutput, calls=product
}"""
    (kernel,) = lower(text, "xla", cache=False).kernels
    # One layer, its number, and the other operand, of two bytes an element.
    assert kernel.bytes_in == 2 * 64 * 128 + 4 + 2 * 32 * 64
    assert kernel.bytes_out == 2 * 32 * 128
