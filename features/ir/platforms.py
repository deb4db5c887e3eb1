"""Platforms that programs were lowered for, since JAX lowers one function differently for each.

Random numbers become a loop on CPUs and straight-line code elsewhere, attention may become a cuDNN
call, and ``jax.lax.platform_dependent`` may be anything. A program that was lowered for another
platform than the device's therefore has other kernels. From an export for several platforms, the
branches of one can be selected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...common.errors import WARNING
from ...common.types import MlirObject
from ..devices.rules import capability_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from ..devices.device import DeviceSpec
    from .reader import SourceProgram

#: Argument with the platform's number in the export's list, which JAX adds to each function that
#: depends on the platform (jax/_src/interpreters/mlir.py, lower_jaxpr_to_module).
INDEX = "_platform_index"
#: Other names that JAX uses for platforms.
_ALIASES = {"gpu": "cuda"}
#: Custom calls that only one platform has, by their names in JAX's lowering rules.
_CALLS = {
    "cpu": re.compile(r"lapack_|blas_|cpu_"),
    "cuda": re.compile(r"__cudnn\$|__cublas\$|cu(?:blas|solver|dnn|sparse|_)|mosaic_gpu"),
    "rocm": re.compile(r"hip(?:blas|solver|sparse|_)|miopen"),
    "tpu": re.compile(r"tpu_custom_call"),
}
#: Parts of the names of these calls, and of Threefry loops, as found in bytecode.
_TRACES = re.compile(
    rb"threefry2x32|lapack_|blas_|cpu_|cudnn|cublas|solver|sparse|cu_|hip_|miopen|mosaic_gpu|"
    rb"tpu_custom_call"
)
#: Module attribute in XLA's dialect that is preserved for front ends, and opcast's key in it.
_FRONTEND, _LOWERED_FOR = "mhlo.frontend_attributes", "opcast_platforms"


class Platform(NamedTuple):
    """Target of a lowering.

    Attributes:
        name: JAX's name of the platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``.
        capability: Compute capability of an NVIDIA GPU times ten; 0 for others and unknown ones.
        kind: JAX's device kind of a TPU (``TPU v5 lite``); empty for others and unknown ones.
    """

    name: str
    capability: int = 0
    kind: str = ""


def platform_of(device: DeviceSpec) -> Platform:
    """Return the platform of a device by JAX's name.

    GPUs other than AMD's are CUDA devices, since JAX has no names for further vendors.
    """
    if device.platform != "gpu":
        kinds = (name for name in device.aliases if name.startswith("TPU "))
        return Platform(device.platform, kind=next(kinds, ""))
    # Measured devices have no vendor; their name is JAX's device kind.
    words = f"{device.vendor} {device.name} {' '.join(device.aliases)}".lower()
    if re.search(r"\bamd\b|instinct|radeon|\bmi\d{3}", words):
        return Platform("rocm")
    return Platform("cuda", capability_of(str(device.compiler.get("target", ""))) or 0)


def platform_here() -> Platform:
    """Return the platform of JAX's default backend."""
    import jax

    name = jax.default_backend()
    version = str(getattr(jax.devices()[0].client, "platform_version", ""))
    return Platform("rocm" if "rocm" in version.lower() else known_platform(name))


def known_platform(name: str) -> str:
    """Return JAX's canonical name of a platform, such as ``cuda`` for ``gpu``."""
    return _ALIASES.get(name, name)


def evident_platform(source: SourceProgram) -> str:
    """Infer the platform that StableHLO was lowered for from its ops; empty if they do not tell."""
    # A search in the raw input avoids walking most programs.
    if source.kind != "stablehlo" or not _TRACES.search(source.raw):
        return ""
    from .mlir.bindings import walk_ops

    found = set()
    for op in walk_ops(source.module):
        if op.name == "stablehlo.custom_call":
            target = str(op.attributes["call_target_name"]).strip('"')
            found |= {name for name, calls in _CALLS.items() if calls.match(target)}
        # JAX makes the Threefry rounds a loop on CPUs only (jax/_src/prng.py).
        elif op.name == "func.func" and "threefry2x32" in str(op.attributes["sym_name"]):
            blocks = op.regions[0].blocks
            if any(o.operation.name == "stablehlo.while" for b in blocks for o in b.operations):
                found.add("cpu")
    return found.pop() if len(found) == 1 else ""


def platform_note(source: SourceProgram, device: DeviceSpec) -> str:
    """Describe a mismatch between a program's platform and a device's; empty if there is none."""
    wanted = platform_of(device).name
    several = source.kind == "stablehlo" and INDEX.encode() in source.raw
    if several and not source.platforms:
        return (
            f"{WARNING}the program was exported for several platforms, and the file does not state "
            "which: the costliest of all branches counts; keep the whole export "
            f"(exported.serialize()), or export for {wanted} alone"
        )
    known = source.platforms or tuple(filter(None, (evident_platform(source),)))
    if not known or wanted in known:
        return ""
    what = "compiled" if source.kind == "hlo" else "lowered"
    return (
        f"{WARNING}the program was {what} for {' and '.join(known)}, but {device.name} needs "
        f"{wanted}: random numbers, attention and whatever else depends on the platform may have "
        "other kernels there, and the time may be far off; give the function itself (opcast "
        f"predict module.py:function --device {device.name}, in Python opcast.predict(function, "
        "*arguments, device=…)), or write the file by opcast.save(function, *arguments, path=…, "
        f"device={device.name!r}) or jax.export.export(function, platforms=[{wanted!r}])"
    )


def for_platform(module: ir.Module, number: int) -> ir.Module:
    """Copy a module with only the branches of one platform.

    Args:
        module: Exported by JAX for several platforms.
        number: Position of the platform in the export's list.

    Returns:
        The copy, without the platform argument of ``main``; the module itself if it has none.
    """
    from jaxlib.mlir import ir

    from .mlir.bindings import copy_module, functions_of

    copy = copy_module(module)
    with copy.context, ir.Location.unknown():
        functions = {
            name: op for name, op in functions_of(copy).items() if len(op.regions[0].blocks)
        }
        found = [(name, _index_argument(op)) for name, op in functions.items()]
        pending = [(name, place) for name, place in found if place is not None]
        if not pending:
            return module
        # Some functions (jax/_src/prng.py) take the number without marking the argument.
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
            # Calls of other functions still pass the number, but nothing passes one to main.
            if name == "main":
                _drop_argument(functions[name], place)
        for function in functions.values():
            _take_branches(function)
    return copy


def _index_argument(function: ir.Operation) -> int | None:
    """Return the position of the argument that JAX marks as the platform's number."""
    if "arg_attrs" not in function.attributes:
        return None
    attributes: MlirObject = function.attributes["arg_attrs"]
    return next((n for n, own in enumerate(attributes) if INDEX in str(own)), None)


def _callee(op: MlirObject) -> str:
    from jaxlib.mlir import ir

    op = op.operation
    if op.name not in ("func.call", "stablehlo.composite"):
        return ""
    key = "callee" if op.name == "func.call" else "decomposition"
    return str(ir.FlatSymbolRefAttr(op.attributes[key]).value)


def _fix(function: ir.Operation, place: int, number: int) -> ir.Value[ir.Type]:
    """Replace an argument of a function by a constant and return the constant."""
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
    kind: MlirObject = ir.TypeAttr(function.attributes["function_type"]).value
    inputs = [own for n, own in enumerate(kind.inputs) if n != place]
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(inputs, kind.results)
    )
    attributes: MlirObject = function.attributes["arg_attrs"]
    kept = [own for n, own in enumerate(attributes) if n != place]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)


def _take_branches(function: ir.Operation) -> None:
    """Replace each case with a constant index by its branch, outermost first."""
    pending = [block for region in function.regions for block in region.blocks]
    while pending:
        block = pending.pop()
        # Restart after each replacement, since the index of a moved case may be constant now.
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
    """Return the integer value of a constant; ``None`` if it is unknown."""
    from jaxlib.mlir import ir

    owner: MlirObject = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name == "stablehlo.convert":
        return _constant(owner.operands[0])
    # JAX versions before 0.5 clamp the branch number (jax.lax.switch).
    if owner.name == "stablehlo.clamp":
        low, number, high = map(_constant, owner.operands)
        if low is None or number is None or high is None:
            return None
        return max(low, min(number, high))
    if owner.name != "stablehlo.constant":
        return None
    literal: MlirObject = ir.DenseIntElementsAttr(owner.attributes["value"])
    return int(literal[0]) if len(literal) == 1 else None


def _inline(case: ir.Operation, number: int) -> None:
    """Replace a case by the ops of one branch."""
    *body, end = [view.operation for view in case.regions[number].blocks[0].operations]
    for op in body:
        op.move_before(case)
    for result, value in zip(case.results, list(end.operands), strict=True):
        result.replace_all_uses_with(value)
    case.erase()


def mark_platforms(module: ir.Module, platforms: Sequence[str]) -> ir.Module:
    """Copy a module and add an attribute with the platforms that it was lowered for."""
    from jaxlib.mlir import ir

    from .mlir.bindings import copy_module

    copy = copy_module(module)
    with copy.context:
        mark = ir.DictAttr.get({_LOWERED_FOR: ir.StringAttr.get(",".join(platforms))})
        copy.operation.attributes[_FRONTEND] = mark
    return copy


def marked_platforms(module: ir.Module) -> tuple[str, ...]:
    """Return the platforms that a module was marked with; empty if there are none."""
    from jaxlib.mlir import ir

    with module.context:
        if _FRONTEND not in module.operation.attributes:
            return ()
        own = ir.DictAttr(module.operation.attributes[_FRONTEND])
        marked = _LOWERED_FOR in own
        return tuple(ir.StringAttr(own[_LOWERED_FOR]).value.split(",")) if marked else ()
