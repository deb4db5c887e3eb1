"""Classes of ops by cost, and facts of types, for the rows and graphs of kernels."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.dtypes import DTYPE_BITS, NONE, dtype_family
from ..ir.op_table import OPS
from ..ir.program import BOOKKEEPING, TensorType


class TypeFacts(NamedTuple):
    """What rows and graphs need from a type.

    Attributes:
        size: Elements.
        nbytes: Bytes.
        minor: Dimension that is contiguous in memory, skipping those of size one; -1 for scalars.
        minor_length: Its size; 1 for scalars.
        bits: Bits per element.
        family: See :func:`dtype_family`.
        order: Physical order of the dimensions larger than one, minor to major.
    """

    size: int
    nbytes: int
    minor: int
    minor_length: int
    bits: int
    family: int
    order: tuple[int, ...]


#: Facts of an op without a result.
NO_FACTS = TypeFacts(0, 0, -1, 0, 0, NONE, ())
#: Facts by type; for loops that cannot afford the call of :func:`type_facts`.
FACTS: dict[TensorType, TypeFacts] = {}
#: Most types that are remembered, so that a run over many programs does not grow without end.
_MAX_FACTS = 1 << 16


def type_facts(t: TensorType) -> TypeFacts:
    """Return the facts of ``t``; remembered, since a program has few distinct types."""
    known = FACTS.get(t)
    if known is None:
        if len(FACTS) >= _MAX_FACTS:
            FACTS.clear()
        known = FACTS[t] = _facts(t)
    return known


def _facts(t: TensorType) -> TypeFacts:
    layout = t.layout if t.layout is not None else range(len(t.shape) - 1, -1, -1)
    order = tuple(d for d in layout if t.shape[d] != 1)
    minor = order[0] if order else -1
    length = t.shape[minor] if order else 1
    bits = DTYPE_BITS[t.dtype]
    return TypeFacts(t.size, t.nbytes, minor, length, bits, dtype_family(t.dtype), order)


class OpClass(NamedTuple):
    """How an opcode counts.

    Attributes:
        column: Column that counts such ops.
        work: Column that adds up their work.
        weight: Work per element (:class:`~opcast.features.ir.op_table.OpSpec`).
    """

    column: str
    work: str
    weight: float


OP_CLASSES: dict[str, OpClass] = {
    name: OpClass(spec.column, spec.work, spec.weight) for name, spec in OPS.items() if spec.column
}
#: Unknown ops: counted, at no work that could be guessed.
OTHER = OpClass("n_other", "work_move", 0.0)
#: Ops without code. Views (``bitcast``, ``reshape``) are counted, at no weight.
FREE = BOOKKEEPING | {"opt-barrier"}
