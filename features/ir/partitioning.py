"""How many devices a program is written for: by its header, and by its shardings.

The header decides, as in XLA: where it sets one partition, shardings are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from ...common.errors import ProgramError, SeveralDevicesError
from ..kernels.kinds import is_collective
from .reader import SourceProgram

if TYPE_CHECKING:
    from jaxlib.mlir import ir

# ``sdy.mesh<["x"=2, "y"=4]>``.
_MESH = re.compile(r"sdy\.mesh<\[([^\]]*)\]")
# ``devices=[2,4]<=[8]``, GSPMD's tiling; a last dimension of replicas counts as devices, too.
_TILES = re.compile(r"devices=\[([\d,]+)\]")


def header_counts(source: SourceProgram) -> tuple[int, int]:
    """Return the replicas and partitions that a program's header sets, each 1 by default."""
    if source.kind == "hlo":
        return source.program.num_replicas, source.program.num_partitions
    from .mlir.bindings import module_counts

    return module_counts(source.module)


def annotated_devices(source: SourceProgram) -> int:
    """Count the devices of the largest mesh or sharding that the ops name; 1 if none."""
    data = source.compile_input
    if source.kind == "hlo":
        from .mlir.shardings import mesh_size

        text = data if isinstance(data, str) else data.decode()
        meshes = [mesh_size(axes) for axes in _MESH.findall(text)]
        return max([1, *meshes, *_tile_sizes(text)])
    # Bytecode holds the names of attributes verbatim, so that few modules have to be walked.
    raw = data.encode() if isinstance(data, str) else data
    return _annotated_in(source.module) if b"sdy" in raw or b"sharding" in raw else 1


def _annotated_in(module: ir.Module) -> int:
    from .mlir.bindings import walk_ops
    from .mlir.shardings import mesh_size

    sizes = [1]
    for op in walk_ops(module):
        if op.name == "sdy.mesh":
            # A mesh may be defined without being used: the largest one counts all the same.
            sizes.append(mesh_size(str(op.attributes["mesh"])))
        elif "mhlo.sharding" in op.attributes:
            sizes += _tile_sizes(str(op.attributes["mhlo.sharding"]))
        elif op.name == "func.func" and "arg_attrs" in op.attributes:
            sizes += _tile_sizes(str(op.attributes["arg_attrs"]))
    return max(sizes)


def _tile_sizes(text: str) -> list[int]:
    return [prod(map(int, tiles.split(","))) for tiles in _TILES.findall(text)]


def sharding_note(source: SourceProgram) -> str:
    """Note that shardings are ignored because the header sets one device; empty if none are."""
    # Compiled modules are partitioned already; others with several partitions will be.
    if _is_compiled(source) or header_counts(source) != (1, 1):
        return ""
    devices = annotated_devices(source)
    if devices == 1:
        return ""
    return (
        f"the program's shardings are over {devices} devices, but its header sets one partition: "
        f"it is counted whole, as one device runs it ({_how_to_split(source, devices)})"
    )


def joined_devices(source: SourceProgram) -> int:
    """Count the devices that the program's collectives name; 1 if there are none."""
    data = source.compile_input
    raw = data.encode() if isinstance(data, str) else data
    # Bytecode, too, holds names verbatim: most programs need not be turned into the IR here.
    if not re.search(rb"replica_groups|source_target_pairs", raw):
        return 1
    most = 0
    for computation in source.program.computations.values():
        for op in computation.ops:
            if is_collective(op.opcode):
                groups = op.attrs.get("replica_groups") or op.attrs.get("source_target_pairs") or ()
                most = max([most, *(device for group in groups for device in group)])
    return most + 1


def check_one_device(
    source: SourceProgram, device: str, suggest: Callable[[str, int], str] | None = None
) -> None:
    """Refuse to run a program for several devices on a single one.

    Args:
        source: The program.
        device: Name of the device.
        suggest: Returns the name of a cluster of a number of devices; empty if there is none.

    Raises:
        SeveralDevicesError: Its header sets several replicas or partitions, or its collectives
            join several devices.
    """
    replicas, partitions = header_counts(source)
    count = replicas * partitions
    told = f"{replicas} replicas of {partitions} partitions"
    if count == 1:
        count = joined_devices(source)
        told = "by its collectives"
    if count == 1:
        return
    cluster = suggest(device, count) if suggest is not None else f"{device}-x{count}"
    file = source.origin or "PROGRAM"
    place = cluster or "FILE.yaml, a file that describes one (docs/clusters.md)"
    hint = f"give a cluster instead: opcast predict {file} --cluster {place}"
    if cluster:
        hint += f", in Python opcast.predict(…, cluster={cluster!r})"
    # One device can run all of what a partitioner would split, but not one part that is joined.
    if joined_devices(source) == 1:
        hint += "; to have one device run the whole program: --whole with its file, in Python take "
        hint += f"{_header_names(source)} out of its header"
    raise SeveralDevicesError(
        f"the program is for {count} devices ({told}), but a single device was given",
        where=source.origin,
        hint=hint,
    )


def check_several_devices(source: SourceProgram, cluster: str, size: int, device: str) -> None:
    """Refuse to run a program for one device on a cluster.

    A program with collectives passes whatever its header states: each device runs it as it is.

    Args:
        source: The program.
        cluster: Name of the cluster.
        size: Number of its devices.
        device: Name of the cluster's device.

    Raises:
        ProgramError: Neither its header nor a collective is for several devices.
    """
    if size == 1 or header_counts(source) != (1, 1):
        return
    computations = source.program.computations.values()
    if any(is_collective(op.opcode) for c in computations for op in c.ops):
        return
    devices = annotated_devices(source)
    spread = f"opcast partition PROGRAM --mesh dp={size} --out FILE spreads it"
    if devices > 1:
        spread = f"its shardings are over {devices} devices: {_how_to_split(source, devices)}"
    raise ProgramError(
        f"the program is for one device, but the cluster {cluster} has {size}",
        where=source.origin,
        hint=f"predict it with --device {device}; {spread}",
    )


def _is_compiled(source: SourceProgram) -> bool:
    return source.kind == "hlo" and source.program.is_scheduled


def _how_to_split(source: SourceProgram, devices: int) -> str:
    value = f"num_partitions={devices}"
    value = value if source.kind == "hlo" else f"mhlo.num_partitions = {devices} : i32"
    return f"{value} in the header has it split"


def _header_names(source: SourceProgram) -> str:
    names = ("replica_count", "num_partitions")
    names = names if source.kind == "hlo" else ("mhlo.num_replicas", "mhlo.num_partitions")
    return " and ".join(names)


def partitions_as_replicas(module: ir.Module, count: int) -> ir.Module:
    """A copy of a module that is partitioned already, its partitions renamed replicas.

    XLA's partitioner runs on every module of several partitions, and refuses ``partition_id`` where
    nothing is left to partition. With one partition, a collective's groups mean replicas once it
    has no channel. Ops keep their places in the walk.

    Args:
        module: StableHLO with explicit collectives and no shardings.
        count: Its partitions.
    """
    from jaxlib.mlir import ir

    from .mlir.bindings import copy_module, set_counts, walk_ops

    copy = copy_module(module)
    with module.context, ir.Location.unknown():
        for op in walk_ops(copy):
            if op.name == "stablehlo.partition_id":
                with ir.InsertionPoint(op):
                    own = ir.Operation.create(
                        "stablehlo.replica_id", results=[op.results[0].type], loc=op.location
                    )
                op.results[0].replace_all_uses_with(own.results[0])
                op.erase()
                continue
            for name in ("channel_handle", "channel_id", "use_global_device_ids"):
                if op.name.startswith("stablehlo.") and name in op.attributes:
                    del op.attributes[name]
    set_counts(copy, replicas=count, partitions=1)
    return copy
