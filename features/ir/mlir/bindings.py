"""MLIR modules as jaxlib reads and writes them, without JAX, which takes longer to import.

A version of jaxlib that moves one of its unstable interfaces breaks this file alone.
"""

from __future__ import annotations

import io
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

#: First bytes of MLIR bytecode, and of StableHLO portable artifacts, which are such bytecode.
BYTECODE_MAGIC = b"ML\xefR"
#: The producer string that follows the magic in a portable artifact starts with this.
PORTABLE_PRODUCER = b"StableHLO_v"
#: Threads of all contexts, as JAX shares its own.
_THREADS = ir.ThreadPool()


class _Context(ir.Context):
    """A context that loads none of the dialects that happen to be linked, as JAX's own."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


def make_context() -> ir.Context:
    """Make a context with JAX's dialects (func, stablehlo, chlo, sdy, mhlo); others pass too."""
    context = _Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.set_thread_pool(_THREADS)
    sdy.register_dialect(context)
    mpmd.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context


def is_portable_artifact(data: bytes) -> bool:
    """Whether bytecode was written by a StableHLO serialiser and needs its version upgrade."""
    # The producer's name lies within the first bytes of the header.
    return data.startswith(BYTECODE_MAGIC) and PORTABLE_PRODUCER in data[:64]


def parse_module(
    data: str | bytes, context: ir.Context | None = None, *, verify: bool = False
) -> ir.Module:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Args:
        data: The program.
        context: Context to parse into; a new one if not given.
        verify: Whether to verify it, too: bytecode is parsed without that.

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
                module = stablehlo.deserialize_portable_artifact(context, data)
            else:
                module = ir.Module.parse(data)
            if verify:
                module.operation.verify()
            return module
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


def with_partitions(data: bytes, count: int, replicas: int = 1) -> ir.Module:
    """Parse bytecode and mark the module as written for ``count`` partitions of each replica."""
    module = parse_module(data)
    if replicas > 1:
        set_counts(module, replicas=replicas)
    set_counts(module, partitions=count)
    return module
