"""Which kernels made a value: a set, or for a tuple one value for each element."""

from __future__ import annotations

from collections.abc import Sequence

Value = frozenset[int] | list["Value"]


def flat(value: Value | Sequence[Value]) -> frozenset[int]:
    """All producers of a value, of every element if it is a tuple."""
    if isinstance(value, frozenset):
        return value
    if len(value) == 1:
        return flat(value[0])
    return frozenset().union(*[flat(item) for item in value])


def pick(value: Value, index: int) -> Value:
    """Producers of one element; a kernel that makes a tuple makes all its elements."""
    if isinstance(value, frozenset):
        return value
    return value[index] if index < len(value) else flat(value)


def merge(value: Value, extra: frozenset[int]) -> Value:
    """Add producers to every element."""
    if isinstance(value, frozenset):
        return value | extra
    return [merge(item, extra) for item in value]
