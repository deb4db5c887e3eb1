"""Lowering without a compiler: every op of the program is a kernel."""

from __future__ import annotations

from .kernel import LoweredProgram
from .kernels import extract_kernels
from .liveness import peak_memory
from .reader import SourceProgram


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
    if program.num_partitions > 1 and not any(k.kind == "collective" for k in kernels):
        notes.append(
            f"the program is to be partitioned over {program.num_partitions} devices, "
            "but without a compiler it is counted whole"
        )
    return LoweredProgram(
        kernels=kernels,
        lowering="op",
        target="any",
        peak_memory_bytes=peak_memory(program),
        memory_source="liveness",
        notes=notes,
        module=program,
    )
