"""Lowering by the real compiler: XLA on JAX's default backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...common.errors import LoweringError
from ...common.types import JaxObject, JsonMapping
from ..devices.device import DeviceSpec
from ..ir.hlo_reader import parse_hlo
from ..ir.mlir.locations import SourceOps
from ..ir.partitioning import header_counts
from ..ir.precision import as_computed
from ..ir.program import Op, Program, TensorType
from ..ir.reader import SourceProgram, TripCounts, read_program
from ..ir.trip_counts import loop_names
from ..kernels.extract import extract_kernels, tagged_ops
from ..kernels.kernel import LoweredProgram
from ..kernels.memory import entry_bytes, peak_memory
from ..kernels.provenance import infer_sources
from .cache import LocalTarget, LoweringCache, environment_hash, from_data, local_target, to_data
from .op import uncosted_notes

if TYPE_CHECKING:
    import jax

logger = logging.getLogger(__name__)


@dataclass
class NativeExecutable:
    """A program compiled for JAX's default backend, to be run or listed as kernels.

    Attributes:
        source: The compiled program.
        executable: JAX's loaded executable.
        hlo: Optimised module text.
        peak_memory_bytes: Peak device memory as stated by the compiler; 0 if not stated.
        target: Target of the compilation.
        device_count: Devices that it runs on.
    """

    source: SourceProgram
    executable: object
    hlo: str
    peak_memory_bytes: float
    target: LocalTarget
    device_count: int = 1

    @cached_property
    def program(self) -> Program:
        """The optimised module."""
        return parse_hlo(self.hlo, self.source.origin)

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        """Types of the arguments (per device), in order."""
        return tuple(op.type for op in self.program.entry_computation.parameters)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output, parameter) that share a buffer: a run consumes the parameter."""
        return self.program.aliases

    @property
    def meta(self) -> dict[str, object]:
        """Peak memory and compiler, as cached with the module."""
        return {"peak_memory_bytes": self.peak_memory_bytes, "compiler": self.target.compiler}

    def lowered(self, trip_counts: TripCounts = None) -> LoweredProgram:
        """List its kernels; ``trip_counts`` are the user's."""
        return lower_compiled(
            self.program, self.hlo, self.source, self.target, self.meta, trip_counts
        )

    def run(self, arguments: Sequence[object]) -> list[jax.Array]:
        """Execute once, without waiting for the result.

        Args:
            arguments: Arrays in the order of the program's parameters; donated ones are consumed.

        Returns:
            Output arrays; on several devices, the arrays of the first one.
        """
        from ..ir.jax_compat import execute

        return execute(self.executable, arguments, self.device_count)


def compile_native(
    source: SourceProgram, *, name: str = "", flags: Mapping[str, object] | None = None
) -> NativeExecutable:
    """Compile a program for JAX's default backend.

    Args:
        source: StableHLO, or HLO that is not optimised yet.
        name: Module name, which distinguishes programs in profiler traces; by default the
            program's own.
        flags: Options of XLA by name without dashes.

    Raises:
        LoweringError: The backend cannot compile it, or there are too few devices.
    """
    from ..ir import jax_compat as _jax_compat
    from ..ir.mlir import bindings as _bindings

    stablehlo = _as_stablehlo(source)
    replicas, partitions = _bindings.module_counts(stablehlo.module)
    target = local_target()
    count = replicas * partitions
    # Checked here because XLA's message names neither the program nor the remedy.
    if count > target.device_count:
        raise LoweringError(
            f"the program is written for {count} devices ({replicas} replicas of {partitions} "
            f"partitions), the {target.platform} backend has {target.device_count}",
            where=source.origin,
            hint="use lowering='op', or for a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}",
        )
    # Tags become instruction metadata, from which kernels are traced back (kernels/extract.py).
    module = _bindings.tag_locations(stablehlo.module)
    if name:
        _bindings.rename_module(module, name)
    try:
        executable = _jax_compat.compile_module(module, replicas, partitions, flags)
    except Exception as error:  # backends raise several unrelated classes
        raise _compile_error(error, source.origin) from error
    hlo = executable.hlo_modules()[0].to_string()
    return NativeExecutable(stablehlo, executable, hlo, _peak(executable), target, count)


def lower_xla(
    source: SourceProgram,
    cache: LoweringCache | None,
    trip_counts: TripCounts = None,
    device: DeviceSpec | None = None,
) -> LoweredProgram:
    """Compile a program, or take it from the cache, and list its kernels.

    Args:
        source: StableHLO or HLO; scheduled HLO is used unchanged.
        cache: Cache of compiled modules; ``None`` disables it.
        trip_counts: As in :func:`opcast.features.lowering.lower.lower`.
        device: Device that scheduled HLO was compiled for, if known.

    Raises:
        LoweringError: The backend cannot compile it, or there are too few devices.
    """
    if source.is_compiled:
        hlo = source.raw.decode()
        target = LocalTarget("hlo", device.platform if device is not None else "", "", 1)
        return lower_compiled(source.program, hlo, source, target, {}, trip_counts)
    if cache is None:
        return compile_native(source).lowered(trip_counts)
    target = local_target()
    # The environment is part of the key: XLA_FLAGS and versions affect kernels.
    key = cache.key(source.content_hash, target.device, target.compiler, environment_hash(), "xla")
    cached = cache.get(key)
    if cached is not None:
        stablehlo = _as_stablehlo(source)
        ops = SourceOps(stablehlo.module, stablehlo.origin)
        stored = from_data(cached.meta.get("kernels", {}), ops, cached.hlo)
        if stored is not None:
            return stored
        program = _parsed(cached.hlo, source.origin)
        if program is not None:
            return lower_compiled(program, cached.hlo, stablehlo, target, cached.meta, trip_counts)
    native = compile_native(source)
    # Checked before trip counts are filled in from the source or the user.
    settled = not _unknown_loops(native.program)
    lowered = native.lowered(trip_counts)
    # Kernels are cached only if they follow from the module alone, without given trip counts.
    kept = {**native.meta, "kernels": to_data(lowered)} if settled else native.meta
    cache.put(key, native.hlo, kept)
    return lowered


def lower_compiled(
    program: Program,
    hlo: str,
    source: SourceProgram,
    target: LocalTarget,
    meta: JsonMapping,
    trip_counts: TripCounts = None,
) -> LoweredProgram:
    """List the kernels of an optimised module.

    Args:
        program: The module; unknown trip counts are filled in.
        hlo: Its text.
        source: The program it was compiled from, for provenance and trip counts.
        target: Target of the compilation.
        meta: ``peak_memory_bytes`` and ``compiler``, if known.
        trip_counts: The user's, for loops where none is found.
    """
    ops = SourceOps(source.module, source.origin) if source.kind == "stablehlo" else None
    _set_trip_counts(program, source, trip_counts)
    program = as_computed(program, target.platform)
    kernels, notes = extract_kernels(program, ops)
    if ops is not None:
        infer_sources(kernels, ops, ops.operations)
    stated = float(meta.get("peak_memory_bytes", 0.0))
    return LoweredProgram(
        kernels=kernels,
        lowering="xla",
        target=target.device,
        compiler=str(meta.get("compiler", "")),
        peak_memory_bytes=stated or peak_memory(program),
        # Where the compiler states no memory statistics, buffer lifetimes give an estimate.
        memory_source="compiler" if stated else "liveness",
        notes=[*notes, *uncosted_notes(kernels)],
        entry_bytes=entry_bytes(program),
        hlo=hlo,
    )


def _parsed(hlo: str, origin: str) -> Program | None:
    """Parse a cached module; ``None`` if it cannot be read, so that it is recompiled."""
    from ...common.errors import ProgramError

    try:
        return parse_hlo(hlo, origin)
    except ProgramError as error:
        logger.warning("ignored a cache entry that cannot be read: %s", error)
        return None


def _set_trip_counts(program: Program, source: SourceProgram, trip_counts: TripCounts) -> None:
    """Fill in trip counts unknown to the compiler: from the source program, else from the user."""
    unknown = _unknown_loops(program)
    if not unknown:
        return
    origins = _loops_of(source) if source.kind == "stablehlo" else {}
    given = source.trip_counts if trip_counts is None else trip_counts
    for op in unknown:
        indices = tagged_ops(op.source.op) if op.source else []
        # A merged instruction lists several ops: the last one named is the innermost.
        origin = next((origins[i] for i in reversed(indices) if i in origins), op)
        count = origin.attrs.get("trip_count")
        if count is None and isinstance(given, int):
            count = given
        elif count is None and isinstance(given, Mapping):
            names = [op.name, *loop_names(origin)]
            count = next((given[name] for name in names if name in given), None)
        op.attrs["trip_count"] = count


def _unknown_loops(program: Program) -> list[Op]:
    loops = [op for c in program.computations.values() for op in c.ops if op.opcode == "while"]
    return [op for op in loops if op.attrs.get("trip_count") is None]


def _loops_of(source: SourceProgram) -> dict[int, Op]:
    """Return the loops of a StableHLO program by walk index."""
    return {
        op.source.index: op
        for comp in source.program.computations.values()
        for op in comp.ops
        if op.opcode == "while" and op.source is not None
    }


def _as_stablehlo(source: SourceProgram) -> SourceProgram:
    """Convert to StableHLO, which compilers accept."""
    if source.kind == "stablehlo":
        return source
    from ..ir.jax_compat import hlo_to_stablehlo
    from ..ir.mlir.bindings import with_partitions, write_bytecode

    counts = header_counts(source)
    try:
        data = hlo_to_stablehlo(source.raw.decode())
        if counts != (1, 1):  # the converter drops them
            data = write_bytecode(with_partitions(data, counts[1], counts[0]))
    except Exception as error:  # the converter raises several unrelated classes
        raise _compile_error(error, source.origin) from error
    converted = read_program(data)
    converted.origin = source.origin
    converted.trip_counts = source.trip_counts
    return converted


def _peak(executable: JaxObject) -> float:
    """Return the bytes of arguments, results and temporaries, counting donated arguments once.

    The compiler's ``peak_memory_in_bytes`` excludes temporaries on CPUs.
    """
    try:
        stats = executable.get_compiled_memory_stats()
    except Exception as error:  # not every backend has them
        logger.debug("the backend states no memory figures: %s", error)
        return 0.0
    return float(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def _compile_error(error: Exception, origin: str) -> LoweringError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else type(error).__name__
    return LoweringError(
        f"the compiler refuses the program: {what[:500]}",
        where=origin,
        hint="lowering='op' works without the compiler",
    )
