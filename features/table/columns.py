"""Columns of the device-independent row of a kernel (see :mod:`opcast.features.table.row`).

``columns.toml`` groups them by how the feature table uses them. Also the facts about types that
rows and graphs of kernels contain.
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.files import own_data
from ..ir.program import BOOKKEEPING, DTYPE_BITS, NONE, TensorType, dtype_family
from ..kernels.kernel import KINDS

_READ = own_data("features/table/columns.toml")
#: Quantities with a unit, or dtype codes; the table forms ratios of them and of device figures.
AMOUNTS: tuple[str, ...] = tuple(_READ["amounts"])
#: Choices by column; the column contains the index plus one, or 0 for none of them.
CODES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    **{column: tuple(choices) for column, choices in _READ["codes"].items()},
}
#: Code by column and choice.
CODE = {
    column: {choice: float(i + 1) for i, choice in enumerate(choices)}
    for column, choices in CODES.items()
}
CODE_FLAGS = tuple(f"{column}_{choice}" for column, choices in CODES.items() for choice in choices)
#: Counts and lengths that most kernels have; the table uses ``log2(1 + x)``.
COMMON_COUNTS: tuple[str, ...] = tuple(_READ["common_counts"])
#: Booleans and small numbers that most kernels have.
COMMON_FLAGS: tuple[str, ...] = tuple(_READ["common_flags"])
#: Details of reductions, products, convolutions, indexed accesses, sorts and loops.
RARE_COUNTS: tuple[str, ...] = tuple(_READ["rare_counts"])
RARE_FLAGS: tuple[str, ...] = tuple(_READ["rare_flags"])

COMMON = (*AMOUNTS, *CODES, *COMMON_COUNTS, *COMMON_FLAGS)
RARE = (*RARE_COUNTS, *RARE_FLAGS)
COLUMNS = (*COMMON, *RARE)
INDEX = {name: i for i, name in enumerate(COLUMNS)}

#: Columns that only TPUs' features need of a kernel (:mod:`opcast.features.table.tpu`).
TPU_COLUMNS: tuple[str, ...] = tuple(_READ["tpu_columns"])
#: Opcodes that graphs of kernels distinguish.
GRAPH_OPCODES: tuple[str, ...] = tuple(_READ["graph_opcodes"])
#: Ops that generate no code. Views (``bitcast``, ``reshape``) are counted, with weight zero.
FREE = BOOKKEEPING | {"opt-barrier"}


class TypeFacts(NamedTuple):
    """Properties of a type that rows and graphs use.

    Attributes:
        size: Elements.
        nbytes: Bytes.
        minor: Dimension that is contiguous in memory, ignoring those of size one; -1 for scalars.
        minor_length: Size of that dimension; 1 for scalars.
        bits: Bits per element.
        family: See :func:`dtype_family`.
        order: Dimensions larger than one in physical order, minor to major.
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
#: Cache of facts by type, for loops that cannot afford to call :func:`type_facts`.
FACTS: dict[TensorType, TypeFacts] = {}
#: Cache size, which bounds memory in a run over many programs.
_MAX_FACTS = 1 << 16


def type_facts(t: TensorType) -> TypeFacts:
    """Return the facts of ``t``, cached because a program has few distinct types."""
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
