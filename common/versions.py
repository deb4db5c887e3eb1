"""Releases of software: their numbers, and whether there can be one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of some packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch number of a version, as far as it begins with them."""
    stem = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, stem[0].split("."))) if stem else ()


def can_be_release(version: str, first: str, newest: str) -> bool:
    """Whether a version may be one, even if it is newer than all that are known.

    Args:
        version: Begins with a number.
        first: The first release; nothing is older.
        newest: The newest known one; nothing is more than a major version ahead of it.
    """
    asked = version_numbers(version)
    old = asked < version_numbers(first)[: len(asked)]
    return not old and asked[0] <= version_numbers(newest)[0] + 1


def is_newer(version: str, newest: str) -> bool:
    """Whether a version is newer than the newest known one, as far as this one says."""
    least = version_numbers(newest)
    return version_numbers(version)[: len(least)] > least
