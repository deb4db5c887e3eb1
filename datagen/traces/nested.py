"""Ranges of one thread: what was under way at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Nested(Generic[T]):
    """Ranges, each inside of the one that began before it and is still open.

    Args:
        ranges: Start, end and what the range is.
    """

    def __init__(self, ranges: Iterable[tuple[float, float, T]]) -> None:
        # Of ranges with one start the longest is the outermost.
        self._ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))
        self._starts = [r[0] for r in self._ranges]
        self._outer: list[int] = []
        open_: list[int] = []
        for place, (_, end, _) in enumerate(self._ranges):
            while open_ and self._ranges[open_[-1]][1] < end:
                open_.pop()
            self._outer.append(open_[-1] if open_ else -1)
            open_.append(place)

    def around(self, at: float) -> list[T]:
        """What was under way at a time, the innermost first."""
        place = bisect_right(self._starts, at) - 1
        found = []
        while place >= 0:
            _, end, what = self._ranges[place]
            if end >= at:
                found.append(what)
            place = self._outer[place]
        return found
