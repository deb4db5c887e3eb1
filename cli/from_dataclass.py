"""Options of a command from the fields of frozen dataclasses (:mod:`..common.options`).

A command takes dataclasses beside ordinary parameters; each of their fields becomes an option::

    def simulate(context: typer.Context, case: StepCase, json_output: Json = False) -> None: ...

A field that is a dataclass itself is flattened, too. Several dataclasses of a command may share a
field, which is then one option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from ..common.options import Option

A = TypeVar("A")
T = TypeVar("T")


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function for Typer, whose dataclasses are flattened into options.

    Args:
        function: The command; its parameters are annotated with dataclasses, an
            :class:`~..common.options.Option` or whatever Typer takes.
    """
    hints = get_type_hints(function, include_extras=True)
    cases: dict[str, type] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for own in inspect.signature(function).parameters.values():
        hint = hints[own.name]
        if is_dataclass(hint) and isinstance(hint, type):
            cases[own.name] = hint
            for parameter in _parameters(hint):
                parameters.setdefault(parameter.name, parameter)
        else:
            parameters[own.name] = _parameter(own.name, hint, own.default, "")

    @wraps(function)
    def command(**given: object) -> None:
        own = {name: value for name, value in given.items() if name in hints}
        function(**own, **{name: build(case, given) for name, case in cases.items()})

    # Typer reads the one, and resolves the other.
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: own.annotation for name, own in parameters.items()}
    return command


def told(function: Callable[[A], T]) -> Callable[[A], T]:
    """Make a parser or check whose message Typer prints behind the option's name."""

    # Typer would give a function with more parameters than one the context as well.
    def told(value: A) -> T:
        try:
            return function(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    # Typer names the type of a parser's option by it.
    told.__name__ = getattr(function, "__name__", "value")
    return told


def names_of(*cases: type) -> set[str]:
    """Names of the parameters that the fields of dataclasses become."""
    return {parameter.name for case in cases for parameter in _parameters(case)}


def build(case: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of parsed options, by name."""
    values: dict[str, Any] = {}
    for field, hint, option in _fields(case):
        if is_dataclass(hint) and isinstance(hint, type):
            values[field.name] = build(hint, given)
        # What was not given is left to the dataclass.
        elif option is not None and (_required(field) or given[field.name] is not None):
            values[field.name] = _value(given[field.name], field.name, hint, option)
    return case(**values)


def _value(value: Any, name: str, hint: Any, option: Option) -> object:
    """The value of a field from that of its option."""
    if option.collect is not None:
        try:
            return option.collect(value)
        except ValueError as error:
            # Here rather than in Typer, which takes what is made of a list for a list.
            spelt = option.names[0] if option.names else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(str(error), param_hint=f"'{spelt}'") from None
    if option.unit is not None:
        kind = get_args(hint)[0] if get_args(hint) else hint
        return kind(value * option.unit)
    return tuple(value) if _item_of(hint) else value


def _fields(case: type) -> Iterator[tuple[Field[Any], Any, Option | None]]:
    """Fields of a dataclass, with their types and options."""
    hints = get_type_hints(case, include_extras=True)
    for field in fields(case):
        hint, option = hints[field.name], None
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            option = next((mark for mark in marks if isinstance(mark, Option)), None)
        yield field, hint, option


def _parameters(case: type) -> Iterator[inspect.Parameter]:
    for field, hint, option in _fields(case):
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _parameters(hint)
        elif option is not None:
            default = field.default
            if _required(field):
                default = inspect.Parameter.empty
            elif default is MISSING or _made(hint, option):
                default = option.typed
            elif option.unit is not None and default is not None:
                default = type(option.unit)(default / option.unit)
            section = option.section or getattr(case, "section", "")
            yield _parameter(field.name, Annotated[hint, option], default, section)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _made(hint: object, option: Option) -> bool:
    """Whether the field's value is made from texts, or of the values that were given."""
    return bool(option.parse or option.collect or _item_of(hint))


def _item_of(hint: object) -> Any:
    """Type of the items of a sequence, such as ``str`` of ``tuple[str, ...]``; else ``None``."""
    return get_args(hint)[0] if get_origin(hint) in (tuple, list, Sequence) else None


def _parameter(name: str, hint: Any, default: object, section: str) -> inspect.Parameter:
    """A parameter as Typer reads it."""
    if get_origin(hint) is Annotated:
        own, *marks = get_args(hint)
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if option is not None:
            hint = _annotated(own, option, option.section or section, default is None)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)


def _annotated(hint: Any, option: Option, section: str, optional: bool) -> Any:
    make = typer.Argument if option.argument else typer.Option
    names = () if option.argument else option.names
    settings: dict[str, Any] = {
        "help": option.help,
        "parser": option.parse and told(option.parse),
        "callback": option.check and told(option.check),
        "min": option.least,
        "max": option.most,
        "metavar": option.metavar,
        "show_default": option.shows_default,
        "envvar": option.environment,
        "rich_help_panel": section or None,
    }
    if option.collect:
        hint = list[str]
    elif option.parse:
        # The parser makes the value, whatever its type.
        hint = str
    elif option.unit is not None:
        hint = type(option.unit)
    elif _item_of(hint):
        hint = list.__class_getitem__(_item_of(hint))
    if optional and NoneType not in get_args(hint):
        hint = hint | None
    info: ParameterInfo = make(*names, **settings)
    return Annotated[hint, info]
