"""From an MLIR location to the user's own line."""

from __future__ import annotations

import re
from typing import NamedTuple

# ``"model.py":12:3``.
_FILE = re.compile(r'"([^"\n]+)":(\d+):\d+')
#: Files of frameworks and of Python itself, whose lines are skipped. Other installed packages may
#: well hold the user's model.
FRAMEWORK = re.compile(
    r"(?:site|dist)-packages[/\\](?:jax|jaxlib|flax|optax|orbax|chex|haiku|equinox|torch\w*|numpy"
    r"|einops|typer|click|pytest|_pytest|pluggy)(?:[/\\.]|$)"
    r"|[/\\]lib[/\\]python3[\d.]*[/\\](?!site-packages|dist-packages)"
    r"|[/\\]jax[/\\]_src[/\\]|[/\\]jaxlib[/\\]|<frozen "
    r"|[/\\](?:bin|Scripts)[/\\]opcast(?:\.exe|-script\.py)?$"
)
#: Files among them that only start a command or a test: none of their lines made an operator.
STARTS = re.compile(
    r"(?:site|dist)-packages[/\\](?:typer|click|pytest|_pytest|pluggy)[/\\.]"
    r"|[/\\](?:bin|Scripts)[/\\]opcast(?:\.exe|-script\.py)?$|<frozen "
)
#: How MLIR names the file of text that was given without one.
ANONYMOUS = "-"
_TEXT_POSITION = f'loc("{ANONYMOUS}":'


class Line(NamedTuple):
    """A line, and whether it is the user's own rather than a library's or unknown."""

    file: str
    line: int
    own: bool


def user_line(location: str, origin: str) -> Line:
    """Return the file and line of a location.

    Locations nest: names and call sites wrap file positions, and are printed innermost first.
    The innermost position outside of frameworks wins; if all are inside, the innermost but for
    those that start commands.

    Args:
        location: Printed location, ``loc(…)``.
        origin: File that the program came from; stands in where the location names no file.

    Returns:
        The line; 0 if the location holds none.
    """
    if location.startswith(_TEXT_POSITION):
        end = location.index(":", len(_TEXT_POSITION))
        return Line(origin, int(location[len(_TEXT_POSITION) : end]), True)
    first: Line | None = None
    # Innermost first: the first position that is not a framework's is the user's own.
    for match in _FILE.finditer(location):
        file = origin if match[1] == ANONYMOUS else match[1]
        if not FRAMEWORK.search(file):
            return Line(file, int(match[2]), True)
        if not STARTS.search(file):
            first = first or Line(file, int(match[2]), False)
    return first or Line(origin, 0, False)
