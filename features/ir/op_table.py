"""What each op is, by HLO opcode: class, kind, FLOPs, operands, and how it reads and fuses.

Costs, kinds, checks, plans and fusion rules take their own lists from it, so that a new op is one
entry here. Where its attributes, FLOPs, features or loop nest do not follow from its result, it is
``like`` an op that has such rules, or has rules of its own (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

from ...common.files import own_data

T = TypeVar("T")
#: Lists of names that have no column in the table.
NAMES = own_data("features/ir/op_names.toml")


class OpSpec(NamedTuple):
    """Facts of an op.

    Attributes:
        column: Column of the feature table that counts such ops; empty: ``n_other``.
        work: Column that adds up their work.
        weight: Work per element, in units of a vector addition (rough throughput ratios of vector
            units and vector math libraries; the learned part corrects them).
        kind: Kind of a kernel of such an op; empty for arithmetic.
        flops: FLOPs per element of the first result, as XLA counts them; ``None`` if a rule in
            ``features/cost/flops.py`` counts them.
        transcendentals: Transcendentals per element of the first result.
        operands: Fewest operands.
        called: Fewest computations that it calls.
        reads: What part of its operands is read for a part of its result: the same ``share``; as
            many elements of the first as the ``result`` has; all but the first, which it
            ``update``s in place; ``all`` of each; or a ``grown`` share, since the result is larger.
        elementwise: Whether operands and result have one shape, and each element depends on one
            element of each operand.
        placed: Whether each element is read from a computed place, so that the op fuses like
            elementwise ones.
        expensive: Whether it is too costly to repeat for each element of an overlapping window,
            after XLA's IsExpensive (instruction_fusion.cc).
        cycles: Cycles of one element, roughly. XLA measures such figures for each device
            (HloOpProfiles); these are engineering estimates in their order of magnitude, tuned so
            that expensive producers are recomputed about as often as by the compiler
            (docs/fused.md).
        in_place: Whether its result may take over the buffer of an operand that nothing reads
            afterwards, as in XLA's buffer assignment.
        root: What the op as a fusion's root says about the emitter that a compiler chooses;
            empty for arithmetic.
        like: Op whose rules it follows where it has none of its own (:func:`by_op`): attributes,
            FLOPs, details of a row, dimensions that a plan may cut; graph networks, whose list of
            opcodes is fixed, see that op instead.
        stablehlo: StableHLO names, separated by spaces, that are not the opcode with underscores;
            names of CHLO with their dialect.
    """

    column: str = ""
    work: str = "work_move"
    weight: float = 0.0
    kind: str = ""
    flops: float | None = 1.0
    transcendentals: float = 0.0
    operands: int = 0
    called: int = 0
    reads: Literal["share", "result", "update", "all", "grown"] = "share"
    elementwise: bool = False
    placed: bool = False
    expensive: bool = False
    cycles: float = 3.0
    in_place: bool = True
    root: str = ""
    like: str = ""
    stablehlo: str = ""


#: Ops that no rule but the default applies to.
_OTHER = OpSpec()
_NOTHING = OpSpec(flops=0.0)
_BASIC = OpSpec("n_elementwise", "work_basic", 1.0, operands=1, elementwise=True)
_LOGIC = _BASIC._replace(column="n_logic")
_SELECT = _BASIC._replace(column="n_select", work="work_select")
_DIVIDE = _BASIC._replace(column="n_divide", work="work_divide", operands=2)
_CONVERT = _BASIC._replace(column="n_convert", work="work_convert", weight=2.0)
# Weights of transcendentals and divisions are 8 for what hardware approximates and refines (sqrt,
# divide), 16 to 20 for a polynomial, 40 for several of them or a range reduction. Only their order
# of magnitude counts: engineering estimates, not fitted.
_MATH = _BASIC._replace(
    column="n_transcendental",
    work="work_transcendental",
    weight=40.0,
    flops=0.0,
    transcendentals=1.0,
)
_FAST, _POLYNOMIAL = _MATH._replace(weight=8.0), _MATH._replace(weight=16.0, expensive=True)
_LONG_POLYNOMIAL = _POLYNOMIAL._replace(weight=20.0)
# Of dialects and of newer HLO, which the fusion rules find by their prefix or leave alone.
_CHLO = _MATH._replace(operands=0, elementwise=False)
_SPECIAL = OpSpec(work="work_transcendental")
_COPY = OpSpec("n_copy", "work_move", 1.0, "copy", 0.0, in_place=False, root="move")
# Broadcasts and slices mostly fold into the addressing of what reads them; gathers and scatters
# compute an address for each element, scatters also combine.
_MOVE = _COPY._replace(column="n_transpose", operands=1, placed=True)
_BROADCAST = _MOVE._replace(column="n_broadcast", weight=0.25, reads="grown", cycles=0.0)
_INDEXED = _MOVE._replace(kind="gather_scatter")
_UPDATE = _INDEXED._replace(reads="update", placed=False, in_place=True, root="update")
_REDUCE = OpSpec(
    "n_reduce", "work_reduce", 1.0, "reduce", None, operands=2, called=1, in_place=False
)
_WINDOW = _REDUCE._replace(column="n_reduce_window", weight=2.0, reads="all")
# Products count as FLOPs of the matrix unit and have no other work.
_DOT = OpSpec("n_dot", "work_basic", 0.0, "gemm", None, reads="all", in_place=False)
_RANDOM = OpSpec("n_random", "work_random", 20.0, flops=0.0)
_SORT = OpSpec("n_sort", "work_select", 4.0, "sort", None, reads="all")
_LIBRARY = OpSpec(kind="custom_call", flops=None, reads="all", in_place=False)
_CALL = OpSpec(flops=None, called=1, reads="all")
_COLLECTIVE = OpSpec(flops=0.0, operands=1, like="all-gather")

#: Each row is what the named ops have in common.
_ROWS: tuple[tuple[OpSpec, str], ...] = (
    (_BASIC, "negate abs sign real imag is-finite reduce-precision"),
    (_BASIC._replace(operands=2), "add subtract multiply maximum minimum complex"),
    (_BASIC._replace(operands=2), "stochastic-convert"),
    (_BASIC._replace(weight=2.0), "floor ceil round-nearest-afz round-nearest-even"),
    (_LOGIC, "not"),
    (_LOGIC._replace(weight=4.0), "popcnt count-leading-zeros"),
    (_LOGIC._replace(operands=2), "and or xor"),
    (_LOGIC._replace(operands=2), "shift-left shift-right-arithmetic shift-right-logical"),
    (_SELECT._replace(operands=2), "compare"),
    (_SELECT._replace(operands=3), "select"),
    (_SELECT._replace(operands=3, weight=2.0), "clamp"),
    (_DIVIDE._replace(weight=8.0, expensive=True, cycles=48.0), "divide"),
    (_DIVIDE._replace(weight=24.0, cycles=90.0), "remainder"),
    (_CONVERT._replace(root="convert"), "convert"),
    (_CONVERT._replace(kind="copy", cycles=0.0), "bitcast-convert"),
    (_FAST._replace(cycles=60.0), "sqrt"),
    (_FAST._replace(cycles=48.0), "rsqrt"),
    (_POLYNOMIAL._replace(cycles=72.0), "exponential"),
    (_POLYNOMIAL._replace(cycles=108.0), "log"),
    (_POLYNOMIAL._replace(cycles=120.0, expensive=False), "cbrt"),
    (_LONG_POLYNOMIAL._replace(cycles=108.0), "tanh"),
    (_LONG_POLYNOMIAL._replace(cycles=120.0), "logistic erf exponential-minus-one"),
    (_LONG_POLYNOMIAL._replace(cycles=144.0), "log-plus-one"),
    (_MATH._replace(cycles=200.0, expensive=True), "sine cosine"),
    (_MATH._replace(cycles=300.0), "tan"),
    (_MATH._replace(operands=2, cycles=180.0), "atan2"),
    (_MATH._replace(operands=2, cycles=3000.0, expensive=True), "power"),
    (_MATH, "acos acosh asin asinh atanh cosh sinh"),
    (_CHLO, "chlo.atan chlo.erf chlo.tan"),
    # FLOPs and transcendentals of one element of the following: what XLA counts after it expands
    # the op for f32, mostly polynomials. Found with XLA's cost analysis, as the other rules. Their
    # weights are those of the ops that XLA's GPU compiler expands them to (JAX 0.10), added up.
    (_CHLO._replace(flops=3.0, transcendentals=2.0), "chlo.acos chlo.cosh"),
    (_CHLO._replace(flops=5.0, transcendentals=2.0), "chlo.asin"),
    (_CHLO._replace(flops=10.0, transcendentals=3.0), "chlo.sinh"),
    (_CHLO._replace(flops=37.0, transcendentals=2.0, weight=65.0), "chlo.erf_inv"),
    (_CHLO._replace(flops=53.0, transcendentals=4.0, weight=208.0), "chlo.lgamma"),
    (_CHLO._replace(flops=73.0, transcendentals=3.0, weight=308.0), "chlo.digamma"),
    (OpSpec(flops=0.0, transcendentals=1.0), "atan"),
    (_SPECIAL._replace(weight=40.0, flops=7.0, transcendentals=4.0), "chlo.acosh"),
    (_SPECIAL._replace(weight=40.0, flops=11.0, transcendentals=3.0), "chlo.asinh"),
    (_SPECIAL._replace(weight=40.0, flops=6.0, transcendentals=2.0), "chlo.atanh"),
    (_SPECIAL._replace(weight=98.0, flops=83.0, transcendentals=1.0), "chlo.bessel_i1e"),
    (_SPECIAL._replace(weight=90.0, flops=62.0, transcendentals=1.0), "chlo.erfc"),
    (_SPECIAL._replace(weight=1155.0, flops=260.0, transcendentals=19.0), "chlo.polygamma"),
    (_SPECIAL._replace(weight=593.0, flops=121.0, transcendentals=11.0), "chlo.zeta"),
    (OpSpec(flops=4.0), "chlo.conj"),
    (OpSpec(flops=2.0), "chlo.is_inf"),
    (OpSpec(weight=24.0, flops=20.0), "chlo.next_after"),
    (_OTHER, "chlo.is_neg_inf chlo.is_pos_inf chlo.square"),
    (_NOTHING, "chlo.constant chlo.constant_like"),
    (_COPY._replace(operands=1), "copy"),
    (_COPY._replace(root="", like="copy"), "copy-start"),
    (_COPY._replace(column="n_elementwise", work="work_basic", root=""), "copy-done"),
    (_MOVE._replace(cycles=0.0), "transpose"),
    (_MOVE._replace(cycles=1.0, root=""), "reverse"),
    (_BROADCAST._replace(stablehlo="broadcast_in_dim"), "broadcast"),
    (_MOVE._replace(column="n_slice", weight=0.5, reads="result", cycles=0.0), "slice"),
    (_MOVE._replace(column="n_concatenate", weight=2.0, cycles=2.0), "concatenate"),
    (_MOVE._replace(column="n_pad", weight=2.0, operands=2, reads="grown"), "pad"),
    (_MOVE._replace(column="n_iota", weight=0.5, operands=0, cycles=1.0, root=""), "iota"),
    (
        _INDEXED._replace(column="n_dynamic_slice", weight=0.5, reads="result", cycles=2.0),
        "dynamic-slice",
    ),
    (
        _INDEXED._replace(column="n_gather", weight=4.0, operands=2, reads="result", cycles=4.0),
        "gather",
    ),
    (_UPDATE._replace(column="n_update_slice", operands=2), "dynamic-update-slice"),
    (
        _UPDATE._replace(column="n_scatter", weight=8.0, flops=None, operands=3, called=1),
        "scatter",
    ),
    (OpSpec(kind="copy", flops=0.0), "dynamic-reshape"),
    (OpSpec(kind="copy"), "real-dynamic-slice"),
    # Views have no work of their own.
    (OpSpec("n_reshape", kind="copy", flops=0.0, operands=1, cycles=0.0), "reshape"),
    (OpSpec("n_reshape", flops=0.0, operands=1), "bitcast"),
    (_REDUCE._replace(expensive=True, root="reduce"), "reduce"),
    (_WINDOW._replace(expensive=True), "reduce-window"),
    (_WINDOW._replace(operands=3, called=2, like="reduce-window"), "select-and-scatter"),
    # XLA gives batch-norm ops no FLOPs: it expands them first.
    (OpSpec(kind="reduce", flops=0.0), "batch-norm-training batch-norm-grad"),
    (_NOTHING, "batch-norm-inference"),
    (_DOT._replace(operands=2, stablehlo="dot_general"), "dot"),
    (_DOT._replace(like="dot"), "scaled-dot"),
    (_DOT._replace(operands=2, like="dot", stablehlo="chlo.ragged_dot"), "ragged-dot"),
    (_DOT._replace(column="n_convolution", kind="conv", operands=2), "convolution"),
    (_SORT._replace(operands=1, called=1), "sort"),
    (_SORT._replace(operands=1, stablehlo="chlo.top_k"), "topk"),
    (_RANDOM._replace(transcendentals=1.0, reads="all"), "rng"),
    (_RANDOM._replace(flops=None, operands=1, reads="all"), "rng-bit-generator"),
    (_RANDOM, "rng-get-and-update-state"),
    (_LIBRARY, "custom-call"),
    (_LIBRARY._replace(operands=1), "fft cholesky"),
    (_LIBRARY._replace(operands=2, like="cholesky"), "triangular-solve"),
    (OpSpec(kind="custom_call", flops=0.0, reads="all"), "infeed"),
    (OpSpec(kind="custom_call", flops=0.0), "outfeed"),
    (_CALL, "fusion"),
    (_CALL._replace(stablehlo="composite"), "call"),
    (_CALL._replace(operands=1, elementwise=True), "map"),
    (_CALL._replace(kind="control", operands=1, called=2), "while"),
    (_CALL._replace(kind="control", operands=1, like="while", stablehlo="case if"), "conditional"),
    # The additions of an all-reduce count; those of a reduce-scatter do not, as in XLA.
    (_COLLECTIVE._replace(flops=None, stablehlo="cross-replica-sum"), "all-reduce"),
    (_COLLECTIVE, "all-to-all reduce-scatter"),
    (_COLLECTIVE._replace(operands=0), "collective-broadcast"),
    (_NOTHING, "ragged-all-to-all send"),
    (_NOTHING._replace(like="send"), "recv"),
    (_NOTHING._replace(operands=1), "get-tuple-element all-gather collective-permute"),
    (_NOTHING._replace(cycles=0.0), "parameter constant"),
    (_NOTHING._replace(root="tuple"), "tuple"),
    (_NOTHING._replace(stablehlo="create_token"), "after-all"),
    (_OTHER._replace(stablehlo="optimization_barrier"), "opt-barrier"),
)
OPS: dict[str, OpSpec] = {name: spec for spec, names in _ROWS for name in names.split()}


def ops_with(has: Callable[[OpSpec], bool]) -> frozenset[str]:
    """Return the opcodes whose facts fulfil a condition."""
    return frozenset(name for name, spec in OPS.items() if has(spec))


def named(key: str) -> frozenset[str]:
    """Return a list of ``op_names.toml``."""
    return frozenset(NAMES[key])


def by_op(rules: Mapping[str, T]) -> dict[str, T]:
    """Give the ops without a rule in a table the rule of the op that they are like."""
    likened = {name: rules[s.like] for name, s in OPS.items() if s.like in rules}
    return likened | dict(rules)


#: Ops that act on each element alone, whose operands and result have one shape.
ELEMENTWISE = ops_with(lambda spec: spec.elementwise)
#: Ops that compute each element from others at computed places; they fuse like elementwise ones.
PLACED = ops_with(lambda spec: spec.placed)
#: Ops that write part of their first operand in place.
UPDATES = ops_with(lambda spec: spec.reads == "update")
