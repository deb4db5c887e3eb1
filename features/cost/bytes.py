"""Memory traffic: the bytes that an op or fusion touches, rather than the sizes of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.op_table import UPDATES, named, ops_with
from ..ir.program import BOOKKEEPING, ON_CHIP, Computation, Op, Program, TensorType
from .library_calls import stated_cost

_NONE: Mapping[str, Computation] = {}
#: Ops without memory traffic.
FREE = BOOKKEEPING | named("no_traffic")
#: Ops that read only as much of their first operand as they return.
_READS_RESULT = ops_with(lambda spec: spec.reads == "result")
#: Ops that only rename their operand's memory.
_VIEWS = frozenset(("bitcast", "reshape"))
#: Ops that need all of every operand for any part of their result.
_READS_ALL = ops_with(lambda spec: spec.reads == "all")
#: Ops whose result is larger than the operand: a part of it may need the whole operand.
_GROWN = ops_with(lambda spec: spec.reads == "grown")
#: Ops that need a different fraction of their operands than of their result; all others, mainly
#: elementwise ones, need the same fraction.
_UNEVEN = ops_with(lambda spec: spec.reads != "share")
#: Starts whose result contains only what they write.
_RESULTS_ALONE = ("all-reduce-start", "send", "recv")


def op_bytes(op: Op, comp: Computation) -> tuple[float, float]:
    """Count the bytes that one op reads and writes by itself.

    Slices and gathers read what they return (at most the whole operand) and their indices;
    updates and scatters run in place: they read and write the updates and read the indices.

    Args:
        op: An op except control flow and fusions.
        comp: The computation that contains it.

    Returns:
        Bytes read, bytes written.
    """
    opcode = op.opcode
    if opcode in FREE or opcode.endswith("-done"):
        return 0.0, 0.0
    operands = [comp.ops[i] for i in op.operands]
    # With layouts assigned, a transpose may be equivalent to a bitcast.
    if opcode == "transpose" and _keeps_order(op, operands[0]):
        return 0.0, 0.0
    if opcode in _READS_RESULT:
        touched = min(op.result_bytes, operands[0].result_bytes)
        return float(touched + _total(operands[1:])), float(op.result_bytes)
    # In place, as XLA's buffer assignment arranges it: the rest of the target is not touched. If it
    # has to be copied first, the copy is a separate op.
    if opcode in UPDATES:
        updates = _total(_update_operands(op, operands))
        n_targets = _n_targets(op)
        return float(_total(operands[n_targets:])), float(updates)
    if opcode.endswith("-start"):
        return _start_bytes(op, operands)
    read, written = float(_total(operands)), float(op.result_bytes)
    stated = stated_cost(op)
    if stated is not None and stated.bytes and read + written:
        # A kernel may state the bytes it touches (pages of a cache, blocks read repeatedly).
        factor = stated.bytes / (read + written)
        return factor * read, factor * written
    return read, written


def _keeps_order(op: Op, operand: Op) -> bool:
    """Return whether a transpose leaves the order of elements in memory unchanged."""
    dims = op.attrs.get("dimensions", ())
    after, before = op.type, operand.type
    rank = len(dims)
    order = after.layout or tuple(range(rank - 1, -1, -1))
    moved = [dims[d] for d in order if after.shape[d] != 1]
    # Dimensions of size one do not affect the order.
    kept = before.layout or range(rank - 1, -1, -1)
    return moved == [d for d in kept if before.shape[d] != 1]


def _total(ops: Sequence[Op]) -> int:
    return sum([op.result_bytes for op in ops])


def _n_targets(op: Op) -> int:
    """Return the number of arrays that an update writes to, its first operands."""
    return 1 if op.opcode == "dynamic-update-slice" else (len(op.operands) - 1) // 2


def _update_operands(op: Op, operands: Sequence[Op]) -> Sequence[Op]:
    if op.opcode == "dynamic-update-slice":
        return operands[1:2]
    return operands[_n_targets(op) + 1 :]


def _start_bytes(op: Op, operands: Sequence[Op]) -> tuple[float, float]:
    """Count the bytes of a start, whose result may repeat the operands and add contexts."""
    read = _total(operands)
    # Other starts return (operands, results, contexts).
    if op.opcode in _RESULTS_ALONE or not op.is_tuple:
        return float(read), float(op.result_bytes)
    # Scalar integers among the results are contexts (semaphores, DMA tokens), not data.
    arrays = sum(t.nbytes for t in op.results if t.shape or t.dtype not in ("u32", "s32"))
    scalars = sum(o.result_bytes for o in operands if not o.results[0].shape)
    written = max(arrays - read + scalars, 0)
    base = op.opcode.removesuffix("-start")
    if base in _READS_RESULT:
        return float(min(written, read)), float(written)
    return float(read), float(written)


def fusion_bytes(
    inner: Computation, computations: Mapping[str, Computation] = _NONE
) -> tuple[float, float]:
    """Count the bytes that a fusion reads and writes.

    Args:
        inner: The fused computation.
        computations: Computations of its program, for nested fusions.

    Returns:
        Bytes read, bytes written.
    """
    read, written = fusion_traffic(inner, computations)
    return sum(read.values()), sum(written)


def fusion_traffic(
    inner: Computation, computations: Mapping[str, Computation] = _NONE
) -> tuple[dict[int, float], list[float]]:
    """Count the bytes that a fusion reads of each parameter and writes of each result.

    The part of each op that is needed is propagated from the results back to the parameters: a
    slice needs a part, an elementwise op the same part as is needed of its result, a contraction
    everything, a nested fusion (TPUs slice a layer of a stack in one) what it reads. A parameter
    that a root ``dynamic-update-slice`` or ``scatter`` updates in place is not read for it, and
    only the updates are written.

    Args:
        inner: The fused computation.
        computations: Computations of its program, for nested fusions.

    Returns:
        Bytes read by parameter number (unread ones are absent), bytes written by result.
    """
    ops = inner.ops
    root = ops[inner.root]
    outputs = root.operands if root.opcode == "tuple" else (inner.root % len(ops),)
    written = []
    in_place: set[int] = set()
    # Two kinds of use: `whole` is a fraction common to all users (elementwise users of a value want
    # the same part, so the largest counts), `parts` adds up slices at different positions.
    whole = [0.0] * len(ops)
    parts = [0.0] * len(ops)
    for output in outputs:
        whole[output] = 1.0
        written.append(_written(ops, output, in_place))
    read: dict[int, float] = {}
    # Ops come after their operands, so a backward walk visits all users of a value before it.
    for i in range(len(ops) - 1, -1, -1):
        share = min(1.0, whole[i] + parts[i])
        if share == 0.0:
            continue
        op = ops[i]
        if op.opcode == "parameter":
            read[int(op.attrs["index"])] = share * op.result_bytes
        elif op.opcode not in _UNEVEN:
            for operand in op.operands:
                if whole[operand] < share:
                    whole[operand] = share
        elif op.opcode == "fusion" and op.called and op.called[0] in computations:
            inside = fusion_traffic(computations[op.called[0]], computations)[0]
            for number, operand in enumerate(op.operands):
                parts[operand] += inside.get(number, 0.0) / max(1, ops[operand].result_bytes)
        elif op.operands:
            _spread(ops, i, share, whole, parts, i in in_place)
    return read, written


def _written(ops: Sequence[Op], output: int, in_place: set[int]) -> float:
    """Count the bytes written for one output; in-place updates are added to ``in_place``."""
    chain: list[int] = []
    position = output
    while True:
        op = ops[position]
        if op.opcode in _VIEWS:
            position = op.operands[0]
        elif op.opcode in UPDATES and _n_targets(op) == 1:
            chain.append(position)
            position = op.operands[0]
        else:
            break
    # Only an update of a value from outside can reuse its buffer; others write a new array.
    if not chain or ops[position].opcode != "parameter":
        return float(ops[output].result_bytes)
    in_place.update(chain)
    updated = 0
    for link in chain:
        op = ops[link]
        updated += _total(_update_operands(op, [ops[i] for i in op.operands]))
    return float(updated)


def _spread(
    ops: Sequence[Op],
    index: int,
    share: float,
    whole: list[float],
    parts: list[float],
    in_place: bool,
) -> None:
    """Propagate the needed fraction of an op's result to its operands."""
    op = ops[index]
    opcode = op.opcode
    operands = op.operands
    if opcode in _READS_RESULT:
        source = operands[0]
        parts[source] += share * op.result_bytes / max(1, ops[source].result_bytes)
        for i in operands[1:]:
            whole[i] = 1.0
        return
    # The target (operand 0) is written in place, not read; updates and indices are read entirely.
    if in_place:
        operands = operands[1:]
        share = 1.0
    elif opcode in _READS_ALL:
        share = 1.0
    elif opcode in _GROWN:
        source = ops[operands[0]].type.size
        share = min(1.0, share * op.type.size / max(1, source))
    for i in operands:
        if whole[i] < share:
            whole[i] = share


#: Arrays with the bytes that a kernel touches of each.
Touched = list[tuple[TensorType, float]]


def array_traffic(op: Op, entry: Computation, program: Program) -> tuple[Touched, Touched]:
    """List a kernel's memory traffic by array: operands with the bytes read, results written.

    Args:
        op: The instruction.
        entry: The computation that contains it.
        program: The program with the called computations.

    Returns:
        Arrays read and arrays written. Except for fusions, the bytes are distributed over the
        operands, and over the results, in proportion to their sizes.
    """
    operands = [entry.ops[i] for i in op.operands]
    if op.opcode == "fusion" and op.called:
        read, written = fusion_traffic(program.computations[op.called[0]], program.computations)
        if len(written) == len(op.results) and all(len(o.results) == 1 for o in operands):
            inputs = [(o.results[0], read.get(i, 0.0)) for i, o in enumerate(operands)]
            return inputs, list(zip(op.results, written, strict=True))
        moved = sum(read.values()), sum(written)
    else:
        moved = op_bytes(op, entry)
    leaves = [t for o in operands for t in o.results]
    return _shared(leaves, moved[0]), _shared(_made(op, len(leaves)), moved[1])


def _made(op: Op, given: int) -> Sequence[TensorType]:
    """Return the results that an op produces: a start repeats its inputs and adds contexts."""
    if not op.opcode.endswith("-start") or not op.is_tuple or op.opcode in _RESULTS_ALONE:
        return op.results
    # A copy's result comes first, those of other starts after the operands.
    return op.results[:1] if op.opcode == "copy-start" else op.results[given:]


def on_chip_bytes(arrays: Touched) -> float:
    """Sum the touched bytes of arrays in a TPU's on-chip memory."""
    return sum(touched for t, touched in arrays if t.memory_space in ON_CHIP)


def _shared(types: Sequence[TensorType], moved: float) -> Touched:
    total = sum(t.nbytes for t in types) or 1
    return [(t, moved * t.nbytes / total) for t in types]
