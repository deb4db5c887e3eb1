"""Unstable interfaces of JAX: its compiler and its traces.

If a JAX version moves one of them, only this file has to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import xla_bridge as _xla_bridge
from jax._src.sharding_impls import GSPMDSharding
from jax.extend import mlir as jax_mlir
from jax.extend.backend import get_backend, get_compile_options
from jax.extend.source_info_util import register_exclusion
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]
from jaxlib.mlir import ir

from ...common.types import JaxObject
from .mlir.bindings import parse_module, walk_ops, write_bytecode

# For a function of JAX itself only the caller's line is known, which must not be one of opcast's.
# Programs of the zoo and of tests count as user programs.
for _own in ("__main__.py", "cli", "features", "predict", "server", "workflows"):
    register_exclusion(str(Path(__file__).parents[2] / _own))


def lowered_platforms(lowered: JaxObject) -> tuple[str, ...]:
    """Return the target platforms of a ``jax.stages.Lowered``; empty if it names none."""
    found = getattr(getattr(lowered, "_lowering", None), "_platforms", None)
    return tuple(map(str, found or ()))


def compile_module(
    module: ir.Module, replicas: int, partitions: int, flags: Mapping[str, object] | None = None
) -> JaxObject:
    """Compile for JAX's default backend.

    Args:
        module: StableHLO.
        replicas: Number of replicas.
        partitions: Number of partitions; above one, the compiler's partitioner runs.
        flags: XLA options by name without dashes.

    Returns:
        A loaded executable.

    Raises:
        Exception: Any error of the backend for a program that it cannot compile.
    """
    client = get_backend()
    count = replicas * partitions
    assignment = np.array([d.id for d in client.devices()[:count]]).reshape(replicas, partitions)
    options = get_compile_options(replicas, partitions, device_assignment=assignment)
    # Options of this compilation, in addition to XLA_FLAGS of the process.
    options.env_option_overrides = list((flags or {}).items())
    build = options.executable_build_options
    build.use_spmd_partitioning = partitions > 1
    # Without sdy ops the program has GSPMD's annotations, which Shardy would not read.
    build.use_shardy_partitioner = partitions > 1 and "sdy." in str(module)
    devices = _jax.DeviceList(tuple(client.devices()[:count]))
    with module.context:
        return client.compile_and_load(module, devices, options)


def hlo_text(proto: bytes) -> str:
    """Print a serialised HLO module.

    Raises:
        ValueError: The data are not an HLO module.
    """
    try:
        return str(_hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string())
    except Exception as error:  # jaxlib raises its own classes
        raise ValueError(f"not an HLO module: {error}") from None


def hlo_to_stablehlo(text: str) -> bytes:
    """Convert the text of an unoptimised HLO module to StableHLO bytecode.

    Raises:
        Exception: Any error of the converter for HLO that it does not support.
    """
    module = _hlo.hlo_module_from_text(text)
    data = bytes(jax_mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto()))
    return _without_copies(data) if b"mhlo" in data else data


def _without_copies(data: bytes) -> bytes:
    """Remove ``mhlo.copy``, which the converter writes and no compiler accepts."""
    module = parse_module(data)
    with module.context:
        for op in [op for op in walk_ops(module) if op.name == "mhlo.copy"]:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return write_bytecode(module)


def backends_started() -> bool:
    """Return whether JAX has started a backend in this process."""
    return bool(_xla_bridge.backends_are_initialized())


def execute(
    executable: JaxObject, arguments: Sequence[object], device_count: int
) -> list[jax.Array]:
    """Run a loaded executable.

    Args:
        executable: From :func:`compile_module`.
        arguments: Full arrays; the program's shardings split them over the devices.
        device_count: Number of devices that the executable runs on.

    Returns:
        Output arrays; those of the first device if there are several.
    """
    arrays = [_on_device(a, None) for a in arguments]
    if device_count == 1:
        return list(executable.execute(arrays))
    devices = executable.local_devices()
    given = executable.get_parameter_shardings() or [None] * len(arrays)
    whole: JaxObject = _hlo.HloSharding.replicate()
    shardings = [GSPMDSharding(devices, s if s is not None else whole) for s in given]
    arrays = [_on_device(a, s) for a, s in zip(arguments, shardings, strict=True)]
    results = executable.execute_sharded(arrays)
    return [per_device[0] for per_device in results.disassemble_into_single_device_arrays()]


def _on_device(array: object, sharding: jax.sharding.Sharding | None) -> JaxObject:
    if isinstance(array, jax.Array) and (sharding is None or array.sharding == sharding):
        return array
    with jax.enable_x64(True):  # keeps 64-bit arguments as they are
        return jax.device_put(array, sharding)


@dataclass(frozen=True)
class TracedFunction:
    """A jitted function and its arguments at a call.

    Attributes:
        name: Name of the function.
        function: The function with flattened arguments, jitted with the same donations.
        args: Shapes and types of the arguments.
    """

    name: str
    function: JaxObject
    args: tuple[jax.ShapeDtypeStruct, ...]


@contextmanager
def recorded_functions() -> Iterator[list[TracedFunction]]:
    """Record the functions that are lowered in the block because of their first call.

    Yields:
        A list that grows with each function; functions of JAX itself are left out.
    """
    found: list[TracedFunction] = []
    pjit: JaxObject = _pjit
    original = pjit._resolve_and_lower
    own = str(Path(jax.__file__).parent)

    def record(args: JaxObject, *rest: object, jaxpr: JaxObject, **options: JaxObject) -> JaxObject:
        debug = jaxpr.jaxpr.debug_info
        if not str(debug.func_filename or own).startswith(own):
            donated = tuple(i for i, flag in enumerate(options["donated_invars"]) if flag)
            function = jax.jit(_core.jaxpr_as_fun(jaxpr), donate_argnums=donated)
            # JAX has no annotations for it, and strict type checking rejects untyped calls.
            struct: JaxObject = jax.ShapeDtypeStruct
            shapes = tuple(struct(a.shape, a.dtype) for a in jaxpr.in_avals)
            found.append(TracedFunction(options["name"], function, shapes))
        return original(args, *rest, jaxpr=jaxpr, **options)

    pjit._resolve_and_lower = record
    try:
        yield found
    finally:
        pjit._resolve_and_lower = original
