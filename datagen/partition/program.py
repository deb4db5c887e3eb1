"""Spreads a program that is written for one device over several, with XLA's own partitioner.

Arguments that a program returns updated (donated ones: parameters and the optimiser's state) are
its state; the batch is cut along its first dimension. ``dp`` keeps the state whole on every device,
``fsdp`` cuts the largest dimension of each of its arrays. Everything in between is up to the
partitioner; as for the zoo, it runs over virtual CPU devices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ...common.errors import PlanError, ProgramError
from ...features.ir.reader import SourceProgram, read_program
from .sharding import batch_spec, parameter_spec, parse_mesh
from .workload import expand_groups, read_dump, run_worker, to_stablehlo


def partition_program(
    program: object, mesh: str, path: Path, batch: Sequence[int] | None = None, format: str = "text"
) -> Path:
    """Write a partitioned program as StableHLO.

    Args:
        program: StableHLO of one device, in any form; its batch is the global batch.
        mesh: Sizes by axis: ``dp``, ``fsdp``.
        path: File to write.
        batch: Numbers of the arguments that are cut along their first dimension; by default those
            that are not donated and have one that can be cut.
        format: ``text`` or ``bytecode``.

    Returns:
        The path written.

    Raises:
        PlanError: The mesh is malformed or has another axis, or an argument cannot be cut.
        ProgramError: The program is for several devices already, or its batch is unknown.
        LoweringError: The partitioner fails.
    """
    sizes = parse_mesh(mesh)
    if "tp" in sizes:
        raise PlanError(
            "the parts of a layer are not known by their names in a program",
            where="--mesh",
            hint="axes are dp and fsdp; models of the zoo know tp: opcast zoo export --mesh",
        )
    source = read_program(program)
    own = source.program
    if own.num_replicas * own.num_partitions > 1 or own.dialect != "stablehlo":
        raise ProgramError(
            "only StableHLO of a single device can be partitioned", where=source.origin
        )
    shapes = [op.type.shape for op in own.entry_computation.parameters]
    donated = {number: output for output, number in own.aliases}
    chosen = _batch(shapes, donated, batch, sizes, source.origin)
    # Batch along its first dimension, state like a parameter without a name, the rest (seeds,
    # learning rates) replicated.
    cuts = [
        batch_spec(shape, sizes, f"argument {n}")
        if n in chosen
        else parameter_spec("", shape, sizes)
        if n in donated
        else ()
        for n, shape in enumerate(shapes)
    ]
    devices = prod(sizes.values())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "program").write_bytes(_bytecode(source))
        job = {
            "program": str(folder / "program"),
            "dump": str(folder / "dump"),
            "devices": devices,
            "arguments": [
                sharding_text(cut, len(shape), sizes)
                for cut, shape in zip(cuts, shapes, strict=True)
            ],
            "outputs": {str(out): number for number, out in donated.items()},
        }
        run_worker(job, devices)
        text = read_dump(folder / "dump", source.origin or "program")
    Path(path).write_bytes(to_stablehlo(expand_groups(text), devices, format))
    return Path(path)


def sharding_text(
    cut: Sequence[str | tuple[str, ...] | None], rank: int, mesh: Mapping[str, int]
) -> str:
    """Return a sharding in XLA's syntax, such as ``{devices=[4,1]<=[4]}``.

    That is HloSharding's V2 form: tiles per dimension, then the iota of devices with an optional
    transposition; a last tile dimension may stand for replication.

    Args:
        cut: Axes that cut each of the first dimensions; others stay whole.
        rank: Dimensions of the array.
        mesh: Sizes by axis, outermost first; devices are numbered in that order.
    """
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in cut]
    axes += [()] * (rank - len(axes))
    used = [axis for own in axes for axis in own]
    if not used:
        return "{replicated}"
    # Axes that cut nothing replicate the array over their devices.
    left = [axis for axis in mesh if axis not in used]
    tiles = [prod(mesh[a] for a in own) for own in axes]
    tiles += [prod(mesh[a] for a in left)] if left else []
    names = list(mesh)
    # Tiles follow the dimensions of the array, devices those of the mesh: transpose where the two
    # orders differ.
    order = [names.index(axis) for axis in (*used, *left)]
    shape = ",".join(map(str, mesh.values()))
    turned = "" if order == sorted(order) else f"T({','.join(map(str, order))})"
    last = " last_tile_dim_replicate" if left else ""
    return f"{{devices=[{','.join(map(str, tiles))}]<=[{shape}]{turned}{last}}}"


def _batch(
    shapes: Sequence[tuple[int, ...]],
    donated: Mapping[int, int],
    given: Sequence[int] | None,
    mesh: Mapping[str, int],
    where: str,
) -> set[int]:
    """Return the numbers of the arguments that are cut along the batch."""
    if given is not None:
        wrong = [n for n in given if not 0 <= n < len(shapes)]
        if wrong:
            raise PlanError(
                f"there is no argument {wrong[0]}",
                where=where,
                hint=f"arguments are numbered from 0 to {len(shapes) - 1}",
            )
        return set(given)
    parts = prod(mesh.values())
    # Whatever is not state and can be cut. A program without donation gives no hint at all.
    leading = {
        n
        for n, shape in enumerate(shapes)
        if n not in donated and shape and shape[0] >= parts and shape[0] % parts == 0
    }
    if not donated or not leading:
        raise ProgramError(
            "the program does not say which of its arguments are the batch",
            where=where,
            hint="name them with --batch-args 3,4, or donate parameters and state",
        )
    return leading


def _bytecode(source: SourceProgram) -> bytes:
    from ...features.ir.jax_compat import write_bytecode

    return write_bytecode(source.module)
