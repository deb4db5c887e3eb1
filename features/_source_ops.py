"""StableHLO ops by their position in the program's walk, read only when someone asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

from ._mlir_locations import Line, user_line
from .ir import Source
from .reader import SourceProgram

_CALLS = ("func.call", "call")


class SourceOps(Sequence[Source]):
    """Sources of a StableHLO program's ops, indexed as :attr:`Source.index` counts.

    Args:
        source: A StableHLO program.
    """

    def __init__(self, source: SourceProgram) -> None:
        from ._jax_compat import walk_ops

        # Operations live as long as their module.
        self._module = source.module
        self._origin = source.origin
        self._ops: list[Any] = walk_ops(self._module)
        self._found: dict[int, Source] = {}
        self._lines: dict[Any, Line] = {}

    @property
    def operations(self) -> Sequence[Any]:
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
        found = self._found.get(index)
        if found is None:
            op = self._ops[index]
            line = self._line(op)
            found = self._found[index] = Source(op.name, line.file, line.line, index)
        return found

    def _line(self, op: Any, depth: int = 0) -> Line:
        """The user's line: of the op, or of a call of the library function that holds it."""
        location = op.location.attr
        found = self._lines.get(location)
        if found is None:
            found = self._lines[location] = user_line(str(location), self._origin)
        if found.own or depth > 50:
            return found
        call = self.first_calls.get(function_of(op))
        outer = self._line(call, depth + 1) if call is not None else found
        return outer if outer.own else found

    @cached_property
    def first_calls(self) -> dict[str, Any]:
        """First call of each function, by its name."""
        found: dict[str, Any] = {}
        for op in self._ops:
            if op.name in _CALLS:
                found.setdefault(str(op.attributes["callee"]).removeprefix("@"), op)
        return found


def function_of(op: Any) -> str:
    """Name of the function that holds an operation; empty outside of any."""
    parent = op
    while parent is not None and parent.name != "func.func":
        parent = parent.parent
    return str(parent.attributes["sym_name"]).strip('"') if parent is not None else ""
