"""Lowering by a target's own compiler on a machine that does not have the target."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ._jax_compat import (
    module_counts,
    partitions_as_replicas,
    tag_locations,
    walk_ops,
    write_bytecode,
)
from ._local_target import LocalTarget
from ._source_ops import SourceOps
from ._stored import from_data, to_data
from ._work_check import work_notes
from .cache import LoweringCache
from .compile_process import CompileSettings, compile_programs
from .compile_target import CompileTarget, target_of
from .device import DeviceSpec
from .errors import CompilerError, LoweringError
from .hlo import parse_hlo
from .kernel import LoweredProgram
from .lowering_op import lower_op
from .lowering_repeats import MIN_LAYERS, extrapolate, shorten
from .lowering_xla import _as_stablehlo, _unknown_loops, lower_compiled
from .reader import SourceProgram, TripCounts

logger = logging.getLogger(__name__)

_MESH_AXIS = re.compile(r'"[^"]+"\s*=\s*(\d+)')
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_SHARDING = ("mhlo.sharding", "sdy.sharding", "sdy.sharding_per_value")
_COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute",
                 "collective_broadcast")
)  # fmt: skip


def lower_absent(
    source: SourceProgram,
    device: DeviceSpec,
    cache: LoweringCache | None,
    trip_counts: TripCounts = None,
    settings: CompileSettings | None = None,
) -> LoweredProgram:
    """Compile a program for a device that is not there, and list its kernels.

    Args:
        source: StableHLO, or HLO that is not optimised yet: for one device, partitioned with
            explicit collectives, or with sharding annotations over a mesh.
        device: What to compile for.
        cache: Where compiled modules are kept; ``None`` keeps none.
        trip_counts: As in :func:`opcast.features.lowering.lower`.
        settings: Limits and options of the compilation.

    Raises:
        DeviceError: The compiler needs a figure that the device's description lacks.
        CompilerError: The compiler is missing, crashed, or ran out of time or memory.
        LoweringError: The compiler refuses the program.
    """
    settings = settings or CompileSettings()
    target = target_of(device)
    stablehlo = _replicated(_as_stablehlo(source))
    key = _key(stablehlo, target, settings)
    found = cache.get(key) if cache else None
    job = _Job(stablehlo, target, settings, trip_counts)
    if found is not None:
        stored = from_data(found.meta.get("kernels", {}), SourceOps(stablehlo), found.hlo)
        if stored is None:
            stored = job.read(CachedHlo(found.hlo, found.meta))
        return _finish(stored, found.meta, target)
    lowered = job.by_layers() if settings.repeats else None
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


class CachedHlo(NamedTuple):
    """A compiled module and what the compiler said of it."""

    hlo: str
    meta: Mapping[str, Any]


class _Job:
    """One program to be compiled for one target.

    Attributes:
        settled: Whether the trips of all loops are known without the user.
    """

    def __init__(
        self,
        source: SourceProgram,
        target: CompileTarget,
        settings: CompileSettings,
        trip_counts: TripCounts,
    ) -> None:
        self.source = source
        self.target = target
        self.settings = settings
        self.trip_counts = trip_counts
        self.settled = True
        self.shape = device_counts(source.module)

    def whole(self) -> LoweredProgram:
        """Compile the program as it is."""
        (lowered,) = self._compile([tag_locations(self.source.module)])
        lowered.notes += self._work_notes(lowered)
        return lowered

    def by_layers(self) -> LoweredProgram | None:
        """Compile it with fewer layers, if it has enough equal ones and nothing speaks against."""
        module, least = self.source.module, MIN_LAYERS[self.target.platform]
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
        if not self.settled or (notes := self._work_notes(lowered)):
            logger.info("the program is compiled whole: %s", notes if self.settled else "loops")
            self.settled = True
            return None
        return lowered

    def read(self, compiled: CachedHlo) -> LoweredProgram:
        """Kernels of a compiled module."""
        program = parse_hlo(compiled.hlo, self.source.origin)
        self.settled &= not _unknown_loops(program)
        local = LocalTarget(
            self.target.device, self.target.compiler.platform, _compiler(self.target), 1
        )
        lowered = lower_compiled(
            program, compiled.hlo, self.source, local, compiled.meta, self.trip_counts
        )
        lowered.compile_seconds = float(compiled.meta.get("seconds", 0.0))
        return lowered

    def _compile(self, modules: Sequence[Any]) -> list[LoweredProgram]:
        programs = [write_bytecode(module) for module in modules]
        results = compile_programs(
            programs, [self.shape] * len(programs), self.target, self.settings,
            origin=self.source.origin,
        )  # fmt: skip
        found = []
        for result in results:
            if isinstance(result, LoweringError):
                raise result
            meta = {
                "peak_memory_bytes": result.memory.get("peak_memory_in_bytes", 0),
                "compiler": _compiler(self.target),
                "seconds": result.seconds,
            }
            lowered = self.read(CachedHlo(result.hlo, meta))
            lowered.notes += [note for note in result.notes if note not in lowered.notes]
            found.append(lowered)
        return found

    def _work_notes(self, lowered: LoweredProgram) -> list[str]:
        return work_notes(lower_op(self.source).kernels, lowered.kernels, prod(self.shape))


def device_counts(module: Any) -> tuple[int, int]:
    """Replicas and partitions of a module: as it says, else as many as its meshes have devices.

    Args:
        module: MLIR module.
    """
    replicas, partitions = module_counts(module)
    if replicas * partitions > 1:
        return replicas, partitions
    sizes = [1]
    for op in walk_ops(module):
        if op.name == "sdy.mesh":
            sizes.append(prod(int(n) for n in _MESH_AXIS.findall(str(op.attributes["mesh"]))))
        elif "mhlo.sharding" in op.attributes:
            sizes += _tiles(str(op.attributes["mhlo.sharding"]))
        elif op.name == "func.func" and "arg_attrs" in op.attributes:
            sizes += _tiles(str(op.attributes["arg_attrs"]))
    return 1, max(sizes)


def _replicated(source: SourceProgram) -> SourceProgram:
    """The program as the compiler takes it: one that is partitioned already as replicas."""
    replicas, partitions = module_counts(source.module)
    if replicas > 1 or partitions == 1 or not is_partitioned(source.module):
        return source
    return replace(source, _module=partitions_as_replicas(source.module, partitions))


def is_partitioned(module: Any) -> bool:
    """Whether a module has collectives, and no op that a partitioner would still look at.

    Shardings of arguments do not count: a partitioner leaves them as a record of what they were.
    """
    talks = False
    for op in walk_ops(module):
        if op.name.startswith("sdy.") or any(name in op.attributes for name in _SHARDING):
            return False
        talks |= op.name in _COLLECTIVES
    return talks


def _tiles(text: str) -> list[int]:
    return [prod(map(int, tiles.split(","))) for tiles in _TILES.findall(text)]


def _key(source: SourceProgram, target: CompileTarget, settings: CompileSettings) -> str:
    options = sorted((name, repr(value)) for name, value in settings.flags.items())
    described = target.config
    if target.platform == "tpu":
        described = f"{target.architecture} {target.config}".strip()
    return LoweringCache.key(
        source.content_hash, described, target.compiler.version, repr(options),
        str(target.devices_per_node), f"xla-absent repeats={settings.repeats}",
    )  # fmt: skip


def _compiler(target: CompileTarget) -> str:
    return f"xla {target.compiler.version} for {target.architecture}"


def _finish(
    lowered: LoweredProgram, meta: Mapping[str, Any], target: CompileTarget
) -> LoweredProgram:
    lowered.target = target.device
    lowered.compile_seconds = float(meta.get("seconds", 0.0))
    lowered.notes += [note for note in target.notes if note not in lowered.notes]
    return lowered
