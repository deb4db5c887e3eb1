"""Columns of the device-independent row of a kernel (see :mod:`opcast.features.table.row`).

Groups by what the feature table makes of them: amounts enter ratios only, codes become one flag a
choice, counts enter as ``log2(1 + count)``, flags and shares enter as they are. The common columns
come first and the rare ones last, because most kernels have none of these: packing their rows takes
half the time. A new column other than an amount is a new schema: raise ``SCHEMA_VERSION`` in
:mod:`opcast.features.table.table`.
"""

from __future__ import annotations

from ..kernels.kernel import KINDS

#: Quantities with a unit, or codes of dtypes; the table divides them by each other and by the
#: device's.
AMOUNTS = (
    "flops",
    "transcendentals",
    "bytes_in",
    "bytes_out",
    "matmul_flops",
    "dense_flops",
    "grouped_flops",
    "matrix_dtype",
    "vector_dtype",
    "partitions",
    "work_basic",
    "work_transcendental",
    "work_divide",
    "work_integer",
    "work_select",
    "work_convert",
    "work_move",
    "work_reduce",
    "work_random",
    "moved_transposed",
    "moved_strided",
    "moved_gathered",
    "moved_broadcast",
    "moved_scattered",
    "elements_all",
    "elements_max",
    "out_elements",
    "operand_bytes",
    "operand_bytes_max",
    "result_bytes",
    "gemm_lhs_bytes",
    "gemm_rhs_bytes",
    "on_chip_in",
    "on_chip_out",
)

#: Choices by column; the column holds the position plus one, or 0 for none of them.
#: Positions are saved in rows and one-hot columns of trained models: append only, with a new schema
#: version.
CODES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "fusion": ("kLoop", "kInput", "kOutput", "kCustom"),
    # Library or code generator behind a custom fusion or custom call.
    "library": ("ynn", "triton", "cudnn", "cublas", "linalg", "topk", "other"),
    "dtype": ("float", "half", "float8", "integer", "pred", "complex"),
    "collective": (
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
    ),
    "root": ("reduce", "update", "move", "tuple", "convert"),
}
#: Code by column and choice.
CODE = {
    column: {choice: float(i + 1) for i, choice in enumerate(choices)}
    for column, choices in CODES.items()
}
CODE_FLAGS = tuple(f"{column}_{choice}" for column, choices in CODES.items() for choice in choices)

#: Counts and lengths that most kernels have; the table takes ``log2(1 + x)``.
COMMON_COUNTS = (
    "n_elementwise",
    "n_transcendental",
    "n_divide",
    "n_logic",
    "n_select",
    "n_convert",
    "n_broadcast",
    "n_reduce",
    "n_reduce_window",
    "n_transpose",
    "n_gather",
    "n_scatter",
    "n_slice",
    "n_dynamic_slice",
    "n_update_slice",
    "n_concatenate",
    "n_pad",
    "n_random",
    "n_sort",
    "n_iota",
    "n_copy",
    "n_reshape",
    "n_dot",
    "n_convolution",
    "n_other",
    "n_ops",
    "n_inputs",
    "n_outputs",
    "n_scalar_inputs",
    "n_shared",
    "depth",
    "out_minor",
    "out_outer",
    "in_minor",
    "out_rank",
    "reducer_ops",
    "window_size",
    "slice_run",
)
#: Yes or no, and small numbers, that most kernels have.
COMMON_FLAGS = (
    "dtype_bits",
    "dtype_wide",
    "dtype_count",
    "mixed_dtype",
    "out_bits",
    "in_bits",
    "out_aligned",
    "transposing",
    "layouts_differ",
    "broadcast_minor",
    "is_async",
)
#: Details of reductions, products, convolutions, indexed accesses, sorts and loops.
RARE_COUNTS = (
    "reduce_length",
    "reduce_kept",
    "reduce_run",
    "gemm_m",
    "gemm_n",
    "gemm_k",
    "gemm_batch",
    "gemm_min",
    "conv_spatial",
    "conv_out_spatial",
    "conv_window",
    "conv_channels",
    "conv_features",
    "conv_groups",
    "conv_batch",
    "conv_stride",
    "conv_rank",
    "gather_rows",
    "gather_length",
    "gather_run",
    "scatter_rows",
    "scatter_length",
    "sort_length",
    "sort_batch",
    "sort_operands",
    "sort_comparator",
    "fft_length",
    "fft_batch",
    "linalg_size",
    "linalg_columns",
    "trip_count",
    "loop_ops",
    "group_size",
    "n_groups",
)
RARE_FLAGS = (
    "reduce_minor",
    "reduce_major",
    "reduce_all",
    "reduce_ordered",
    "concatenate_minor",
    "pad_interior",
    "window_overlap",
    "gemm_lhs_k_minor",
    "gemm_lhs_batch_minor",
    "gemm_rhs_k_minor",
    "gemm_rhs_batch_minor",
    "gemm_out_n_minor",
    "gemm_vector",
    "gemm_outer_product",
    "gemm_accumulates_wide",
    "conv_depthwise",
    "conv_grouped",
    "conv_batch_grouped",
    "conv_dilates_input",
    "conv_dilates_window",
    "conv_reverses",
    "conv_pads",
    "conv_pointwise",
    "conv_input_f_minor",
    "conv_kernel_o_minor",
    "conv_output_f_minor",
    "conv_canonical",
    "conv_window_over_output",
    "scatter_combines",
    "sort_minor",
    "sort_stable",
    "fft_real",
    "trip_unknown",
)

COMMON = (*AMOUNTS, *CODES, *COMMON_COUNTS, *COMMON_FLAGS)
RARE = (*RARE_COUNTS, *RARE_FLAGS)
COLUMNS = (*COMMON, *RARE)
INDEX = {name: i for i, name in enumerate(COLUMNS)}
