"""Types of JSON data, and their validation when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

#: A JSON or YAML object, or values by name that are written as one.
JsonObject = dict[str, Any]
#: A read-only JSON or YAML object.
JsonMapping = Mapping[str, Any]
#: A value, type, attribute or operation of MLIR, if the stubs of its bindings lack the class.
MlirObject = Any
#: An object of JAX without a public type: lowered and compiled functions, jaxprs, devices.
JaxObject = Any

T = TypeVar("T")


def listed(value: object) -> list[object]:
    """A copy of a list of JSON; empty if the value is not a list."""
    return list(value) if isinstance(value, list) else []


def typed(kind: type[T], value: Any, at: str) -> T:
    """Convert a JSON value to a type.

    Args:
        kind: A dataclass, whose unknown keys are ignored, a ``dict``, ``tuple``, number or text, or
            a union of one with ``None``.
        value: Value from the file.
        at: Location of the value, for the message.

    Raises:
        ValueError: It has another type; the message has the location.
    """
    chosen: Any = kind
    if isinstance(chosen, UnionType):
        chosen = get_args(chosen)[value is None]
    origin: Any = get_origin(chosen) or chosen
    parts, found = get_args(chosen), value
    if isinstance(value, dict) and (origin is dict or is_dataclass(chosen)):
        kinds = dict.fromkeys(value, parts[1]) if parts else get_type_hints(origin)
        found = {k: typed(kinds[k], v, f"{at}: {k}") for k, v in value.items() if k in kinds}
        found = origin(**found)
    elif isinstance(value, list) and origin is tuple:
        each = parts[:1] * len(value) if parts[-1] is ... else parts
        if len(each) == len(value):
            found = tuple(typed(k, v, at) for k, v in zip(each, value, strict=True))
    elif isinstance(value, int) and origin is float:
        found = float(value)
    if not isinstance(found, origin):
        raise ValueError(f"{at}: {value!r} is not of the type {chosen}")
    return cast("T", found)
