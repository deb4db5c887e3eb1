"""Versions of software: their numbers, and whether they are plausible."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the installed ones of some packages."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch number at the start of a version, as far as present."""
    stem = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, stem[0].split("."))) if stem else ()


def can_be_release(version: str, first: str, newest: str) -> bool:
    """Whether a version may exist, even if it is newer than all known ones.

    Args:
        version: Starts with a number.
        first: The first release; no version is older.
        newest: The newest known release; no version is more than a major version ahead.
    """
    asked = version_numbers(version)
    old = asked < version_numbers(first)[: len(asked)]
    return not old and asked[0] <= version_numbers(newest)[0] + 1


def is_newer(version: str, newest: str) -> bool:
    """Whether a version is newer than the newest known one, up to the latter's precision."""
    least = version_numbers(newest)
    return version_numbers(version)[: len(least)] > least
