"""FLOPs of library calls: GEMM and convolution libraries, LAPACK, FFT, top-k.

Counts for dense linear algebra are the leading terms of Golub and Van Loan, Matrix Computations
(4th edition); for FFTs the convention of the FFTW benchmark, ``5 N log2 N`` for a complex
transform of ``N`` points and half of that for a real one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from math import log2, prod, sqrt
from typing import NamedTuple

from ...common import plugins
from ...common.errors import OpcastError
from ..ir.op_table import NAMES, named
from ..ir.precision import arithmetic
from ..ir.program import STATED, Op, Program, TensorType, read_work
from ..operators.op import op_flops
from .convolution import conv_flops

Work = tuple[float, float]
Matrix = Callable[[float, float], float]

#: Short names within targets, as patterns.
_SHORT: dict[str, str] = NAMES["short_names"]
#: Such as ``__cublas$lt$matmul``, ``__onednn$matmul``, ``__triton$gemm``, ``EigenMatMulF32``.
_GEMM = re.compile(
    r"cublas\$(?:gemm|lt\$)|onednn\$matmul|triton\$gemm|block_?[sS]caled_?[dD]ot|Matmul|MatMul|matmul|gemm"
)
#: Such as ``__cudnn$convForward``.
_CONV = re.compile(r"(?:cudnn|onednn)\$conv|DnnConv")
#: Attention and experts of published tables; their quantised products are counted as GEMMs.
_PUBLISHED = (
    *("opcast.op.attention", "opcast.op.moe"),
    *("opcast.op.convolution_gradient", "opcast.op.tuned_gemm"),
)
#: Sorts by CUB: n · ⌈log2 n⌉ comparisons, as every sort counts.
_SORT = re.compile(r"cub\$DeviceRadixSort|cub_sort")
#: Mean, variance, subtraction, division by the deviation, scale and shift: about eight per element.
#: Engineering estimate; norms are memory-bound anyway.
_NORM_FLOPS = 8.0
#: Such as ``TopK`` and ``__gpu$TopK``.
_TOP_K = re.compile(r"top_?k", re.IGNORECASE)
#: Routines of LAPACK and the GPU libraries in any spelling: lapack_dgetrf, cusolver_getrf_ffi,
#: __cublas$triangularSolve, Eigh, …
_ROUTINE = re.compile(
    r"potrf|trsm|syrk|getrf|ludecomposition|geqrf|geqp3|orgqr|ungqr|syevd?|heevd?|gesdd|gesvdj?"
    r"|geev|hybrid_eig|gehrd|gees|sytrd|hetrd"
    rf"|gtsv|tridiagonal_?solve|cholesky|triangular_?solve|{_SHORT['lu']}pivots|{_SHORT['eigh']}|svd|{_SHORT['qr']}|householder",
    re.IGNORECASE,
)


def by_target(target: str, table: str, default: str) -> str:
    """Look up a target in a table of ``op_names.toml`` by the first matching pattern."""
    lower = target.lower()
    marks = ((mark.format(**_SHORT), word) for mark, word in NAMES[table].items())
    return next((word for mark, word in marks if re.search(mark, lower)), default)


def routine_of(target: str) -> str:
    """Return the linear-algebra routine that a target names, in lower case; empty for none."""
    found = _ROUTINE.search(target.replace("-", "_"))
    return found[0].lower() if found else ""


#: FLOPs of an m × n factorisation with m ≥ n, by routine (source: module docstring).
_FACTORISATIONS: tuple[tuple[str, Matrix], ...] = (
    ("potrf cholesky", lambda m, n: n**3 / 3),
    ("getrf ludecomposition", lambda m, n: m * n**2 - n**3 / 3 if m >= n else n * m**2 - m**3 / 3),
    ("geqrf geqp3 qr orgqr ungqr householder", lambda m, n: 2 * n**2 * (m - n / 3)),
    ("syevd syev heevd heev eigh", lambda m, n: 9 * n**3),
    ("gesdd gesvd gesvdj svd", lambda m, n: 4 * m**2 * n + 22 * n**3),
    ("geev gees hybrid_eig", lambda m, n: 25 * n**3),
    ("gehrd", lambda m, n: 10 * n**3 / 3),
    ("sytrd hetrd", lambda m, n: 4 * n**3 / 3),
)
_BY_ROUTINE = {name: rule for names, rule in _FACTORISATIONS for name in names.split()}
#: Targets that annotate values and run no code.
ANNOTATIONS = named("annotations")
#: Targets that only pass over their operands and results.
_PASSES = re.compile("|".join(NAMES["passes"]))
_HOST = re.compile("|".join(NAMES["host_calls"]))


def is_annotation(op: Op) -> bool:
    """Return whether a custom call only carries a sharding, placement or layout."""
    target = str(op.attrs.get("target", ""))
    return target in ANNOTATIONS or target.startswith("xla.sdy.")


def is_host_call(op: Op) -> bool:
    """Return whether an op runs Python on the host, or transfers data to or from it."""
    if op.opcode == "custom-call":
        return bool(_HOST.fullmatch(str(op.attrs.get("target", ""))))
    return bool(op.attrs.get("is_host_transfer")) and op.opcode.startswith(("send", "recv"))


def custom_call_flops(op: Op, operands: Sequence[TensorType]) -> Work:
    """Count the FLOPs and transcendentals of a custom call from its target and shapes.

    Args:
        op: A ``custom-call``.
        operands: First leaf type of each operand.

    Returns:
        Zeros if neither this module nor a plug-in recognises the target (its bytes still count).
    """
    return _known_work(op, operands) or (0.0, 0.0)


def unknown_calls(body: Program) -> list[str]:
    """Return the names of unrecognised custom calls in a kernel's module; usually none.

    Neither the call nor a rule nor a plug-in states their work. Their time does not follow from
    operands and results, which they may read repeatedly or compute on. The name of a hand-written
    kernel is appended to its target after a colon.
    """
    found = []
    for computation in body.computations.values():
        for op in computation.ops:
            if op.opcode != "custom-call":
                continue
            operands = [computation.ops[i].results for i in op.operands]
            if _known_work(op, [types[0] for types in operands if types]) is None:
                found.append(":".join(filter(None, (str(op.attrs.get("target")), kernel_name(op)))))
    return found


def _known_work(op: Op, operands: Sequence[TensorType]) -> Work | None:
    """Return FLOPs and transcendentals of a custom call; ``None`` if the target is unknown."""
    target = str(op.attrs.get("target", ""))
    # A plug-in's rule comes first, one for a specific kernel before one for its target.
    name = kernel_name(op)
    own = plugin_flops(f"{target}:{name}", operands, op.results) if name else None
    own = own if own is not None else plugin_flops(target, operands, op.results)
    if own is not None:
        return own
    stated = stated_cost(op)
    if stated is not None:
        return stated.flops, stated.transcendentals
    if is_annotation(op) or is_host_call(op) or _PASSES.fullmatch(target):
        return 0.0, 0.0
    if not operands or not op.results:
        return None
    # From the most to the least specific: parts of these names occur in others.
    if target.startswith(_PUBLISHED):
        return op_flops(op.config("published_op")), 0.0
    # cuDNN's fused attention, forward and backward.
    if "fmha" in target:
        return _attention(op, operands, target)
    # A product of complex numbers, or by an algorithm of several passes, is several real products.
    times = arithmetic(operands[0].dtype, op.attrs).times
    if _CONV.search(target) and "dim_labels" in op.attrs and len(operands) > 1:
        return _library_conv(op, operands, target) * times, 0.0
    if _GEMM.search(target) and len(operands) > 1:
        return _gemm(op, operands) * times, 0.0
    if _TOP_K.search(target):
        return top_k_flops(operands[0], op.results[0]), 0.0
    if target.startswith("__cudnn$norm"):
        return _NORM_FLOPS * operands[0].size, 0.0
    if _SORT.search(target):
        n = operands[0].size
        return float(n * max(0, n - 1).bit_length()), 0.0
    if "fft" in target.lower():
        return _library_fft(op, operands[0]), 0.0
    routine = routine_of(target)
    if routine:
        return _linear_algebra(routine, op, operands) * times, 0.0
    return None


class StatedCost(NamedTuple):
    """Cost that a hand-written kernel states, or that was counted in its function.

    Attributes:
        flops: Floating-point operations.
        transcendentals: exp, log, tanh and similar.
        bytes: Bytes read and written; 0 if not stated.
    """

    flops: float
    transcendentals: float
    bytes: float


def stated_cost(op: Op) -> StatedCost | None:
    """Return the cost that a custom call states; ``None`` if it states none.

    Pallas kernels whose function was available carry counted costs, others for TPUs the estimate
    from ``pallas_call(cost_estimate=…)``.
    """
    if op.opcode != "custom-call":
        return None
    counted = read_work(op.attrs.get("frontend_attributes")).split()
    stated = op.config("custom_call_config", "cost_estimate")
    # HLO writes 64-bit numbers as strings.
    flops, transcendentals, moved = map(
        _amount, counted if len(counted) == len(STATED) else map(stated.get, STATED)
    )
    return StatedCost(flops, transcendentals, moved) if flops or transcendentals or moved else None


def useless_costs(body: Program) -> list[str]:
    """Return messages about calls in a kernel's module whose stated cost has no positive figure."""
    found = []
    for computation in body.computations.values():
        for op in computation.ops:
            said = op.config("custom_call_config", "cost_estimate")
            own = [f"{name}={said[name]}" for name in STATED if name in said]
            if own and op.opcode == "custom-call" and stated_cost(op) is None:
                found.append(f"its cost_estimate of {', '.join(own)} has no figure above zero")
    return found


def _amount(value: object) -> float:
    try:
        amount = float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
    # Configurations are untrusted, and Pallas writes -1 for unknown figures.
    return amount if 0.0 < amount < math.inf else 0.0


#: A Triton kernel's name in the text of its configuration.
_KERNEL_NAME = re.compile(r'\bname = "([^"\\]+)"')


def kernel_name(op: Op) -> str:
    """Return the name of a hand-written kernel that a custom call runs; empty if it has none."""
    config = op.attrs.get("backend_config")
    named = _KERNEL_NAME.search(config) if isinstance(config, str) else None
    return named[1] if named else ""


def fft_flops(
    source: TensorType, result: TensorType, lengths: Sequence[int], *, real: bool
) -> float:
    """Return ``5 N log2 N`` for each transform, half of it if one side is real (FFTW's convention).

    Args:
        source: Input type.
        result: Result type.
        lengths: Points along each transformed dimension.
        real: Whether input or result is real.
    """
    points = prod(lengths)
    if points <= 1:
        return 0.0
    rank = len(lengths)
    transforms = prod(source.shape[: len(source.shape) - rank])
    # FFTW's convention is a figure of merit, not a count: real transforms halve it by symmetry.
    return (2.5 if real else 5.0) * transforms * points * log2(points)


def top_k_flops(source: TensorType, values: TensorType) -> float:
    """Return ``n · ⌈log2(k + 1)⌉`` comparisons: every element against a heap of ``k``."""
    k = values.shape[-1] if values.shape else 1
    return float(source.size * k.bit_length())


def _library_fft(op: Op, source: TensorType) -> float:
    result = op.results[0]
    if not source.shape or not result.shape:
        return 0.0
    # The longer side has all points: the complex side of a real transform has only n / 2 + 1.
    real = (source.dtype[0] == "c") != (result.dtype[0] == "c")
    return fft_flops(source, result, (max(source.shape[-1], result.shape[-1]),), real=real)


def _gemm(op: Op, operands: Sequence[TensorType]) -> float:
    """Count ``2 · M · N · K``; K is from the dimension numbers, else from the three sizes."""
    lhs, rhs = operands[:2]
    out = op.results[0]
    numbers = op.config("gemm_backend_config").get("dot_dimension_numbers", {})
    contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", ())]
    if contracted and all(d < len(lhs.shape) for d in contracted):
        return 2.0 * out.size * prod(lhs.shape[d] for d in contracted)
    # A product without dimension numbers: batches are the result's leading dimensions.
    batch = prod(out.shape[:-2]) if len(lhs.shape) == len(rhs.shape) else 1
    # Sizes are B·M·K, B·K·N and B·M·N, so their quotient is B·K².
    return 2.0 * out.size * sqrt(lhs.size * rhs.size / max(1, out.size * batch))


def _library_conv(op: Op, operands: Sequence[TensorType], target: str) -> float:
    """Count the FLOPs of the forward convolution that a call or gradient call describes."""
    first, second = operands[:2]
    result = op.results[0]
    lhs, rhs, out = first, second, result
    if "BackwardInput" in target:
        lhs, out = result, first
    elif "BackwardFilter" in target:
        rhs, out = result, second
    window, labels = op.attrs.get("window", ()), op.attrs["dim_labels"]
    return conv_flops(lhs, rhs, out, window, labels)


def _attention(op: Op, operands: Sequence[TensorType], target: str) -> Work | None:
    """Count two products forward, five backward, and one exp per unmasked score."""
    config = op.config("cudnn_fmha_backend_config")
    shape = config.get("intermediate_tensor_shape", {})
    dims = [int(d) for d in (shape.get("dimensions", ()) if isinstance(shape, dict) else ())]
    scores: float = prod(dims)
    if len(dims) != 4 or not scores:
        return None
    queries, keys = dims[2:]
    # Queries are the last positions, so query i sees keys - queries + 1 + i keys: an arithmetic
    # series, as in operators/op.py.
    if "CAUSAL" in str(config.get("mask_type", "")) and queries <= keys:
        scores *= 1.0 - (queries - 1) / (2.0 * keys)
    head_size = operands[0].size / (dims[0] * dims[1] * dims[2])
    # Backward recomputes the scores (one product) and has two each for the gradients of both
    # forward products (Dao et al., FlashAttention, 2022, algorithm 4).
    products = 5 if "Backward" in target else 2
    return products * 2.0 * scores * head_size, float(scores)


def _linear_algebra(routine: str, op: Op, operands: Sequence[TensorType]) -> float:
    matrix = operands[0]
    if len(matrix.shape) < 2:
        return 0.0
    *batch, rows, columns = matrix.shape
    # Half of a product of a matrix and its transpose costs as much as a solve.
    if routine in ("trsm", "triangular_solve", "triangularsolve", "syrk"):
        return float(op.results[0].size * columns)
    # Thomas algorithm: eight operations per unknown of a tridiagonal system.
    if routine in ("gtsv", "tridiagonal_solve", "tridiagonalsolve"):
        return 8.0 * op.results[0].size
    rule = _BY_ROUTINE.get(routine)
    m, n = float(max(rows, columns)), float(min(rows, columns))
    return prod(batch) * rule(m, n) if rule else 0.0


#: Entry-point group through which packages add rules for their own custom calls, by target.
GROUP = "opcast.ops"
#: Takes types of operands and results, returns FLOPs and transcendentals.
CallCost = Callable[[Sequence[TensorType], Sequence[TensorType]], tuple[float, float]]


def plugin_flops(
    target: str, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> Work | None:
    """Return the FLOPs and transcendentals of a call by a plug-in's rule; ``None`` without one.

    Raises:
        OpcastError: The plug-in cannot be imported, or does not return two valid numbers.
    """
    rule = _rule(target)
    if rule is None:
        return None
    counts = rule(operands, results)
    numbers = tuple(counts) if isinstance(counts, tuple | list) else ()
    if len(numbers) != 2 or not all(
        isinstance(n, int | float) and 0 <= n < math.inf for n in numbers
    ):
        raise OpcastError(
            f"returned {counts!r}, not FLOPs and transcendentals",
            where=f"{GROUP}: {target}",
            hint="return two numbers that are not below zero",
        )
    return float(numbers[0]), float(numbers[1])


@cache
def _rule(target: str) -> CallCost | None:
    point = plugins.found(GROUP).get(target)
    rule: CallCost | None = None if point is None else plugins.load(point)
    return rule
