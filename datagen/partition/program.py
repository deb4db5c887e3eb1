"""Distributes a single-device program over several devices with XLA's own partitioner.

Arguments that a program returns updated (donated ones: parameters and the optimiser's state) are
its state; the batch is split along its first dimension. ``dp`` replicates the state on every
device; ``fsdp`` shards the largest dimension of each of its arrays and gathers parameters where
products use them, so that activations stay split along the batch. The partitioner decides
everything in between; as for the zoo, it runs over virtual CPU devices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import PlanError, ProgramError
from ...common.files import write_bytes
from ...common.units import size
from ...features.ir.partitioning import joined_devices
from ...features.ir.program import TensorType
from ...features.ir.reader import SourceProgram, read_program
from .workload import (
    batch_spec,
    expand_groups,
    parameter_spec,
    parse_mesh,
    read_dump,
    run_worker,
    to_stablehlo,
)

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from ...features.ir.mlir.attention_calls import CallAxis, CallSplit

#: Collective traffic of a step, as a multiple of the parameters, above which activations must be
#: moved too. FSDP gathers parameters for the forward and the backward pass and reduces their
#: gradients: three times.
_MOST_MOVED = 4.0


#: Data of a key of random numbers: Threefry's and RBG's (jax/_src/prng.py). It has no batch.
_KEYS = (("u32", (2,)), ("u32", (4,)))


@dataclass(frozen=True)
class Partitioned:
    """A partitioned program that was written.

    Attributes:
        path: The file.
        moved_bytes: Bytes that a device sends into or receives from collectives in a run, the
            larger of the two for each.
        parameter_bytes: Bytes of all parameters (state that products read); 0 if unknown.
        note: A remark for the user, or empty.
    """

    path: Path
    moved_bytes: float
    parameter_bytes: float
    note: str = ""


def partition_program(
    program: object, mesh: str, path: Path, batch: Sequence[int] | None = None, format: str = "text"
) -> Partitioned:
    """Write a partitioned program as StableHLO.

    Args:
        program: StableHLO for one device, in any form; its batch is the global batch.
        mesh: Sizes by axis: ``dp``, ``fsdp``.
        path: File to write.
        batch: Numbers of the arguments that are split along their first dimension; by default those
            that are not donated and have a divisible one.
        format: ``text`` or ``bytecode``.

    Returns:
        The file, and the traffic of its collectives.

    Raises:
        PlanError: The mesh is malformed or has another axis, or an argument cannot be split.
        ProgramError: The program is already for several devices, or its batch is unknown.
        LoweringError: The partitioner fails.
    """
    from ...features.ir.mlir.shardings import gathered_at_use, without_empty_meshes

    sizes = parse_mesh(mesh)
    if "tp" in sizes:
        raise PlanError(
            "the parts of a layer are not known by their names in a program",
            where="--mesh",
            hint="axes are dp and fsdp; models of the zoo also have tp: opcast zoo export --mesh",
        )
    source = read_program(program)
    own = source.program
    if own.num_replicas * own.num_partitions > 1 or own.dialect != "stablehlo":
        raise ProgramError(
            "only StableHLO of a single device can be spread over a mesh",
            where=source.origin,
            hint="without --mesh a program is partitioned by its own shardings",
        )
    kinds = [op.type for op in own.entry_computation.parameters]
    shapes = [kind.shape for kind in kinds]
    donated = {number: output for output, number in own.aliases}
    chosen = _batch(kinds, donated, batch, sizes, source.origin)
    # The batch along its first dimension, state like a parameter without a name, the rest (seeds,
    # learning rates) replicated.
    cuts = [
        batch_spec(shape, sizes, f"argument {n}")
        if n in chosen
        else parameter_spec("", shape, sizes)
        if n in donated
        else ()
        for n, shape in enumerate(shapes)
    ]
    # Inlined and marked, which also shows which part of the state is a parameter.
    gathered, used = gathered_at_use(without_empty_meshes(source.module), sorted(donated))
    module = gathered if "fsdp" in sizes else without_empty_meshes(source.module)
    shardings = {
        "arguments": [
            sharding_text(cut, len(shape), sizes) for cut, shape in zip(cuts, shapes, strict=True)
        ],
        "outputs": {str(out): number for number, out in donated.items()},
    }
    module = _calls_cut(module, sizes)
    data = _run(module, prod(sizes.values()), format, source.origin, shardings)
    write_bytes(Path(path), data)
    return _summary(Path(path), read_program(data), float(sum(kinds[n].nbytes for n in used)))


def _calls_cut(module: ir.Module, sizes: Mapping[str, int]) -> ir.Module:
    """Split attention calls along the batch over all axes, where divisible."""
    from ...features.ir.mlir.attention_calls import call_axes
    from ...features.ir.mlir.bindings import walk_ops
    from ...features.ir.mlir.shardings import constrained

    calls = {}
    for number, op in enumerate(walk_ops(module)):
        axes = call_axes(op)
        if axes and axes[0].operands:
            operands, results = ([list(v.type.shape) for v in s] for s in (op.operands, op.results))
            if all(operands[k][d] % prod(sizes.values()) == 0 for k, d in axes[0].operands):
                calls[number] = call_split(axes, (tuple(sizes), ()), operands, results, sizes)
    return constrained(module, {}, {}, calls) if calls else module


def call_split(
    axes: Sequence[CallAxis],
    cuts: Sequence[tuple[str, ...]],
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    mesh: Mapping[str, int],
) -> CallSplit:
    """Shardings of an attention call that is split along its batch and heads.

    Args:
        axes: Positions of the batch and of the heads.
        cuts: Mesh axes that split the batch, and the heads.
        operands: Shapes of its operands.
        results: Shapes of its results.
        mesh: Sizes by axis.
    """
    from ...features.ir.mlir.attention_calls import CallSplit

    def texts(shapes: Sequence[Sequence[int]], side: int) -> tuple[str, ...]:
        specs: list[list[tuple[str, ...]]] = [[()] * len(shape) for shape in shapes]
        for axis, cut in zip(axes, cuts, strict=True):
            for k, d in axis[side]:
                specs[k][d] = cut
        return tuple(sharding_text(spec, len(spec), mesh) for spec in specs)

    batch, heads = (prod(mesh[a] for a in cut) for cut in cuts)
    return CallSplit(texts(operands, 1), texts(results, 0), (batch, heads))


def partition_annotated(source: SourceProgram, format: str = "text") -> bytes:
    """Partition a program along its own shardings, Shardy's or GSPMD's.

    Args:
        source: StableHLO for several partitions, according to its header.
        format: ``text`` or ``bytecode``.

    Returns:
        StableHLO of one device, with explicit collectives.

    Raises:
        ProgramError: The program is not for several partitions of one replica, or already has
            collectives.
        LoweringError: The partitioner fails.
    """
    own = source.program
    if own.dialect != "stablehlo" or own.num_partitions < 2:
        raise ProgramError(
            "the program has no shardings to partition it by",
            where=source.origin,
            hint="spread it over a mesh: --mesh dp=8; or write it with shardings and "
            "mhlo.num_partitions in its header, as jax.jit does",
        )
    if own.num_replicas > 1 or joined_devices(source) > 1:
        raise ProgramError(
            "the program is partitioned already: it has collectives or replicas",
            where=source.origin,
            hint="opcast predict --cluster takes it as it is",
        )
    return _run(source.module, own.num_partitions, format, source.origin)


def _run(
    module: ir.Module,
    devices: int,
    format: str,
    origin: str,
    shardings: Mapping[str, object] | None = None,
) -> bytes:
    """Partition a module, with its own shardings or given ones."""
    from ...features.ir.mlir.bindings import write_bytecode

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "program").write_bytes(write_bytecode(module))
        job = {
            "program": str(folder / "program"),
            "dump": str(folder / "dump"),
            "devices": devices,
            **(shardings or {}),
        }
        run_worker(job, devices)
        text = read_dump(folder / "dump", origin or "program")
    return to_stablehlo(expand_groups(text), devices, format)


def _summary(path: Path, partitioned: SourceProgram, parameters: float) -> Partitioned:
    """Summarise the collectives of a partitioned program."""
    from ...features.lowering.op import lower_op

    moved: dict[tuple[str, TensorType], float] = {}
    for kernel in lower_op(partitioned).kernels:
        if kernel.kind == "collective":
            most = max(kernel.bytes_in, kernel.bytes_out) * kernel.multiplicity
            key = (kernel.op.opcode, kernel.op.type)
            moved[key] = moved.get(key, 0.0) + most
    total = sum(moved.values())
    if not parameters or total <= _MOST_MOVED * parameters:
        return Partitioned(path, total, parameters)
    (opcode, kind), most = max(moved.items(), key=lambda item: item[1])
    shape = ",".join(map(str, kind.shape))
    return Partitioned(
        path,
        total,
        parameters,
        f"its collectives move {size(total)} a run, {total / parameters:.0f} times the parameters "
        f"({size(parameters)}), so activations are moved too: {opcode} of {kind.dtype}[{shape}] "
        f"moves {size(most)}; is the batch the first dimension of the arguments named by "
        "--batch-args, and large enough for the mesh?",
    )


def sharding_text(
    cut: Sequence[str | tuple[str, ...] | None], rank: int, mesh: Mapping[str, int]
) -> str:
    """A sharding in XLA's syntax, such as ``{devices=[4,1]<=[4]}``.

    This is HloSharding's V2 form: tiles per dimension, then the iota of devices with an optional
    transposition; a last tile dimension may represent replication.

    Args:
        cut: Axes that split each of the first dimensions; others stay whole.
        rank: Number of dimensions of the array.
        mesh: Sizes by axis, outermost first; devices are numbered in that order.
    """
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in cut]
    axes += [()] * (rank - len(axes))
    used = [axis for own in axes for axis in own]
    if not used:
        return "{replicated}"
    # Axes that split nothing replicate the array over their devices.
    left = [axis for axis in mesh if axis not in used]
    tiles = [prod(mesh[a] for a in own) for own in axes]
    tiles += [prod(mesh[a] for a in left)] if left else []
    names = list(mesh)
    # Tiles follow the array's dimensions, devices the axes of the mesh: transpose if the two
    # orders differ. Axes that stay neighbours must be one dimension of the iota: XLA silently drops
    # a sharding in any other form.
    runs: list[list[int]] = []
    for number in (names.index(axis) for axis in (*used, *left)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    order = sorted(range(len(runs)), key=lambda run: runs[run][0])
    extents = [prod(mesh[names[n]] for n in runs[run]) for run in order]
    shape = ",".join(map(str, extents))
    turned = f"T({','.join(str(order.index(n)) for n in range(len(runs)))})"
    turned = turned if len(runs) > 1 else ""
    last = " last_tile_dim_replicate" if left else ""
    return f"{{devices=[{','.join(map(str, tiles))}]<=[{shape}]{turned}{last}}}"


def _first_sizes(kinds: Sequence[TensorType], donated: Mapping[int, int]) -> list[int]:
    """First dimensions of arguments that may be a batch, as opposed to donated state."""
    if not donated:
        return []
    return sorted(
        {
            kind.shape[0]
            for n, kind in enumerate(kinds)
            if n not in donated and kind.shape and (kind.dtype, kind.shape) not in _KEYS
        }
    )


def _batch(
    kinds: Sequence[TensorType],
    donated: Mapping[int, int],
    given: Sequence[int] | None,
    mesh: Mapping[str, int],
    where: str,
) -> set[int]:
    """Numbers of the arguments that are split along the batch."""
    if given is not None:
        wrong = [n for n in given if not 0 <= n < len(kinds)]
        if wrong:
            raise PlanError(
                f"there is no argument {wrong[0]}",
                where=where,
                hint=f"arguments are numbered from 0 to {len(kinds) - 1}",
            )
        return set(given)
    parts = prod(mesh.values())
    # Everything that is not state and is divisible. A program without donation gives no hint.
    leading = {
        n
        for n, kind in enumerate(kinds)
        if n not in donated
        and kind.shape
        and kind.shape[0] >= parts
        and kind.shape[0] % parts == 0
        and (kind.dtype, kind.shape) not in _KEYS
    }
    if not leading and (sizes := _first_sizes(kinds, donated)):
        raise PlanError(
            f"no argument has a batch that {parts} devices divide",
            where=where,
            hint=f"arguments that are not donated have {', '.join(map(str, sizes))} rows: take a "
            "mesh that divides them, or name the batch with --batch-args",
        )
    if not donated or not leading:
        raise ProgramError(
            "the program does not mark which of its arguments are the batch",
            where=where,
            hint="name them with --batch-args 3,4, or donate parameters and state",
        )
    return leading
