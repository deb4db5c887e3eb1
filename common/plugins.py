"""Plug-ins, and the packages of opcast's extras.

Plug-ins are added by other packages through the entry points of a group. ``opcast.estimators`` name
classes of models, ``opcast.devices`` folders of device files, ``opcast.workloads`` modules of the
zoo, ``opcast.ops`` costs of custom calls and ``opcast.splits`` splits of a dataset. Packages are
only imported when one of these is used.
"""

from __future__ import annotations

import json
import sys
import traceback
from functools import cache
from importlib.metadata import (
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from .errors import OpcastError
from .paths import PACKAGE


def found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; the names are sorted."""
    # If two packages define a name, the last one wins.
    points = {point.name: point for point in _installed(group)}
    return dict(sorted(points.items()))


@cache
def _installed(group: str) -> EntryPoints:
    """Entry points of all packages, which take 10 ms to read where there are hundreds."""
    return entry_points(group=group)


def call(point: EntryPoint, *arguments: object) -> Any:
    """Call the function that an entry point names.

    Raises:
        OpcastError: Its package cannot be imported, or the function fails: a fault of the plug-in,
            named with its file and line.
    """
    function = load(point)
    try:
        return function(*arguments)
    except OpcastError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        file = getattr(sys.modules.get(point.module), "__file__", None)
        # The innermost line of the plug-in: more informative than a line of a library below it.
        own = [frame for frame in frames if frame.filename == file] or frames
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else point.value
        raise OpcastError(
            f"the plug-in {point.value} failed: {type(error).__name__}: {error}",
            where=place,
            hint=f"its fault, not opcast's: correct it, or take another {point.group} than "
            f"{point.name!r}",
        ) from error


def load(point: EntryPoint) -> Any:
    """Import the object that an entry point names.

    Raises:
        OpcastError: Its package cannot be imported.
    """
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise OpcastError(
            f"{point.name!r} cannot be loaded: {error}",
            where=f"{point.group}: {point.value}",
            hint="install the package that brings it again, or remove it",
        ) from None


def extra_hint(extra: str) -> str:
    """Return the command to install an extra; opcast is on no package index.

    Args:
        extra: Name of the extra, such as ``track``.
    """
    clone = _clone()
    where = f"in {clone}" if clone else "in your clone of opcast"
    return f"{where}: pip install '.[{extra}]'"


def _clone() -> Path | None:
    """The clone that opcast runs in or was installed from, if it still exists."""
    if (PACKAGE / "pyproject.toml").is_file():
        return PACKAGE
    try:
        text = distribution("opcast").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    # PEP 610: pip records the folder that it installed from.
    url = urlparse(json.loads(text).get("url", "")) if text else None
    if url is None or url.scheme != "file":
        return None
    folder = Path(unquote(url.path))
    return folder if (folder / "pyproject.toml").is_file() else None
