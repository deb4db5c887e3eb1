"""Cross-compilation: lowering by the target's compiler on a machine without the target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ...common.errors import CompilerError, LoweringError
from ...common.types import JsonMapping
from ..devices.device import DeviceSpec
from ..ir.hlo_reader import parse_hlo
from ..ir.mlir.bindings import module_counts, tag_locations, walk_ops, write_bytecode
from ..ir.mlir.locations import SourceOps
from ..ir.mlir.opcodes import hlo_opcode
from ..ir.mlir.shardings import ANNOTATIONS
from ..ir.partitioning import partitions_as_replicas
from ..ir.program import COLLECTIVES
from ..ir.reader import SourceProgram, TripCounts
from ..kernels.kernel import Kernel, LoweredProgram
from .cache import CachedModule, LocalTarget, LoweringCache, from_data, to_data
from .op import lower_op, ragged_notes, work_notes
from .repeated_layers.lower import MIN_LAYERS, extrapolate, shorten
from .target_compiler.process import CompileSettings, compile_programs
from .target_compiler.target import CompileTarget, target_of
from .xla import _as_stablehlo, _unknown_loops, lower_compiled

if TYPE_CHECKING:
    from jaxlib.mlir import ir

logger = logging.getLogger(__name__)


def lower_absent(
    source: SourceProgram,
    device: DeviceSpec,
    cache: LoweringCache | None,
    trip_counts: TripCounts = None,
    settings: CompileSettings | None = None,
) -> LoweredProgram:
    """Compile a program for a device absent from this machine, and list its kernels.

    Args:
        source: StableHLO, or HLO that is not optimised yet: for one device, partitioned with
            explicit collectives, or with shardings over as many devices as its header states.
        device: Target device.
        cache: Cache of compiled modules; ``None`` disables it.
        trip_counts: As in :func:`opcast.features.lowering.lower.lower`.
        settings: Limits and options of the compilation.

    Raises:
        DeviceError: The device's description lacks a figure that the compiler needs.
        CompilerError: The compiler is missing, crashed, or ran out of time or memory.
        LoweringError: The compiler rejects the program.
    """
    settings = settings or CompileSettings()
    target = target_of(device)
    stablehlo = _replicated(_as_stablehlo(source))
    key = _key(stablehlo, target, settings)
    cached = cache.get(key) if cache else None
    job = _Job(stablehlo, target, settings, device, trip_counts)
    if cached is not None:
        ops = SourceOps(stablehlo.module, stablehlo.origin)
        stored = from_data(cached.meta.get("kernels", {}), ops, cached.hlo)
        if stored is None:
            # Kernels from another version: read the module again, which needs no compiler.
            stored = job.read(cached)
        return _finish(stored, cached.meta, target)
    lowered = job.by_layers() if settings.repeats else None
    # By layers where that saves time; as a whole where the structure is unclear.
    lowered = lowered or job.whole()
    meta = {
        "peak_memory_bytes": lowered.peak_memory_bytes,
        "compiler": lowered.compiler,
        "seconds": lowered.compile_seconds,
    }
    if cache:
        kept = {**meta, "kernels": to_data(lowered)} if job.settled else meta
        cache.put(key, lowered.hlo, kept)
    return _finish(lowered, meta, target)


@dataclass
class _Job:
    """One program to be compiled for one target.

    Attributes:
        settled: Whether all trip counts are known without the user's help.
    """

    source: SourceProgram
    target: CompileTarget
    settings: CompileSettings
    device: DeviceSpec
    trip_counts: TripCounts
    settled: bool = True

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Replicas and partitions."""
        return module_counts(self.source.module)

    def whole(self) -> LoweredProgram:
        """Compile the program unchanged."""
        (lowered,) = self._compile([tag_locations(self.source.module)])
        lowered.notes += [*self._work_notes(lowered), *self._ragged_notes(lowered)]
        return lowered

    def by_layers(self) -> LoweredProgram | None:
        """Compile with fewer layers; ``None`` if too few are equal or work would be lost."""
        module, least = self.source.module, MIN_LAYERS[self.target.platform]
        # Tagged before ops are removed: tags are indices in the whole program.
        short = shorten(module, tag_locations(module), least)
        if short is None:
            return None
        try:
            full, half = self._compile(short.modules)
        except CompilerError:
            raise
        except LoweringError as error:
            logger.info("the program is compiled whole: with fewer layers %s", error)
            return None
        lowered = extrapolate(full, half, short.layers)
        # Trip counts that depend on the number of layers, and lost products, cannot be
        # extrapolated.
        if not self.settled or (notes := self._work_notes(lowered)):
            logger.info("the program is compiled whole: %s", notes if self.settled else "loops")
            self.settled = True
            return None
        lowered.notes += self._ragged_notes(lowered)
        return lowered

    def read(self, compiled: CachedModule) -> LoweredProgram:
        """List the kernels of a compiled module."""
        program = parse_hlo(compiled.hlo, self.source.origin)
        # Kernels that depend on user-given trip counts are not cached: the next call may give
        # others.
        self.settled &= not _unknown_loops(program)
        local = LocalTarget(
            self.target.device, self.target.compiler.platform, _compiler(self.target), 1
        )
        lowered = lower_compiled(
            program, compiled.hlo, self.source, local, compiled.meta, self.trip_counts
        )
        lowered.compile_seconds = float(compiled.meta.get("seconds", 0.0))
        return lowered

    def _compile(self, modules: Sequence[ir.Module]) -> list[LoweredProgram]:
        programs = [write_bytecode(module) for module in modules]
        results = compile_programs(
            programs,
            [self.shape] * len(programs),
            self.target,
            self.settings,
            origin=self.source.origin,
        )
        outcomes = []
        for result in results:
            if isinstance(result, LoweringError):
                raise result
            meta = {
                "peak_memory_bytes": result.memory.get("peak_memory_in_bytes", 0),
                "compiler": _compiler(self.target),
                "seconds": result.seconds,
            }
            lowered = self.read(CachedModule(result.hlo, meta))
            lowered.notes += [note for note in result.notes if note not in lowered.notes]
            outcomes.append(lowered)
        return outcomes

    def _work_notes(self, lowered: LoweredProgram) -> list[str]:
        return work_notes(self._ops, lowered.kernels, prod(self.shape))

    def _ragged_notes(self, lowered: LoweredProgram) -> list[str]:
        return ragged_notes([k.opcode for k in self._ops], lowered.kernels)

    @cached_property
    def _ops(self) -> list[Kernel]:
        """The source's ops as kernels."""
        return lower_op(self.source, self.device).kernels


def _replicated(source: SourceProgram) -> SourceProgram:
    """Rename partitions to replicas if the program is already partitioned."""
    replicas, partitions = module_counts(source.module)
    # Otherwise XLA's partitioner would run again and reject partition_id.
    if replicas > 1 or partitions == 1 or not is_partitioned(source.module):
        return source
    return replace(source, _module=partitions_as_replicas(source.module, partitions))


def is_partitioned(module: ir.Module) -> bool:
    """Return whether a module has collectives, and no op that a partitioner would still act on.

    Shardings of arguments do not count: a partitioner keeps them for information.
    """
    talks = False
    for op in walk_ops(module):
        if op.name.startswith("sdy.") or any(name in op.attributes for name in ANNOTATIONS):
            return False
        talks |= hlo_opcode(op.name) in COLLECTIVES
    return talks


def _key(source: SourceProgram, target: CompileTarget, settings: CompileSettings) -> str:
    options = sorted((name, repr(value)) for name, value in settings.flags.items())
    described = target.config
    # libtpu identifies a chip by name; an empty configuration must not conflate generations.
    if target.platform == "tpu":
        described = f"{target.architecture} {target.config}".strip()
    return LoweringCache.key(
        source.content_hash,
        described,
        target.compiler.version,
        repr(options),
        str(target.devices_per_node),
        f"xla-absent repeats={settings.repeats}",
    )


def _compiler(target: CompileTarget) -> str:
    return f"xla {target.compiler.version} for {target.architecture}"


def _finish(lowered: LoweredProgram, meta: JsonMapping, target: CompileTarget) -> LoweredProgram:
    lowered.target = target.device
    lowered.compile_seconds = float(meta.get("seconds", 0.0))
    lowered.notes += [note for note in target.notes if note not in lowered.notes]
    return lowered
