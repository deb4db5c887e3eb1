"""Functions in place of their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..jax_compat import copy_module, functions_of, walk_ops

if TYPE_CHECKING:
    from jaxlib.mlir import ir


def inline_calls(module: ir.Module) -> ir.Module:
    """Copy a module with all calls of ``main`` inlined; functions that nothing calls are removed.

    MLIR's own pass of that name leaves calls as they are, because StableHLO does not declare that
    its ops may be moved into another function. Locations are call sites, so that the lines of
    callers are kept.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    copy = copy_module(module)
    with copy.context:
        functions = functions_of(copy)
        calls = [op for op in walk_ops(copy) if op.name == "func.call"]
        entry = functions.get("main")
        # Calls in functions that are called come along when those are.
        pending = [op for op in calls if entry is None or _function_of(op) == entry]
        while pending:
            call = pending.pop()
            callee = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
            pending += _inline(call, callee.regions[0].blocks[0])
        passes: Any = PassManager.parse("builtin.module(symbol-dce)")
        passes.run(copy.operation)
        if not ir.Operation.verify(copy.operation):
            raise ValueError("a function does not fit in the place of its call")
    return copy


def _function_of(op: ir.Operation) -> ir.Operation:
    while op.name != "func.func":
        above = op.parent
        assert above is not None  # calls are in functions
        op = above.operation
    return op


def _inline(call: ir.Operation, body: ir.Block) -> list[ir.Operation]:
    """Clone a function's ops in front of a call, which goes; returns the calls among them."""
    from jaxlib.mlir import ir

    known: dict[Any, Any] = dict(zip(body.arguments, call.operands, strict=True))
    calls = []
    place = ir.InsertionPoint(call)
    *ops, end = [view.operation for view in body.operations]
    for op in ops:
        clone = op.clone(ip=place).operation
        known.update(zip(op.results, clone.results, strict=True))
        for inner in nested_ops(clone):
            for number, value in enumerate(inner.operands):
                if value in known:
                    inner.operands[number] = known[value]
            inner.location = ir.Location.callsite(inner.location, [call.location])
            if inner.name == "func.call":
                calls.append(inner)
    for old, new in zip(call.results, end.operands, strict=True):
        old.replace_all_uses_with(known[new])
    call.erase()
    return calls


def nested_ops(op: ir.Operation) -> list[ir.Operation]:
    """An op and the ops of its regions, in the order of :func:`walk_ops`."""
    found = [op]
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                found += nested_ops(view.operation)
    return found
