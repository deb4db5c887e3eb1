"""Bodies of requests from the fields of frozen dataclasses (:mod:`opcast.common.options`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import Field as DataField
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model

from ..common.options import Option, described

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


def body_of(
    name: str, case: type, base: type[B], narrower: Mapping[str, Any], *left_out: str
) -> type[B]:
    """Make the schema of a request.

    Args:
        name: Of the schema.
        case: Dataclass, whose fields that are dataclasses are flattened.
        base: What the schema extends; its own fields count.
        narrower: Types of fields of which a server takes less than a command line, by name.
        left_out: Names of fields that requests do not have.
    """
    made: dict[str, Any] = {}
    for field, hint, option in _flat(case):
        if field.name in base.model_fields or field.name in left_out:
            continue
        known = {"ge": option.least, "le": option.most}
        limits: dict[str, Any] = {k: v for k, v in known.items() if v is not None}
        if option.unit is not None or hint is float:
            limits["allow_inf_nan"] = False
        if option.choices:
            hint = Literal[option.choices]
        if field.name in narrower:
            hint, limits = narrower[field.name], {}
        made_anew = field.default_factory is not MISSING
        limits |= (
            {"default_factory": field.default_factory} if made_anew else {"default": field.default}
        )
        # Names of options are those of fields.
        words = option.help.replace("--", "")
        made[field.name] = (hint, Field(description=words, **limits))
    return create_model(name, __base__=base, __doc__=base.__doc__, **made)


def build(case: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of a request, by name."""
    values: dict[str, Any] = {}
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            values[field.name] = build(hint, given)
        elif option is not None and field.name in given:
            own = given[field.name]
            values[field.name] = own if option.unit is None else own * option.unit
    return case(**values)


def _flat(case: type) -> Iterator[tuple[DataField[Any], Any, Option]]:
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _flat(hint)
        elif option is not None:
            yield field, hint, option
