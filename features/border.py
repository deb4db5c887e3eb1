"""What crosses a kernel's border: each array with the bytes that are touched of it."""

from __future__ import annotations

from collections.abc import Sequence

from .cost_bytes import fusion_traffic, op_bytes
from .ir import ON_CHIP, Computation, Op, Program, TensorType

#: Arrays of a kernel with the bytes that it touches of each: what it reads, what it writes.
Border = tuple[list[tuple[TensorType, float]], list[tuple[TensorType, float]]]


def border(op: Op, entry: Computation, program: Program) -> Border:
    """Arrays that a kernel's instruction reads and writes, with the bytes that it touches.

    Args:
        op: The instruction.
        entry: The computation that holds it.
        program: The program that holds the called computations.

    Returns:
        Arrays read and arrays written. Of an instruction that is no fusion, the bytes are shared
        out among its operands, and among its results, in proportion to their sizes.
    """
    operands = [entry.ops[i] for i in op.operands]
    if op.opcode == "fusion" and op.called:
        read, written = fusion_traffic(program.computations[op.called[0]])
        if len(written) == len(op.results) and all(len(o.results) == 1 for o in operands):
            inputs = [(o.results[0], read.get(i, 0.0)) for i, o in enumerate(operands)]
            return inputs, list(zip(op.results, written, strict=True))
        moved = sum(read.values()), sum(written)
    else:
        moved = op_bytes(op, entry)
    leaves = [t for o in operands for t in o.results]
    return _shared(leaves, moved[0]), _shared(op.results, moved[1])


def on_chip_bytes(arrays: Sequence[tuple[TensorType, float]]) -> float:
    """Touched bytes of the arrays that lie on a TPU's chip."""
    return sum(touched for t, touched in arrays if t.memory_space in ON_CHIP)


def _shared(types: Sequence[TensorType], moved: float) -> list[tuple[TensorType, float]]:
    total = sum(t.nbytes for t in types) or 1
    return [(t, moved * t.nbytes / total) for t in types]
