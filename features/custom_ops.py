"""FLOPs of custom calls that other packages know, by the entry points of the group ``opcast.ops``.

An entry point is named after the custom call's target. It is a function of the operands' and the
results' types that returns FLOPs and transcendentals of one call; bytes follow from the types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from . import plugins
from .errors import OpcastError
from .ir import TensorType

GROUP = "opcast.ops"
#: Operands and results in, FLOPs and transcendentals out.
CallCost = Callable[[Sequence[TensorType], Sequence[TensorType]], tuple[float, float]]


def plugin_flops(
    target: str, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> tuple[float, float]:
    """FLOPs and transcendentals of a custom call; zeros if no package knows its target.

    Raises:
        OpcastError: The package cannot be imported, or returns no such numbers.
    """
    rule = _rule(target)
    if rule is None:
        return 0.0, 0.0
    found = rule(operands, results)
    numbers = tuple(found) if isinstance(found, tuple | list) else ()
    if len(numbers) != 2 or not all(_is_count(n) for n in numbers):
        raise OpcastError(
            f"returned {found!r}, not FLOPs and transcendentals", where=f"{GROUP}: {target}",
            hint="return two numbers that are not below zero",
        )  # fmt: skip
    return float(numbers[0]), float(numbers[1])


@cache
def _rule(target: str) -> CallCost | None:
    point = plugins.found(GROUP).get(target)
    rule: CallCost | None = None if point is None else plugins.load(point)
    return rule


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf
