"""Lower bounds for kernels that XLA's CPU backend runs element by element, far above rooflines."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, lgamma, log, prod

import numpy as np

from ..devices.device import DeviceSpec
from ..ir.program import FLOAT, HALF, INTEGER, Computation, Op, Program, TensorType
from ..kernels.kernel import Kernel
from .columns import CODE, INDEX, type_facts
from .row import rows

#: Latency of an addition in cycles: 3 on AMD's Zen 3 and 4, 3 to 4 on Intel's server cores (Fog,
#: Instruction tables, ADDSS). A comparison and the selection by its result take the same.
_ADD_CYCLES = 3.0
#: Elements of one reduction that overlap with those of the next: a core holds some 300 instructions
#: in flight (Zen 4: 320, Golden Cove: 512), an element takes about ten.
_OVERLAPPED = 32
#: Bytes between lines of the same set of a core's L1 cache (64 sets, as with 4 KiB pages); bytes of
#: its L2 (1 MiB on Zen 4, 2 on Golden Cove); and cycles per element read from beyond if neither
#: holds enough lines of a column (measured: 8 to 23).
_SET_BYTES, _CORE_BYTES, _FAR_CYCLES = 4096, 1 << 20, 8.0
#: Cycles of a comparison of unsorted keys: half of the branches are mispredicted, and the
#: comparator is called through a pointer. Of 64 sorts in ``datagen/datasets/cpu`` all but one take
#: longer, by a factor of 1.5 in the median.
_COMPARE_CYCLES = 30.0
#: Columns up to which XLA:CPU's library sums rows in registers; beyond, each element is added to a
#: sum in memory, and beyond twice as many in two passes. Core cycles per element there, for sums
#: and for other reductions, measured: 0.15 ns on two cores become 2.2, and 4.4.
_WIDE_COLUMNS, _WIDE_SUM, _WIDE_OTHER = 16384, 11.0, 4.5
#: Result types of products that XLA:CPU's libraries compute at the rate of the type. Products of
#: integers other than s32 are loops on one core.
_LIBRARY_RESULTS = frozenset(("f16", "bf16", "f32", "f64", "c64", "c128"))
#: Core cycles of an s32 multiply-add; the library uses s32 for all integers but s8 (measured: 0.16
#: to 0.24). No vector instruction combines both steps.
_S32_CYCLES = 0.15
#: Core cycles of elementwise functions that are calls or divisions, which are not vectorised:
#: measured on a Zen 4, for floats except ``divide``, as 36, 41, 36, 17, 17, 16, 40 and 5. An
#: exponential takes 1.2.
_CALL_CYCLES = {
    "atan2": 30.0, "cbrt": 30.0, "tan": 30.0, "sine": 12.0, "cosine": 12.0, "power": 12.0,
    "remainder": 30.0, "divide": 4.0,
}  # fmt: skip
#: Core cycles per window element (measured: 1.1 to 1.2 for sums, 1.0 to 2.3 for maxima), and the
#: longest windows; longer ones are scans, which the compiler rewrites.
_TAP_CYCLES, _LONGEST_WINDOW = 1.0, 256.0
#: Core cycles per element of a column that a product loop reads, by the cache that holds all of its
#: lines: L1, L2, neither. Measured with columns of s8, u32 and s64 on a Zen 4: 0.55 to 0.6, 3.6 to
#: 6.8, 9.4. Along rows, the loop is vectorised: 0.13.
_COLUMN_CYCLES, _ROW_CYCLES = (0.5, 3.6, _FAR_CYCLES), 0.1
#: Size in bytes, and bytes between lines of the same set, of L1 and L2 with eight ways each.
_CACHES = ((32 << 10, _SET_BYTES), (_CORE_BYTES, 128 << 10))


def scalar_seconds(kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Return lower bounds for work that a CPU does element by element, ``(n,)``; zero elsewhere.

    - A convolution whose layout is not ``NHWC`` by ``HWIO`` uses no library: each output is a chain
      of multiply-adds, ``MACs · cycles / clock / parts``. Dilated windows skip terms and get no
      bound.
    - A joint reduction of several arrays (``argmax``) is also a chain unless the compiler may
      reorder it along rows. Down columns, each element may be in a line that no core's cache holds.
    - A transposition of a value computed in the kernel also runs down columns.
    - A library reduction of rows that are too wide for its registers.
    - A sort compares keys ``log2(n!)`` times, one at a time.
    - Windows are loops over their elements, and some functions are calls.
    - A product whose result is of a type without a library (``s8``, ``s64``, ``u32``, ``pred``) is
      a loop that reads the second operand down its columns; one of ``s32`` has no fast instruction.
    """
    if device.platform != "cpu" or not device.clock_hz:
        return np.zeros(len(kernels))
    row = rows(kernels)
    seconds = _convolutions(row, device)
    library = row[:, INDEX["library"]] == CODE["library"]["ynn"]
    # Kernels with any of these ops: the reducer of a joint reduction has a step for each array.
    ordered = (row[:, INDEX["n_sort"]] > 0) | (row[:, INDEX["reducer_ops"]] > 1)
    ordered |= library & (row[:, INDEX["reduce_run"]] > _WIDE_COLUMNS)
    ordered |= row[:, INDEX["kind"]] == CODE["kind"]["gemm"]
    ordered |= (row[:, INDEX["work_transcendental"]] > 0) | (row[:, INDEX["work_divide"]] > 0)
    ordered |= row[:, INDEX["n_reduce_window"]] > 0
    loops = row[:, INDEX["fusion"]] == CODE["fusion"]["kLoop"]
    ordered |= loops & (row[:, INDEX["transposing"]] > 0)
    for i in np.flatnonzero(ordered).tolist():
        body, inner, calls = kernels[i].body, kernels[i].inner, 0.0
        for op in inner.ops:
            own = 0.0
            calls += _calls(op, inner, row[i, INDEX["window_size"]])
            if op.opcode == "sort" and op.called:
                own = _sort(op, inner, body, device)
            elif op.opcode == "reduce" and len(op.operands) > 2:
                own = _joint_reduction(op, inner, body, device, row[i, INDEX["partitions"]])
            elif op.opcode == "reduce" and library[i]:
                own = _wide_reduction(op, inner, body, device)
            elif op.opcode == "dot" and op.type.dtype not in _LIBRARY_RESULTS:
                own = _product_loop(op, inner, device)
            elif op.opcode in ("copy", "transpose") and loops[i]:
                own = _transposition(op, inner, device)
            seconds[i] = max(seconds[i], own)
        shared = calls / device.clock_hz / max(device.core_count, 1)
        seconds[i] = max(seconds[i], shared)
    return seconds


def _calls(op: Op, inner: Computation, taps: float) -> float:
    """Return core cycles of an op that is a loop over a window, or a call for each element."""
    code = op.opcode
    if code == "reduce-window" and taps <= _LONGEST_WINDOW:
        return op.type.size * taps * _TAP_CYCLES
    if code not in _CALL_CYCLES:
        return 0.0
    if type_facts(op.type).family == INTEGER:
        divisor = inner.ops[op.operands[1]]
        while divisor.opcode in ("broadcast", "convert", "reshape"):
            divisor = inner.ops[divisor.operands[0]]
        # Division by a constant is a multiplication; a remainder is one division.
        if code not in ("divide", "remainder") or divisor.opcode == "constant":
            return 0.0
        code = "divide"
    elif code == "divide":
        return 0.0
    return op.type.size * _CALL_CYCLES[code]


def _convolutions(row: np.ndarray, device: DeviceSpec) -> np.ndarray:
    scalar = (row[:, INDEX["kind"]] == CODE["kind"]["conv"]) & (row[:, INDEX["library"]] == 0)
    for flag in ("conv_canonical", "conv_dilates_window", "conv_dilates_input"):
        scalar &= row[:, INDEX[flag]] == 0
    parts = np.clip(row[:, INDEX["partitions"]], 1, max(device.core_count, 1))
    seconds = row[:, INDEX["matmul_flops"]] / 2 * _ADD_CYCLES / device.clock_hz / parts
    return np.where(scalar, seconds, 0.0)


def _sort(op: Op, inner: Computation, body: Program, device: DeviceSpec) -> float:
    source = inner.ops[op.operands[0]].type
    # Keys compared directly, without payload, use a specialised sort.
    if len(op.operands) == 1 and body.computations[op.called[0]].only_op is not None:
        return 0.0
    length = source.shape[op.attrs.get("dimension", -1)] if source.shape else 1
    comparisons = source.size / max(length, 1) * lgamma(length + 1) / log(2)
    return float(comparisons * _COMPARE_CYCLES / device.clock_hz)


def _wide_reduction(op: Op, inner: Computation, body: Program, device: DeviceSpec) -> float:
    source, dims = inner.ops[op.operands[0]].type, op.attrs.get("dimensions", ())
    order = type_facts(source).order  # without dimensions of one element, minor first
    columns = prod(source.shape[d] for d in order[:-1])
    if columns <= _WIDE_COLUMNS or set(order).intersection(dims) != {order[-1]}:
        return 0.0
    sums = body.computations[op.called[0]].root_op.opcode == "add"
    passes = 2 if columns > 2 * _WIDE_COLUMNS else 1
    cycles = source.size * passes * (_WIDE_SUM if sums else _WIDE_OTHER)
    return float(cycles / device.clock_hz / max(device.core_count, 1))


def _joint_reduction(
    op: Op, inner: Computation, body: Program, device: DeviceSpec, stated: float
) -> float:
    source, dims = inner.ops[op.operands[0]].type, op.attrs.get("dimensions", ())
    facts, reducer = type_facts(source), body.computations[op.called[0]]
    length = max(prod(source.shape[d] for d in dims), 1)
    along_rows = facts.minor in dims
    if along_rows and _reorders(reducer):
        return 0.0
    chained = facts.size * max(length - _OVERLAPPED, 0) / length
    cycles = chained * _cycles(reducer)
    if not along_rows:
        stride = prod(source.shape[d] for d in facts.order if d not in dims) * facts.bits // 8
        cycles = max(cycles, facts.size * _far_cycles(stride, length))
    # If the compiler states no partitions, each core may compute some of the results.
    parts = min(stated or facts.size / length, max(device.core_count, 1))
    return float(cycles / device.clock_hz / max(parts, 1.0))


def _transposition(op: Op, inner: Computation, device: DeviceSpec) -> float:
    made = inner.ops[op.operands[0]]
    source, out = type_facts(made.type), type_facts(op.type)
    if op.opcode == "transpose":
        read = op.attrs["dimensions"][out.minor] if out.minor >= 0 else -1
    else:
        read = out.minor
    if read in (-1, source.minor):
        return 0.0
    while made.opcode in ("bitcast", "reshape", "transpose", "convert"):
        made = inner.ops[made.operands[0]]
    # Reading an array in storage order, or by indices, is no slower than usual.
    if made.opcode in ("parameter", "gather"):
        return 0.0
    kind = inner.ops[op.operands[0]].type
    cycles = source.size * _far_cycles(_stride(kind, read), kind.shape[read])
    return float(cycles / device.clock_hz / max(device.core_count, 1))


def _product_loop(op: Op, inner: Computation, device: DeviceSpec) -> float:
    cycles, depth = 0.0, 1
    library = op.type.dtype == "s32"
    if library and inner.ops[op.operands[0]].type.dtype == "s8":
        return 0.0
    for side, operand in zip(("lhs", "rhs"), op.operands, strict=True):
        source = inner.ops[operand].type
        facts, dims = type_facts(source), op.attrs[f"{side}_contracting_dims"]
        batch = op.attrs.get(f"{side}_batch_dims", ())
        depth = prod(source.shape[d] for d in dims)
        if source.size <= depth * prod(source.shape[d] for d in batch):
            # A vector: these loops are tiled.
            return 0.0
        column = [d for d in facts.order if d in dims]
        if column and column[0] != facts.minor:
            cycles += _column_cycles(_stride(source, column[0]), source.shape[column[0]])
    cycles = _S32_CYCLES / max(device.core_count, 1) if library else max(cycles, _ROW_CYCLES)
    return float(op.type.size * depth * cycles / device.clock_hz)


def _stride(kind: TensorType, dim: int) -> int:
    """Return the bytes between neighbours along a dimension."""
    facts = type_facts(kind)
    inside = facts.order[: facts.order.index(dim)]
    return prod(kind.shape[d] for d in inside) * facts.bits // 8


def _column_cycles(stride: int, lines: int) -> float:
    """Return core cycles per element of a column whose ``lines`` are ``stride`` bytes apart."""
    # Lines a power of two apart share cache sets, so each occupies that much of the cache.
    apart = max(stride & -stride, 64)
    level = sum(lines * min(apart, sets) > size for size, sets in _CACHES)
    return _COLUMN_CYCLES[level]


def _far_cycles(stride: int, lines: int) -> float:
    """Return core cycles per element of a column whose ``lines`` are ``stride`` bytes apart."""
    # Lines a power of two apart share cache sets, so each occupies that much of the cache.
    far = stride % _SET_BYTES == 0 and lines * (stride & -stride) > _CORE_BYTES
    return _FAR_CYCLES if far else 0.0


def _reorders(reducer: Computation) -> bool:
    """Return whether elements may come in any order: integers only, or separate extremes."""
    floats = [p for p in reducer.parameters if type_facts(p.type).family in (FLOAT, HALF)]
    results = [reducer.ops[i].opcode for i in reducer.root_op.operands]
    return not floats or all(opcode in ("minimum", "maximum") for opcode in results)


def _cycles(reducer: Computation) -> float:
    """Return the cycles from one element to the next: the longest path from a value to itself."""
    longest = 0.0
    for number, result in enumerate(reducer.root_op.operands):
        steps: list[float] = []
        for op in reducer.ops:
            before = max((steps[o] for o in op.operands), default=-inf)
            own = op.opcode == "parameter" and int(op.attrs["index"]) == number
            steps.append(0.0 if own else before + 1.0)
        # A step of an integer chain takes one cycle.
        floats = type_facts(reducer.ops[result].type).family in (FLOAT, HALF)
        longest = max(longest, steps[result] * (_ADD_CYCLES if floats else 1.0))
    return longest
