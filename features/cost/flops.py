"""FLOPs, transcendentals and bytes of ops, kernels and programs, by XLA's rules.

The rules are the same for StableHLO and HLO. XLA counts one FLOP per element of an elementwise
result of any type; exp, log, sin and similar count as transcendentals instead. Data movement counts
as zero. The rules were determined by experiments with XLA's cost analysis and deviate from it on
purpose in six places: FFTs cost ``5 N log2 N``, half if real (XLA: 8), triangular solves ``n² m``
(XLA: twice that), top-k and known library calls are not free, and products count the real products
that they consist of: four if they are complex, and the passes of an algorithm such as
``dot_bf16_bf16_f32_x6`` (XLA: one). Long running sums cost as much as a tree of partial sums (XLA:
every window from scratch, which none of its compilers runs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ..ir.op_table import OPS, by_op
from ..ir.precision import arithmetic
from ..ir.program import Computation, Op, Program, TensorType, WindowDim
from .bytes import FREE, fusion_bytes, op_bytes
from .convolution import conv_flops
from .library_calls import custom_call_flops, fft_flops, is_annotation, top_k_flops

#: Elements of a scan that one thread computes from scratch per result; longer ones become trees
#: (ReduceWindowRewriter's base length); on a TPU as many as a register has lanes.
SCAN, TPU_SCAN = 16, 128

Work = tuple[float, float]
_NONE: Work = (0.0, 0.0)

#: FLOPs and transcendentals per element.
_PER_ELEMENT: dict[str, Work] = {
    name: (spec.flops, spec.transcendentals) for name, spec in OPS.items() if spec.flops is not None
}
#: The most common ops, checked first. Ops in no table count the same.
_ONE_FLOP = frozenset(name for name, work in _PER_ELEMENT.items() if work == (1.0, 0.0))
#: Ops that compute nothing.
NO_FLOPS = FREE | {name for name, work in _PER_ELEMENT.items() if work == _NONE}
#: Ops whose work is that of the computations they call.
CONTROL = frozenset(("fusion", "call", "while", "conditional", "async-start"))


def op_work(op: Op, comp: Computation, program: Program) -> Work:
    """Count the FLOPs and transcendentals of one execution of an op.

    Args:
        op: An op; for fusions, calls and control flow the called computations are counted, those
            of a loop once per iteration (once if the trip count is unknown).
        comp: The computation that contains it.
        program: The program with the called computations.
    """
    opcode = op.opcode
    # The most common ops first: this function runs for every op of every kernel.
    if opcode in _ONE_FLOP:
        return float(op.results[0].size), 0.0
    if opcode in NO_FLOPS:
        return _NONE
    each = _PER_ELEMENT.get(opcode)
    if each is not None:
        return _times(op.results[0].size, each)
    rule = _RULES.get(opcode)
    if rule is not None:
        return rule(op, comp, program)
    if opcode in CONTROL:
        return _control(op, program)
    # Shardings and other annotations of dialects cost nothing; the end of an asynchronous pair is
    # counted at its start.
    if opcode.endswith("-done") or opcode.startswith(("sdy.", "mhlo.")) or not op.results:
        return _NONE
    if opcode.endswith("-start"):
        return _start(op, comp, program)
    return float(op.results[0].size), 0.0


def computation_work(comp: Computation, program: Program) -> Work:
    """Sum :func:`op_work` over a computation."""
    flops = transcendentals = 0.0
    for op in comp.ops:
        if op.opcode in _ONE_FLOP:
            flops += op.results[0].size
        elif op.opcode not in NO_FLOPS:
            more, extra = op_work(op, comp, program)
            flops += more
            transcendentals += extra
    return flops, transcendentals


def _control(op: Op, program: Program) -> Work:
    inside = [computation_work(program.computations[n], program) for n in op.called]
    return of_called(op, inside)


def of_called(op: Op, inside: Sequence[Work]) -> Work:
    """Combine two figures of each computation that an op calls into those of the op.

    Args:
        op: A loop, branch, call, fusion or asynchronous start.
        inside: FLOPs and transcendentals, or bytes read and written, by called computation.
    """
    if not inside:
        return _NONE
    first, second = zip(*inside, strict=True)
    if op.opcode == "conditional":
        # Separately: the branch with the most FLOPs may not be the one that moves the most bytes.
        return max(first), max(second)
    # Body and condition count equally, without the final test of the condition.
    times = trip_count(op) if op.opcode == "while" else 1
    return times * sum(first), times * sum(second)


def trip_count(op: Op) -> int:
    """Return how often a ``while`` runs; 1 if unknown."""
    count = op.attrs.get("trip_count")
    return 1 if count is None else int(count)


def _called(op: Op, program: Program, position: int = 0) -> Work:
    """Count the work of one application of a called computation; one FLOP if there is none."""
    if position >= len(op.called):
        return 1.0, 0.0
    return computation_work(program.computations[op.called[position]], program)


def _times(count: float, work: Work) -> Work:
    count = max(0.0, float(count))
    return count * work[0], count * work[1]


def _operand_size(op: Op, comp: Computation, position: int = 0) -> int:
    return comp.ops[op.operands[position]].results[0].size


def _dot(op: Op, comp: Computation, program: Program) -> Work:
    """Count ``2 · result elements · contracted elements`` per real product that it consists of."""
    lhs = comp.ops[op.operands[0]].results[0]
    depth = prod([lhs.shape[d] for d in op.attrs.get("lhs_contracting_dims", ())])
    return 2.0 * op.results[0].size * depth * arithmetic(lhs.dtype, op.attrs).times, 0.0


def _ragged_dot(op: Op, comp: Computation, program: Program) -> Work:
    """Count the rows of each group: if rows are contracted, each group sums only its own."""
    flops = _dot(op, comp, program)[0]
    contracted = op.attrs.get("lhs_contracting_dims", ())
    if not set(op.attrs.get("lhs_ragged_dims", ())) & set(contracted):
        return flops, 0.0
    # The result has a leading dimension of groups.
    return flops / max(op.results[0].shape[0], 1), 0.0


def _convolution(op: Op, comp: Computation, program: Program) -> Work:
    attrs = op.attrs
    lhs, rhs = (comp.ops[i].results[0] for i in op.operands[:2])
    groups = int(attrs.get("batch_group_count", 1))
    window, labels = attrs.get("window", ()), attrs["dim_labels"]
    flops = conv_flops(lhs, rhs, op.results[0], window, labels, groups)
    return flops * arithmetic(lhs.dtype, attrs).times, 0.0


def _reduce(op: Op, comp: Computation, program: Program) -> Work:
    # n elements take n - 1 applications; XLA counts a reduction with an initial value the same.
    steps = _operand_size(op, comp) - op.results[0].size
    return _times(steps, _called(op, program))


def _window_size(op: Op) -> int:
    return prod([dim.size for dim in op.attrs.get("window", ())])


def _reduce_window(op: Op, comp: Computation, program: Program) -> Work:
    # Padding counts as if it were data: unlike for convolutions, XLA does not subtract it.
    taps = window_taps(op, comp.ops[op.operands[0]].results[0])
    return _times(op.results[0].size * (taps - 1), _called(op, program))


def window_taps(op: Op, operand: TensorType) -> int:
    """Return the number of elements that a ``reduce-window`` combines per result.

    A running sum longer than compilers compute at once is a tree of parts of 16: 15 steps per part,
    one for the preceding parts, and both again for a sixteenth of the elements.
    """
    taps = _window_size(op)
    scan = taps > TPU_SCAN and scan_dimension(op.attrs["window"], operand) is not None
    return SCAN + 2 if scan else taps


def scan_dimension(window: Sequence[WindowDim], operand: TensorType) -> int | None:
    """Return the dimension along which a window is a prefix or suffix scan, or ``None``."""
    wide = [d for d, own in enumerate(window) if own != WindowDim(1)]
    if len(wide) != 1:
        return None
    length = operand.shape[wide[0]]
    ends = (WindowDim(length, pad_low=length - 1), WindowDim(length, pad_high=length - 1))
    return wide[0] if window[wide[0]] in ends else None


def _select_and_scatter(op: Op, comp: Computation, program: Program) -> Work:
    sources = _operand_size(op, comp, 1)
    select = _times(sources * (_window_size(op) - 1), _called(op, program))
    scatter = _times(sources, _called(op, program, 1))
    return select[0] + scatter[0], select[1] + scatter[1]


def _scatter(op: Op, comp: Computation, program: Program) -> Work:
    # Operands are n arrays, the indices, and n updates.
    first_update = (len(op.operands) - 1) // 2 + 1
    return _times(_operand_size(op, comp, first_update), _called(op, program))


def _map(op: Op, comp: Computation, program: Program) -> Work:
    return _times(op.results[0].size, _called(op, program))


def _sort(op: Op, comp: Computation, program: Program) -> Work:
    """Return ``n · ⌈log2 n⌉`` for all ``n`` elements of the first operand, as XLA counts."""
    n = _operand_size(op, comp)
    # ⌈log2 n⌉ of an integer without floating point.
    return float(n * max(0, n - 1).bit_length()), 0.0


def _random_bits(op: Op, comp: Computation, program: Program) -> Work:
    return 0.0, float(sum(t.size for t in op.results))


def _all_reduce(op: Op, comp: Computation, program: Program) -> Work:
    return float(sum(t.size for t in op.results)), 0.0


def _cholesky(op: Op, comp: Computation, program: Program) -> Work:
    """Return ``n³ / 3`` per matrix (Golub and Van Loan, Matrix Computations, 4.2)."""
    result = op.results[0]
    # size is batch · n²; the last dimension is n.
    return result.size * result.shape[-1] / 3 * arithmetic(result.dtype, {}).times, 0.0


def _triangular_solve(op: Op, comp: Computation, program: Program) -> Work:
    """Return ``n² · m`` per solve with ``m`` right-hand sides (Golub and Van Loan, 3.1)."""
    result, matrix = op.results[0], comp.ops[op.operands[0]].results[0]
    return float(result.size * matrix.shape[-1] * arithmetic(result.dtype, {}).times), 0.0


def _fft(op: Op, comp: Computation, program: Program) -> Work:
    kind = str(op.attrs.get("fft_type", "FFT"))
    lengths = op.attrs.get("fft_length", ())
    lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    source = comp.ops[op.operands[0]].results[0]
    return fft_flops(source, op.results[0], lengths, real="R" in kind), 0.0


def _top_k(op: Op, comp: Computation, program: Program) -> Work:
    return top_k_flops(comp.ops[op.operands[0]].results[0], op.results[0]), 0.0


def _custom_call(op: Op, comp: Computation, program: Program) -> Work:
    return custom_call_flops(
        op, [comp.ops[i].results[0] for i in op.operands if comp.ops[i].results]
    )


def _start(op: Op, comp: Computation, program: Program) -> Work:
    """Count the work of ``X-start``, which represents an asynchronous ``X``."""
    base = op.opcode.removesuffix("-start")
    if base == "all-reduce":
        return _all_reduce(op, comp, program)
    if op.called:
        return _called(op, program)
    # A start's tuple repeats its operands before the results.
    results = op.results[len(op.operands) :] or op.results
    return op_work(Op(op.name, base, op.operands, results, op.attrs), comp, program)


_Rule = Callable[[Op, Computation, Program], Work]
_RULES: dict[str, _Rule] = by_op(
    {
        "dot": _dot,
        "convolution": _convolution,
        "reduce": _reduce,
        "reduce-window": _reduce_window,
        "scatter": _scatter,
        "map": _map,
        "select-and-scatter": _select_and_scatter,
        "sort": _sort,
        "all-reduce": _all_reduce,
        "rng-bit-generator": _random_bits,
        "cholesky": _cholesky,
        "fft": _fft,
        "triangular-solve": _triangular_solve,
        "topk": _top_k,
        "ragged-dot": _ragged_dot,
        "custom-call": _custom_call,
    }
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one execution.

    Attributes:
        flops: Floating-point (and integer) operations; a multiply-add counts as two.
        transcendentals: exp, log, tanh and similar, which XLA counts separately.
        bytes_in: Bytes read, only what is touched.
        bytes_out: Bytes written, only what is touched.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.bytes_in + self.bytes_out


def op_cost(op: Op, comp: Computation, program: Program) -> Cost:
    """Compute the cost of one op, including everything that it calls.

    Args:
        op: An op.
        comp: The computation that contains it.
        program: The program with the called computations.

    Returns:
        FLOPs, transcendentals and touched bytes. Body and condition of a ``while`` count once per
        iteration, once if the trip count is unknown. For a ``conditional``, each of the four is the
        maximum over the branches, as in XLA; a fusion has the bytes of its operands and results.
    """
    return Cost(*op_work(op, comp, program), *_traffic(op, comp, program))


def _traffic(op: Op, comp: Computation, program: Program) -> tuple[float, float]:
    """Count the bytes that an op reads and writes, including what it calls."""
    # Inside a fusion values stay in registers: only its boundary has traffic.
    if op.opcode == "fusion" and op.called:
        return fusion_bytes(program.computations[op.called[0]], program.computations)
    if op.opcode in CONTROL and op.called:
        called = (program.computations[name] for name in op.called)
        return of_called(op, [_computation_traffic(c, program) for c in called])
    if op.opcode == "custom-call" and is_annotation(op):
        return 0.0, 0.0
    return op_bytes(op, comp)


def _computation_traffic(comp: Computation, program: Program) -> tuple[float, float]:
    moved = [_traffic(op, comp, program) for op in comp.ops if op.opcode not in FREE]
    return sum(m[0] for m in moved), sum(m[1] for m in moved)


def kernel_cost(body: Program) -> Cost:
    """Compute the cost of one execution of a kernel.

    Args:
        body: A module whose entry has parameters and one instruction, the root.
    """
    entry = body.entry_computation
    return op_cost(entry.root_op, entry, body)
