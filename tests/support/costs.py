"""What whole programs cost, to compare with XLA's analysis."""

from __future__ import annotations

from dataclasses import replace

from opcast.features.cost.flops import Cost, op_cost
from opcast.features.ir.program import Op, Program


def program_cost(program: Program, *, loops: bool = True) -> Cost:
    """Sum what the ops of a program's entry cost.

    Args:
        program: The program.
        loops: Whether loops count as often as they run; XLA counts them once.
    """
    if not loops:
        program = replace(
            program,
            computations={
                name: replace(own, ops=list(map(_once, own.ops)))
                for name, own in program.computations.items()
            },
        )
    entry = program.entry_computation
    costs = [op_cost(op, entry, program) for op in entry.ops]
    names = ("flops", "transcendentals", "bytes_in", "bytes_out")
    return Cost(*(sum(getattr(cost, name) for cost in costs) for name in names))


def _once(op: Op) -> Op:
    return replace(op, attrs={k: v for k, v in op.attrs.items() if k != "trip_count"})
