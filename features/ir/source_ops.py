"""StableHLO ops by their position in the program's walk, each read on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

from .mlir.locations import Line, user_line
from .program import Source
from .reader import SourceProgram

if TYPE_CHECKING:
    from jaxlib.mlir.ir import Operation

_CALLS = ("func.call", "call")
#: Calls that are followed outwards, by judgement: malformed programs may call in a circle.
MAX_CALLS = 50


class SourceOps(Sequence[Source]):
    """Sources of a StableHLO program's ops, indexed as :attr:`Source.index` counts.

    Args:
        source: A StableHLO program.
    """

    def __init__(self, source: SourceProgram) -> None:
        from .jax_compat import walk_ops

        # Operations live as long as their module.
        self._module = source.module
        self._origin = source.origin
        self._ops: list[Operation] = walk_ops(self._module)
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
        """Return the user's line: of the op, or of a call of the library function that holds it."""
        location = op.location.attr
        line = self._lines.get(location)
        if line is None:
            line = self._lines[location] = user_line(str(location), self._origin)
        # The op lies in library code that was outlined: the user's line is at its call.
        if line.own or depth > MAX_CALLS:
            return line
        calls = self.calls.get(function_of(op))
        outer = self._line(calls[0], depth + 1) if calls else line
        return outer if outer.own else line

    @cached_property
    def calls(self) -> dict[str, list[Operation]]:
        """Calls of each function, by its name."""
        calls: dict[str, list[Operation]] = {}
        for op in self._ops:
            if op.name in _CALLS:
                calls.setdefault(str(op.attributes["callee"]).removeprefix("@"), []).append(op)
        return calls


def function_of(op: Operation) -> str:
    """Name of the enclosing function; empty if there is none."""
    parent: Operation | None = op
    while parent is not None and parent.name != "func.func":
        parent = parent.parent
    return str(parent.attributes["sym_name"]).strip('"') if parent is not None else ""
