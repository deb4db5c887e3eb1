"""A console that prints text literally: no markup, no links, no control sequences.

Names of kernels, devices, models and files are untrusted input. They must not be able to colour the
screen, create a link, move the cursor or set the window title.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .files import printable


class PlainConsole(Console):
    """Rich's console with styling only by :class:`rich.text.Text`.

    Args:
        options: Arguments of :class:`rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        # Rich styles [red]…[/], :smile: and numbers in any text, including names from files.
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render something to segments without control characters in their text."""
        for segment in super().render(renderable, options):
            # Rich's own control segments (cursor, progress) pass; text is escaped.
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
