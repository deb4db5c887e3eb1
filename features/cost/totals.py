"""FLOPs and bytes of ops, kernels and programs, the same for StableHLO and for HLO."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Computation, Op, Program
from .bytes import FREE, fusion_bytes, op_bytes
from .flops import CONTROL, computation_work, of_called, op_work
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
    return Cost(*op_work(op, comp, program, loops), *_traffic(op, comp, program, loops))


def _traffic(op: Op, comp: Computation, program: Program, loops: bool) -> tuple[float, float]:
    """Count the bytes that an op reads and writes, those of what it calls included."""
    # Inside a fusion values stay in registers: only its boundary has traffic.
    if op.opcode == "fusion" and op.called:
        return fusion_bytes(program.computations[op.called[0]], program.computations)
    if op.opcode in CONTROL and op.called:
        called = (program.computations[name] for name in op.called)
        return of_called(op, [_computation_traffic(c, program, loops) for c in called], loops)
    if op.opcode == "custom-call" and is_annotation(op):
        return 0.0, 0.0
    return op_bytes(op, comp)


def _computation_traffic(comp: Computation, program: Program, loops: bool) -> tuple[float, float]:
    moved = [_traffic(op, comp, program, loops) for op in comp.ops if op.opcode not in FREE]
    return sum(m[0] for m in moved), sum(m[1] for m in moved)


def program_cost(program: Program, *, loops: bool = True) -> Cost:
    """Compute the cost of one run of a program.

    Args:
        program: From StableHLO (every op moves its operands and results) or HLO (fusions move
            only their operands and results).
        loops: Whether loop bodies count as often as they run, as in :func:`op_cost`. XLA's own
            cost analysis counts them once.
    """
    entry = program.entry_computation
    work = computation_work(entry, program, loops)
    return Cost(*work, *_computation_traffic(entry, program, loops))


def kernel_cost(body: Program) -> Cost:
    """Compute the cost of one execution of a kernel.

    Args:
        body: A module with one instruction, the root, beside the parameters of its entry.
    """
    entry = body.entry_computation
    return op_cost(entry.root_op, entry, body)
