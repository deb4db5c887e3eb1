"""From a program to the kernels that a target runs: the one entry for all lowerings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from .cache import LoweringCache
from .device import DeviceSpec, device_slug
from .errors import DeviceError, LoweringError
from .kernel import LoweredProgram
from .lowering_choice import LOWERINGS as LOWERINGS
from .lowering_choice import check_lowering, choose_lowering
from .quiet import device_files
from .reader import SourceProgram, TripCounts, read_program
from .untrusted import well_formed

if TYPE_CHECKING:
    from .compile_process import CompileSettings


def lower(
    source: Any,
    lowering: str = "xla",
    *,
    cache: LoweringCache | Literal[False] | None = None,
    trip_counts: TripCounts = None,
    device: DeviceSpec | None = None,
    fallback: str = "",
    settings: CompileSettings | None = None,
) -> LoweredProgram:
    """Lower a program to kernels.

    Args:
        source: A :class:`SourceProgram`, or whatever :func:`read_program` takes.
        lowering: ``xla`` compiles with the compiler of ``device``, or JAX's default backend if that
            is the device or none is given; ``fused`` applies our own fusion rules; ``op`` makes
            every op a kernel; ``auto`` is ``xla``, or ``fused`` where the device's compiler is not
            installed. HLO that is optimised and scheduled already is taken as it is by ``xla``.
        cache: Cache of compiled programs; ``None`` takes the default one, ``False`` none.
        trip_counts: Trips of loops whose count cannot be found: one number for all, or by name or
            source line (``model.py:12``).
        device: What the prediction is for. A GPU or TPU that is not JAX's default device is
            compiled for by its own compiler, which needs neither the device nor a driver.
        fallback: Lowering to take where that compiler is missing, fails or exceeds its limits; a
            note says so. By default it is an error.
        settings: Limits and options of that compiler; ``fused`` heeds its option of horizontal
            fusion, ``xla_gpu_use_horizontal_fusion``.

    Returns:
        Kernels in schedule order with peak memory and notes.

    Raises:
        LoweringError: The name is unknown, or the compiler does not take the program.
        CompilerError: The device's compiler is not installed, crashed, or exceeded its limits.
        DeviceError: The compiler needs a figure that the device's description lacks.
        ProgramError: The program cannot be read.
    """
    for name in (lowering, fallback or lowering):
        check_lowering(name)
    program = read_program(source, trip_counts=trip_counts)
    with well_formed(program.origin):
        return _lower(program, lowering, cache, trip_counts, device, fallback, settings)


def _lower(
    program: SourceProgram,
    lowering: str,
    cache: LoweringCache | Literal[False] | None,
    trip_counts: TripCounts,
    device: DeviceSpec | None,
    fallback: str,
    settings: CompileSettings | None,
) -> LoweredProgram:
    if trip_counts is not None and program.trip_counts != trip_counts:
        program = replace(program, trip_counts=trip_counts)
    absent = device is not None and lowering in ("auto", "xla") and _is_absent(program, device)
    choice = choose_lowering(lowering, device, absent=absent)
    if choice.lowering == "op":
        from .lowering_op import lower_op

        return lower_op(program)
    if choice.lowering == "fused":
        from .lowering_fused import HORIZONTAL, lower_fused

        wanted = settings is not None and bool(settings.flags.get(HORIZONTAL))
        lowered = lower_fused(program, device, horizontal=wanted)
        if choice.note:
            lowered.notes.insert(0, choice.note)
        return lowered
    store = LoweringCache() if cache is None else cache or None
    if device is not None and absent:
        from .lowering_target import lower_absent

        try:
            return lower_absent(program, device, store, trip_counts, settings)
        except (LoweringError, DeviceError) as error:
            if not fallback:
                raise
            found = lower(
                program, fallback, cache=cache, trip_counts=trip_counts, device=device,
                settings=settings,
            )  # fmt: skip
            found.notes.append(f"lowering {fallback} instead of {lowering}: {error.what}")
            return found
    from .lowering_xla import lower_xla

    lowered = lower_xla(program, store, trip_counts)
    _note_platform(lowered, device)
    return lowered


def _is_absent(program: SourceProgram, device: DeviceSpec) -> bool:
    """Whether a device needs a compiler of its own: a GPU or TPU that is not JAX's default one."""
    if device.platform not in ("gpu", "tpu") or _is_compiled(program):
        return False
    from ._local_target import local_target

    if not device_files():
        return True
    names = {device_slug(name) for name in (device.name, *device.aliases)}
    return local_target().device not in names


def _is_compiled(program: SourceProgram) -> bool:
    return program.kind == "hlo" and program.program.is_scheduled


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
