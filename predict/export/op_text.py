"""Wrap a single StableHLO operation, as another simulator prints it, into a program."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...common.errors import ProgramError

#: SSA values of MLIR, such as ``%2``, ``%arg0`` and ``%3#1`` (a result of a multi-result op).
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"^\s*%[\w$.-]+(?::\d+)?\s*=\s*")


def op_program(
    line: str,
    inputs: Sequence[tuple[Sequence[int], object]],
    outputs: Sequence[tuple[Sequence[int], object]],
) -> str:
    """Return a module whose only function consists of the operation.

    Args:
        line: The operation as MLIR prints it, such as ``%2 = stablehlo.add %0, %1 : …``.
        inputs: Shape and element type of each operand.
        outputs: Shape and element type of each result.

    Raises:
        ProgramError: The numbers of operands and of types in the text differ.
    """
    body = _RESULT.sub("", line.strip(), count=1)
    # Operands come first in MLIR's generic and pretty forms; values used within a region follow and
    # are not arguments.
    names = [m.group() for m in _VALUE.finditer(body)][: len(inputs)]
    if body.startswith("stablehlo.reduce("):
        # Printed in pairs of an operand and its initial value; the types list all operands first.
        names = names[::2] + names[1::2]
    if len(names) < len(inputs):
        raise ProgramError(
            f"the operation has {len(names)} operands, but types for {len(inputs)}", where=line[:80]
        )
    # A value used twice (x * x) is one argument.
    own = {name: f"%in{i}" for i, name in enumerate(dict.fromkeys(names))}
    body = _VALUE.sub(lambda m: own.get(m.group(), m.group()), body)
    types = dict(zip(names, map(_tensor, inputs), strict=True))
    arguments = ", ".join(f"{own[name]}: {types[name]}" for name in own)
    results = [_tensor(o) for o in outputs]
    left = "" if not results else "%out = " if len(results) == 1 else f"%out:{len(results)} = "
    values = ["%out"] if len(results) == 1 else [f"%out#{i}" for i in range(len(results))]
    back = f"return {', '.join(values)} : {', '.join(results)}" if results else "return"
    return (
        f"module {{\n  func.func public @main({arguments}) -> ({', '.join(results)}) {{\n"
        f"    {left}{body}\n    {back}\n  }}\n}}\n"
    )


def _tensor(kind: tuple[Sequence[int], object]) -> str:
    shape, dtype = kind
    return f"tensor<{''.join(f'{n}x' for n in shape)}{dtype}>"
