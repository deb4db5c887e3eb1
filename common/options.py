"""What a field of a dataclass says about itself to command lines, the server and table readers.

A question is one frozen dataclass, whose fields are annotated with an :class:`Option`::

    @dataclass(frozen=True)
    class Load:
        section: ClassVar[str] = "Load"
        rate: Annotated[float, Option("Requests per second.", least=0.0)] = 0.0
        timeout_s: Annotated[float, Option("Time limit.", parse=seconds_of, typed="60s")] = 60.0
        price: Annotated[Mapping[str, float], Option("Price.", collect=prices_of)] = …
        spec: DeviceSpec | None = None  # without an Option: not on the command line

``cli/from_dataclass.py`` makes a command's options of it, ``server/from_dataclass.py`` the schema
of a request. A module that defines a question is imported for ``--help``, so it imports little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parquet import TABLES

#: Units that options take, as factors to the unit they are kept in; without a unit that unit.
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1.0, "GiB": 2.0**30, "MiB": 2.0**20, "GB": 1e9, "MB": 1e6}
_WATTS = {"": 1.0, "W": 1.0, "kW": 1e3}


@dataclass(frozen=True)
class Option:
    """A field that users set.

    Attributes:
        help: What it is, in one sentence for ``--help`` and the server's document.
        names: Spellings on the command line, such as ``("--prefix-cache/--no-prefix-cache",)``; by
            default ``--`` and the field's name. A flag that is only ever set has one name.
        section: Section of a long help; by default the attribute ``section`` of the dataclass.
        parse: Makes the field's value from its text, such as :func:`seconds_of`. Raises a
            ``ValueError`` whose message says what to write instead.
        typed: With ``parse``: the default as it is written on the command line.
        collect: As ``parse``, of all texts of an option that may be given again.
        check: Takes the value and returns it, or raises a ``ValueError``, such as :func:`folder`.
        least: Smallest number, as it is given.
        most: Largest number; the server allows no larger one either.
        choices: The texts that are allowed, which the server's schema lists.
        unit: Factor from the number on the command line to the field's, such as ``2.0**30`` of a
            size in GiB; whole numbers are given if it is an ``int``.
        metavar: What stands for the value in ``--help``.
        argument: Whether it is given by its position, without a name.
        shows_default: Whether ``--help`` prints the default.
        environment: Environment variable that gives the value where the command line does not.
    """

    help: str
    names: tuple[str, ...] = ()
    section: str = ""
    parse: Callable[[str], object] | None = None
    typed: str | None = None
    collect: Callable[[Sequence[str]], object] | None = None
    check: Callable[[Any], object] | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    unit: float | None = None
    metavar: str | None = None
    argument: bool = False
    shows_default: bool = True
    environment: str | None = None


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    number = text.rstrip("".join({*"".join(units), " "}))
    try:
        value = float(number) * units[text[len(number) :].strip()]
    except (ValueError, KeyError):
        value = math.nan
    # Also false for NaN.
    if not 0.0 < value < math.inf:
        raise ValueError(f"{text!r} is not a {what}: write {example}")
    return value


def seconds_of(text: str) -> float:
    """Parse a duration such as ``90s``, ``10m`` or ``2h`` into seconds.

    Raises:
        ValueError: It is not a positive, finite duration.
    """
    return _quantity(text, _SECONDS, "duration", "90s, 10m or 2h")


def bytes_of(text: str) -> float:
    """Parse an amount of memory such as ``60GiB`` or ``80GB`` into bytes.

    Raises:
        ValueError: It is not a finite amount of a MiB or more.
    """
    value = _quantity(text, _BYTES, "memory size", "60GiB or 64GB")
    if value < _BYTES["MiB"]:
        raise ValueError(f"{text!r} is less than 1 MiB: write a unit, as in 60GiB")
    return value


def watts_of(text: str) -> float:
    """Parse a power such as ``400``, ``400W`` or ``0.4kW`` into watts.

    Raises:
        ValueError: It is not a positive, finite power.
    """
    return _quantity(text, _WATTS, "power", "400W")


def called(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Make the check of a file's name: its suffix must name the format of its content.

    Args:
        suffixes: Suffixes of the formats that are written.
    """

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            kinds = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise ValueError(f"{str(path)!r} has to be called {kinds}")
        return path

    return check


def folder(path: Path | None) -> Path | None:
    """Check the name of a folder: refuse a file, and the name of one.

    Raises:
        ValueError: It is a file, or called as one.
    """
    if path is not None and (path.is_file() or path.suffix.lower() in (*TABLES, ".html", ".png")):
        raise ValueError(f"{str(path)!r} is called as a file, but a folder is written")
    return path


json_file, page_file, yaml_file = called(".json"), called(".html", ".htm"), called(".yaml", ".yml")
table_file, plot_file = called(*TABLES), called(".png", ".svg", ".pdf", ".jpg")
