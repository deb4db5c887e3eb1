"""Lower a program to the kernels that a target runs: the entry point of all lowerings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...common.collection import paused_collection
from ...common.errors import CompilerError, DeviceError, LoweringError, ProgramError
from ...common.jax_platforms import device_files
from ..devices.catalogue import device_file, find_typed
from ..devices.device import DeviceSpec, device_slug
from ..devices.rules import generations, narrow_floats_of
from ..ir.partitioning import sharding_note
from ..ir.platforms import platform_note, platform_of
from ..ir.program import Program
from ..ir.reader import SourceProgram, TripCounts, read_program
from ..ir.untrusted import well_formed
from ..kernels.kernel import LoweredProgram
from .cache import LoweringCache, local_target
from .options import AUTO, LoweringOptions, check_lowering
from .target_compiler.install import PLATFORMS, find_compiler

if TYPE_CHECKING:
    from .target_compiler.process import CompileSettings

#: Most ops, with functions inlined, of a program lowered without a compiler: some 12,000 take two
#: seconds. Engineering estimate.
MOST_OPS = 2**20


def lower(
    source: object,
    lowering: str = "xla",
    *,
    cache: LoweringCache | Literal[False] | None = None,
    trip_counts: TripCounts = None,
    device: DeviceSpec | str | Path | None = None,
    fallback: str = "",
    settings: CompileSettings | None = None,
) -> LoweredProgram:
    """Lower a program to kernels.

    Args:
        source: A :class:`SourceProgram`, or any input of :func:`read_program`: a path, text or
            bytes of StableHLO or HLO, a lowered or exported JAX function.
        lowering: ``xla`` compiles with the compiler of ``device``, or with JAX's default backend if
            that is the device or none is given; ``fused`` applies opcast's fusion rules; ``op``
            makes every op a kernel; ``auto`` is ``xla``, or ``fused`` where the device's compiler
            is not installed. ``xla`` uses optimised and scheduled HLO unchanged.
        cache: Cache of compiled programs; ``None`` for the default one, ``False`` for none.
        trip_counts: Trips of loops whose count cannot be determined: one number for all, or by name
            or source line (``model.py:12``).
        device: Target of the prediction: a description, its name in the catalogue, the path of a
            device file, or ``local`` for JAX's default device. Another GPU or TPU is compiled for
            by its own compiler, which needs neither the device nor a driver.
        fallback: Lowering to use if that compiler is missing, fails or exceeds its limits; a note
            reports it. By default this is an error.
        settings: Limits and options of that compiler; ``fused`` also follows those of horizontal
            fusion, ``xla_gpu_use_horizontal_fusion``, and of products,
            ``xla_gpu_enable_triton_gemm``.

    Returns:
        Kernels in schedule order with peak memory and notes.

    Raises:
        LoweringError: The name is unknown, or the compiler rejects the program.
        CompilerError: The device's compiler is not installed, crashed, or exceeded its limits.
        DeviceError: The device is unknown, or its description lacks a figure that the compiler
            needs.
        ProgramError: The program cannot be read or is malformed.
        InternalError: A rule of opcast fails on the program.
    """
    return lower_with(
        source, LoweringOptions(lowering, device, trip_counts, fallback, settings, cache)
    )


def lower_with(source: object, options: LoweringOptions) -> LoweredProgram:
    """Lower a program to kernels, as :func:`lower` with its options in one object.

    Raises:
        OpcastError: As :func:`lower`.
    """
    device = _described(options.device)
    options.check()
    platform = platform_of(device) if device is not None else None
    program = read_program(source, trip_counts=options.trip_counts, platform=platform)
    with well_formed(program), paused_collection():
        lowered = _lower(program, device, options)
        notes = [program.note, sharding_note(program)]
        notes += [platform_note(program, device)] if device is not None else []
        if options.trip_counts is not None and not _has_loops(program):
            notes.append("a trip count was given, but the program has no loops")
        lowered.notes += [note for note in notes if note and note not in lowered.notes]
        return lowered


def _has_loops(program: SourceProgram) -> bool:
    return any(
        op.opcode == "while" for own in program.program.computations.values() for op in own.ops
    )


def _described(device: object) -> DeviceSpec | None:
    """Resolve a device argument to its description; ``None`` for JAX's default device."""
    if device is None or isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str | Path):
        raise DeviceError(
            f"a device cannot be a {type(device).__name__}",
            where="device",
            hint="give a name of the catalogue (opcast device --list), the path of a device file, "
            "a DeviceSpec, or None for the default device of JAX",
        )
    return device_file(device) or (None if device == "local" else find_typed(str(device)))


def _check_size(program: Program) -> None:
    """Reject a program whose nested calls multiply into too many ops.

    Raises:
        ProgramError: Inlined, it has more than :data:`MOST_OPS` ops.
    """
    count = program.inlined_op_count
    if count > MOST_OPS:
        raise ProgramError(
            f"with its functions inlined, the program has {count:.3g} ops, more than {MOST_OPS:,}",
            hint="functions that call others several times each multiply: call them fewer times, "
            "or in a loop",
        )


def _lower(
    program: SourceProgram, device: DeviceSpec | None, options: LoweringOptions
) -> LoweredProgram:
    trip_counts = options.trip_counts
    if trip_counts is not None and program.trip_counts != trip_counts:
        program = replace(program, trip_counts=trip_counts)
    asked = options.lowering
    # Determining the local device may start a JAX backend, so it is done only for lowerings that
    # compile.
    absent = device is not None and asked in (AUTO, "xla") and _is_absent(program, device)
    choice = choose_lowering(asked, device, absent=absent)
    widened = ""
    if device is not None and absent and choice.lowering == "xla":
        widened = _widened_by_stand_in(program.program, device)
    if widened and asked == AUTO:
        choice = Choice("fused", f"kernels are made by opcast's own fusion rules: {widened}")
    # Compilers limit their own time and memory; HLO that they wrote is inlined here as well.
    if choice.lowering != "xla" or program.kind == "hlo":
        _check_size(program.program)
    if choice.lowering == "op":
        # Local imports: `fused` and `op` must work without jaxlib's compiler, and load quickly.
        from .fused.lower import as_run
        from .op import lower_op

        if device is None:
            return lower_op(program)
        program, notes = as_run(program, device.platform)
        lowered = lower_op(program, device)
        lowered.notes += notes
        return lowered
    if choice.lowering == "fused":
        from .fused.lower import lower_fused

        lowered = lower_fused(
            program, device, horizontal=options.horizontal, generated=options.generated
        )
        if choice.note:
            lowered.notes.insert(0, choice.note)
        return lowered
    # `False` disables the cache, `None` selects the default one.
    store = LoweringCache() if options.cache is None else options.cache or None
    if device is not None and absent:
        from .absent import lower_absent

        try:
            lowered = lower_absent(program, device, store, trip_counts, options.settings)
            lowered.notes += [widened] if widened else []
            return lowered
        except (LoweringError, DeviceError) as error:
            if not options.fallback:
                raise
            instead = replace(options, lowering=options.fallback, device=device, fallback="")
            lowered = lower_with(program, instead)
            lowered.notes.append(f"lowering {options.fallback} instead of {asked}: {error.what}")
            return lowered
    from .xla import lower_xla

    lowered = lower_xla(program, store, trip_counts, device)
    _note_platform(lowered, device)
    return lowered


def _is_absent(program: SourceProgram, device: DeviceSpec) -> bool:
    """Return whether a device is a GPU or TPU other than JAX's default, to cross-compile for."""
    if device.platform not in ("gpu", "tpu") or program.is_compiled:
        return False
    # Without a device file this machine has no GPU or TPU, so JAX need not be started to find out.
    if not device_files():
        return True
    names = {device_slug(name) for name in (device.name, *device.aliases)}
    return local_target().device not in names


def _widened_by_stand_in(program: Program, device: DeviceSpec) -> str:
    """Describe product formats that the stand-in architecture's rules widen; empty if none."""
    target = str(device.compiler.get("target", ""))
    rules = generations().nearest.get(target, target)
    own, other = (narrow_floats_of(name) or frozenset() for name in (target, rules))
    if own <= other:
        return ""
    multiplied = {
        comp.ops[operand].type.dtype
        for comp in program.computations.values()
        for op in comp.ops
        if op.opcode == "dot"
        for operand in op.operands
    }
    lacking = ", ".join(sorted(multiplied & (own - other)))
    if not lacking:
        return ""
    return (
        f"XLA's rules for {rules}, which stand in for those for {target}, widen products of "
        f"{lacking} to 16 bits, which {device.name} multiplies as they are"
    )


def _note_platform(lowered: LoweredProgram, device: DeviceSpec | None) -> None:
    """Add a note if the kernels were compiled for another platform than the device's."""
    known = lowered.compiler.split()
    if device is None or len(known) < 3:
        return
    # The compiler is recorded as "xla <version> <platform> …" (cache.py).
    platform = "gpu" if known[2] in ("cuda", "rocm") else known[2]
    if platform != device.platform:
        lowered.notes.append(
            f"kernels are those of the {platform} compiler, but {device.name} is a "
            f"{device.platform}: compile there, or give its optimised HLO"
        )


class Choice(NamedTuple):
    """A lowering, and the reason if it is not the best one.

    Attributes:
        lowering: One of :data:`.options.LOWERINGS`.
        note: Reason for the user; empty if the best one was chosen.
    """

    lowering: str
    note: str = ""


def choose_lowering(lowering: str, device: DeviceSpec | None, *, absent: bool) -> Choice:
    """Choose the lowering that ``auto`` selects.

    Args:
        lowering: Requested lowering; anything except ``auto`` is used unchanged.
        device: Target of the prediction.
        absent: Whether the target needs its own compiler: it is not JAX's default device, and the
            program is not compiled yet.

    Returns:
        For ``auto``, ``xla`` if the compiler is available and the device's description has the
        figures it needs, else ``fused``.

    Raises:
        LoweringError: The name is unknown.
    """
    check_lowering(lowering)
    if lowering != AUTO:
        return Choice(lowering)
    if device is None or not absent or device.platform not in PLATFORMS:
        return Choice("xla")
    try:
        find_compiler(device.platform)
    except CompilerError as error:
        return Choice(
            "fused",
            f"{error.what}: kernels are made by opcast's own fusion rules (lowering fused), not by "
            f"the compiler of {device.name}; to have it: opcast compilers install "
            f"{device.platform}",
        )
    from .target_compiler.target import target_of

    try:
        target_of(device)
    except DeviceError as error:
        # A description with the documented minimum is enough for a prediction.
        return Choice(
            "fused",
            f"{device.name}: {error.what}: kernels are made by opcast's own fusion rules (lowering "
            f"fused); to have the compiler's: {error.hint}",
        )
    return Choice("xla")
