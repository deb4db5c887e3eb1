"""MLIR modules through jaxlib, without JAX, which takes longer to import.

If a version of jaxlib moves one of its unstable interfaces, only this file has to change.
"""

from __future__ import annotations

import io
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

#: First bytes of MLIR bytecode and of StableHLO portable artifacts, which are MLIR bytecode.
BYTECODE_MAGIC = b"ML\xefR"
#: Start of the producer string that follows the magic in a portable artifact.
PORTABLE_PRODUCER = b"StableHLO_v"
#: Thread pool of all contexts, shared as in JAX.
_THREADS = ir.ThreadPool()


class _Context(ir.Context):
    """A context that loads no dialects by itself, like JAX's own."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


def make_context() -> ir.Context:
    """Make a context with JAX's dialects (func, stablehlo, chlo, sdy, mhlo) that accepts others."""
    context = _Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    # The parser loads the dialects that a program has: loading all takes four times as long as
    # reading a small program.
    context.set_thread_pool(_THREADS)
    sdy.register_dialect(context)
    mpmd.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context


def is_portable_artifact(data: bytes) -> bool:
    """Return whether a StableHLO serialiser wrote the bytecode, so that it needs an upgrade."""
    # The producer string is near the start of the header.
    return data.startswith(BYTECODE_MAGIC) and PORTABLE_PRODUCER in data[:64]


def parse_module(
    data: str | bytes, context: ir.Context | None = None, *, verify: bool = False
) -> ir.Module:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into an MLIR module.

    Args:
        data: The program.
        context: Context to parse into; a new one by default.
        verify: Whether to verify the module, which parsing bytecode does not.

    Raises:
        ValueError: The data are not a module; the message has the diagnostics with their positions.
    """
    context = context or make_context()
    messages: list[str] = []

    def note(diagnostic: ir.Diagnostic) -> bool:
        try:
            messages.append(f"{diagnostic.location}: {diagnostic.message}")
        except Exception:  # a message that quotes damaged bytes and is not UTF-8
            messages.append("the data is damaged")
        return True

    # Without a handler, diagnostics go to stderr, or abort on text that is not UTF-8.
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
    """Return all operations of a module or op, including itself, in pre-order.

    :attr:`opcast.features.ir.program.Source.index` numbers the ops of a module in this order.
    """
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        ops.append(op)
        return ir.WalkResult.ADVANCE

    with root.context:
        root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return ops


def functions_of(module: ir.Module) -> dict[str, ir.Operation]:
    """Return the functions of a module by name, in order."""
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in walk_ops(module)
        if op.name == "func.func"
    }


def write_bytecode(module: ir.Module) -> bytes:
    """Serialise a module to MLIR bytecode with its locations."""
    buffer = io.BytesIO()
    with module.context:
        module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def attribute_text(op: ir.Operation, name: str, limit: int | None = None) -> str:
    """Print an op's only attribute, for attributes that the bindings cannot wrap.

    Args:
        op: The operation.
        name: Name of the attribute.
        limit: Most dense elements to print; ``None`` prints all.

    Returns:
        The text; empty if the op has no such attribute.
    """
    text = str(op.get_asm(print_generic_op_form=True, large_elements_limit=limit))
    start = text.find(f"{{{name} = ")
    return text[start + len(name) + 4 : text.rfind("}> :")] if start >= 0 else ""


def tag_locations(module: ir.Module) -> ir.Module:
    """Copy a module, naming its ops ``op<position>/<name>`` by their position in :func:`walk_ops`.

    Compilers pass an op's name on to the instructions made from it, so that each optimised
    instruction names the ops that it came from.
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
    """Copy a module with its locations in the same context."""
    with module.context:
        return ir.Module.parse(write_bytecode(module))


def rename_module(module: ir.Module, name: str) -> None:
    """Set a module's name, which appears in profiler traces of the compiled program."""
    with module.context:
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)


def module_counts(module: ir.Module) -> tuple[int, int]:
    """Return the numbers of replicas and partitions that a module is for."""
    counts = []
    with module.context:
        for key in ("mhlo.num_replicas", "mhlo.num_partitions"):
            attributes = module.operation.attributes
            known = key in attributes
            counts.append(ir.IntegerAttr(attributes[key]).value if known else 1)
    return counts[0], counts[1]


def set_counts(module: ir.Module, **counts: int) -> None:
    """Set the number of ``replicas`` or ``partitions`` that a module is for."""
    with module.context:
        for name, number in counts.items():
            value = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
            module.operation.attributes[f"mhlo.num_{name}"] = value


def with_partitions(data: bytes, count: int, replicas: int = 1) -> ir.Module:
    """Parse bytecode and set the numbers of partitions and replicas of the module."""
    module = parse_module(data)
    if replicas > 1:
        set_counts(module, replicas=replicas)
    set_counts(module, partitions=count)
    return module
