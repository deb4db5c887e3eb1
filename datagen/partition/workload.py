"""Distributed StableHLO of a workload, with explicit collectives, on a machine without devices.

XLA's partitioner runs for as many virtual CPU devices as the mesh has. For CPUs it creates no
reduce-scatter: gradients of sharded parameters are all-reduced and sliced, which compilers for
accelerators change later (as does ``opcast predict --cluster``).

Axes are named by their purpose: ``dp`` splits the batch, ``fsdp`` the batch and the largest
dimension of every parameter, ``tp`` the products of attention and feed-forward: columns of the
first product, rows of the second, which combines the parts (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

from ...common.errors import LoweringError, PlanError
from ...common.files import write_bytes
from ...common.worker_process import WorkerEnded, WorkerProcess, WorkerTimeout, module_command
from ...features.ir.hlo_attributes import read_header
from ...features.ir.program import Program
from ...features.ir.replica_groups import parse_replica_groups
from ..zoo.registry import Setting, resolve

#: Seconds after which partitioning is aborted: large models over hundreds of devices take minutes
#: (engineering choice).
TIMEOUT_S = 1800
#: Compressed forms of replica groups: a named mesh with axes, or an iota list with an optional
#: transposition (``[2,4]<=[8]``). Explicit lists are left as they are.
_GROUPS = re.compile(
    r"replica_groups=(mesh\[[^\]]*\](?:,\s*device_ids=\((?:\[[\d,]*\](?:T\([\d,]*\))?|[\d,]*)\))?"
    r"\s*\{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)

#: Axes of a mesh in rank order, outermost first.
AXES = ("dp", "fsdp", "tp")
#: Parameters whose columns or rows are split, by words of their path in the zoo.
_COLUMNS = ("query", "key", "value", "qkv", "gate", "up", "head", "fc1", "embedding", "words")
_ROWS = ("out", "down", "fc2")

Spec = tuple[str | tuple[str, ...] | None, ...]


def export_partitioned(
    name: str, settings: Mapping[str, Setting], mesh: str, path: str | Path, format: str = "text"
) -> Path:
    """Write a partitioned workload as StableHLO.

    Args:
        name: Family of the zoo.
        settings: Settings of the family; ``batch`` is the global batch.
        mesh: Sizes by axis, such as ``fsdp=4,tp=2``.
        path: File to write.
        format: ``text`` or ``bytecode``.

    Returns:
        The path written.

    Raises:
        OpcastError: The family, a setting or the mesh is wrong, sizes do not match, or the
            partitioner fails.
    """
    if format not in ("text", "bytecode"):
        raise LoweringError(
            f"partitioned programs cannot be written as {format!r}", hint="text or bytecode"
        )
    sizes = parse_mesh(mesh)
    full = resolve(name, settings)
    if full["data_parallel"] != 1:
        raise LoweringError("data_parallel and a mesh do not go together", hint="use --mesh dp=4")
    text = expand_groups(partitioned_hlo(name, full, sizes))
    target = Path(path)
    write_bytes(target, to_stablehlo(text, prod(sizes.values()), format))
    return target


def partitioned_hlo(name: str, settings: Mapping[str, Setting], mesh: Mapping[str, int]) -> str:
    """HLO text of one device's program after partitioning.

    Raises:
        LoweringError: The partitioner fails or leaves no program.
    """
    devices = prod(mesh.values())
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch) / "dump"
        job = {"family": name, "settings": dict(settings), "mesh": dict(mesh), "dump": str(dump)}
        run_worker(job, devices)
        return read_dump(dump, name)


def read_dump(folder: Path, name: str) -> str:
    """Read the HLO text that the partitioner left in a folder.

    Raises:
        LoweringError: There is none.
    """
    # The name of the pass depends on the version of jax.
    dumps = partitioner_dumps(folder) or sorted(folder.glob("*after_shardy-xla*"))
    if not dumps:
        raise LoweringError(
            "the partitioner left no program", where=name, hint="try another version of jax"
        )
    return dumps[-1].read_text()


def partitioner_dumps(folder: Path) -> list[Path]:
    """Files that XLA's partitioner wrote at its end."""
    return sorted(folder.glob("*after_spmd-partitioning*"))


def expand_groups(text: str) -> str:
    """Write out every compressed list of replica groups in HLO text, as converters require."""
    # A large program repeats a few lists thousands of times.
    known: dict[str, str] = {}

    def written(match: re.Match[str]) -> str:
        if match[1] not in known:
            groups = parse_replica_groups(match[1])
            listed = ",".join("{" + ",".join(map(str, g)) + "}" for g in groups)
            known[match[1]] = f"replica_groups={{{listed}}}"
        return known[match[1]]

    return _GROUPS.sub(written, text)


def to_stablehlo(text: str, devices: int, format: str = "text") -> bytes:
    """Convert partitioned HLO text to StableHLO.

    Args:
        text: HLO with its replica groups written out.
        devices: Number of partitions of the program.
        format: ``text`` or ``bytecode``.

    Raises:
        LoweringError: The converter rejects it.
    """
    from ...features.ir.jax_compat import hlo_to_stablehlo
    from ...features.ir.mlir.bindings import with_partitions, write_bytecode
    from ...features.ir.mlir.shardings import with_donations

    header = Program()
    read_header(text.splitlines(), header)
    try:
        module = with_partitions(hlo_to_stablehlo(text), devices)
        module = with_donations(module, header.aliases, header.donors)
    except Exception as error:  # the converter raises several unrelated classes
        raise LoweringError(
            f"the partitioned program cannot be converted: {str(error).splitlines()[0]}",
            hint="try another version of jax",
        ) from None
    return write_bytecode(module) if format == "bytecode" else str(module).encode()


def run_worker(job: Mapping[str, object], devices: int) -> None:
    """Run the worker on a job, with virtual devices.

    Raises:
        LoweringError: It fails, or takes too long.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
    }
    with WorkerProcess(module_command(f"{__package__}.worker"), variables=variables) as worker:
        try:
            worker.send(json.dumps(job).encode(), TIMEOUT_S)
            worker.receive(TIMEOUT_S)
        except WorkerTimeout:
            raise LoweringError(
                f"partitioning took more than {TIMEOUT_S} s", hint="fewer layers"
            ) from None
        except WorkerEnded:
            worker.ending()
            last = worker.last_error() or "no message"
            where = str(job.get("family", "program"))
            raise LoweringError(f"partitioning failed: {last}", where=where) from None


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``fsdp=4,tp=2`` into sizes by axis, outermost first.

    Raises:
        PlanError: An axis is unknown or repeated, or a size is not a positive number.
    """
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in axes or not size.isdigit() or int(size) < 1:
            raise PlanError(
                f"{part!r} is not an axis of a mesh",
                where="--mesh",
                hint=f"axes are {', '.join(AXES)}, each once with its size: fsdp=4,tp=2",
            )
        axes[axis] = int(size)
    if prod(axes.values()) < 2:
        raise PlanError(f"mesh {text!r} has no two devices", where="--mesh", hint="fsdp=4")
    return {axis: axes[axis] for axis in AXES if axis in axes}


def batch_spec(shape: tuple[int, ...], mesh: Mapping[str, int], where: str) -> Spec:
    """Sharding of an input along its batch dimension.

    Raises:
        PlanError: The batch is not a multiple of the axes' sizes.
    """
    axes = tuple(a for a in ("dp", "fsdp") if a in mesh)
    parts = prod(mesh[a] for a in axes)
    if not shape or not axes:
        return ()
    if shape[0] % parts:
        raise PlanError(
            f"a batch of {shape[0]} cannot be cut into {parts} parts",
            where=where,
            hint=f"make batch a multiple of {parts}",
        )
    return (axes,)


def parameter_spec(path: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> Spec:
    """Sharding of a parameter, or of the optimiser's state for it.

    Args:
        path: Names of the tree's keys, such as ``Block_0/attention/query/kernel``.
        shape: Its shape; dimensions that an axis does not divide stay whole.
        mesh: Sizes by axis.
    """
    spec: list[str | None] = [None] * len(shape)
    tensor = _tensor_dimension(path, shape) if "tp" in mesh else None
    if tensor is not None and shape[tensor] % mesh["tp"] == 0:
        spec[tensor] = "tp"
    if "fsdp" in mesh:
        free = [i for i in range(len(shape)) if spec[i] is None and shape[i] % mesh["fsdp"] == 0]
        # By convention the largest divisible dimension.
        if free:
            spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(spec)


def cache_spec(shape: tuple[int, ...], mesh: Mapping[str, int], where: str) -> Spec:
    """Sharding of a KV cache (batch, positions, heads, head size): along batch and heads.

    Tensor parallelism keeps the keys and values of a head on the rank that computes them (Pope et
    al., Efficiently Scaling Transformer Inference, 2022, section 3.3). Heads that ``tp`` does not
    divide stay whole.

    Raises:
        PlanError: The batch is not a multiple of the axes' sizes.
    """
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    spec[:1] = batch_spec(shape, mesh, where) or (None,)
    if "tp" in mesh and len(shape) > 2 and shape[-2] % mesh["tp"] == 0:
        spec[-2] = "tp"
    return tuple(spec)


def _tensor_dimension(path: str, shape: tuple[int, ...]) -> int | None:
    words = set(re.split(r"[^a-z0-9]+", path.lower()))
    # Biases and scales stay whole. Rows are checked first, since a path may contain words of both.
    if len(shape) < 2:
        return None
    if words & set(_ROWS):
        return len(shape) - 2
    return len(shape) - 1 if words & set(_COLUMNS) else None
