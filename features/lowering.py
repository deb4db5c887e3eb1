"""From a program to the kernels that a target runs: the one entry for all lowerings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from .cache import LoweringCache
from .device import DeviceSpec
from .errors import LoweringError
from .kernel import LoweredProgram
from .reader import TripCounts, read_program

#: Lowerings by falling fidelity.
LOWERINGS = ("xla", "op")


def lower(
    source: Any,
    lowering: str = "xla",
    *,
    cache: LoweringCache | Literal[False] | None = None,
    trip_counts: TripCounts = None,
    device: DeviceSpec | None = None,
) -> LoweredProgram:
    """Lower a program to kernels.

    Args:
        source: A :class:`SourceProgram`, or whatever :func:`read_program` takes.
        lowering: ``xla`` compiles with JAX's default backend; ``op`` makes every op a kernel.
            HLO that is optimised and scheduled already is taken as it is by ``xla``.
        cache: Cache of compiled programs; ``None`` takes the default one, ``False`` none.
        trip_counts: Trips of loops whose count cannot be found: one number for all, or by name or
            source line (``model.py:12``).
        device: What the prediction is for; another platform than the compiler's is noted.

    Returns:
        Kernels in schedule order with peak memory and notes.

    Raises:
        LoweringError: The name is unknown, or the compiler does not take the program.
        ProgramError: The program cannot be read.
    """
    if lowering not in LOWERINGS:
        raise LoweringError(
            f"unknown lowering {lowering!r}", hint=f"choose one of {', '.join(LOWERINGS)}"
        )
    program = read_program(source, trip_counts=trip_counts)
    if trip_counts is not None and program.trip_counts != trip_counts:
        program = replace(program, trip_counts=trip_counts)
    if lowering == "op":
        from .lowering_op import lower_op

        return lower_op(program)
    from .lowering_xla import lower_xla

    store = LoweringCache() if cache is None else cache or None
    lowered = lower_xla(program, store, trip_counts)
    _note_platform(lowered, device)
    return lowered


def _note_platform(lowered: LoweredProgram, device: DeviceSpec | None) -> None:
    """Say so if the kernels are those of another kind of device."""
    known = lowered.compiler.split()
    if device is None or len(known) < 3:
        return
    platform = "gpu" if known[2] in ("cuda", "rocm") else known[2]
    if platform != device.platform:
        lowered.notes.append(
            f"kernels are those of the {platform} compiler, but {device.name} is a "
            f"{device.platform}: compile there, or give its optimised HLO"
        )
