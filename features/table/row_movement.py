"""Row entries of ops that move, reduce or order data.

Handlers write an op's details into the row and return the number of elements that it processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod

from ..cost.flops import window_taps
from ..ir.op_table import by_op
from ..ir.program import COMPLEX, DTYPE_BITS, FLOAT, HALF, Op, Program, TensorType
from .columns import FREE, TypeFacts, type_facts
from .row_products import Row, convolution_row, custom_call_row, dot_row, linalg_row, ragged_dot_row

#: Bytes that a gather re-reads from a core's cache: at most half of the L1 of NVIDIA's GPUs from
#: compute capability 7.0 on. Engineering estimate.
_REACH_BYTES = 64 << 10
#: Smallest transaction of a GPU's memory in bytes.
_SECTOR_BYTES = 32

Handler = Callable[[Row, Op, list[Op], Program], float]


def contiguous_run(t: TensorType, sizes: tuple[int, ...], facts: TypeFacts) -> int:
    """Count the contiguous elements in memory when a box of ``sizes`` is cut out of ``t``."""
    run = 1
    for d in facts.order:
        # Minor to major: the run ends with the first dimension that is not taken entirely.
        run *= sizes[d]
        if sizes[d] != t.shape[d]:
            break
    return run


def _operand(op: Op, ops: list[Op], position: int = 0) -> TensorType | None:
    if position >= len(op.operands):
        return None
    source = ops[op.operands[position]]
    return source.results[0] if source.results else None


def _broadcast(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    dims = op.attrs.get("dimensions")
    if not dims:
        return 0.0  # a scalar stays in a register
    out = type_facts(op.type)
    row["moved_broadcast"] += out.size
    if out.minor not in dims:
        row["broadcast_minor"] = 1.0
    return out.size


def _transpose(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    out, source = type_facts(op.type), _operand(op, ops)
    dims = op.attrs.get("dimensions", ())
    if source is not None and out.minor >= 0 and dims:
        _moved(row, out, dims[out.minor], type_facts(source).minor)
    return out.size


def _copy(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    out, source = type_facts(op.type), _operand(op, ops)
    if source is not None:
        _moved(row, out, out.minor, type_facts(source).minor)
    return out.size


def _moved(row: Row, out: TypeFacts, minor: int, source_minor: int) -> None:
    if minor != source_minor:
        row["moved_transposed"] += out.size
        row["transposing"] = 1.0


def _reverse(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    size = type_facts(op.type).size
    row["moved_strided"] += size
    return size


def _slice(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    out, source = type_facts(op.type), _operand(op, ops)
    bounds = op.attrs.get("slice", ())
    if source is None or not bounds:
        return out.size
    facts = type_facts(source)
    # A stride along the contiguous dimension touches single elements.
    if facts.minor >= 0 and bounds[facts.minor][2] > 1:
        row["moved_strided"] += out.size
        row["slice_run"] = 1.0
    else:
        row["slice_run"] = max(row["slice_run"], contiguous_run(source, op.type.shape, facts))
    return out.size


def _dynamic_slice(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    source = _operand(op, ops)
    if source is not None:
        run = contiguous_run(source, op.type.shape, type_facts(source))
        row["slice_run"] = max(row["slice_run"], run)
    return type_facts(op.type).size


def _update_slice(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    update = _operand(op, ops, 1)
    if update is None:
        return 0.0
    run = contiguous_run(op.type, update.shape, type_facts(op.type))
    row["slice_run"] = max(row["slice_run"], run)
    return type_facts(update).size


def _concatenate(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    out = type_facts(op.type)
    if out.minor in op.attrs.get("dimensions", ()):
        row["concatenate_minor"] = 1.0
    return out.size


def _pad(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    if any(interior for _, _, interior in op.attrs.get("padding", ())):
        row["pad_interior"] = 1.0
    return type_facts(op.type).size


def _reduce(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    source = _operand(op, ops)
    if source is None:
        return 0.0
    facts, dims = type_facts(source), op.attrs.get("dimensions", ())
    n = len(op.operands) // 2 or 1
    length = prod([source.shape[d] for d in dims])
    # Of several reductions, the details describe one with at least half of the work so far.
    if 2 * facts.size * n >= row["work_reduce"]:
        row["reduce_length"], row["reduce_kept"] = length, facts.size // max(length, 1)
        row["reduce_run"] = _leading_run(source, facts, dims)
        row["reduce_minor"] = facts.minor in dims
        # Reducing the outermost dimension sums rows: it streams, unlike reducing across each row.
        row["reduce_major"] = facts.minor >= 0 and facts.order[-1] in dims
        row["reduce_all"] = len(dims) == len(source.shape)
    _reducer(row, op, facts, program)
    return facts.size * n


def _leading_run(t: TensorType, facts: TypeFacts, dims: tuple[int, ...]) -> int:
    """Count the elements, from the minor dimension on, that are all reduced or all kept."""
    run, first = 1, facts.minor in dims
    for d in facts.order:
        if (d in dims) != first:
            break
        run *= t.shape[d]
    return run


def _reducer(row: Row, op: Op, facts: TypeFacts, program: Program) -> None:
    reducer = program.computations.get(op.called[-1]) if op.called else None
    if reducer is None:
        return
    row["reducer_ops"] = max(row["reducer_ops"], _work_ops(reducer.ops))
    # Float sums must not be reordered freely, which limits vectorisation; max, min and integer sums
    # may be.
    if reducer.root_op.opcode in ("add", "multiply") and facts.family in (FLOAT, HALF, COMPLEX):
        row["reduce_ordered"] = 1.0


def _work_ops(ops: list[Op]) -> int:
    return sum(op.opcode not in FREE for op in ops)


def _reduce_window(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    source = _operand(op, ops)
    window = op.attrs.get("window", ())
    # Overlapping windows read elements several times.
    if any(w.size > w.stride for w in window):
        row["window_overlap"] = 1.0
    if source is None or not op.results:
        return 0.0
    taps = window_taps(op, source)
    row["window_size"] = max(row["window_size"], taps)
    _reducer(row, op, type_facts(source), program)
    positions: float = op.type.size
    # Its windows are those of the forward pooling, one per update.
    if op.opcode == "select-and-scatter" and (updates := _operand(op, ops, 1)) is not None:
        positions = updates.size
    return positions * taps


def _gather(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    out, source = type_facts(op.type), _operand(op, ops)
    sizes = op.attrs.get("slice_sizes", ())
    length = max(prod(sizes), 1)
    row["gather_rows"], row["gather_length"] = out.size // length, length
    if source is not None and len(sizes) == len(source.shape):
        # Compilers also express batch positions as indices.
        names = ("start_index_map", "operand_batching_dims")
        run = _read_together(source, sizes, [d for n in names for d in op.attrs.get(n, ())])
        # The runs of several gathers add up, independently of their order.
        runs = row["moved_gathered"] / row.get("gather_run", 1.0) + out.size / max(run, 1)
        row["gather_run"] = (row["moved_gathered"] + out.size) / max(runs, 1.0)
    row["moved_gathered"] += out.size
    return out.size


def _read_together(t: TensorType, sizes: tuple[int, ...], indexed: Sequence[int]) -> int:
    """Count the contiguous elements of an array that a gather reads.

    They are those of a slice, or a whole sector if a core's cache holds everything indices reach.
    """
    facts = type_facts(t)
    places = [place for place, d in enumerate(facts.order) if d in indexed]
    reach = prod([t.shape[d] for d in facts.order[: max(places, default=-1) + 1]])
    run, bits = contiguous_run(t, sizes, facts), DTYPE_BITS[t.dtype]
    held = reach * bits <= 8 * _REACH_BYTES
    return max(run, min(reach, 8 * _SECTOR_BYTES // bits)) if held else run


def _scatter(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    n = max((len(op.operands) - 1) // 2, 1)
    updates = _operand(op, ops, n + 1)
    if updates is None:
        return 0.0
    length = max(prod([updates.shape[d] for d in op.attrs.get("update_window_dims", ())]), 1)
    elements = updates.size * n
    row["moved_scattered"] += elements
    row["scatter_rows"], row["scatter_length"] = updates.size // length, length
    combiner = program.computations.get(op.called[0]) if op.called else None
    # A combiner that returns a parameter overwrites; any other one needs atomics or an order.
    row["scatter_combines"] = combiner is not None and combiner.root_op.opcode != "parameter"
    return elements


def _sort(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    source = _operand(op, ops)
    if source is None:
        return 0.0
    dimension = op.attrs.get("dimension", -1)
    length = source.shape[dimension] if source.shape else 1
    row["sort_length"], row["sort_batch"] = length, source.size // max(length, 1)
    row["sort_operands"] = len(op.operands)
    row["sort_minor"] = type_facts(source).minor == dimension % max(len(source.shape), 1)
    row["sort_stable"] = str(op.attrs.get("is_stable", "")).lower() == "true"
    comparator = program.computations.get(op.called[0]) if op.called else None
    row["sort_comparator"] = _work_ops(comparator.ops) if comparator else 0
    # Comparison sort: log2(length) passes over all keys and payloads; + 1 keeps length 1 above
    # zero.
    return float(source.size * len(op.operands) * log2(length + 1))


def _fft(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    lengths = op.attrs.get("fft_length", ())
    length = prod(lengths) if isinstance(lengths, tuple) else int(lengths)
    source = _operand(op, ops)
    row["fft_length"] = length
    row["fft_batch"] = max(source.size if source else 0, op.type.size) // max(length, 1)
    # RFFT and IRFFT: half of the points on one side.
    row["fft_real"] = "R" in str(op.attrs.get("fft_type", ""))
    return op.type.size


def _while(row: Row, op: Op, ops: list[Op], program: Program) -> float:
    trips = op.attrs.get("trip_count")
    # Conditionals also come here; they have no trip count: unknown.
    row["trip_unknown"] = trips is None
    row["trip_count"] = trips or 0
    bodies = (program.computations.get(name) for name in op.called)
    row["loop_ops"] = sum(_work_ops(body.ops) for body in bodies if body is not None)
    return 0.0


#: Handlers by opcode; ops without one process as many elements as their result has.
_HANDLERS: dict[str, Handler] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "copy": _copy,
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _update_slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
    "fft": _fft,
    "while": _while,
    "dot": dot_row,
    "ragged-dot": ragged_dot_row,
    "convolution": convolution_row,
    "custom-call": custom_call_row,
    "cholesky": linalg_row,
}
HANDLERS = by_op(_HANDLERS)
