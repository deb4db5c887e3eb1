"""Row entries of matrix products and convolutions: implicit GEMM, contiguity, geometry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...common.types import JsonObject
from ..cost.convolution import read_dim_labels
from ..cost.library_calls import by_target
from ..ir.precision import Arithmetic, arithmetic
from ..ir.program import DTYPE_BITS, DTYPE_CODE, Op, Program, TensorType, WindowDim
from .columns import CODE, type_facts

Row = dict[str, float]
Dims = Sequence[int]


def dot_row(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    """Record a ``dot``; of several, the largest one determines the details."""
    if len(op.operands) < 2:
        return 0.0
    lhs, rhs = ops[op.operands[0]], ops[op.operands[1]]
    if not (lhs.results and rhs.results and op.results):
        return 0.0
    way = arithmetic(lhs.type.dtype, op.attrs)
    gemm(row, lhs.type, rhs.type, op.type, *_dot_dims(op), way=way)
    return 0.0


def ragged_dot_row(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    """Record a ``ragged-dot`` as one product of all rows, each with one group's weights."""
    if len(op.operands) < 2:
        return 0.0
    lhs, rhs = (ops[i].type for i in op.operands[:2])
    lhs_k, rhs_k, lhs_batch, rhs_batch = _dot_dims(op)
    groups = sorted(op.attrs.get("rhs_group_dims", ()))
    own = TensorType(rhs.dtype, tuple(n for d, n in enumerate(rhs.shape) if d not in groups))

    def left(dims: Dims) -> Dims:
        return [d - sum(g < d for g in groups) for d in dims]

    out, way = op.type, arithmetic(lhs.dtype, op.attrs)
    if set(op.attrs.get("lhs_ragged_dims", ())) & set(lhs_k):
        out = TensorType(out.dtype, out.shape[1:])
    gemm(row, lhs, own, out, lhs_k, left(rhs_k), lhs_batch, left(rhs_batch), way=way)
    row["gemm_rhs_bytes"] = rhs.nbytes
    return 0.0


def gemm(
    row: Row,
    lhs: TensorType,
    rhs: TensorType,
    out: TensorType,
    lhs_k: Dims,
    rhs_k: Dims,
    lhs_batch: Dims,
    rhs_batch: Dims,
    way: Arithmetic,
) -> None:
    """Record ``out[batch, m, n] = lhs[batch, m, k] · rhs[batch, k, n]``, in any dimension order."""
    batch = k = 1
    for d in lhs_batch:
        batch *= lhs.shape[d]
    for d in lhs_k:
        k *= lhs.shape[d]
    a, b, c = type_facts(lhs), type_facts(rhs), type_facts(out)
    # Zero-sized dimensions occur in valid programs.
    shared = max(batch * k, 1)
    m, n = a.size // shared, b.size // shared
    flops = 2.0 * batch * m * n * k * way.times
    row["dense_flops"] += flops
    # dense_flops includes this product: details are kept only if it is at least half of the total.
    if 2 * flops < row["dense_flops"]:
        return
    _sizes(row, m, n, k, batch, lhs, rhs, out, way)
    row["gemm_lhs_k_minor"] = a.minor in lhs_k
    row["gemm_lhs_batch_minor"] = a.minor in lhs_batch
    row["gemm_rhs_k_minor"] = b.minor in rhs_k
    row["gemm_rhs_batch_minor"] = b.minor in rhs_batch
    rhs_free = len(rhs.shape) - len(rhs_k) - len(rhs_batch)
    # HLO orders a dot's result as batch, free dimensions of the left side, then of the right side.
    row["gemm_out_n_minor"] = c.minor >= len(out.shape) - rhs_free


def _sizes(
    row: Row,
    m: int,
    n: int,
    k: int,
    batch: int,
    lhs: TensorType,
    rhs: TensorType,
    out: TensorType,
    way: Arithmetic,
) -> None:
    row["gemm_vector"] = m == 1 or n == 1
    row["gemm_outer_product"] = k == 1
    # As one real product: a complex operand has rows of both parts, (re, -im) and (im, re), and
    # repeated passes extend the contraction.
    m, k = m * way.parts, k * way.parts * way.passes
    row["gemm_m"], row["gemm_n"], row["gemm_k"], row["gemm_batch"] = m, n, k, batch
    row["gemm_min"] = min(m, n, k)
    row["gemm_lhs_bytes"], row["gemm_rhs_bytes"] = way.operand_bytes(lhs, rhs)
    row["gemm_accumulates_wide"] = DTYPE_BITS[out.dtype] > DTYPE_BITS[lhs.dtype]
    row["matrix_dtype"] = DTYPE_CODE[way.rate]


def convolution_row(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    """Record a ``convolution`` or a library call of one.

    Library calls of gradients are described by the corresponding forward convolution.
    """
    if len(op.operands) < 2 or not op.results:
        return 0.0
    data, kernel, out = ops[op.operands[0]].type, ops[op.operands[1]].type, op.type
    target = str(op.attrs.get("target", ""))
    # A gradient call has the gradient of the result as an operand: swapping it with the call's
    # result gives the shapes of the forward convolution.
    if "BackwardInput" in target:
        data, out = out, data
    elif "BackwardFilter" in target:
        kernel, out = out, kernel
    _convolution(row, op.attrs, data, kernel, out)
    if "BackwardInput" in target:
        row["conv_reverses"] = 1.0
    elif "BackwardFilter" in target:
        row["conv_window_over_output"] = 1.0
    return 0.0


def _convolution(
    row: Row, attrs: JsonObject, data: TensorType, kernel: TensorType, out: TensorType
) -> None:
    at = read_dim_labels(attrs["dim_labels"])
    window: tuple[WindowDim, ...] = attrs.get("window", ())
    groups = int(attrs.get("feature_group_count", 1))
    batch_groups = int(attrs.get("batch_group_count", 1))
    # m, n and k of the implicit GEMM; padding and dilation holes count as if multiplied.
    taps = space = batch = 1
    for w in window:
        if _is_batch(w):
            batch *= w.size
        else:
            taps *= w.size
    for d in at.out_spatial:
        space *= out.shape[d]
    channels, features = data.shape[at.lhs_feature], kernel.shape[at.rhs_output]
    n_groups = groups * batch_groups
    m, n = out.shape[at.out_batch] * space // batch, features // n_groups
    k = kernel.shape[at.rhs_input] * taps
    way = arithmetic(data.dtype, attrs)
    flops = 2.0 * m * n * k * n_groups * batch * way.times
    row["dense_flops"] += flops
    if n_groups > 1:
        row["grouped_flops"] += flops
    if 2 * flops < row["dense_flops"]:
        return
    _sizes(row, m, n, k, n_groups * batch, data, kernel, out, way)
    row["conv_spatial"] = data.size // max(data.shape[at.lhs_batch] * channels, 1)
    row["conv_out_spatial"], row["conv_window"] = space, taps
    row["conv_channels"], row["conv_features"] = channels, features
    row["conv_groups"], row["conv_batch"] = n_groups, data.shape[at.lhs_batch]
    row["conv_rank"] = len(window)
    row["conv_depthwise"] = groups > 1 and groups == channels
    row["conv_grouped"], row["conv_batch_grouped"] = groups > 1, batch_groups > 1
    row["conv_pointwise"] = taps == 1
    # A window larger than the result indicates the gradient of a filter.
    row["conv_window_over_output"] = taps > space
    row["conv_canonical"] = at.is_nhwc
    row["conv_input_f_minor"] = type_facts(data).minor == at.lhs_feature
    row["conv_kernel_o_minor"] = type_facts(kernel).minor == at.rhs_output
    row["conv_output_f_minor"] = type_facts(out).minor == at.out_feature
    _window_flags(row, window)


def _dot_dims(op: Op) -> tuple[Dims, Dims, Dims, Dims]:
    """Return contracted and batched dimensions of both sides of a dot."""
    keys = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    a, b, c, d = (op.attrs.get(key, ()) for key in keys)
    return a, b, c, d


def _is_batch(w: WindowDim) -> bool:
    """Return whether a spatial dimension is a batch of products, as a TPU's compiler expresses it.

    Each output meets one tap: ``size=B stride=B-1 lhs_dilate=B``.
    """
    return w.size > 1 and w.lhs_dilation == w.size and w.stride == max(w.size - 1, 1)


def _window_flags(row: Row, window: tuple[WindowDim, ...]) -> None:
    stride = 1
    for w in window:
        stride *= w.stride
        if w.lhs_dilation > 1:
            row["conv_dilates_input"] = 1.0
        if w.rhs_dilation > 1:
            row["conv_dilates_window"] = 1.0
        if w.reversal:
            row["conv_reverses"] = 1.0
        if w.pad_low or w.pad_high:
            row["conv_pads"] = 1.0
    row["conv_stride"] = stride


@lru_cache(maxsize=4096)
def library_of(target: str) -> str:
    """Return the library of a custom-call target, one of ``CODES["library"]``."""
    return by_target(target, "libraries_of_targets", "other")


def custom_call_row(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    """Record a custom call: its library, and its product, convolution or matrix."""
    library = library_of(str(op.attrs.get("target", "")))
    row["library"] = CODE["library"][library]
    operands = [ops[i].type for i in op.operands if ops[i].results]
    if "dim_labels" in op.attrs and "window" in op.attrs:
        return convolution_row(row, op, ops, program)
    if "fmha" in str(op.attrs.get("target", "")) and len(operands) > 2:
        _attention(row, op, operands)
    elif library == "cublas" and len(operands) > 1 and op.results:
        _library_gemm(row, op, operands)
    elif library == "linalg":
        return linalg_row(row, op, ops, program)
    elif library == "triton" and row["flops"]:
        _all_dense(row, operands)
    return float(sum(t.size for t in op.results)) if library == "topk" else 0.0


def _library_gemm(row: Row, op: Op, operands: list[TensorType]) -> None:
    config = op.config("gemm_backend_config") or op.config()
    if not config:
        return
    dims = _numbers(config.get("dot_dimension_numbers", {}))
    way = arithmetic(operands[0].dtype, op.attrs)
    gemm(row, operands[0], operands[1], op.type, *dims, way=way)


def _attention(row: Row, op: Op, operands: list[TensorType]) -> None:
    """Record a fused attention by its first product; all of its work counts as products."""
    numbers = attention_numbers(op)
    query, key = operands[:2]
    if numbers is None or len(query.shape) != 4 or len(key.shape) != 4:
        _all_dense(row, operands[:2])
        return
    before = row["dense_flops"]
    gemm(row, query, key, op.type, *numbers, way=Arithmetic(query.dtype))
    # All FLOPs of the call run on the matrix unit, including the second product, which gemm() does
    # not cover.
    row["dense_flops"] = before + row["flops"]


def attention_numbers(op: Op) -> tuple[Dims, Dims, Dims, Dims] | None:
    """Return the dimension numbers of queries times keys in a fused attention call.

    A backward call states only the products of its gradients: queries are the right side of the
    product for the keys' gradient, keys that of the product for the queries', each contracted over
    its positions. The dimension that is neither batch nor position is the head size.

    Returns:
        Contracted dimensions of queries and of keys, batch dimensions of queries and of keys;
        ``None`` if the call does not state them.
    """
    config = op.config("cudnn_fmha_backend_config")
    forward = _numbers(config.get("bmm1_dot_dimension_numbers") or {})
    if all(forward):
        return forward
    sides: list[tuple[Dims, Dims]] = []
    for product in ("bmm1_grad_gemm1", "bmm1_grad_gemm2"):
        _, positions, _, batch = _numbers(config.get(f"{product}_dot_dimension_numbers") or {})
        head = tuple({0, 1, 2, 3} - {*positions, *batch})
        if len(positions) != 1 or len(batch) != 2 or len(head) != 1:
            return None
        sides.append((head, batch))
    (query_head, query_batch), (key_head, key_batch) = sides
    return query_head, key_head, query_batch, key_batch


def _all_dense(row: Row, operands: list[TensorType]) -> None:
    """Count all FLOPs of a call as products, at the rate of its narrowest float operand.

    Kernels with enough FLOPs to matter are products and attention; at the vector rate they would
    take ten times as long.
    """
    row["dense_flops"] += row["flops"]
    floats = [t.dtype for t in operands if t.dtype[:1] in "bf"]
    if floats:
        narrowest = min(floats, key=lambda name: DTYPE_BITS[name])
        row["matrix_dtype"] = DTYPE_CODE[arithmetic(narrowest, {}).rate]
        # Makes ``_dtype`` in row.py keep that type, though the sizes are unknown.
        row.setdefault("gemm_k", 0.0)


def _numbers(numbers: JsonObject) -> tuple[Dims, Dims, Dims, Dims]:
    """Return contracted and batched dimensions of both sides from a backend configuration."""
    keys = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
    a, b, c, d = (tuple(int(d) for d in numbers.get(f"{key}_dimensions", ())) for key in keys)
    return a, b, c, d


def linalg_row(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    """Record the matrix size of a factorisation or triangular solve."""
    shapes = [ops[i].type.shape for i in op.operands if ops[i].results]
    matrices = [shape for shape in shapes if len(shape) > 1]
    if matrices:
        row["linalg_size"] = min(matrices[0][-2:])
        row["linalg_columns"] = max(matrices[-1][-2:])
    return 0.0
