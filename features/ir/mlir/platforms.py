"""Takes one platform's branches of a module that JAX exported for several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..jax_compat import copy_module, functions_of
from ..platforms import INDEX

if TYPE_CHECKING:
    from jaxlib.mlir import ir


def for_platform(module: ir.Module, number: int) -> ir.Module:
    """Copy a module with the branches of one platform only.

    Args:
        module: As JAX exports it for several platforms.
        number: Number of the platform in the export's list.

    Returns:
        The copy, without the argument of ``main`` that chose; the module itself if it has none.
    """
    from jaxlib.mlir import ir

    copy = copy_module(module)
    with copy.context, ir.Location.unknown():
        functions = {
            name: op for name, op in functions_of(copy).items() if len(op.regions[0].blocks)
        }
        found = [(name, _index_argument(op)) for name, op in functions.items()]
        pending = [(name, place) for name, place in found if place is not None]
        if not pending:
            return module
        # Some functions (jax/_src/prng.py) get the number without any mark.
        fixed = set(pending)
        while pending:
            name, place = pending.pop()
            value = _fix(functions[name], place, number)
            for use in value.uses:
                callee = _callee(use.owner)
                target = (callee, use.operand_number)
                if callee in functions and target not in fixed:
                    fixed.add(target)
                    pending.append(target)
        for name, place in fixed:
            # Callers of other functions still pass the number; nobody passes any to main.
            if name == "main":
                _drop_argument(functions[name], place)
        for function in functions.values():
            _take_branches(function)
    return copy


def _index_argument(function: ir.Operation) -> int | None:
    """Number of the argument that JAX marks as the platform's number."""
    if "arg_attrs" not in function.attributes:
        return None
    attributes: Any = function.attributes["arg_attrs"]
    return next((n for n, own in enumerate(attributes) if INDEX in str(own)), None)


def _callee(op: Any) -> str:
    from jaxlib.mlir import ir

    op = op.operation
    if op.name not in ("func.call", "stablehlo.composite"):
        return ""
    key = "callee" if op.name == "func.call" else "decomposition"
    return str(ir.FlatSymbolRefAttr(op.attributes[key]).value)


def _fix(function: ir.Operation, place: int, number: int) -> ir.Value[ir.Type]:
    """Replace an argument of a function by a constant, and return that."""
    from jaxlib.mlir import ir

    block = function.regions[0].blocks[0]
    argument = block.arguments[place]
    shape = ir.RankedTensorType(argument.type)
    value = ir.IntegerAttr.get(shape.element_type, number)
    with ir.InsertionPoint.at_block_begin(block):
        constant = ir.Operation.create(
            "stablehlo.constant",
            results=[shape],
            attributes={"value": ir.DenseElementsAttr.get_splat(shape, value)},
        )
    fixed: ir.Value[ir.Type] = constant.results[0]
    argument.replace_all_uses_with(fixed)
    return fixed


def _drop_argument(function: ir.Operation, place: int) -> None:
    from jaxlib.mlir import ir

    function.regions[0].blocks[0].erase_argument(place)
    kind: Any = ir.TypeAttr(function.attributes["function_type"]).value
    inputs = [own for n, own in enumerate(kind.inputs) if n != place]
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(inputs, kind.results)
    )
    attributes: Any = function.attributes["arg_attrs"]
    kept = [own for n, own in enumerate(attributes) if n != place]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)


def _take_branches(function: ir.Operation) -> None:
    """Put the chosen branch in place of every case whose index is a constant, outermost first."""
    pending = [block for region in function.regions for block in region.blocks]
    while pending:
        block = pending.pop()
        # Again from the start after each replacement: what it brought may be decided now.
        while (case := next((op for op in _cases(block)), None)) is not None:
            _inline(*case)
        for view in block.operations:
            pending += [inner for region in view.operation.regions for inner in region.blocks]


def _cases(block: ir.Block) -> list[tuple[ir.Operation, int]]:
    found = []
    for view in block.operations:
        op = view.operation
        if op.name == "stablehlo.case" and (number := _constant(op.operands[0])) is not None:
            # Out of range means the last branch (StableHLO specification, case).
            last = len(op.regions) - 1
            found.append((op, number if 0 <= number <= last else last))
    return found


def _constant(value: ir.Value[ir.Type]) -> int | None:
    """The integer that a value is, if that is known."""
    from jaxlib.mlir import ir

    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.convert":
        return _constant(owner.operands[0])
    # Around the number of a branch (jax.lax.switch), in versions before 0.5.
    if owner.name == "stablehlo.clamp":
        low, number, high = map(_constant, owner.operands)
        if low is None or number is None or high is None:
            return None
        return max(low, min(number, high))
    if owner.name != "stablehlo.constant":
        return None
    literal: Any = ir.DenseIntElementsAttr(owner.attributes["value"])
    return int(literal[0]) if len(literal) == 1 else None


def _inline(case: ir.Operation, number: int) -> None:
    """Replace a case by the ops of one branch."""
    *body, end = [view.operation for view in case.regions[number].blocks[0].operations]
    for op in body:
        op.move_before(case)
    for result, value in zip(case.results, list(end.operands), strict=True):
        result.replace_all_uses_with(value)
    case.erase()
