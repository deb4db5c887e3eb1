"""Read the ops of an MLIR module as a table, and write the module with fewer layers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from ....common.types import MlirObject
from ...ir.mlir.bindings import attribute_text
from .runs import Excision, OpTable, Read

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from .remat import Again

_RETURN = ("func.return", "return")


def main_function(module: ir.Module) -> ir.OpView | None:
    """Return the public function of a module if its body is one block, else ``None``."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and str(op.attributes["sym_name"]) == '"main"':
            return op if len(op.regions[0].blocks) == 1 else None
    return None


def read_table(function: ir.OpView) -> OpTable:
    """Read signatures and reads of a function's ops, except its return.

    An op reads its operands, then the values captured by its regions, in the order of
    :func:`_uses`.
    """
    block = function.regions[0].blocks[0]
    values: dict[object, Read] = {arg: (-1, i) for i, arg in enumerate(block.arguments)}
    signatures, reads = [], []
    for number, op in enumerate(block.operations):
        operation = op.operation
        if operation.name in _RETURN:
            break
        for i, result in enumerate(operation.results):
            values[result] = (number, i)
        signatures.append(_signature(operation, outer=True))
        reads.append([values[user.operands[i]] for user, i in _uses(operation, values)])
    return OpTable(signatures, reads)


def _uses(operation: ir.Operation, outer: Container[object]) -> Iterator[tuple[ir.Operation, int]]:
    """Yield (op, operand) for each read of ``outer`` values by an op or the ops of its regions."""
    for number, value in enumerate(operation.operands):
        if value in outer:
            yield operation, number
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield from _uses(op.operation, outer)


def _signature(operation: ir.Operation, *, outer: bool = False) -> tuple[object, ...]:
    """Describe what an op does. Types and attributes are unique in their context, so cheap keys.

    A scalar integer constant of the function itself (``outer``) may differ from layer to layer: it
    is folded into each layer's random key.
    """
    types = tuple(value.type for value in (*operation.operands, *operation.results))
    if outer and operation.name == "stablehlo.constant" and _is_whole(types[0]):
        return (operation.name, types)
    inner = tuple(_body(block) for region in operation.regions for block in region.blocks)
    return (operation.name, types, _attributes(operation), inner)


def _is_whole(kind: ir.Type) -> bool:
    """Return whether a type is a scalar integer."""
    from jaxlib.mlir import ir

    own = ir.RankedTensorType(kind)
    return not own.shape and isinstance(own.element_type, ir.IntegerType)


def _attributes(operation: ir.Operation) -> tuple[object, ...]:
    pairs: list[tuple[str, object]] = []
    for item in operation.attributes:
        name = item if isinstance(item, str) else item.name
        try:
            pairs.append((name, operation.attributes[name]))
        except TypeError:  # the bindings have no class for complex elements
            pairs.append((name, attribute_text(operation, name)))
    return tuple(pairs)


def _body(block: ir.Block) -> tuple[object, ...]:
    """Return the signature of a region's block, with values numbered in order of definition."""
    values: dict[object, int] = {arg: i for i, arg in enumerate(block.arguments)}
    signatures = []
    for op in block.operations:
        operation = op.operation
        # Values from outside the region are not distinguished here; values of the function are
        # distinguished by the reads of the whole op.
        reads = tuple(values.get(value, -1) for value in operation.operands)
        for result in operation.results:
            values[result] = len(values)
        signatures.append((_signature(operation), reads))
    return tuple(signatures)


def write_excised(
    module: ir.Module, function: ir.OpView, table: OpTable, excision: Excision
) -> bool:
    """Remove ops from a module's main function, in place.

    Arguments that are no longer read and results that were removed are dropped from its type.

    Returns:
        Whether the module is still valid; if not, it must not be used.
    """
    block = function.regions[0].blocks[0]
    ops = [op.operation for op in block.operations]
    outer = {*block.arguments, *(result for op in ops for result in op.results)}
    with module.context:
        uses = {reader: list(_uses(ops[reader], outer)) for reader, _ in excision.rewired}
        for (reader, number), (source, result) in excision.rewired.items():
            values = ops[source].results if source >= 0 else block.arguments
            user, operand = uses[reader][number]
            user.operands[operand] = values[result]
        last = ops[len(table.reads)]
        lost = {result for number in excision.removed for result in ops[number].results}
        results = [i for i, value in enumerate(last.operands) if value not in lost]
        write_return(last, [last.operands[i] for i in results])
        # Users before their operands: an op that still has uses must not be erased.
        for number in sorted(excision.removed, reverse=True):
            ops[number].erase()
        used = {
            read[1]
            for op, reads in enumerate(table.reads)
            if op not in excision.removed
            for number, old in enumerate(reads)
            if (read := excision.rewired.get((op, number), old))[0] < 0
        }
        was_used = {read[1] for reads in table.reads for read in reads if read[0] < 0}
        # Arguments unused from the start stay, as part of the program's interface.
        returned = list(list(block.operations)[-1].operation.operands)
        kept = [
            i
            for i, arg in enumerate(block.arguments)
            if i in used or i not in was_used or any(arg == value for value in returned)
        ]
        retype(function, kept, results)
        # The rewiring is a guess at the structure: only a module that verifies is compiled.
        return bool(module.operation.verify())


def clone_ops(function: ir.OpView, table: OpTable, parts: Sequence[Again]) -> None:
    """Recompute ops before their late users, each part behind its own barrier.

    Args:
        function: The function that ``table`` was read from; it is changed.
        table: Its ops.
        parts: Ops to recompute, and their late users.
    """
    from jaxlib.mlir import ir

    block = function.regions[0].blocks[0]
    ops = [op.operation for op in block.operations]
    outer = {value: None for op in ops for value in op.results}
    outer |= dict.fromkeys(block.arguments)
    uses = [list(_uses(op, outer)) for op in ops[: len(table.reads)]]

    def value(read: Read) -> MlirObject:
        return ops[read[0]].results[read[1]] if read[0] >= 0 else block.arguments[read[1]]

    # Clones read the function's original values, so all are created before any user is changed.
    with function.context:
        made: list[dict[Read, MlirObject]] = []
        for part in parts:
            place = ir.InsertionPoint(ops[part.late[0]])
            held = [*part.inputs, *([part.trigger] if part.trigger is not None else [])]
            values = [value(read) for read in held]
            barrier = ir.Operation.create(
                "stablehlo.optimization_barrier",
                results=[v.type for v in values],
                operands=values,
                loc=ops[part.ops[0]].location,
                ip=place,
            )
            known: dict[Read, MlirObject] = dict(zip(part.inputs, barrier.results, strict=False))
            for number in part.ops:
                clone = ops[number].clone(ip=place).operation
                for read, (user, operand) in zip(
                    table.reads[number], list(_uses(clone, outer)), strict=True
                ):
                    user.operands[operand] = known[read]
                for result, own in enumerate(clone.results):
                    known[number, result] = own
            made.append(known)
        for part, clones in zip(parts, made, strict=True):
            for op in part.late:
                for read, (user, operand) in zip(table.reads[op], uses[op], strict=True):
                    if read in part.values:
                        user.operands[operand] = clones[read]


def write_return(old: ir.Operation, values: Sequence[MlirObject]) -> None:
    """Replace a function's return by one of other values."""
    from jaxlib.mlir import ir

    ir.Operation.create(old.name, operands=values, loc=old.location, ip=ir.InsertionPoint(old))
    old.erase()


def retype(
    function: ir.OpView, kept: Sequence[int], results: Sequence[int], more: tuple[int, int] = (0, 0)
) -> None:
    """Erase arguments, and adapt a function's type and attributes.

    Args:
        function: The function, with its return already rewritten.
        kept: Arguments to keep.
        results: Previous indices of the results.
        more: Number of arguments, and of results, appended after those.
    """
    from jaxlib.mlir import ir

    block, attributes = function.regions[0].blocks[0], function.operation.attributes
    place = {old: new for new, old in enumerate(results)}
    pairs = (("arg_attrs", kept), ("res_attrs", results))
    for (key, keep), added in zip(pairs, more, strict=True):
        if key in attributes:
            listed = list(ir.ArrayAttr(attributes[key]))
            own = [_fitting(listed[i], place) for i in keep]
            attributes[key] = ir.ArrayAttr.get(own + [ir.DictAttr.get({})] * added)
    for i in reversed(range(len(block.arguments) - more[0])):
        if i not in kept:
            block.erase_argument(i)
    inputs = [arg.type for arg in block.arguments]
    types = [v.type for v in list(block.operations)[-1].operation.operands]
    attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, types))


def _fitting(attrs: MlirObject, place: dict[int, int]) -> MlirObject:
    """Renumber the result that aliases an argument, and drop result names.

    Without result names, equal parts of a program are equal programs.
    """
    from jaxlib.mlir import ir

    key = "tf.aliasing_output"
    kept = {named.name: named.attr for named in attrs if named.name != "jax.result_info"}
    if key in kept:
        result = place.get(ir.IntegerAttr(kept[key]).value)
        if result is None:
            del kept[key]
        else:
            kept[key] = ir.IntegerAttr.get(kept[key].type, result)
    return ir.DictAttr.get(kept)
