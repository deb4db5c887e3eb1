"""Lowering by a target's own compiler on a machine that does not have the target."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from ._local_target import LocalTarget
from ._source_ops import SourceOps
from ._stored import from_data, to_data
from ._work_check import work_notes
from .cache import LoweringCache
from .compile_process import CompiledModule, CompileSettings, compile_programs
from .compile_target import CompileTarget, target_of
from .device import DeviceSpec
from .hlo import parse_hlo
from .kernel import LoweredProgram
from .lowering_op import lower_op
from .lowering_xla import _as_stablehlo, _unknown_loops, lower_compiled
from .reader import SourceProgram, TripCounts

_MESH_AXIS = re.compile(r'"[^"]+"\s*=\s*(\d+)')
_TILES = re.compile(r"devices=\[([\d,]+)\]")


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
    stablehlo = _as_stablehlo(source)
    key = _key(stablehlo, target, settings)
    found = cache.get(key) if cache else None
    local = LocalTarget(target.device, target.compiler.platform, _compiler(target), 1)
    if found is not None:
        stored = from_data(found.meta.get("kernels", {}), SourceOps(stablehlo), found.hlo)
        if stored is not None:
            return _finish(stored, found.meta, target)
        program = parse_hlo(found.hlo, source.origin)
        lowered = lower_compiled(program, found.hlo, stablehlo, local, found.meta, trip_counts)
        return _finish(lowered, found.meta, target)
    compiled = _compile(stablehlo, target, settings)
    meta = {
        "peak_memory_bytes": compiled.memory.get("peak_memory_in_bytes", 0),
        "compiler": _compiler(target),
        "seconds": compiled.seconds,
    }
    program = parse_hlo(compiled.hlo, source.origin)
    settled = not _unknown_loops(program)
    lowered = lower_compiled(program, compiled.hlo, stablehlo, local, meta, trip_counts)
    devices = prod(device_counts(stablehlo.module))
    lowered.notes += work_notes(lower_op(stablehlo).kernels, lowered.kernels, devices)
    if cache:
        stored_meta = {**meta, "kernels": to_data(lowered)} if settled else meta
        cache.put(key, compiled.hlo, stored_meta)
    return _finish(lowered, meta, target)


def device_counts(module: Any) -> tuple[int, int]:
    """Replicas and partitions of a module: as it says, else as many as its meshes have devices.

    Args:
        module: MLIR module.
    """
    from ._jax_compat import module_counts, walk_ops

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


def _tiles(text: str) -> list[int]:
    return [prod(map(int, tiles.split(","))) for tiles in _TILES.findall(text)]


def _compile(
    source: SourceProgram, target: CompileTarget, settings: CompileSettings
) -> CompiledModule:
    from ._jax_compat import tag_locations, write_bytecode

    program = write_bytecode(tag_locations(source.module))
    shape = device_counts(source.module)
    (compiled,) = compile_programs([program], [shape], target, settings, origin=source.origin)
    if isinstance(compiled, Exception):
        raise compiled
    return compiled


def _key(source: SourceProgram, target: CompileTarget, settings: CompileSettings) -> str:
    options = sorted((name, repr(value)) for name, value in settings.flags.items())
    described = target.config or target.architecture
    return LoweringCache.key(
        source.content_hash, described, target.compiler.version, repr(options),
        str(target.devices_per_node), "xla-absent",
    )  # fmt: skip


def _compiler(target: CompileTarget) -> str:
    return f"xla {target.compiler.version} for {target.architecture}"


def _finish(lowered: LoweredProgram, meta: dict[str, Any], target: CompileTarget) -> LoweredProgram:
    lowered.target = target.device
    lowered.compile_seconds = float(meta.get("seconds", 0.0))
    lowered.notes += [note for note in target.notes if note not in lowered.notes]
    return lowered
