"""Prepares a module for the partitioner, mainly by gathering parameters where they are used.

XLA's partitioner chooses which operand of a product to communicate by its size. If parameters and
batch are split over the same axis, it may gather or reduce activations instead of parameters. What
frameworks call FSDP or ZeRO-3 (Rajbhandari et al., ZeRO, 2020) gathers a parameter right before its
use, so that activations stay split along the batch. Constraints at each use in a product express
that here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from ....common.types import JsonObject, MlirObject
from ..op_table import named
from .attention_calls import CallSplit, Value, sharded, split_call
from .bindings import copy_module, functions_of, set_counts, walk_ops
from .locations import function_of

#: Ops that only convert a parameter to another form, in which it may be gathered.
_FORMS = named("forms_of_parameters")
#: Ops that combine a parameter with activations, unlike the arithmetic of an optimiser.
_USES = named("uses_of_parameters")
#: ``"x"=2`` of a Shardy mesh, whose quotes are escaped in HLO text.
_MESH_AXIS = re.compile(r'\\?"[^"\\]+\\?"\s*=\s*(\d+)')
#: Shardy's op for a ``shard_map``, whose body has the shapes of one device.
_MANUAL = "sdy.manual_computation"
_ALIAS, _DONOR = "tf.aliasing_output", "jax.buffer_donor"
#: Attributes of ops, arguments and results that a partitioner acts on.
ANNOTATIONS = ("mhlo.sharding", "sdy.sharding", "sdy.sharding_per_value")


def without_empty_meshes(module: ir.Module) -> ir.Module:
    """Copy a module without Shardy's empty meshes, which have no effect.

    JAX writes them around random numbers. An op of that dialect makes XLA use Shardy, which does
    not read the shardings added here. A module without such ops is returned itself.
    """
    if "sdy." not in str(module.operation.get_asm(large_elements_limit=8)):
        return module
    copy = copy_module(module)
    with copy.context:
        ops = [op for op in walk_ops(copy) if op.name.startswith("sdy.")]
        meshes = {
            str(op.attributes["sym_name"]).strip('"'): op
            for op in ops
            if op.name == "sdy.mesh" and "=" not in str(op.attributes["mesh"])
        }
        constraints = [op for op in ops if op.name == "sdy.sharding_constraint"]
        for op in constraints:
            if any(f"@{name}," in str(op.attributes["sharding"]) for name in meshes):
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
        for op in meshes.values():
            op.erase()
    return copy


def gathered_at_use(module: ir.Module, arguments: Collection[int]) -> tuple[ir.Module, set[int]]:
    """Copy a module so that its products read whole parameters.

    Args:
        module: StableHLO for one device.
        arguments: Numbers of the arguments of ``main`` that may be parameters.

    Returns:
        The copy with inlined calls, and the numbers of the arguments that products use.
    """
    copy = inline_calls(module)
    used: set[int] = set()
    with copy.context:
        main = functions_of(copy)["main"]
        values = list(main.regions[0].blocks[0].arguments)
        uses: list[tuple[ir.Operation, int]] = []
        for number in arguments:
            own = _uses(values[number])
            if own:
                used.add(number)
            uses += own
        for op, place in uses:
            _constrain(op, place, "{replicated}")
    return copy, used


def _constrain(op: ir.Operation, place: int, sharding: str) -> None:
    """Let an op read an operand with a sharding."""
    with ir.InsertionPoint(op), op.location:
        op.operands[place] = sharded(op.operands[place], sharding)


def constrained(
    module: ir.Module,
    operands: Mapping[tuple[int, int], str],
    results: Mapping[int, str],
    calls: Mapping[int, CallSplit],
) -> ir.Module:
    """Copy a module and annotate values with shardings.

    Args:
        module: StableHLO; ops are numbered as in
            :func:`~opcast.features.ir.mlir.bindings.walk_ops`.
        operands: Shardings of operands by numbers of op and operand.
        results: Shardings of the first results of ops, by number of the op.
        calls: Splits of library calls, by number of the op.
    """
    copy = copy_module(module)
    ops = walk_ops(copy)
    with copy.context:
        for (number, place), text in operands.items():
            _constrain(ops[number], place, text)
        for number, text in results.items():
            op = ops[number]
            value = op.results[0]
            users = [(use.owner.operation, use.operand_number) for use in value.uses]
            if users:
                with ir.InsertionPoint.after(op), op.location:
                    annotated = sharded(value, text)
                for user, place in users:
                    user.operands[place] = annotated
        for number, split in calls.items():
            split_call(ops[number], split)
    return copy


def argument_names(module: ir.Module) -> dict[int, str]:
    """Return the paths of a program's arguments, which JAX writes into their locations."""
    found = {}
    with module.context:
        main = functions_of(module).get("main")
        for number, value in enumerate(main.regions[0].blocks[0].arguments if main else ()):
            match = re.match(r'loc\("(.+?)"[\(\)]', str(value.location))
            if match and not match[1].endswith(".mlir"):
                found[number] = match[1].replace('\\"', '"')
    return found


def _uses(parameter: ir.Value[ir.Type]) -> list[tuple[ir.Operation, int]]:
    """Find the products that read a parameter, with the number of the operand."""
    found: list[tuple[ir.Operation, int]] = []
    pending: list[Value] = [parameter]
    while pending:
        for use in pending.pop().uses:
            op, place = use.owner.operation, use.operand_number
            if op.name in _USES:
                found.append((op, place))
            elif op.name in _FORMS:
                # The indices of a slice are not parameters; a barrier returns several values.
                if place < len(op.results):
                    pending.append(op.results[place])
            elif op.name == "stablehlo.while" and _is_kept(op, place):
                pending.append(op.regions[1].blocks[0].arguments[place])
    return found


def _is_kept(loop: ir.Operation, place: int) -> bool:
    """Return whether a loop keeps a value unchanged, as JAX does for captured values."""
    body = loop.regions[1].blocks[0]
    *_, end = [view.operation for view in body.operations]
    return bool(end.operands[place] == body.arguments[place])


def _pair_donors(main: ir.Operation, arguments: list[JsonObject]) -> None:
    """Give each donated argument a result of its type that may reuse its buffer, as JAX does.

    If the shardings of results are open, JAX leaves this to the compiler.
    """
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    known = [ir.IntegerAttr(own[_ALIAS]).value for own in arguments if _ALIAS in own]
    left = [n for n in range(len(kind.results)) if n not in known]
    for own, given in zip(arguments, kind.inputs, strict=True):
        if own.pop(_DONOR, None) is None:
            continue
        fit = next((n for n in left if kind.results[n] == given), None)
        if fit is not None:
            left.remove(fit)
            own[_ALIAS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), fit)


def with_donations(
    module: ir.Module, aliases: Iterable[tuple[int, int]], donors: Iterable[int]
) -> ir.Module:
    """Copy a module with the donations of an HLO header, as attributes of arguments as in JAX.

    Each donor is paired with the first result of its type that has none, as in JAX.

    Args:
        module: A module converted from HLO, which lost or hid the aliases of the header.
        aliases: Pairs of an output and the argument whose buffer it reuses.
        donors: Arguments whose buffers any output may reuse.
    """
    copy = copy_module(module)
    with copy.context:
        main = functions_of(copy)["main"]
        given: MlirObject = main.attributes.get("arg_attrs", None)
        count = len(main.regions[0].blocks[0].arguments)
        own = [{each.name: each.attr for each in attrs} for attrs in given or [()] * count]
        for output, number in aliases:
            own[number][_ALIAS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), output)
        for number in donors:
            own[number][_DONOR] = ir.BoolAttr.get(True)
        _pair_donors(main, own)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in own])
        if "mhlo.input_output_alias" in copy.operation.attributes:
            del copy.operation.attributes["mhlo.input_output_alias"]
    return copy


def without_shardings(module: ir.Module) -> ir.Module:
    """Copy a module for one device, removing all annotations of GSPMD and Shardy.

    Raises:
        ValueError: A part of the module is written for each device (``shard_map``), so there is no
            program for one device.
    """
    copy = copy_module(module)
    with copy.context:
        for op in walk_ops(copy):
            call = "call_target_name" in op.attributes
            target = str(op.attributes["call_target_name"]).strip('"') if call else ""
            if op.name == _MANUAL or target == "SPMDFullToShardShape":
                raise ValueError(
                    "a part is written for each device, by shard_map or by a plan that was saved "
                    "with cuts of cuDNN's attention"
                )
            annotation = op.name == "stablehlo.custom_call" and target == "Sharding"
            if annotation or op.name == "sdy.sharding_constraint":
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
                continue
            if op.name == "sdy.mesh":
                op.erase()
                continue
            for name in ANNOTATIONS:
                if name in op.attributes:
                    del op.attributes[name]
            for side in ("arg_attrs", "res_attrs"):
                if op.name == "func.func" and side in op.attributes:
                    old: MlirObject = op.attributes[side]
                    new = [
                        {own.name: own.attr for own in each if own.name not in ANNOTATIONS}
                        for each in old
                    ]
                    if side == "arg_attrs":
                        _pair_donors(op, new)
                    op.attributes[side] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in new])
    set_counts(copy, partitions=1)
    return copy


def mesh_size(axes: str) -> int:
    """Return the number of devices of a mesh, from the text of its axes."""
    return prod(int(n) for n in _MESH_AXIS.findall(axes))


def manual_devices(module: ir.Module) -> int:
    """Count the devices of the largest mesh of a ``shard_map``; 1 if there is none.

    For an ``AbstractMesh``, JAX writes one partition into the header, although the body has the
    shapes of a single device.
    """
    ops = list(walk_ops(module))
    used = " ".join(str(op.attributes["in_shardings"]) for op in ops if op.name == _MANUAL)
    meshes = [op for op in ops if op.name == "sdy.mesh"]
    sizes = {str(op.attributes["sym_name"]).strip('"'): op.attributes["mesh"] for op in meshes}
    named = [mesh_size(str(mesh)) for name, mesh in sizes.items() if f"@{name}," in used]
    return max([1, *named])


def inline_calls(module: ir.Module) -> ir.Module:
    """Copy a module with all calls of ``main`` inlined, and without functions that are not called.

    MLIR's own inlining pass keeps the calls, because StableHLO does not declare that its ops may be
    moved into other functions. Locations become call sites, which keep the lines of callers.
    """
    copy = copy_module(module)
    with copy.context:
        functions = functions_of(copy)
        calls = [op for op in walk_ops(copy) if op.name == "func.call"]
        # Calls inside called functions are handled when those are inlined.
        pending = [op for op in calls if "main" not in functions or function_of(op) == "main"]
        while pending:
            call = pending.pop()
            callee = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
            pending += _inline(call, callee.regions[0].blocks[0])
        passes = PassManager.parse("builtin.module(symbol-dce)")
        passes.run(copy.operation)
        if not ir.Operation.verify(copy.operation):
            raise ValueError("a function does not fit in the place of its call")
    return copy


def _inline(call: ir.Operation, body: ir.Block) -> list[ir.Operation]:
    """Replace a call by clones of the function's ops, and return the calls among them."""
    known: dict[Value, Value] = dict(zip(body.arguments, call.operands, strict=True))
    calls = []
    place = ir.InsertionPoint(call)
    *ops, end = [view.operation for view in body.operations]
    for op in ops:
        for inner in substitute(op, known, place):
            inner.location = ir.Location.callsite(inner.location, [call.location])
            if inner.name == "func.call":
                calls.append(inner)
    for old, new in zip(call.results, end.operands, strict=True):
        old.replace_all_uses_with(known[new])
    call.erase()
    return calls


def substitute(
    op: ir.Operation,
    known: dict[Value, Value],
    place: ir.InsertionPoint | None = None,
) -> list[ir.Operation]:
    """Clone an op with other operands.

    Args:
        op: The op.
        known: Replacements of values; the results of the clone are added.
        place: Where to insert the clone; by default the current insertion point.

    Returns:
        The clone and the ops of its regions, as listed by :func:`walk_ops`.
    """
    clone = op.clone(ip=place).operation
    known.update(zip(op.results, clone.results, strict=True))
    ops = walk_ops(clone)
    for inner in ops:
        for number, value in enumerate(inner.operands):
            if value in known:
                inner.operands[number] = known[value]
    return ops


def with_shardings(
    module: ir.Module, arguments: Sequence[str], results: Mapping[int, str], count: int
) -> ir.Module:
    """Copy a module for one device, with its arguments split over several devices.

    Args:
        module: StableHLO with a function ``main``.
        arguments: Sharding of each argument in XLA's notation.
        results: Shardings of results by number; the partitioner chooses the others.
        count: Number of devices.
    """
    copy = copy_module(module)
    with module.context:
        main = functions_of(copy)["main"]
        kind: MlirObject = ir.TypeAttr(main.attributes["function_type"]).value
        for side, total, known in (
            ("arg_attrs", len(kind.inputs), dict(enumerate(arguments))),
            ("res_attrs", len(kind.results), results),
        ):
            old: MlirObject = main.attributes[side] if side in main.attributes else [None] * total
            new = [_with_sharding(own, known.get(n, "")) for n, own in enumerate(old)]
            main.attributes[side] = ir.ArrayAttr.get(new)
    set_counts(copy, partitions=count)
    return copy


def _with_sharding(attributes: MlirObject, text: str) -> ir.DictAttr:
    kept = {own.name: own.attr for own in attributes} if attributes is not None else {}
    if text:
        kept["mhlo.sharding"] = ir.StringAttr.get(text)
    return ir.DictAttr.get(kept)
