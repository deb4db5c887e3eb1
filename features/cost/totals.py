"""FLOPs and bytes of ops, kernels and programs, the same for StableHLO and for HLO."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from ..ir.program import Computation, Op, Program
from .bytes import FREE, fusion_bytes, op_bytes
from .flops import computation_work, op_work, trip_count
from .library_calls import is_annotation


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one execution.

    Attributes:
        flops: Floating-point (and integer) operations; a multiply-add counts as two.
        transcendentals: exp, log, tanh and their like, which XLA counts apart.
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

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
        )

    def scale(self, factor: float) -> Cost:
        """Return the cost of ``factor`` executions."""
        return Cost(
            factor * self.flops,
            factor * self.transcendentals,
            factor * self.bytes_in,
            factor * self.bytes_out,
        )


_ZERO = Cost()


def op_cost(op: Op, comp: Computation, program: Program, *, loops: bool = True) -> Cost:
    """Compute the cost of one op, everything that it calls included.

    Args:
        op: Any op.
        comp: The computation that holds it.
        program: The program that holds the called computations.
        loops: Whether the body of a ``while`` counts as often as it runs; otherwise, and where
            the trip count is unknown, it counts once. Its condition counts as often.

    Returns:
        FLOPs, transcendentals and touched bytes. For a ``conditional``, each of the four comes from
        the branch with most of it, as XLA counts; a fusion has the bytes of operands and results.
    """
    opcode = op.opcode
    if opcode in FREE:
        return _ZERO
    # Inside a fusion values stay in registers: only its boundary has traffic.
    if opcode == "fusion" and op.called:
        inner = program.computations[op.called[0]]
        moved = fusion_bytes(inner, program.computations)
        return Cost(*computation_work(inner, program, loops), *moved)
    if opcode in _CONTROL and op.called:
        return _control_cost(op, program, loops)
    if opcode == "custom-call" and is_annotation(op):
        return _ZERO
    return Cost(*op_work(op, comp, program, loops), *op_bytes(op, comp))


#: Ops whose work is the work of the computations they call.
_CONTROL = frozenset(("call", "while", "conditional", "async-start"))


def _control_cost(op: Op, program: Program, loops: bool) -> Cost:
    inside = [_computation_cost(program.computations[n], program, loops) for n in op.called]
    if op.opcode == "conditional":
        # Element by element: the costliest branch for FLOPs need not be the one that moves most.
        return Cost(*map(max, *(astuple(cost) for cost in inside), (0.0,) * 4))
    # Condition and body together; the condition's last test is left out, as it hardly costs.
    once = sum(inside, _ZERO)
    return once.scale(trip_count(op)) if loops and op.opcode == "while" else once


def _computation_cost(comp: Computation, program: Program, loops: bool) -> Cost:
    total = _ZERO
    for op in comp.ops:
        if op.opcode not in FREE:
            total += op_cost(op, comp, program, loops=loops)
    return total


def program_cost(program: Program, *, loops: bool = True) -> Cost:
    """Compute the cost of one run of a program.

    Args:
        program: From StableHLO (every op moves its operands and results) or HLO (fusions move
            only their operands and results).
        loops: Whether loop bodies count as often as they run, as in :func:`op_cost`. XLA's own
            cost analysis counts them once.
    """
    return _computation_cost(program.entry_computation, program, loops)


def kernel_cost(body: Program) -> Cost:
    """Compute the cost of one execution of a kernel.

    Args:
        body: A module with one instruction, the root, beside the parameters of its entry.
    """
    entry = body.entry_computation
    return op_cost(entry.root_op, entry, body)
