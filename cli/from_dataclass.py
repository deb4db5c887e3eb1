"""Derive the options of a command from the fields of frozen dataclasses (``common/options.py``).

A command may have dataclasses among its parameters; each of their fields becomes an option::

    def simulate(context: typer.Context, case: StepCase, json_output: Json = False) -> None: ...

Nested dataclasses are flattened. A field that several dataclasses of a command share is one option.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..common.options import Option, described

A = TypeVar("A")
T = TypeVar("T")
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class _Setting:
    """A field or parameter with an option.

    Attributes:
        name: Name of the field.
        type: Type of the field without the option.
        option: The option.
        default: Default; ``Parameter.empty`` if it is required, ``MISSING`` if it comes from a
            factory.
        section: Help section of the dataclass.
    """

    name: str
    type: Any
    option: Option
    default: object
    section: str = ""

    @property
    def item(self) -> Any:
        """Item type of a sequence, such as ``str`` for ``tuple[str, ...]``; else ``None``."""
        whole = get_origin(self.type) in (tuple, list, Sequence)
        return get_args(self.type)[0] if whole and not self.option.collect else None

    @property
    def number(self) -> bool:
        """Whether the option takes a float, which a user may write as ``nan``."""
        kinds = get_args(self.type) or (self.type,)
        return float in kinds and not self.option.parse and not self.option.collect

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter for Typer."""
        option, hint, default = self.option, self.type, self.default
        if option.collect:
            hint = list[str]
        elif option.parse:
            # The parser converts the text, whatever the field's type.
            hint = str
        elif option.unit is not None:
            hint = type(option.unit)
        elif self.item:
            hint = list.__class_getitem__(self.item)
        if default is not _REQUIRED:
            if option.shown:
                default = option.shown(default)
            elif option.parse or option.collect or self.item or default is MISSING:
                default = None
            elif option.unit is not None and isinstance(default, int | float):
                default = type(option.unit)(default / option.unit)
            hint = hint | None if default is None else hint
        settings: dict[str, Any] = {
            "help": option.help,
            "parser": option.parse and told(option.parse),
            "callback": told(option.check) if option.check else finite if self.number else None,
            "min": option.least,
            "max": option.most,
            "metavar": option.metavar,
            "show_default": option.shows_default,
            "envvar": option.environment,
            "rich_help_panel": option.section or self.section or None,
        }
        mark = (
            typer.Argument(**settings)
            if option.argument
            else typer.Option(*option.names, **settings)
        )
        return _parameter(self.name, Annotated[hint, mark], default)

    def given(self, value: Any) -> object:
        """Convert the option's value to the field's; ``MISSING`` to take the factory's default."""
        option = self.option
        if value is None and self.default is not _REQUIRED:
            return MISSING if self.default is MISSING else self.default
        if option.collect is not None:
            try:
                return option.collect(value)
            except ValueError as error:
                # Not as Typer's callback, which requires a list in return.
                spelt = option.names[0] if option.names else f"--{self.name.replace('_', '-')}"
                raise typer.BadParameter(str(error), param_hint=f"'{spelt}'") from None
        if option.unit is not None:
            kind = get_args(self.type)[0] if get_args(self.type) else self.type
            return kind(value * option.unit)
        return tuple(value) if self.item else value


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function for Typer with the dataclass parameters flattened into options.

    Args:
        function: The command; its parameters are annotated with dataclasses, an
            :class:`~opcast.common.options.Option`, or annotations that Typer accepts.
    """
    cases: dict[str, type] = {}
    settings: dict[str, _Setting] = {}
    parameters: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(function, include_extras=True)
    for own in inspect.signature(function).parameters.values():
        hint, setting = hints[own.name], _setting(own.name, hints[own.name], own.default)
        if _is_case(hint):
            cases[own.name] = hint
            for one in _settings(hint):
                parameters.setdefault(one.name, one.parameter)
        elif setting is not None:
            settings[own.name] = setting
            parameters[own.name] = setting.parameter
        else:
            parameters[own.name] = _parameter(own.name, hint, own.default)

    @wraps(function)
    def command(**given: object) -> None:
        own = {name: value for name, value in given.items() if name in hints}
        own |= {name: setting.given(given[name]) for name, setting in settings.items()}
        function(**own, **{name: build(case, given) for name, case in cases.items()})

    # Typer reads the signature and resolves the annotations.
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: own.annotation for name, own in parameters.items()}
    return command


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity; nan would pass every check against a minimum and maximum."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number")
    return value


def told(function: Callable[[A], T]) -> Callable[[A], T]:
    """Wrap a parser or check so that Typer prints its message with the option's name."""

    # Typer passes the context to a function with more than one parameter.
    def told(value: A) -> T:
        try:
            return function(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    # Typer shows this name as the type of the option.
    told.__name__ = getattr(function, "__name__", "value")
    return told


def names_of(*cases: type) -> set[str]:
    """Names of the parameters made from the fields of dataclasses."""
    return {setting.name for case in cases for setting in _settings(case)}


def build(case: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of parsed options by name."""
    values = {s.name: s.given(given[s.name]) for s in _settings(case, nested=False)}
    values |= {
        field.name: build(hint, given) for field, hint, _ in described(case) if _is_case(hint)
    }
    # Fields that were not given keep the default of the dataclass.
    return case(**{name: value for name, value in values.items() if value is not MISSING})


def _settings(case: Any, nested: bool = True) -> Iterator[_Setting]:
    """Fields that have options, including those of nested dataclasses."""
    for field, hint, option in described(case):
        default = field.default
        if default is MISSING and field.default_factory is MISSING:
            default = _REQUIRED
        if option is not None:
            yield _Setting(field.name, hint, option, default, getattr(case, "section", ""))
        elif nested and _is_case(hint):
            yield from _settings(hint)


def _setting(name: str, hint: Any, default: object) -> _Setting | None:
    """The setting of a parameter; ``None`` if it has no option."""
    if get_origin(hint) is not Annotated:
        return None
    own, *marks = get_args(hint)
    options = [mark for mark in marks if isinstance(mark, Option)]
    return _Setting(name, own, options[0], default) if options else None


def _is_case(hint: object) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _parameter(name: str, hint: Any, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)
