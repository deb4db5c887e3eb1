"""Classes of ops by cost, and facts of types, for the rows and graphs of kernels."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.dtypes import DTYPE_BITS, NONE, dtype_family
from ..ir.program import BOOKKEEPING, TensorType


class TypeFacts(NamedTuple):
    """What rows and graphs need to know of a type.

    Attributes:
        size: Elements.
        nbytes: Bytes.
        minor: Dimension that is contiguous in memory, those of size one skipped; -1 for scalars.
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
        weight: Work per element, in units of a vector addition (rough throughput ratios of vector
            units and vector math libraries; the learned part corrects them).
    """

    column: str
    work: str
    weight: float


# Weights are those of the class docstring. Their order of magnitude is what counts: 8 for what
# hardware approximates and refines (sqrt, divide), 16 to 20 for a polynomial, 40 for several of
# them or a range reduction. Engineering estimates; not fitted.
_GROUPS: tuple[tuple[str, str, float, str], ...] = (
    (
        "n_elementwise",
        "work_basic",
        1.0,
        "add subtract multiply maximum minimum negate abs sign "
        "real imag complex is-finite copy-done stochastic-convert reduce-precision",
    ),
    ("n_elementwise", "work_basic", 2.0, "floor ceil round-nearest-afz round-nearest-even"),
    ("n_transcendental", "work_transcendental", 8.0, "sqrt rsqrt"),
    ("n_transcendental", "work_transcendental", 16.0, "exponential log cbrt"),
    (
        "n_transcendental",
        "work_transcendental",
        20.0,
        "tanh logistic erf exponential-minus-one log-plus-one",
    ),
    (
        "n_transcendental",
        "work_transcendental",
        40.0,
        "sine cosine tan power atan2 chlo.erf "
        "chlo.erf_inv chlo.lgamma chlo.digamma chlo.tan chlo.sinh chlo.cosh chlo.asin chlo.acos "
        "chlo.atan acos acosh asin asinh atanh cosh sinh",
    ),
    ("n_divide", "work_divide", 8.0, "divide"),
    ("n_divide", "work_divide", 24.0, "remainder"),
    (
        "n_logic",
        "work_basic",
        1.0,
        "and or xor not shift-left shift-right-arithmetic shift-right-logical",
    ),
    ("n_logic", "work_basic", 4.0, "popcnt count-leading-zeros"),
    ("n_select", "work_select", 1.0, "compare select"),
    ("n_select", "work_select", 2.0, "clamp"),
    ("n_convert", "work_convert", 2.0, "convert bitcast-convert"),
    # Broadcasts and slices mostly fold into the addressing of what reads them; gathers and scatters
    # compute an address for each element, scatters also combine.
    ("n_broadcast", "work_move", 0.25, "broadcast"),
    ("n_reduce", "work_reduce", 1.0, "reduce"),
    ("n_reduce_window", "work_reduce", 2.0, "reduce-window select-and-scatter"),
    ("n_transpose", "work_move", 1.0, "transpose reverse"),
    ("n_gather", "work_move", 4.0, "gather"),
    ("n_scatter", "work_move", 8.0, "scatter"),
    ("n_slice", "work_move", 0.5, "slice"),
    ("n_dynamic_slice", "work_move", 0.5, "dynamic-slice"),
    ("n_update_slice", "work_move", 1.0, "dynamic-update-slice"),
    ("n_concatenate", "work_move", 2.0, "concatenate"),
    ("n_pad", "work_move", 2.0, "pad"),
    ("n_random", "work_random", 20.0, "rng rng-bit-generator rng-get-and-update-state"),
    ("n_sort", "work_select", 4.0, "sort topk"),
    ("n_iota", "work_move", 0.5, "iota"),
    ("n_copy", "work_move", 1.0, "copy copy-start"),
    # No work of their own: reshapes are views, products count as FLOPs of the matrix unit.
    ("n_reshape", "work_move", 0.0, "reshape bitcast"),
    ("n_dot", "work_basic", 0.0, "dot ragged-dot scaled-dot"),
    ("n_convolution", "work_basic", 0.0, "convolution"),
)

OP_CLASSES: dict[str, OpClass] = {
    name: OpClass(column, work, weight)
    for column, work, weight, names in _GROUPS
    for name in names.split()
}
#: Unknown ops: counted, at no work that could be guessed.
OTHER = OpClass("n_other", "work_move", 0.0)
#: Ops without code. Views (``bitcast``, ``reshape``) are counted, at no weight.
FREE = BOOKKEEPING | {"opt-barrier"}
