"""Settings as text (``tp=8,pp=4``) or YAML with the same keys, checked against field types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ...common.errors import PlanError, meant
from ...common.files import is_yaml, parse_yaml
from ...common.options import Option
from ...common.types import JsonObject

T = TypeVar("T")
V = TypeVar("V")
#: YAML 1.1 booleans, which ``key=value`` text also accepts.
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def sizes_of(texts: Sequence[str], option: str = "--set") -> JsonObject:
    """Settings, such as model sizes, from texts such as ``layers=32,d_model=4096``.

    Args:
        texts: Values of an option that may be repeated.
        option: Name of the option, for messages.

    Raises:
        PlanError: A part is not a pair, or a name is given twice.
    """
    pairs = [pair for text in texts for pair in read_pairs(text, option).items()]
    return once(pairs, {}, option)


def once(pairs: Iterable[tuple[str, V]], aliases: Mapping[str, str], what: str) -> dict[str, V]:
    """Settings by canonical name.

    Args:
        pairs: Names, possibly aliases, and values.
        aliases: Canonical names by alias.
        what: What the settings describe, for messages.

    Raises:
        PlanError: A setting is given twice, possibly under two names.
    """
    known: dict[str, str] = {}
    values: dict[str, V] = {}
    for key, value in pairs:
        name = aliases.get(key, key)
        if name in known:
            other = known[name]
            same = "twice" if other == key else f"twice, as {other} and as {key}"
            raise PlanError(f"{name} is given {same}", where=what, hint="give it once")
        known[name], values[name] = key, value
    return values


def read_pairs(text: str, what: str) -> JsonObject:
    """Settings from comma-separated ``key=value`` pairs, or from a YAML file.

    Args:
        text: Pairs such as ``tp=8,pp=4``; a name that ends in ``.yaml`` or ``.yml`` is a file.
        what: What the settings describe, for messages.

    Raises:
        PlanError: The file cannot be read, or the pairs are invalid (:func:`pairs_of`).
    """
    if is_yaml(text):
        return _read_yaml(Path(text), what)
    return dict(pairs_of(text, what))


def pairs_of(text: str, what: str, hint: str = "as in tp=8,pp=4") -> dict[str, str]:
    """Parse comma-separated ``key=value`` pairs; an empty text has none.

    Args:
        text: The pairs.
        what: What they describe, for messages.
        hint: An example, for messages.

    Raises:
        PlanError: A part is not a pair, or a key is repeated.
    """

    def parts() -> Iterator[tuple[str, str]]:
        for part in text.split(",") if text.strip() else ():
            key, equals, value = (own.strip() for own in part.partition("="))
            if not equals:
                raise PlanError(f"{part!r} is not of the form key=value", where=what, hint=hint)
            yield key, value

    return once(parts(), {}, what)


def _read_yaml(path: Path, what: str) -> dict[str, object]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"the {what} cannot be read: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise PlanError(f"the {what} holds no mapping", where=str(path), hint="write key: value")
    return {str(k): v for k, v in data.items()}


def build(kind: type[T], values: Mapping[str, object], what: str, **known: object) -> T:
    """Create a dataclass from settings, converting every value to the type of its field.

    Args:
        kind: A dataclass with int, float, bool and str fields that have defaults.
        values: Settings by field name.
        what: What the settings describe, for messages.
        known: Default values, over which settings take precedence.

    Raises:
        PlanError: A key is unknown, or a value has the wrong type.
    """
    # With postponed annotations a field's type is its text ("int"), which is sufficient here.
    types = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in types:
            raise PlanError(f"{what} has no key {key!r}", hint=meant(key, list(types)))
    converted = {k: _converted(k, v, types[k], what) for k, v in values.items()}
    return kind(**{**known, **converted})


def _converted(key: str, value: Any, kind: str, what: str) -> Any:
    try:
        if kind.startswith("bool"):
            word = str(value).lower()
            return _WORDS[word] if word in _WORDS else bool(int(word))
        if kind == "int":
            # Through float, so that "1e3" and "8.0" are whole numbers; through str, so that True
            # from YAML is rejected.
            number = float(str(value))
            if number != int(number):
                raise ValueError(value)
            return int(number)
        return float(value) if kind == "float" else str(value)
    except (ValueError, TypeError, OverflowError):
        raise PlanError(f"{key}={value!r} is not of type {kind}", where=what) from None


#: Model sizes by name, for a step or for serving.
SizesOpt = Annotated[
    Mapping[str, object],
    Option(
        "Model sizes, such as layers=32,d_model=4096; may be given again.",
        ("--set",),
        collect=sizes_of,
    ),
]
