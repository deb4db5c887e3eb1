"""Number of devices that a program is for, by its header and by its shardings.

As in XLA, the header decides: if it sets one partition, shardings are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from ...common.errors import ProgramError, SeveralDevicesError
from ..kernels.kernel import is_collective
from .reader import SourceProgram

if TYPE_CHECKING:
    from jaxlib.mlir import ir

# ``sdy.mesh<["x"=2, "y"=4]>``.
_MESH = re.compile(r"sdy\.mesh<\[([^\]]*)\]")
# ``devices=[2,4]<=[8]``, GSPMD's tiling; a last dimension of replicas also counts as devices.
_TILES = re.compile(r"devices=\[([\d,]+)\]")


def header_counts(source: SourceProgram) -> tuple[int, int]:
    """Return the numbers of replicas and partitions in a program's header, 1 by default."""
    if source.kind == "hlo":
        return source.program.num_replicas, source.program.num_partitions
    from .mlir.bindings import module_counts

    return module_counts(source.module)


def annotated_devices(source: SourceProgram) -> int:
    """Return the size of the largest mesh or sharding in the program; 1 if there is none."""
    if source.kind == "hlo":
        from .mlir.shardings import mesh_size

        text = source.raw.decode()
        meshes = [mesh_size(axes) for axes in _MESH.findall(text)]
        return max([1, *meshes, *_tile_sizes(text)])
    # A search in the raw input avoids walking most modules.
    return _annotated_in(source.module) if re.search(b"sdy|sharding", source.raw) else 1


def _annotated_in(module: ir.Module) -> int:
    from .mlir.bindings import walk_ops
    from .mlir.shardings import mesh_size

    sizes = [1]
    for op in walk_ops(module):
        if op.name == "sdy.mesh":
            # A mesh counts even if it is not used.
            sizes.append(mesh_size(str(op.attributes["mesh"])))
        elif "mhlo.sharding" in op.attributes:
            sizes += _tile_sizes(str(op.attributes["mhlo.sharding"]))
        elif op.name == "func.func" and "arg_attrs" in op.attributes:
            sizes += _tile_sizes(str(op.attributes["arg_attrs"]))
    return max(sizes)


def _tile_sizes(text: str) -> list[int]:
    return [prod(map(int, tiles.split(","))) for tiles in _TILES.findall(text)]


def sharding_note(source: SourceProgram) -> str:
    """Describe shardings that the header's single device overrides; empty if there are none."""
    # Compiled modules are already partitioned; those with several partitions will be.
    if source.is_compiled or header_counts(source) != (1, 1):
        return ""
    devices = annotated_devices(source)
    if devices == 1:
        return ""
    return (
        f"the program's shardings are over {devices} devices, but its header sets one partition: "
        f"it is counted whole, as one device runs it ({_how_to_split(source, devices)})"
    )


def joined_devices(source: SourceProgram) -> int:
    """Count the devices in the groups of the program's collectives; 1 if there are none."""
    # A search in the raw input avoids reading most programs into the IR.
    if not re.search(rb"replica_groups|source_target_pairs", source.raw):
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
    """Raise an error if a program for several devices is to run on a single one.

    Args:
        source: The program.
        device: Name of the device.
        suggest: Returns the name of a cluster with a given number of devices; empty if there is
            none.

    Raises:
        SeveralDevicesError: Its header sets several replicas or partitions, or its collectives
            connect several devices.
    """
    replicas, partitions = header_counts(source)
    count = replicas * partitions
    reason = f"{replicas} replicas of {partitions} partitions"
    if count == 1:
        count = joined_devices(source)
        reason = "by its collectives"
    if count == 1:
        return
    cluster = suggest(device, count) if suggest is not None else f"{device}-x{count}"
    file = source.origin or "PROGRAM"
    place = cluster or "FILE.yaml, a file that describes one (docs/clusters.md)"
    hint = f"give a cluster instead: opcast predict {file} --cluster {place}"
    if cluster:
        hint += f", in Python opcast.predict(…, cluster={cluster!r})"
    # One device can run a program that has yet to be partitioned, but not a single part of one.
    if joined_devices(source) == 1:
        hint += "; to have one device run the whole program: --whole with its file, in Python take "
        hint += f"{_header_names(source)} out of its header"
    raise SeveralDevicesError(
        f"the program is for {count} devices ({reason}), but a single device was given",
        where=source.origin,
        hint=hint,
    )


def check_several_devices(source: SourceProgram, cluster: str, size: int, device: str) -> None:
    """Raise an error if a program for one device is to run on a cluster.

    A program with collectives is accepted whatever its header states: each device runs it as it is.

    Args:
        source: The program.
        cluster: Name of the cluster.
        size: Number of devices in the cluster.
        device: Name of the cluster's device.

    Raises:
        ProgramError: Neither the header nor a collective is for several devices.
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


def _how_to_split(source: SourceProgram, devices: int) -> str:
    value = f"num_partitions={devices}"
    value = value if source.kind == "hlo" else f"mhlo.num_partitions = {devices} : i32"
    return f"{value} in the header has it split"


def _header_names(source: SourceProgram) -> str:
    names = ("replica_count", "num_partitions")
    names = names if source.kind == "hlo" else ("mhlo.num_replicas", "mhlo.num_partitions")
    return " and ".join(names)


def partitions_as_replicas(module: ir.Module, count: int) -> ir.Module:
    """Copy a partitioned module, turning its partitions into replicas.

    XLA's partitioner runs on every module with several partitions, and rejects ``partition_id`` if
    nothing is left to partition. With one partition, groups of a collective without a channel mean
    replicas. Ops keep their positions in the walk.

    Args:
        module: StableHLO with explicit collectives and no shardings.
        count: Number of partitions.
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
