"""MLIR locations as lines of the user's code, for single ops or all ops by position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, overload

from ..program import Source

if TYPE_CHECKING:
    from jaxlib.mlir.ir import Module, Operation

# ``"model.py":12:3``.
_FILE = re.compile(r'"([^"\n]+)":(\d+):\d+')
#: Files of frameworks and of Python itself, whose lines are skipped. Other installed packages may
#: contain the user's model.
FRAMEWORK = re.compile(
    r"(?:site|dist)-packages[/\\](?:jax|jaxlib|flax|optax|orbax|chex|haiku|equinox|torch\w*|numpy"
    r"|einops|typer|click|pytest|_pytest|pluggy)(?:[/\\.]|$)"
    r"|[/\\]lib[/\\]python3[\d.]*[/\\](?!site-packages|dist-packages)"
    r"|[/\\]jax[/\\]_src[/\\]|[/\\]jaxlib[/\\]|<frozen "
    r"|[/\\](?:bin|Scripts)[/\\]opcast(?:\.exe|-script\.py)?$"
)
#: Those of these files that only start a command or a test, so that no op comes from them.
STARTS = re.compile(
    r"(?:site|dist)-packages[/\\](?:typer|click|pytest|_pytest|pluggy)[/\\.]"
    r"|[/\\](?:bin|Scripts)[/\\]opcast(?:\.exe|-script\.py)?$|<frozen "
)
#: MLIR's file name for text that was parsed without one.
ANONYMOUS = "-"
_TEXT_POSITION = f'loc("{ANONYMOUS}":'
_CALLS = ("func.call", "call")
#: Largest depth of calls that are followed, by judgement, as malformed programs may call in a
#: cycle.
MAX_CALLS = 50


class Line(NamedTuple):
    """A line, and whether it is the user's own instead of a library's or unknown."""

    file: str
    line: int
    own: bool


def user_line(location: str, origin: str) -> Line:
    """Return the file and line of a location.

    Locations nest: names and call sites wrap file positions, which are printed innermost first.
    The innermost position outside of frameworks is used; if there is none, the innermost one that
    does not start a command.

    Args:
        location: Printed location, ``loc(…)``.
        origin: File of the program, used if the location names no file.

    Returns:
        The line; 0 if the location has none.
    """
    if location.startswith(_TEXT_POSITION):
        end = location.index(":", len(_TEXT_POSITION))
        return Line(origin, int(location[len(_TEXT_POSITION) : end]), True)
    first: Line | None = None
    # Innermost first: the first position outside of frameworks is the user's own.
    for match in _FILE.finditer(location):
        file = origin if match[1] == ANONYMOUS else match[1]
        if not FRAMEWORK.search(file):
            return Line(file, int(match[2]), True)
        if not STARTS.search(file):
            first = first or Line(file, int(match[2]), False)
    return first or Line(origin, 0, False)


class SourceOps(Sequence[Source]):
    """Sources of a StableHLO program's ops, indexed like :attr:`Source.index` and read on demand.

    Args:
        module: A StableHLO program.
        origin: File that it was read from.
    """

    def __init__(self, module: Module, origin: str) -> None:
        from .bindings import walk_ops

        # Operations live as long as their module.
        self._module = module
        self._origin = origin
        self._ops: list[Operation] = walk_ops(module)
        self._sources: dict[int, Source] = {}
        self._lines: dict[object, Line] = {}

    @property
    def operations(self) -> Sequence[Operation]:
        """MLIR operations by walk index."""
        return self._ops

    def __len__(self) -> int:
        return len(self._ops)

    @overload
    def __getitem__(self, index: int) -> Source: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Source]: ...

    def __getitem__(self, index: int | slice) -> Source | Sequence[Source]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source = self._sources.get(index)
        if source is None:
            op = self._ops[index]
            line = self._line(op)
            source = self._sources[index] = Source(op.name, line.file, line.line, index)
        return source

    def _line(self, op: Operation, depth: int = 0) -> Line:
        """Return the user's line: of the op, or of a call of the library function around it."""
        location = op.location.attr
        line = self._lines.get(location)
        if line is None:
            line = self._lines[location] = user_line(str(location), self._origin)
        # For ops in outlined library code, the user's line is at the call.
        if line.own or depth > MAX_CALLS:
            return line
        calls = self.calls.get(function_of(op))
        outer = self._line(calls[0], depth + 1) if calls else line
        return outer if outer.own else line

    @cached_property
    def calls(self) -> dict[str, list[Operation]]:
        """Calls of each function by its name."""
        calls: dict[str, list[Operation]] = {}
        for op in self._ops:
            if op.name in _CALLS:
                calls.setdefault(str(op.attributes["callee"]).removeprefix("@"), []).append(op)
        return calls


def function_of(op: Operation) -> str:
    """Return the name of the enclosing function; empty if there is none."""
    parent: Operation | None = op
    while parent is not None and parent.name != "func.func":
        parent = parent.parent
    return str(parent.attributes["sym_name"]).strip('"') if parent is not None else ""
