"""The platform that a program was lowered for: JAX lowers one function differently for each.

Random numbers become a loop on a CPU and straight code elsewhere, attention may become a call of
cuDNN, and ``jax.lax.platform_dependent`` may be anything: a program that was lowered for another
platform than the device's has other kernels. Of an export for several, one platform's branches
can be taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.errors import WARNING
from ..devices.rules import capability_of

if TYPE_CHECKING:
    from jaxlib.mlir import ir

    from ..devices.device import DeviceSpec
    from .reader import SourceProgram

#: Argument of every function of an export for several platforms that depends on the platform: its
#: number in the export's list (jax/_src/interpreters/mlir.py, lower_jaxpr_to_module).
INDEX = "_platform_index"
#: JAX's other names for the platforms.
_ALIASES = {"gpu": "cuda"}
#: Custom calls that one platform alone has, as JAX's lowering rules name them.
_CALLS = {
    "cpu": re.compile(r"lapack_|blas_|cpu_"),
    "cuda": re.compile(r"__cudnn\$|__cublas\$|cu(?:blas|solver|dnn|sparse|_)|mosaic_gpu"),
    "rocm": re.compile(r"hip(?:blas|solver|sparse|_)|miopen"),
    "tpu": re.compile(r"tpu_custom_call"),
}
#: Traces of any of these, or of a loop of Threefry, in bytecode, which holds names verbatim.
_TRACES = re.compile(
    rb"threefry2x32|lapack_|blas_|cpu_|cudnn|cublas|solver|sparse|cu_|hip_|miopen|mosaic_gpu|"
    rb"tpu_custom_call"
)


class Platform(NamedTuple):
    """What a function is lowered for.

    Attributes:
        name: One of :data:`PLATFORMS`.
        capability: Compute capability of an NVIDIA GPU times ten; 0 for others and unknown ones.
        kind: What JAX calls a TPU (``TPU v5 lite``); empty for others and unknown ones.
    """

    name: str
    capability: int = 0
    kind: str = ""


def platform_of(device: DeviceSpec) -> Platform:
    """Return the platform of a device, as JAX calls it.

    GPUs are CUDA's unless they are AMD's: JAX has no name for GPUs of other vendors.
    """
    if device.platform != "gpu":
        kinds = (name for name in device.aliases if name.startswith("TPU "))
        return Platform(device.platform, kind=next(kinds, ""))
    # Measured devices have no vendor, but JAX's device kind as their name.
    words = f"{device.vendor} {device.name} {' '.join(device.aliases)}".lower()
    if re.search(r"\bamd\b|instinct|radeon|\bmi\d{3}", words):
        return Platform("rocm")
    return Platform("cuda", capability_of(str(device.compiler.get("target", ""))) or 0)


def platform_here() -> Platform:
    """Return the platform of JAX's default backend, as a device that nobody measured has it."""
    import jax

    name = jax.default_backend()
    version = str(getattr(jax.devices()[0].client, "platform_version", ""))
    return Platform("rocm" if "rocm" in version.lower() else known_platform(name))


def known_platform(name: str) -> str:
    """Return JAX's name of a platform: ``gpu`` stands for ``cuda``."""
    return _ALIASES.get(name, name)


def evident_platform(source: SourceProgram) -> str:
    """Infer from its ops which platform StableHLO was lowered for; empty if they do not show it."""
    data = source.compile_input
    raw = data.encode() if isinstance(data, str) else data
    # Most programs need not be walked.
    if source.kind != "stablehlo" or not _TRACES.search(raw):
        return ""
    from .mlir.bindings import walk_ops

    found = set()
    for op in walk_ops(source.module):
        if op.name == "stablehlo.custom_call":
            target = str(op.attributes["call_target_name"]).strip('"')
            found |= {name for name, calls in _CALLS.items() if calls.match(target)}
        # JAX rolls the rounds of Threefry into a loop on CPUs alone (jax/_src/prng.py).
        elif op.name == "func.func" and "threefry2x32" in str(op.attributes["sym_name"]):
            blocks = op.regions[0].blocks
            if any(o.operation.name == "stablehlo.while" for b in blocks for o in b.operations):
                found.add("cpu")
    return found.pop() if len(found) == 1 else ""


def _chooses(source: SourceProgram) -> bool:
    """Whether StableHLO takes the number of its platform as an argument."""
    data = source.compile_input
    raw = data.encode() if isinstance(data, str) else data
    return source.kind == "stablehlo" and INDEX.encode() in raw


def platform_note(source: SourceProgram, device: DeviceSpec) -> str:
    """Note that a program was lowered for another platform than a device's; empty if it was not."""
    wanted = platform_of(device).name
    if not source.platforms and _chooses(source):
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
    """Copy a module with the branches of one platform only.

    Args:
        module: As JAX exports it for several platforms.
        number: Number of the platform in the export's list.

    Returns:
        The copy, without the argument of ``main`` that chose; the module itself if it has none.
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


#: Attribute of a module in XLA's own dialect for what front ends want kept.
_FRONTEND, _SAID = "mhlo.frontend_attributes", "opcast_platforms"


def say_platform(module: ir.Module, platforms: Sequence[str]) -> ir.Module:
    """Copy a module with an attribute that names the platforms it was lowered for."""
    from jaxlib.mlir import ir

    from .mlir.bindings import copy_module

    copy = copy_module(module)
    with copy.context:
        said = ir.DictAttr.get({_SAID: ir.StringAttr.get(",".join(platforms))})
        copy.operation.attributes[_FRONTEND] = said
    return copy


def said_platforms(module: ir.Module) -> tuple[str, ...]:
    """Return the platforms that a module states it was lowered for; empty if it states none."""
    from jaxlib.mlir import ir

    with module.context:
        if _FRONTEND not in module.operation.attributes:
            return ()
        own = ir.DictAttr(module.operation.attributes[_FRONTEND])
        return tuple(ir.StringAttr(own[_SAID]).value.split(",")) if _SAID in own else ()
