"""Where in a user's model an operator belongs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where in the user's model a node belongs.

    Attributes:
        file: The innermost file of the user's own; empty if unknown.
        line: Line in it.
        modules: Scopes, outermost first, joined by slashes.
    """

    file: str = ""
    line: int = 0
    modules: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.modules
