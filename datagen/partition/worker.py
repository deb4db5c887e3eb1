"""Partitions a workload or a program with XLA's partitioner, over virtual devices.

Started as ``python -m opcast.datagen.partition.worker``, with one JSON message per job. It is a
separate process because the flag that creates virtual devices is only read when JAX starts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.child_process import Channel
from ...common.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ..zoo.registry import Setting
    from ..zoo.workload import PyTree
    from .workload import Spec


#: Passes after which XLA dumps the module: its partitioners, and the pass after them, whose file
#: indicates that theirs is complete.
_DUMPED = "spmd-partitioning|shardy-xla|control-dep-rewriter"
_BEHIND = "*after_control-dep-rewriter*"
#: Seconds between checks for that file.
_POLL_S = 0.02


def main() -> None:
    """Read jobs, compile, and leave the partitioner's dump in each job's folder.

    The answer is sent as soon as the dump is complete, while XLA still compiles: the parent then
    ends the process, which saves code generation for the CPU, half of the time.
    """
    channel = Channel()
    for message in channel:
        job = json.loads(message)
        threading.Thread(target=_tell, args=(Path(job["dump"]), channel), daemon=True).start()
        if "program" in job:
            partition_program(job)
        else:
            partition(job["family"], job["settings"], job["mesh"], job["dump"])
        channel.send(b"done")


def _tell(folder: Path, channel: Channel) -> None:
    """Answer when the partitioner has written its dump; never if XLA's passes differ."""
    while not any(folder.glob(_BEHIND)):
        time.sleep(_POLL_S)
    channel.send(b"done")


def partition_program(job: JsonMapping) -> None:
    """Compile a program under the shardings of a job and dump the partitioner's result.

    Args:
        job: ``program``, the file of a module; ``devices``, their number; ``dump``, a folder;
            ``arguments`` and ``outputs``, the shardings of its arguments and of some of its results
            by number. Without them the module's own shardings apply.
    """
    from ...features.ir.jax_compat import compile_module
    from ...features.ir.mlir.bindings import parse_module
    from ...features.ir.mlir.shardings import with_shardings
    from .workload import partitioner_dumps

    module = parse_module(Path(job["program"]).read_bytes())
    if "arguments" in job:
        texts = job["arguments"]
        outputs = {int(out): texts[number] for out, number in job["outputs"].items()}
        module = with_shardings(module, texts, outputs, job["devices"])
    Path(job["dump"]).mkdir(parents=True, exist_ok=True)
    try:
        compile_module(module, 1, job["devices"], dump_flags(job["dump"]))
    except Exception:
        # Passes after the partitioner do not matter: a CPU has no code for the libraries
        # of a GPU.
        if not partitioner_dumps(Path(job["dump"])):
            raise


def partition(family: str, settings: dict[str, Setting], mesh: dict[str, int], dump: str) -> None:
    """Compile a workload over a mesh and dump the partitioner's result.

    Args:
        family: Family of the zoo.
        settings: Settings of the family.
        mesh: Sizes by axis.
        dump: Folder for the dump.
    """
    import jax
    import numpy as np

    from ..zoo.registry import build
    from .workload import batch_spec, cache_spec, parameter_spec

    workload = build(family, **settings)
    devices = np.array(jax.devices()).reshape(tuple(mesh.values()))
    grid = jax.sharding.Mesh(devices, tuple(mesh))
    train = settings.get("mode") == "train"
    *held, batch = workload.abstract_args
    # Parameters and statistics are followed by the optimiser's state, or by the caches of a
    # decoding step.
    caches = [] if train else held[2:]

    def cut(path: Sequence[object], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        return _sharded(leaf, grid, parameter_spec(names, leaf.shape, mesh))

    def cut_batch(path: Sequence[object], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = "/".join(str(getattr(k, "key", k)) for k in path)
        # A key of random numbers has no batch dimension.
        split = not names.startswith("dropout_key")
        return _sharded(leaf, grid, batch_spec(leaf.shape, mesh, names) if split else ())

    def cut_cache(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return _sharded(leaf, grid, cache_spec(leaf.shape, mesh, "caches"))

    held = held[: len(held) - len(caches)]
    args = [jax.tree_util.tree_map_with_path(cut, arg) for arg in held]
    args += [jax.tree.map(cut_cache, arg) for arg in caches]
    args.append(jax.tree_util.tree_map_with_path(cut_batch, batch))
    outputs = jax.eval_shape(workload.function, *workload.abstract_args)
    out = _out_shardings(outputs, args, train, grid)
    jitted = jax.jit(
        workload.function,
        donate_argnums=workload.donate_argnums,
        keep_unused=True,
        out_shardings=out,
    )
    Path(dump).mkdir(parents=True, exist_ok=True)
    jitted.lower(*args).compile(compiler_options=dump_flags(dump))


def dump_flags(folder: str) -> JsonObject:
    """Options that make XLA dump its partitioner's result into a folder."""
    # Only the partitioner's output is needed: code generation runs without optimisation.
    return {
        "xla_dump_to": folder,
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": _DUMPED,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }


def _sharded(leaf: jax.ShapeDtypeStruct, grid: Mesh, spec: Spec) -> jax.ShapeDtypeStruct:
    import jax

    # JAX has no annotations for these, and a strict checker rejects calls of such functions.
    struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype, sharding=_sharding(grid, spec))


def _sharding(grid: Mesh, spec: Spec) -> NamedSharding:
    import jax

    partition: Callable[..., PartitionSpec] = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(grid, partition(*spec))


def _out_shardings(outputs: PyTree, args: list[PyTree], train: bool, grid: Mesh) -> PyTree:
    """Updated parameters and state keep their shardings; the partitioner chooses the others."""
    import jax

    if not train:
        # A decoding step returns its updated caches after the tokens.
        caches = [jax.tree.map(lambda leaf: leaf.sharding, arg) for arg in args[2:-1]]
        return (None, *caches) if caches else None
    # A training step returns parameters, statistics and optimiser state (its first three
    # arguments), then the loss.
    kept = [jax.tree.map(lambda leaf: leaf.sharding, arg) for arg in args[:3]]
    whole = _sharding(grid, ())
    return (*kept, jax.tree.map(lambda _: whole, outputs[3]))


if __name__ == "__main__":
    main()
