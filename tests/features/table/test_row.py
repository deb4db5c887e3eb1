"""Rows of kernels: amounts, counts and flags computed by hand, before any device enters."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.features.cost.convolution import read_dim_labels
from opcast.features.ir.program import DTYPE_CODE, TensorType
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.table.columns import CODE, CODES, COLUMNS, COMMON, INDEX, type_facts
from opcast.features.table.row import code_flags, kernel_row, rows
from opcast.features.table.row_movement import contiguous_run
from opcast.features.table.row_products import library_of

ENTRY = "HloModule kernel\n\n{called}ENTRY main {{\n{lines}\n}}\n"


def row(*lines: str, called: str = "") -> dict[str, float]:
    text = ENTRY.format(called=called, lines="\n".join(f"  {line}" for line in lines))
    return dict(zip(COLUMNS, kernel_row(kernel_from_ir(text)).tolist(), strict=True))


def test_loop_fusion():
    body = """c0 {
  v0 = f32[16,32] parameter(0)
  v1 = f32[] parameter(1)
  v2 = f32[16,32] broadcast(v1), dimensions={}
  v3 = f32[16,32] multiply(v0, v2)
  v4 = f32[16,32] exponential(v3)
  ROOT v5 = f32[16,32] add(v4, v0)
}

"""
    own = row(
        "p0 = f32[16,32] parameter(0)",
        "p1 = f32[] parameter(1)",
        "ROOT r = f32[16,32] fusion(p0, p1), kind=kLoop, calls=c0",
        called=body,
    )
    # Multiply and add: 2 × 512 FLOPs, one exponential each, weighted 16 vector operations.
    assert (own["flops"], own["transcendentals"]) == (1024.0, 512.0)
    assert own["work_basic"] == 2 * 512 and own["work_transcendental"] == 16 * 512
    assert (own["n_elementwise"], own["n_transcendental"], own["n_broadcast"]) == (2, 1, 1)
    # The chain broadcast, multiply, exponential, add.
    assert (own["n_ops"], own["depth"]) == (4, 4)
    # v0 is read twice.
    assert own["n_shared"] == 1
    assert (own["n_inputs"], own["n_scalar_inputs"], own["n_outputs"]) == (2, 1, 1)
    assert own["operand_bytes"] == 16 * 32 * 4 + 4 and own["operand_bytes_max"] == 16 * 32 * 4
    assert (own["out_minor"], own["out_outer"], own["out_aligned"]) == (32, 16, 1)
    assert own["fusion"] == CODE["fusion"]["kLoop"] and own["dtype"] == CODE["dtype"]["float"]
    assert own["vector_dtype"] == own["matrix_dtype"] == DTYPE_CODE["f32"]


def test_product():
    own = row(
        "p0 = bf16[4,8,16] parameter(0)",
        "p1 = bf16[4,16,32] parameter(1)",
        "ROOT r = f32[4,8,32] dot(p0, p1), lhs_batch_dims={0}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    )
    sizes = (own["gemm_batch"], own["gemm_m"], own["gemm_n"], own["gemm_k"])
    assert sizes == (4, 8, 32, 16) and own["gemm_min"] == 8
    assert own["dense_flops"] == own["matmul_flops"] == 2 * 4 * 8 * 32 * 16
    assert own["gemm_lhs_bytes"] == 4 * 8 * 16 * 2
    assert (own["gemm_lhs_k_minor"], own["gemm_rhs_k_minor"], own["gemm_out_n_minor"]) == (1, 0, 1)
    assert own["gemm_accumulates_wide"] == 1 and own["matrix_dtype"] == DTYPE_CODE["bf16"]


def test_products_of_f32_run_at_the_reduced_rate_unless_precision_is_highest():
    lines = ("p0 = f32[8,8] parameter(0)", "p1 = f32[8,8] parameter(1)")
    dot = "ROOT r = f32[8,8] dot(p0, p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert row(*lines, dot)["matrix_dtype"] == DTYPE_CODE["tf32"]
    exact = row(*lines, dot + ", operand_precision={highest,highest}")
    assert exact["matrix_dtype"] == DTYPE_CODE["f32"]


def test_convolution_as_an_implicit_product():
    own = row(
        "p0 = f32[2,9,9,4] parameter(0)",
        "p1 = f32[3,3,4,16] parameter(1)",
        "ROOT r = f32[2,4,4,16] convolution(p0, p1), window={size=3x3 stride=2x2}, "
        "dim_labels=b01f_01io->b01f",
    )
    # m = batch × output positions, n = features, k = taps × channels.
    assert (own["gemm_m"], own["gemm_n"], own["gemm_k"]) == (2 * 4 * 4, 16, 9 * 4)
    assert (own["conv_spatial"], own["conv_out_spatial"], own["conv_window"]) == (81, 16, 9)
    assert (own["conv_stride"], own["conv_rank"], own["conv_canonical"]) == (4, 2, 1)
    assert own["conv_input_f_minor"] == own["conv_kernel_o_minor"] == 1


@pytest.mark.parametrize(
    ("labels", "nhwc"),
    [
        ("b01f_01io->b01f", True),
        ("bf_io->bf", True),
        ("bf01_oi01->bf01", False),
        ("b01f_01oi->b01f", False),
        ("f01b_i01o->01bf", False),
    ],
)
def test_order_of_dimensions(labels, nhwc):
    assert read_dim_labels(labels).is_nhwc == nhwc


def test_reduction():
    own = row(
        "p0 = f32[8,64] parameter(0)",
        "p1 = f32[] parameter(1)",
        "ROOT r = f32[8] reduce(p0, p1), dimensions={1}, to_apply=c0",
        called="c0 {\n  v0 = f32[] parameter(0)\n  v1 = f32[] parameter(1)\n"
        "  ROOT v2 = f32[] add(v0, v1)\n}\n\n",
    )
    assert (own["reduce_length"], own["reduce_kept"], own["reduce_run"]) == (64, 8, 64)
    assert (own["reduce_minor"], own["reduce_major"], own["reduce_all"]) == (1, 0, 0)
    assert (own["reducer_ops"], own["reduce_ordered"]) == (1, 1)
    assert own["root"] == CODE["root"]["reduce"] and own["flops"] == 8 * 63


def test_gather():
    own = row(
        "p0 = f32[100,32] parameter(0)",
        "p1 = s32[7] parameter(1)",
        "ROOT r = f32[7,32] gather(p0, p1), offset_dims={1}, collapsed_slice_dims={0}, "
        "start_index_map={0}, index_vector_dim=1, slice_sizes={1,32}",
    )
    assert (own["gather_rows"], own["gather_length"], own["gather_run"]) == (7, 32, 32)
    assert own["moved_gathered"] == 7 * 32


@pytest.mark.parametrize(("columns", "run"), [(256, 32 / 4), (1 << 15, 1.0)])
def test_elements_that_a_cache_holds_are_gathered_by_sectors(columns, run):
    """Each result is one of a row's elements: rows of 1 KiB stay in a cache, of 128 KiB not."""
    own = row(
        f"p0 = f32[64,{columns}] parameter(0)",
        "p1 = s32[7,1] parameter(1)",
        "ROOT r = f32[64,7] gather(p0, p1), offset_dims={0}, collapsed_slice_dims={1}, "
        "start_index_map={1}, index_vector_dim=1, slice_sizes={64,1}",
    )
    assert (own["gather_run"], own["moved_gathered"]) == (run, 64 * 7)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runs_of_several_gathers_add_up(order):
    whole = "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, slice_sizes={1,64}"
    single = "offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, slice_sizes={1024,1}"
    gathers = [
        f"  v2 = f32[64,64] gather(v0, v1), index_vector_dim=1, {whole}",
        f"  v3 = f32[1024,64] gather(v0, v1), index_vector_dim=1, {single}",
    ]
    body = "\n".join(
        [
            "c0 {",
            "  v0 = f32[1024,65536] parameter(0)",
            "  v1 = s32[64,1] parameter(1)",
            *(gathers[i] for i in order),
            "  ROOT v4 = (f32[64,64], f32[1024,64]) tuple(v2, v3)",
            "}\n\n",
        ]
    )
    own = row(
        "p0 = f32[1024,65536] parameter(0)",
        "p1 = s32[64,1] parameter(1)",
        "ROOT r = (f32[64,64], f32[1024,64]) fusion(p0, p1), kind=kLoop, calls=c0",
        called=body,
    )
    elements = 64 * 64 + 1024 * 64
    # 64 runs of 64 elements, and one for each of the others.
    assert own["moved_gathered"] == elements
    assert own["gather_run"] == pytest.approx(elements / (64 + 1024 * 64))


def test_sort():
    own = row(
        "p0 = f32[4,16] parameter(0)",
        "ROOT r = f32[4,16] sort(p0), dimensions={1}, is_stable=true, to_apply=c0",
        called="c0 {\n  v0 = f32[] parameter(0)\n  v1 = f32[] parameter(1)\n"
        "  ROOT v2 = pred[] compare(v0, v1), direction=LT\n}\n\n",
    )
    assert (own["sort_length"], own["sort_batch"], own["sort_operands"]) == (16, 4, 1)
    assert (own["sort_minor"], own["sort_stable"], own["sort_comparator"]) == (1, 1, 1)


def test_collective():
    own = row(
        "p0 = f32[16] parameter(0)",
        "ROOT r = f32[16] all-reduce(p0), replica_groups={{0,1},{2,3}}, to_apply=c0",
        called="c0 {\n  v0 = f32[] parameter(0)\n  v1 = f32[] parameter(1)\n"
        "  ROOT v2 = f32[] add(v0, v1)\n}\n\n",
    )
    assert (own["n_groups"], own["group_size"]) == (2, 2)
    assert own["collective"] == CODE["collective"]["all-reduce"]


@pytest.mark.parametrize(
    ("layout", "sizes", "run"),
    [
        (None, (2, 4, 8), 64),  # all of it
        (None, (1, 4, 8), 32),  # a plane
        (None, (2, 1, 8), 8),  # rows
        (None, (2, 4, 2), 2),  # parts of rows
        ((0, 1, 2), (2, 1, 8), 2),  # dimension 0 is contiguous
    ],
)
def test_contiguous_run(layout, sizes, run):
    t = TensorType("f32", (2, 4, 8), layout)
    assert contiguous_run(t, sizes, type_facts(t)) == run


@pytest.mark.parametrize(
    ("target", "library"),
    [
        ("__cublas$lt$matmul", "cublas"),
        ("__onednn$matmul", "cublas"),
        ("__cudnn$convForward", "cudnn"),
        ("lapack_sgetrf_ffi", "linalg"),
        ("TopK", "topk"),
        ("tpu_custom_call", "triton"),
        ("mine", "other"),
        ("cusolver_geqrf_ffi", "linalg"),
        ("Qr", "linalg"),
        ("Eigh", "linalg"),
        ("cu_lu_pivots_to_permutation", "linalg"),
        ("my_sqrt", "other"),
        ("my_gelu_forward", "other"),
        ("relu_backward", "other"),
        ("weighted_sum", "other"),
        ("convert_layout", "other"),
    ],
)
def test_library_of_a_target(target, library):
    assert library_of(target) == library


def test_rows_are_kept_and_codes_become_flags():
    text = ENTRY.format(called="", lines="  p0 = f32[4] parameter(0)\n  ROOT r = f32[4] negate(p0)")
    kernel = kernel_from_ir(text)
    table = rows([kernel, kernel])
    assert table.shape == (2, len(COLUMNS)) and kernel.row is not None
    assert rows([]).shape == (0, len(COLUMNS))
    flags = dict(zip(CODES, code_flags(table), strict=True))
    kind = CODES["kind"].index("fusion")
    assert flags["kind"][0].tolist() == [i == kind for i in range(len(CODES["kind"]))]
    assert not flags["collective"].any()
    # Rare columns are zero, and stand behind the common ones.
    assert not np.any(table[:, len(COMMON) :])
    assert table[0, INDEX["flops"]] == 4.0
