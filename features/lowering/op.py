"""Lowering without a compiler: every op of the program is a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.program import Program
from ..ir.reader import SourceProgram
from ..kernels.extract import extract_kernels
from ..kernels.kernel import Kernel, LoweredProgram
from ..kernels.memory import peak_memory
from .work_check import uncosted_notes


def lower_op(source: SourceProgram) -> LoweredProgram:
    """List a program's ops as kernels.

    Functions are inlined where they are called, loops multiply, scalar regions (reducers,
    comparators) belong to their op, and constants and reshapes cost nothing.

    Args:
        source: StableHLO or HLO.

    Raises:
        ProgramError: The program is malformed.
    """
    program = source.program
    kernels, notes = extract_kernels(program)
    notes += [*whole_notes(program, kernels), *uncosted_notes(kernels)]
    return LoweredProgram(
        kernels=kernels,
        lowering="op",
        target="any",
        peak_memory_bytes=peak_memory(program),
        memory_source="liveness",
        notes=notes,
        module=program,
    )


def whole_notes(program: Program, kernels: Sequence[Kernel]) -> list[str]:
    """Note that only a compiler would partition the program, if that is so."""
    if program.num_partitions <= 1 or any(k.kind == "collective" for k in kernels):
        return []
    return [
        f"the program is to be partitioned over {program.num_partitions} devices, "
        "but without a compiler it is counted whole"
    ]
