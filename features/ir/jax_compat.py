"""The only module that uses unstable interfaces of JAX: its MLIR bindings and its compiler.

A JAX version that moves one of them breaks this file alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _jax_mlir
from jax._src.sharding_impls import GSPMDSharding
from jax.extend import mlir as jax_mlir
from jax.extend.backend import get_backend, get_compile_options
from jax.extend.source_info_util import register_exclusion
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as _stablehlo

# A function of JAX itself has only its caller's line, and the caller must not be one of ours.
# Programs of the zoo and of tests count as users' programs.
for _own in ("__main__.py", "cli", "features", "predict", "server", "workflows"):
    register_exclusion(str(Path(__file__).parents[2] / _own))

#: First bytes of MLIR bytecode, and of StableHLO portable artifacts, which are such bytecode.
BYTECODE_MAGIC = b"ML\xefR"
#: The producer string that follows the magic in a portable artifact starts with this.
PORTABLE_PRODUCER = b"StableHLO_v"


def make_context() -> ir.Context:
    """Make a context with JAX's dialects (func, stablehlo, chlo, sdy, mhlo); others pass too."""
    context = _jax_mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    return context


def is_portable_artifact(data: bytes) -> bool:
    """Whether bytecode was written by a StableHLO serialiser and needs its version upgrade."""
    # The producer's name lies within the first bytes of the header.
    return data.startswith(BYTECODE_MAGIC) and PORTABLE_PRODUCER in data[:64]


def parse_module(data: str | bytes, context: ir.Context | None = None) -> ir.Module:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Args:
        data: The program.
        context: Context to parse into; a new one if not given.

    Raises:
        ValueError: The data is not a module; the message holds the diagnostics with their places.
    """
    context = context or make_context()
    messages: list[str] = []

    def note(diagnostic: ir.Diagnostic) -> bool:
        try:
            messages.append(f"{diagnostic.location}: {diagnostic.message}")
        except Exception:  # a message that quotes damaged bytes is not UTF-8
            messages.append("the data is damaged")
        return True

    # Diagnostics are handled here: else they end up on stderr, or abort on text that is not UTF-8.
    handler: Any = context.attach_diagnostic_handler(note)
    context.emit_error_diagnostics = True
    try:
        with context:
            if isinstance(data, bytes) and is_portable_artifact(data):
                return _stablehlo.deserialize_portable_artifact(context, data)
            return ir.Module.parse(data)
    except Exception as error:  # the bindings raise several unrelated classes
        raise ValueError("\n".join(messages) or str(error)) from None
    finally:
        context.emit_error_diagnostics = False
        handler.detach()


def walk_ops(root: ir.Module | ir.Operation) -> list[ir.Operation]:
    """All operations of a module or op, itself included, in pre-order.

    In this order :attr:`opcast.features.ir.program.Source.index` counts the ops of a module.
    """
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        ops.append(op)
        return ir.WalkResult.ADVANCE

    with root.context:
        root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return ops


def functions_of(module: ir.Module) -> dict[str, ir.Operation]:
    """Functions of a module by name, in order."""
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in walk_ops(module)
        if op.name == "func.func"
    }


def write_bytecode(module: ir.Module) -> bytes:
    """Serialise a module to MLIR bytecode, locations included."""
    buffer = io.BytesIO()
    with module.context:
        module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def attribute_text(op: ir.Operation, name: str, limit: int | None = None) -> str:
    """Printed value of an op's only attribute, for attributes that the bindings cannot wrap.

    Args:
        op: The operation.
        name: Name of the attribute.
        limit: Dense elements beyond this number are left out; ``None`` prints all.

    Returns:
        The text; empty if the op has no such attribute.
    """
    text = str(op.get_asm(print_generic_op_form=True, large_elements_limit=limit))
    start = text.find(f"{{{name} = ")
    return text[start + len(name) + 4 : text.rfind("}> :")] if start >= 0 else ""


def tag_locations(module: ir.Module) -> ir.Module:
    """A copy whose ops are called ``op<position>/<name>``, positions as :func:`walk_ops` counts.

    Compilers carry an op's name over to the instructions they make of it, so that every optimised
    instruction names the ops it came from.
    """
    copy = copy_module(module)
    with module.context:
        for position, op in enumerate(walk_ops(copy)):
            # Position 0 is the module itself.
            if position:
                name = f"op{position}/{op.name.rsplit('.', 1)[-1]}"
                op.location = ir.Location.name(name, op.location)
    return copy


def copy_module(module: ir.Module) -> ir.Module:
    """A copy in the same context, locations included."""
    with module.context:
        return ir.Module.parse(write_bytecode(module))


def rename_module(module: ir.Module, name: str) -> None:
    """Set a module's name, which the compiled program carries into profiler traces."""
    with module.context:
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)


def module_counts(module: ir.Module) -> tuple[int, int]:
    """Return the numbers of replicas and partitions that a module is written for."""
    counts = []
    with module.context:
        for key in ("mhlo.num_replicas", "mhlo.num_partitions"):
            attributes = module.operation.attributes
            known = key in attributes
            counts.append(ir.IntegerAttr(attributes[key]).value if known else 1)
    return counts[0], counts[1]


def set_counts(module: ir.Module, **counts: int) -> None:
    """Write into a module how many ``replicas`` or ``partitions`` it is for."""
    with module.context:
        for name, number in counts.items():
            value = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
            module.operation.attributes[f"mhlo.num_{name}"] = value


def lowered_platforms(lowered: Any) -> tuple[str, ...]:
    """Return the platforms that a ``jax.stages.Lowered`` is for; empty if it names none."""
    found = getattr(getattr(lowered, "_lowering", None), "_platforms", None)
    return tuple(map(str, found or ()))


def compile_module(
    module: ir.Module, replicas: int, partitions: int, flags: Mapping[str, object] | None = None
) -> Any:
    """Compile for JAX's default backend.

    Args:
        module: StableHLO.
        replicas: Number of replicas.
        partitions: Number of partitions; with more than one, the compiler's partitioner runs.
        flags: Options of XLA by name without dashes.

    Returns:
        A loaded executable.

    Raises:
        Exception: Whatever the backend raises for a program that it cannot compile.
    """
    client = get_backend()
    count = replicas * partitions
    assignment = np.array([d.id for d in client.devices()[:count]]).reshape(replicas, partitions)
    options = get_compile_options(replicas, partitions, device_assignment=assignment)
    # Options of one compilation, beside XLA_FLAGS of the process.
    options.env_option_overrides = list((flags or {}).items())
    build = options.executable_build_options
    build.use_spmd_partitioning = partitions > 1
    # Without sdy ops the program carries GSPMD's annotations, which Shardy would not read.
    build.use_shardy_partitioner = partitions > 1 and "sdy." in str(module)
    devices = _jax.DeviceList(tuple(client.devices()[:count]))
    with module.context:
        return client.compile_and_load(module, devices, options)


def hlo_text(proto: bytes) -> str:
    """Print a serialised HLO module.

    Raises:
        ValueError: It is none.
    """
    try:
        return str(_hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string())
    except Exception as error:  # jaxlib raises its own classes
        raise ValueError(f"not an HLO module: {error}") from None


def hlo_to_stablehlo(text: str) -> bytes:
    """Convert the text of an HLO module that is not optimised to StableHLO bytecode.

    Raises:
        Exception: Whatever the converter raises for HLO that it does not support.
    """
    module = _hlo.hlo_module_from_text(text)
    data = bytes(jax_mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto()))
    return _without_copies(data) if b"mhlo" in data else data


def _without_copies(data: bytes) -> bytes:
    """Bytecode without ``mhlo.copy``, which the converter writes and no compiler takes."""
    module = parse_module(data)
    with module.context:
        for op in [op for op in walk_ops(module) if op.name == "mhlo.copy"]:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return write_bytecode(module)


def with_partitions(data: bytes, count: int, replicas: int = 1) -> ir.Module:
    """Parse bytecode and mark the module as written for ``count`` partitions of each replica."""
    module = parse_module(data)
    if replicas > 1:
        set_counts(module, replicas=replicas)
    set_counts(module, partitions=count)
    return module


def backends_started() -> bool:
    """Return whether JAX has started a backend in this process."""
    return bool(_xla_bridge.backends_are_initialized())


def execute(executable: Any, arguments: Sequence[object], device_count: int) -> list[jax.Array]:
    """Run a loaded executable.

    Args:
        executable: From :func:`compile_module`.
        arguments: Arrays; whole ones, which are split over the devices by the program's shardings.
        device_count: Devices that the executable runs on.

    Returns:
        Output arrays; with several devices, the arrays of the first one.
    """
    arrays = [_on_device(a, None) for a in arguments]
    if device_count == 1:
        return list(executable.execute(arrays))
    devices = executable.local_devices()
    given = executable.get_parameter_shardings() or [None] * len(arrays)
    whole: Any = _hlo.HloSharding.replicate()
    shardings = [GSPMDSharding(devices, s if s is not None else whole) for s in given]
    arrays = [_on_device(a, s) for a, s in zip(arguments, shardings, strict=True)]
    results = executable.execute_sharded(arrays)
    return [per_device[0] for per_device in results.disassemble_into_single_device_arrays()]


def _on_device(array: object, sharding: jax.sharding.Sharding | None) -> Any:
    if isinstance(array, jax.Array) and (sharding is None or array.sharding == sharding):
        return array
    with jax.enable_x64(True):  # keeps 64-bit arguments as they are
        return jax.device_put(array, sharding)


@dataclass(frozen=True)
class TracedFunction:
    """A jitted function as it was called.

    Attributes:
        name: Its name.
        function: The same function of its flat arguments; jitted, with the same donations.
        args: Their shapes and types are used.
    """

    name: str
    function: Any
    args: tuple[jax.ShapeDtypeStruct, ...]


@contextmanager
def recorded_functions() -> Iterator[list[TracedFunction]]:
    """Record the functions that are lowered in the block because they are called first.

    Yields:
        A list that grows with each function; JAX's own are left out.
    """
    found: list[TracedFunction] = []
    pjit: Any = _pjit
    original = pjit._resolve_and_lower
    own = str(Path(jax.__file__).parent)

    def record(args: Any, *rest: Any, jaxpr: Any, **options: Any) -> Any:
        debug = jaxpr.jaxpr.debug_info
        if not str(debug.func_filename or own).startswith(own):
            donated = tuple(i for i, flag in enumerate(options["donated_invars"]) if flag)
            function = jax.jit(_core.jaxpr_as_fun(jaxpr), donate_argnums=donated)
            # JAX has no annotations for it, and a strict checker refuses calls of such functions.
            struct: Any = jax.ShapeDtypeStruct
            shapes = tuple(struct(a.shape, a.dtype) for a in jaxpr.in_avals)
            found.append(TracedFunction(options["name"], function, shapes))
        return original(args, *rest, jaxpr=jaxpr, **options)

    pjit._resolve_and_lower = record
    try:
        yield found
    finally:
        pjit._resolve_and_lower = original
