"""The device-independent row of a kernel: one pass over its fused computation.

A row contains what :mod:`opcast.features.table.table` and :mod:`opcast.features.table.roofline`
need of a kernel, without any device figures, so it is computed once and cached in ``kernel.row``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice

import numpy as np

from ...common.types import JsonObject
from ..cost.bytes import array_traffic, on_chip_bytes
from ..ir.op_table import OPS, OpSpec
from ..ir.program import DTYPE_CODE, FAMILIES, INTEGER, Computation, Op, Program, TensorType
from ..kernels.kernel import Kernel
from .columns import (
    CODE,
    CODES,
    COLUMNS,
    COMMON,
    FACTS,
    FREE,
    INDEX,
    NO_FACTS,
    RARE,
    type_facts,
)
from .row_movement import HANDLERS, Handler
from .row_products import Row

#: Ops whose called computation is part of the kernel's own work.
_INLINE = ("fusion", "call", "map", "async-start")
#: Ops that compute in their operand's type: a comparison of floats returns a ``pred``.
_TYPED_BY_INPUT = frozenset(("compare", "convert", "dot", "convolution", "reduce"))
_TOKEN = TensorType("token", (0,))
_EMPTY = dict.fromkeys(COMMON, 0.0)
# struct converts numbers faster than NumPy does.
# Every kernel of every program needs a row: this module trades some elegance for speed
# (docs/features.md, Speed).
_PACK_COMMON = struct.Struct(f"{len(COMMON)}d").pack
_PACK_RARE = struct.Struct(f"{len(RARE)}d").pack
_NO_RARE = [0.0] * len(RARE)
_NO_RARE_PACKED = _PACK_RARE(*_NO_RARE)
_RARE_INDEX = {name: i for i, name in enumerate(RARE)}

_Entry = tuple[str, str, float, Handler | None, bool]


def _entry(opcode: str) -> _Entry:
    spec, handler = OPS.get(opcode, OpSpec()), HANDLERS.get(opcode)
    return spec.column or "n_other", spec.work, spec.weight, handler, opcode in _INLINE


#: Contribution of an opcode to the row; ``None`` for ops that cost nothing.
_TABLE: dict[str, _Entry | None] = {
    **{opcode: _entry(opcode) for opcode in {*OPS, *HANDLERS, *_INLINE}},
    **dict.fromkeys(FREE),
}
_OTHER_ENTRY = _entry("")
# Hints from the root about the emitter that a compiler selects; arithmetic roots are the default,
# 0.
_ROOT_CODE = {name: CODE["root"][spec.root] for name, spec in OPS.items() if spec.root}
_KIND_CODE, _FUSION_CODE, _COLLECTIVE_CODE = CODE["kind"], CODE["fusion"], CODE["collective"]


def rows(kernels: Sequence[Kernel]) -> np.ndarray:
    """Return the kernels' rows, ``(n, len(COLUMNS))``; computed where ``kernel.row`` is empty."""
    parts = []
    for kernel in kernels:
        row = kernel.row
        # A row of another length is from another version of the columns.
        if row is None or row.size != len(COLUMNS):
            row = kernel.row = kernel_row(kernel)
        parts.append(row)
    if not parts:
        return np.empty((0, len(COLUMNS)))
    return np.concatenate(parts).reshape(len(parts), len(COLUMNS))


def code_flags(row: np.ndarray) -> list[np.ndarray]:
    """Expand the code columns of rows ``(n, columns)`` to flags, shape ``(n, choices)`` each."""
    return [
        row[:, INDEX[column], None] == np.arange(1.0, len(choices) + 1)
        for column, choices in CODES.items()
    ]


def kernel_row(kernel: Kernel) -> np.ndarray:
    """Compute the device-independent row of a kernel, shape ``(len(COLUMNS),)``, float64."""
    row = _EMPTY.copy()
    body = kernel.body
    entry = body.computations[body.entry]
    op = entry.ops[entry.root]
    inner = entry
    if op.called and op.opcode in ("fusion", "call"):
        inner = body.computations[op.called[0]]
    row["flops"], row["transcendentals"] = kernel.flops, kernel.transcendentals
    row["bytes_in"], row["bytes_out"] = kernel.bytes_in, kernel.bytes_out
    row["kind"] = _KIND_CODE[kernel.kind]
    main = _visit(row, inner, body)
    dense = row["dense_flops"]
    # dense_flops counts a convolution as an implicit GEMM, including padding, which the cost rules
    # exclude. Unknown library calls have no FLOPs of their own.
    row["matmul_flops"] = min(dense, kernel.flops) if kernel.flops > 0 else dense
    if _interface(row, op, entry.ops):
        read, written = array_traffic(op, entry, body)
        row["on_chip_in"], row["on_chip_out"] = on_chip_bytes(read), on_chip_bytes(written)
    # A kernel computes in the type of its largest op with work; pure data movement has none.
    _dtype(row, main or _largest_result(op))
    _root(row, inner)
    _instruction(row, op, kernel)
    return np.frombuffer(_pack(row))


def _pack(row: Row) -> bytes:
    """Pack values in the order of ``COLUMNS``; the common ones come first in the dictionary."""
    if len(row) == len(COMMON):
        return _PACK_COMMON(*row.values()) + _NO_RARE_PACKED
    values = [*row.values()]
    rare = _NO_RARE[:]
    for name, value in zip(islice(row, len(COMMON), None), values[len(COMMON) :], strict=True):
        rare[_RARE_INDEX[name]] = value
    return _PACK_COMMON(*values[: len(COMMON)]) + _PACK_RARE(*rare)


def _visit(row: Row, computation: Computation, program: Program) -> TensorType | None:
    """Add up the ops of a computation and of those that it inlines; return the main type.

    This loop dominates the cost of a row: one dictionary look-up per op, types looked up only when
    they change, sums kept in local variables.
    """
    ops = computation.ops
    known, table = FACTS.get, _TABLE.get
    depth: list[int] = []
    uses: list[int] = []
    deepest = n_ops = largest = total = main_size = 0.0
    main: Op | None = None
    last: TensorType | None = None
    facts = NO_FACTS
    for op in ops:
        entry = table(op.opcode, _OTHER_ENTRY)
        below = 0
        for o in op.operands:
            if depth[o] > below:
                below = depth[o]
        if entry is None:
            depth.append(below)
            continue
        uses += op.operands
        depth.append(below + 1)
        if below >= deepest:
            deepest = below + 1
        # Free ops were skipped above, so this op generates code.
        count, work, weight, handler, inlines = entry
        row[count] += 1.0
        n_ops += 1
        if inlines:
            for name in op.called:
                main_inside = _visit(row, program.computations[name], program)
                last = main_inside or last
        if not op.results:
            continue
        t = op.results[0]
        if t is not last:
            last, facts = t, known(t) or type_facts(t)
        size = handler(row, op, ops, program) if handler else facts.size
        total += size
        if size > largest:
            largest = size
        if weight:
            row[work] += weight * size
            if facts.family == INTEGER:
                row["work_integer"] += weight * size
            # The later op wins at equal size: the end of a chain of conversions is what is
            # computed.
            if size >= main_size:
                main_size, main = size, op
        elif handler and size >= main_size:
            main = op
    row["n_ops"] += n_ops
    # Values with several users are recomputed or kept in registers.
    row["n_shared"] += len(uses) - len(set(uses))
    row["depth"] += deepest
    row["elements_all"] += total
    row["elements_max"] = max(row["elements_max"], largest)
    return _compute_type(main, ops) if main else None


def _compute_type(op: Op, ops: list[Op]) -> TensorType:
    if op.operands and op.opcode in _TYPED_BY_INPUT:
        source = ops[op.operands[0]]
        if source.results:
            return source.results[0]
    return op.results[0]


def _largest_result(op: Op) -> TensorType:
    if not op.results:
        return _TOKEN
    return op.results[0] if len(op.results) == 1 else max(op.results, key=lambda t: t.nbytes)


def _interface(row: Row, op: Op, entry: list[Op]) -> bool:
    """Record sizes, layouts and types of the interface; return whether any is off main memory."""
    out_type = _largest_result(op)
    out, rank = type_facts(out_type), len(out_type.shape)
    total = biggest = scalars = n_inputs = 0
    largest = NO_FACTS
    dtypes = {t.dtype for t in op.results}
    elsewhere = any(t.memory_space for t in op.results)
    for i in op.operands:
        for t in entry[i].results:
            n_inputs += 1
            elsewhere |= t.memory_space > 0
            facts = FACTS.get(t) or type_facts(t)
            total += facts.nbytes
            dtypes.add(t.dtype)
            if facts.size == 1:
                scalars += 1
                continue
            if facts.nbytes > biggest:
                biggest, largest = facts.nbytes, facts
            # Dimensions can be compared by number only between arrays of equal rank; vectors have
            # no order.
            if facts.minor != out.minor and len(t.shape) == rank and len(facts.order) > 1:
                row["layouts_differ"] = 1.0
    # Scalars are passed by value or read once: they are counted separately from arrays.
    row["n_inputs"], row["n_scalar_inputs"], row["n_outputs"] = n_inputs, scalars, len(op.results)
    row["operand_bytes"], row["operand_bytes_max"] = total, biggest
    row["result_bytes"] = out.nbytes if len(op.results) == 1 else op.result_bytes
    row["out_elements"] = out.size
    row["elements_max"] = row["elements_max"] or out.size  # a fill works on its result
    row["out_minor"], row["out_rank"] = out.minor_length, len(out.order)
    row["out_outer"] = out.size // max(out.minor_length, 1)
    # Rows of whole 64-byte lines (512 bits) are aligned, so vector loads need no peeling.
    row["out_aligned"] = out.minor_length * out.bits % 512 == 0
    row["in_minor"] = largest.minor_length
    row["out_bits"], row["in_bits"] = out.bits, largest.bits
    row["dtype_count"], row["mixed_dtype"] = len(dtypes), len(dtypes) > 1
    return elsewhere


def _dtype(row: Row, main: TensorType) -> None:
    facts = type_facts(main)
    row["vector_dtype"] = DTYPE_CODE[main.dtype]
    row["dtype_bits"] = facts.bits
    row["dtype_wide"] = facts.bits >= 64
    # Codes start at one; NONE, the last family, wraps around to 0, "none of them".
    row["dtype"] = (facts.family + 1) % len(FAMILIES)
    if "gemm_k" not in row:
        row["matrix_dtype"] = row["vector_dtype"]


def _root(row: Row, inner: Computation) -> None:
    root = inner.root_op
    # Views do not determine the emitter; the op behind them does.
    while root.opcode in ("bitcast", "reshape") and root.operands:
        root = inner.ops[root.operands[0]]
    row["root"] = _ROOT_CODE.get(root.opcode, 0.0)


def _instruction(row: Row, op: Op, kernel: Kernel) -> None:
    """Record attributes of the instruction: fusion kind, partitions, library, replica groups."""
    attrs = op.attrs
    row["is_async"] = bool(kernel.async_role)
    if op.opcode == "fusion":
        kind = attrs.get("kind", "")
        row["fusion"] = _FUSION_CODE.get(kind, 0.0)
        if kind == "kCustom":
            row["library"] = _fusion_library(op.config())
    config = op.config()
    if config:
        row["partitions"] = _partitions(config)
    if kernel.kind == "collective":
        _groups(row, op)


def _partitions(config: JsonObject) -> float:
    """Return the product of XLA:CPU's ``outer_dimension_partitions``; 0 if absent."""
    parts = config.get("outer_dimension_partitions")
    if not parts:
        return 0.0
    product = 1
    for part in parts:
        product *= int(part)
    return product


def _fusion_library(config: JsonObject) -> float:
    inner = config.get("fusion_config") or config.get("fusion_backend_config") or {}
    kind = str(inner.get("kind", ""))
    for library, mark in (("ynn", "nn_fusion"), ("triton", "triton"), ("cudnn", "cudnn")):
        if mark in kind:
            return CODE["library"][library]
    return CODE["library"]["other"]


def _groups(row: Row, op: Op) -> None:
    name = op.opcode.removesuffix("-start").removesuffix("-done")
    row["collective"] = _COLLECTIVE_CODE.get(name, 0.0)
    groups = op.attrs.get("replica_groups") or ()
    row["n_groups"] = len(groups)
    row["group_size"] = max((len(group) for group in groups), default=0)
