from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.table import FeatureTable, feature_names, feature_table, schema_hash

DEVICE = DeviceSpec(
    "d", "cpu", {"f32": 100e9, "bf16": 400e9}, {"f32": 50e9},
    (MemoryLevel(1e6, 100e9), MemoryLevel(32e6, 40e9), MemoryLevel(64e9, 10e9)),
    floor=1e-6, launch_gap=1e-7, core_count=4, clock_hz=2.5e9,
)  # fmt: skip
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
"""


def kernel(text: str, kind: str = "fusion", **amounts: float) -> Kernel:
    return Kernel("k", kind, parse_hlo(f"HloModule m\n{text}"), "", "", **amounts)


def entry(line: str, *parameters: str, kind: str, before: str = "", **amounts: float) -> Kernel:
    """One instruction over parameters p0, p1 …"""
    ops = [f"  %p{i} = {t} parameter({i})" for i, t in enumerate(parameters)]
    text = "\n".join([before + "ENTRY %main () -> f32[] {", *ops, f"  ROOT {line}", "}"])
    return kernel(text, kind, **amounts)


def one(k: Kernel, device: DeviceSpec = DEVICE) -> dict[str, float]:
    table = feature_table([k], device)
    return dict(zip(table.names, table.X[0].tolist(), strict=True))


def dot(lhs: str, rhs: str, out: str, k: tuple[int, int], batch: str = "", **a: float) -> Kernel:
    line = (
        f"%d = {out} dot(%p0, %p1), {batch}lhs_contracting_dims={{{k[0]}}}, "
        f"rhs_contracting_dims={{{k[1]}}}"
    )
    return entry(line, lhs, rhs, kind="gemm", **a)


def conv(
    data: str, window: str, kernel_type: str, labels: str, out: str, extra: str = ""
) -> Kernel:
    line = f"%c = {out} convolution(%p0, %p1), window={{{window}}}, dim_labels={labels}{extra}"
    return entry(line, data, kernel_type, kind="conv")


def count(value: float) -> float:
    """Undo ``log2(1 + x)``."""
    return 2.0**value - 1.0


LOOP = """%fused (p0: f32[64,32], p1: f32[32]) -> f32[64,32] {
  %p0 = f32[64,32]{1,0} parameter(0)
  %p1 = f32[32]{0} parameter(1)
  %b = f32[64,32]{1,0} broadcast(%p1), dimensions={1}
  %m = f32[64,32]{1,0} multiply(%p0, %b)
  %a = f32[64,32]{1,0} add(%m, %p0)
  ROOT %t = f32[64,32]{1,0} tanh(%a)
}
ENTRY %main (x: f32[64,32], y: f32[32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %y = f32[32]{0} parameter(1)
  ROOT %k = f32[64,32]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused, backend_config={"outer_dimension_partitions":["2","3"]}
}"""  # noqa: E501
YNN = """%fused (p0: f32[8,32], p1: f32[32,16]) -> f32[8,16] {
  %p0 = f32[8,32]{1,0} parameter(0)
  %p1 = f32[32,16]{1,0} parameter(1)
  ROOT %d = f32[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (x: f32[8,32], y: f32[32,16]) -> f32[8,16] {
  %x = f32[8,32]{1,0} parameter(0)
  %y = f32[32,16]{1,0} parameter(1)
  ROOT %k = f32[8,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused, backend_config={"outer_dimension_partitions":[],"fusion_config":{"kind":"__ynn_fusion"}}
}"""  # noqa: E501
EVERY = [
    kernel(LOOP, flops=4096.0, transcendentals=2048.0, bytes_in=8320.0, bytes_out=8192.0),
    kernel(YNN, "gemm", flops=8192.0, bytes_in=3072.0, bytes_out=512.0),
    entry("%t = f32[] negate(%p0)", "f32[]", kind="fusion"),
    entry("%t = f32[0,4]{1,0} negate(%p0)", "f32[0,4]{1,0}", kind="fusion"),
    entry("%t = f32[32,64]{1,0} copy(%p0)", "f32[32,64]{0,1}", kind="copy"),
    entry("%t = token[] after-all()", kind="control"),
    entry("%t = c64[8,16]{1,0} fft(%p0), fft_type=FFT, fft_length={16}", "c64[8,16]{1,0}",
          kind="custom_call"),
    entry('%t = f32[8,8]{1,0} custom-call(%p0), custom_call_target="lapack_spotrf_ffi"',
          "f32[8,8]{1,0}", kind="custom_call"),
    entry('%t = (f32[8]{0}, s32[8]{0}) custom-call(%p0), custom_call_target="mystery"',
          "f32[64]{0}", kind="custom_call"),
    entry("%t = f32[64]{0} all-reduce(%p0), replica_groups={{0,1,2,3}}, to_apply=%add",
          "f32[64]{0}", kind="collective", before=ADD),
    entry("%t = bf16[8]{0} convert(%p0)", "f32[8]{0}", kind="fusion"),
    entry("%t = s32[8]{0} unheard-of(%p0)", "s32[8]{0}", kind="fusion"),
]  # fmt: skip


@pytest.mark.parametrize("k", EVERY, ids=lambda k: k.opcode)
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_finite_for_every_kernel(k: Kernel, levels: int, floor: float) -> None:
    table = feature_table([k], replace(DEVICE, levels=DEVICE.levels[-levels:], floor=floor))
    assert table.X.shape == (1, len(table.names))
    assert table.X.dtype == np.float32
    assert np.isfinite(table.X).all()
    assert np.isfinite(table.roofline_s).all()


def test_names_are_unique() -> None:
    assert len(set(feature_names())) == len(feature_names())


def test_table_of_many_equals_tables_of_one_across_chunks() -> None:
    kernels = [replace(EVERY[i % len(EVERY)], row=None) for i in range(2500)]
    table = feature_table(kernels, DEVICE)
    single = [feature_table([k], DEVICE) for k in EVERY]
    for i in (0, 1, 1023, 1024, 2047, 2048, 2499):
        expected = single[i % len(EVERY)]
        np.testing.assert_array_equal(table.X[i], expected.X[0])
        assert table.roofline_s[i] == expected.roofline_s[0]
        assert table.bound[i] == expected.bound[0]


def test_no_kernels() -> None:
    table = feature_table([], DEVICE)
    assert isinstance(table, FeatureTable)
    assert table.X.shape == (0, len(feature_names()))


def test_row_is_kept_and_does_not_depend_on_the_device() -> None:
    k = replace(EVERY[0], row=None)
    feature_table([k], DEVICE)
    row = k.row
    assert row is not None
    feature_table([k], replace(DEVICE, floor=1e-3, platform="gpu"))
    assert k.row is row


def test_twice_as_fast_a_device_is_the_same_problem() -> None:
    faster = replace(
        DEVICE,
        peak_flops={d: 2 * p for d, p in DEVICE.peak_flops.items()},
        vector_flops={d: 2 * p for d, p in DEVICE.vector_flops.items()},
        levels=tuple(MemoryLevel(m.capacity, 2 * m.bandwidth) for m in DEVICE.levels),
        floor=DEVICE.floor / 2, launch_gap=DEVICE.launch_gap / 2, clock_hz=2 * DEVICE.clock_hz,
    )  # fmt: skip
    slow, fast = feature_table(EVERY, DEVICE), feature_table(EVERY, faster)
    np.testing.assert_allclose(fast.X, slow.X, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast.roofline_s, slow.roofline_s / 2)
    assert (fast.bound == slow.bound).all()


def test_schema_hash_is_stable_across_processes() -> None:
    code = "from opcast.features.table.table import schema_hash; print(schema_hash())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert schema_hash() == other
    assert len(other) == 16


def test_loop_fusion() -> None:
    f = one(EVERY[0])
    assert f["kind_fusion"] == f["fusion_kLoop"] == f["dtype_float"] == 1.0
    assert count(f["log_n_elementwise"]) == pytest.approx(2)
    assert count(f["log_n_transcendental"]) == pytest.approx(1)
    assert count(f["log_n_broadcast"]) == pytest.approx(1)
    assert count(f["log_n_ops"]) == pytest.approx(4)
    assert count(f["log_depth"]) == pytest.approx(4)  # broadcast, multiply, add, tanh
    assert count(f["log_n_inputs"]) == pytest.approx(2)
    assert count(f["log_n_shared"]) == pytest.approx(1)  # p0 is read twice
    assert count(f["log_out_minor"]) == pytest.approx(32)
    assert count(f["log_partitions"]) == pytest.approx(6, rel=1e-5)
    assert f["partitions_per_core"] == pytest.approx(np.log2(6 / 4))
    assert f["cores_used"] == 1.0
    assert f["share_moved_broadcast"] == 1.0
    # tanh weighs 20, add and multiply 1 each, a broadcast 0.25 an element.
    assert f["share_transcendental"] == pytest.approx(20 / 22.25)


def test_times_over_floor() -> None:
    f = one(EVERY[0])
    compute = (4096 + 16 * 2048) / 50e9
    memory = (8320 + 8192) / 100e9
    assert f["log_compute_floor"] == pytest.approx(np.log2(compute / 1e-6 + 2**-10), rel=1e-4)
    assert f["log_memory_floor"] == pytest.approx(np.log2(memory / 1e-6 + 2**-10), rel=1e-4)
    assert f["set_over_first"] == pytest.approx(np.log2(16513 / 1e6), rel=1e-4)
    assert f["in_over_out"] == pytest.approx(np.log2(8321 / 8193), rel=1e-3)


def test_loop_without_partitions_runs_on_one_core_of_a_cpu_only() -> None:
    assert one(EVERY[2])["cores_used"] == 0.25
    assert one(EVERY[2], replace(DEVICE, platform="gpu"))["cores_used"] == 1.0
    assert one(EVERY[1])["cores_used"] == 1.0


def test_library_fusion() -> None:
    f = one(EVERY[1])
    assert f["fusion_kCustom"] == f["library_ynn"] == f["share_matmul"] == 1.0
    assert [count(f[f"log_gemm_{d}"]) for d in "mnk"] == pytest.approx([8, 16, 32])


@pytest.mark.parametrize("lhs_k", [0, 1])
@pytest.mark.parametrize("rhs_k", [0, 1])
@pytest.mark.parametrize("column_major", [False, True])
def test_gemm_layouts(lhs_k: int, rhs_k: int, column_major: bool) -> None:
    m, n, k = 24, 40, 72
    lhs = (m, k) if lhs_k else (k, m)
    rhs = (n, k) if rhs_k else (k, n)
    layout = "{0,1}" if column_major else "{1,0}"
    f = one(
        dot(f"f32[{lhs[0]},{lhs[1]}]{layout}", f"f32[{rhs[0]},{rhs[1]}]{layout}",
            "f32[24,40]{1,0}", (lhs_k, rhs_k), flops=2.0 * m * n * k)
    )  # fmt: skip
    assert [count(f[f"log_gemm_{d}"]) for d in "mnk"] == pytest.approx([m, n, k])
    assert f["gemm_lhs_k_minor"] == ((lhs_k == 1) != column_major)
    assert f["gemm_rhs_k_minor"] == ((rhs_k == 1) != column_major)
    assert f["gemm_out_n_minor"] == 1.0
    assert f["fill_m16"] == pytest.approx(24 / 32)
    assert f["fill_n32"] == pytest.approx(40 / 64)
    assert f["fill_k8"] == 1.0
    assert f["gemm_depth"] == pytest.approx(np.log2((k + 1) / (m + n + 1)))


def test_batched_gemm_and_matrix_vector() -> None:
    batch = "lhs_batch_dims={0}, rhs_batch_dims={0}, "
    f = one(dot("f32[6,8,32]{2,1,0}", "f32[6,32,16]{2,1,0}", "f32[6,8,16]{2,1,0}", (2, 1), batch))
    sizes = [count(f[f"log_gemm_{d}"]) for d in ("batch", "m", "n", "k")]
    assert sizes == pytest.approx([6, 8, 16, 32])
    assert f["gemm_vector"] == 0.0
    vector = one(dot("f32[1,32]{1,0}", "f32[32,16]{1,0}", "f32[1,16]{1,0}", (1, 0)))
    assert vector["gemm_vector"] == 1.0


def test_gemm_dtypes() -> None:
    k = dot("bf16[8,32]{1,0}", "bf16[32,16]{1,0}", "f32[8,16]{1,0}", (1, 0), flops=8192.0)
    table = feature_table([k], DEVICE)
    assert table.roofline_s[0] == pytest.approx(8192 / 400e9)
    f = one(k)
    assert f["gemm_accumulates_wide"] == f["mixed_dtype"] == f["dtype_half"] == 1.0


def test_cublas_call() -> None:
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],'
        '"rhs_batch_dimensions":[]}}}'
    )
    line = (
        "%g = (f32[24,40]{1,0}, s8[4096]{0}) custom-call(%p0, %p1), "
        f'custom_call_target="__cublas$gemm", backend_config={config}'
    )
    f = one(entry(line, "f32[72,24]{1,0}", "f32[72,40]{1,0}", kind="gemm"))
    assert f["library_cublas"] == 1.0
    assert [count(f[f"log_gemm_{d}"]) for d in "mnk"] == pytest.approx([24, 40, 72])
    assert f["gemm_lhs_k_minor"] == 0.0


def test_forward_convolution_in_both_layouts() -> None:
    nhwc = one(conv("f32[2,8,8,16]{3,2,1,0}", "size=3x3 pad=1_1x1_1", "f32[3,3,16,32]{3,2,1,0}",
                    "b01f_01io->b01f", "f32[2,8,8,32]{3,2,1,0}"))  # fmt: skip
    nchw = one(conv("f32[2,16,8,8]{3,2,1,0}", "size=3x3 pad=1_1x1_1", "f32[32,16,3,3]{3,2,1,0}",
                    "bf01_oi01->bf01", "f32[2,32,8,8]{3,2,1,0}"))  # fmt: skip
    for f in (nhwc, nchw):
        # implicit GEMM: batch 2 × 8 × 8 positions, 32 features, 16 channels × 3 × 3 taps
        assert [count(f[f"log_gemm_{d}"]) for d in "mnk"] == pytest.approx([128, 32, 144])
        assert count(f["log_conv_window"]) == pytest.approx(9)
        assert count(f["log_conv_spatial"]) == pytest.approx(64)
        assert f["conv_pads"] == 1.0
        assert f["conv_grouped"] == f["conv_window_over_output"] == f["conv_dilates_input"] == 0.0
    assert nhwc["conv_canonical"] == nhwc["conv_input_f_minor"] == nhwc["conv_kernel_o_minor"] == 1
    assert nchw["conv_canonical"] == nchw["conv_input_f_minor"] == nchw["conv_output_f_minor"] == 0


def test_gradient_convolutions() -> None:
    data = one(conv("f32[4,16,16,32]{3,2,1,0}", "size=3x3 pad=2_1x2_1 lhs_dilate=2x2",
                    "f32[3,3,32,16]{3,2,1,0}", "b01f_01io->b01f",
                    "f32[4,32,32,16]{3,2,1,0}"))  # fmt: skip
    assert data["conv_dilates_input"] == 1.0
    assert data["conv_window_over_output"] == 0.0
    weights = one(conv("f32[16,32,32,4]{3,2,1,0}", "size=16x16 pad=0_1x0_1 rhs_dilate=2x2",
                       "f32[16,16,4,32]{3,2,1,0}", "b01f_01io->b01f",
                       "f32[16,3,3,32]{3,2,1,0}"))  # fmt: skip
    assert weights["conv_dilates_window"] == weights["conv_window_over_output"] == 1.0
    assert count(weights["log_gemm_k"]) == pytest.approx(4 * 256)


def test_depthwise_strided_convolution() -> None:
    f = one(conv("f32[2,8,8,16]{3,2,1,0}", "size=3x3 stride=2x2", "f32[3,3,1,16]{3,2,1,0}",
                 "b01f_01io->b01f", "f32[2,3,3,16]{3,2,1,0}",
                 ", feature_group_count=16"))  # fmt: skip
    assert f["conv_depthwise"] == f["conv_grouped"] == 1.0
    assert count(f["log_conv_groups"]) == pytest.approx(16)
    assert count(f["log_conv_stride"]) == pytest.approx(4)
    assert [count(f[f"log_gemm_{d}"]) for d in "mnk"] == pytest.approx([18, 1, 9])
    assert f["share_grouped"] == 1.0


def test_depthwise_convolution_beside_a_larger_product_is_seen() -> None:
    text = """
%f (x: f32[4,8,8,16], w: f32[3,3,1,16], y: f32[16,64]) -> f32[256,64] {
  %x = f32[4,8,8,16]{3,2,1,0} parameter(0)
  %w = f32[3,3,1,16]{3,2,1,0} parameter(1)
  %c = f32[4,8,8,16]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, feature_group_count=16
  %b = f32[256,16]{1,0} bitcast(%c)
  %y = f32[16,64]{1,0} parameter(2)
  ROOT %d = f32[256,64]{1,0} dot(%b, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (p: f32[4,8,8,16], q: f32[3,3,1,16], r: f32[16,64]) -> f32[256,64] {
  %p = f32[4,8,8,16]{3,2,1,0} parameter(0)
  %q = f32[3,3,1,16]{3,2,1,0} parameter(1)
  %r = f32[16,64]{1,0} parameter(2)
  ROOT %k = f32[256,64]{1,0} fusion(%p, %q, %r), kind=kCustom, calls=%f
}
"""  # noqa: E501
    f = one(kernel(text, "gemm", flops=561152.0))
    grouped, product = 2 * 256 * 9 * 16, 2 * 256 * 16 * 64  # padding is not counted out here
    assert f["share_grouped"] == pytest.approx(grouped / (grouped + product))
    assert count(f["log_gemm_n"]) == pytest.approx(64)  # the product gives the details


def test_transposing_copy() -> None:
    turned, straight = (
        one(EVERY[4]),
        one(entry("%t = f32[32,64]{1,0} copy(%p0)", "f32[32,64]{1,0}", kind="copy")),
    )
    assert turned["transposing"] == turned["layouts_differ"] == turned["root_move"] == 1.0
    assert turned["share_moved_transposed"] == 1.0
    assert straight["transposing"] == straight["layouts_differ"] == 0.0


def test_transpose_that_keeps_the_minor_dimension() -> None:
    kept = one(entry("%t = f32[4,8,64]{2,1,0} transpose(%p0), dimensions={1,0,2}",
                     "f32[8,4,64]{2,1,0}", kind="copy"))  # fmt: skip
    moved = one(entry("%t = f32[64,4,8]{2,1,0} transpose(%p0), dimensions={2,1,0}",
                      "f32[8,4,64]{2,1,0}", kind="copy"))  # fmt: skip
    assert kept["transposing"] == 0.0
    assert moved["transposing"] == 1.0


@pytest.mark.parametrize(("dims", "minor", "length", "run"), [("1", 1, 32, 32), ("0", 0, 64, 32)])
def test_reduce_over_minor_or_major(dims: str, minor: int, length: int, run: int) -> None:
    kept = 64 * 32 // length
    line = f"%r = f32[{kept}]{{0}} reduce(%p0, %p1), dimensions={{{dims}}}, to_apply=%add"
    f = one(entry(line, "f32[64,32]{1,0}", "f32[]", kind="reduce", before=ADD))
    assert f["reduce_minor"] == minor
    assert f["reduce_ordered"] == 1.0
    assert count(f["log_reduce_length"]) == pytest.approx(length)
    assert count(f["log_reduce_kept"]) == pytest.approx(kept)
    assert count(f["log_reduce_run"]) == pytest.approx(run)


def test_gather_scatter_and_slices() -> None:
    gather = one(
        entry("%g = f32[128,1,64]{2,1,0} gather(%p0, %p1), offset_dims={1,2}, "
              "collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=1, "
              "slice_sizes={1,64}", "f32[1000,64]{1,0}", "s32[128,1]{1,0}", kind="gather_scatter")
    )  # fmt: skip
    assert count(gather["log_gather_rows"]) == pytest.approx(128)
    assert count(gather["log_gather_run"]) == pytest.approx(64, rel=1e-5)
    assert gather["share_moved_gathered"] == 1.0
    scatter = one(
        entry("%s = f32[1000,64]{1,0} scatter(%p0, %p1, %p2), update_window_dims={1,2}, "
              "inserted_window_dims={}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
              "to_apply=%add", "f32[1000,64]{1,0}", "s32[128,1]{1,0}", "f32[128,1,64]{2,1,0}",
              kind="gather_scatter", before=ADD)
    )  # fmt: skip
    assert count(scatter["log_scatter_rows"]) == pytest.approx(128)
    assert count(scatter["log_scatter_length"]) == pytest.approx(64, rel=1e-5)
    assert scatter["scatter_combines"] == scatter["root_update"] == 1.0
    cut = one(entry("%s = f32[8,16]{1,0} slice(%p0), slice={[0:8], [0:32:2]}", "f32[8,32]{1,0}",
                    kind="copy"))  # fmt: skip
    assert cut["share_moved_strided"] == 1.0


def test_fill_works_on_its_result() -> None:
    f = one(entry("%b = f32[64,32]{1,0} broadcast(%p0), dimensions={}", "f32[]", kind="copy"))
    assert f["elements_per_core"] == pytest.approx(np.log2((64 * 32 + 1) / 4))
    assert f["share_moved_broadcast"] == 0.0


def test_sort() -> None:
    less = """%less (x: f32[], y: f32[]) -> pred[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %c = pred[] compare(%x, %y), direction=LT
}
"""
    f = one(entry("%s = f32[100,64]{1,0} sort(%p0), dimensions={0}, is_stable=true, "
                  "to_apply=%less", "f32[100,64]{1,0}", kind="sort", before=less))  # fmt: skip
    assert count(f["log_sort_length"]) == pytest.approx(100)
    assert count(f["log_sort_batch"]) == pytest.approx(64, rel=1e-5)
    assert count(f["log_sort_comparator"]) == pytest.approx(1)
    assert f["sort_minor"] == 0.0
    assert f["sort_stable"] == 1.0


def test_custom_calls_and_collectives() -> None:
    assert one(EVERY[7])["library_linalg"] == 1.0
    assert count(one(EVERY[7])["log_linalg_size"]) == pytest.approx(8)
    assert one(EVERY[8])["library_other"] == 1.0
    reduce = one(EVERY[9])
    assert reduce["collective_all-reduce"] == 1.0
    assert count(reduce["log_group_size"]) == pytest.approx(4)


def test_compute_dtype_of_a_conversion_is_its_input() -> None:
    f = one(EVERY[10])
    assert f["dtype_float"] == f["mixed_dtype"] == 1.0
    assert f["out_bits"] == 16.0
