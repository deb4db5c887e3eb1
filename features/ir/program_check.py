"""Find the fault in a program on which a rule failed: an op that does not match its operands.

XLA verifies whole programs first, but most programs read here were verified before. These checks
therefore run only after a rule failed, to distinguish faults of the program from faults of opcast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .op_table import ELEMENTWISE, OPS, OpSpec
from .program import Computation, Op, Program

#: Number of elements that exceeds any device's memory.
_MOST_ELEMENTS = 2**60

#: Ops whose rules accept tuple operands.
_ON_TUPLES = frozenset(("get-tuple-element", "while"))


def program_fault(program: Program) -> tuple[str, str]:
    """Find the first op that does not match its operands.

    Args:
        program: A program from any reader.

    Returns:
        A description of the fault and the name of the op; empty strings if there is none.
    """
    for computation in program.computations.values():
        for op in computation.ops:
            if fault := _op_fault(op, computation, program):
                return fault, op.name
    return "", ""


def _op_fault(op: Op, computation: Computation, program: Program) -> str:
    if not op.is_tuple and len(op.results) != 1:
        return f"{op.opcode} has no type"
    # Products of such sizes overflow int64 and exceed the integers that floats represent exactly.
    if any(t.size > _MOST_ELEMENTS for t in op.results):
        return f"{op.opcode} has a result of more than 2^60 elements"
    spec = OPS.get(op.opcode, OpSpec())
    missing = spec.operands - len(op.operands)
    if missing > 0:
        return f"{op.opcode} lacks {missing} of its operands"
    missing = spec.called - len(op.called)
    if missing > 0:
        return f"{op.opcode} lacks {missing} of the computations that it calls"
    operands = [computation.ops[i] for i in op.operands]
    rule = _RULES.get(op.opcode)
    if rule is None:
        return ""
    # The rules below read one type per operand.
    if op.opcode not in _ON_TUPLES and any(o.is_tuple for o in operands):
        return f"an operand of {op.opcode} is a tuple, but must be an array"
    try:
        return rule(op, operands, program)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"the attributes of {op.opcode} cannot be read ({type(error).__name__}: {error})"


def _equal_shapes(op: Op, operands: Sequence[Op], program: Program) -> str:
    # select and clamp accept scalars besides arrays.
    shapes = [
        o.type.shape for o in operands if o.type.shape or op.opcode not in ("select", "clamp")
    ]
    if any(shape != op.type.shape for shape in shapes):
        texts = ", ".join(str(o.type) for o in operands)
        return f"{op.opcode} of {texts} cannot be {op.type}"
    return ""


def _dimensions(op: Op, count: int, rank: int, name: str = "dimensions") -> str:
    """Check a list of distinct dimensions; a ``count`` of -1 allows any number of them."""
    dims = tuple(op.attrs[name])
    if count >= 0 and len(dims) != count:
        return f"{name} of {op.opcode} are {len(dims)}, not {count}"
    if any(not 0 <= d < rank for d in dims) or len(set(dims)) < len(dims):
        return f"{name}={_braces(dims)} of {op.opcode} do not fit {rank} dimensions"
    return ""


def _braces(values: Sequence[int]) -> str:
    return f"{{{','.join(map(str, values))}}}"


def _transpose(op: Op, operands: Sequence[Op], program: Program) -> str:
    source = operands[0].type.shape
    fault = _dimensions(op, len(source), len(source))
    if not fault and op.type.shape != tuple(source[d] for d in op.attrs["dimensions"]):
        return f"transpose of {operands[0].type} cannot be {op.type}"
    return fault


def _broadcast(op: Op, operands: Sequence[Op], program: Program) -> str:
    return _dimensions(op, len(operands[0].type.shape), len(op.type.shape))


def _reduce(op: Op, operands: Sequence[Op], program: Program) -> str:
    if len(operands) % 2:
        return "reduce lacks the initial value of an operand"
    rank = len(operands[0].type.shape)
    fault = _dimensions(op, -1, rank)
    if not fault and rank - len(op.attrs["dimensions"]) != len(op.type.shape):
        return f"reduce of {operands[0].type} cannot be {op.type}"
    return fault


def _reverse(op: Op, operands: Sequence[Op], program: Program) -> str:
    return _dimensions(op, -1, len(operands[0].type.shape))


def _concatenate(op: Op, operands: Sequence[Op], program: Program) -> str:
    ranks = {len(o.type.shape) for o in operands}
    if ranks != {len(op.type.shape)}:
        return "concatenate of arrays with different numbers of dimensions"
    return _dimensions(op, 1, len(op.type.shape))


def _dot(op: Op, operands: Sequence[Op], program: Program) -> str:
    shapes = [o.type.shape for o in operands[:2]]
    for kind in ("contracting", "batch"):
        names = [f"{side}_{kind}_dims" for side in ("lhs", "rhs")]
        for name, shape in zip(names, shapes, strict=True):
            if fault := _dimensions(op, -1, len(shape), name):
                return fault
        sizes = [[s[d] for d in op.attrs[n]] for n, s in zip(names, shapes, strict=True)]
        if sizes[0] != sizes[1]:
            return f"{kind} dimensions of dot have sizes {sizes[0]} and {sizes[1]}"
    return ""


def _slice(op: Op, operands: Sequence[Op], program: Program) -> str:
    source = operands[0].type.shape
    limits = op.attrs["slice"]
    fits = len(limits) == len(source) and all(
        0 <= start <= limit <= size and stride > 0
        for (start, limit, stride), size in zip(limits, source, strict=True)
    )
    return "" if fits else f"the limits of slice do not fit {operands[0].type}"


def _pad(op: Op, operands: Sequence[Op], program: Program) -> str:
    given, rank = len(op.attrs["padding"]), len(operands[0].type.shape)
    return "" if given == rank else f"padding of {given} dimensions of {operands[0].type}"


def _same_rank(op: Op, operands: Sequence[Op], program: Program) -> str:
    source = operands[0].type
    if len(source.shape) != len(op.type.shape):
        return f"{op.opcode} of {source} cannot be {op.type}"
    return ""


def _reshape(op: Op, operands: Sequence[Op], program: Program) -> str:
    if operands[0].type.size != op.type.size:
        return f"reshape of {operands[0].type} cannot be {op.type}"
    return ""


def _window(op: Op, operands: Sequence[Op], program: Program) -> str:
    given, rank = len(op.attrs["window"]), len(operands[0].type.shape)
    return "" if given == rank else f"the window of {op.opcode} has {given} dimensions, not {rank}"


def _convolution(op: Op, operands: Sequence[Op], program: Program) -> str:
    rank = len(op.type.shape)
    if any(len(o.type.shape) != rank for o in operands[:2]):
        return "convolution of arrays with different numbers of dimensions"
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", str(op.attrs["dim_labels"]))
    if labels is None or any(len(part) != rank for part in labels.groups()):
        return f"dim_labels={op.attrs['dim_labels']} of convolution do not fit {rank} dimensions"
    given = len(op.attrs["window"])
    return "" if given == rank - 2 else f"the window of convolution has {given} dimensions"


def _element(op: Op, operands: Sequence[Op], program: Program) -> str:
    whole, index = operands[0], int(op.attrs["index"])
    if not whole.is_tuple:
        return "get-tuple-element of an array"
    if not whole.attrs.get("nesting") and not 0 <= index < len(whole.results):
        return f"get-tuple-element {index} of a tuple of {len(whole.results)}"
    return ""


def _while(op: Op, operands: Sequence[Op], program: Program) -> str:
    given = [t.shape for o in operands for t in o.results]
    for name in op.called:
        # Only shapes: layouts and memory spaces may differ between a loop and its body.
        taken = [t.shape for p in program.computations[name].parameters for t in p.results]
        if taken != given:
            return f"{name} does not take the state of the loop"
    body = [t.shape for t in program.computations[op.called[1]].root_op.results]
    if body != given[: len(body)] or len(body) != len(op.results):
        return f"{op.called[1]} does not return the state of the loop"
    return ""


_RULES: dict[str, Callable[[Op, Sequence[Op], Program], str]] = {
    # A bitcast may change the shape; for a map, the called computation is checked.
    **dict.fromkeys(ELEMENTWISE - {"bitcast-convert", "map"}, _equal_shapes),
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot": _dot,
    "dynamic-slice": _same_rank,
    "dynamic-update-slice": _same_rank,
    "get-tuple-element": _element,
    "pad": _pad,
    "reduce": _reduce,
    "reduce-window": _window,
    "reshape": _reshape,
    "reverse": _reverse,
    "slice": _slice,
    "transpose": _transpose,
    "while": _while,
}
