"""Pieces of text that several outputs share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.interval import Interval
from ...common.notes import WARNING
from ...common.units import duration


def headline(figure: str, rest: str) -> Text:
    """Make a line that begins with its most important figure."""
    return Text.assemble((figure, "bold"), rest)


def timed_headline(latency_us: float, lo_us: float, hi_us: float, rest: str) -> Text:
    """Make a headline of a predicted time in microseconds with its interval."""
    span = f"(90 % interval {duration(lo_us)} to {duration(hi_us)})"
    return headline(duration(latency_us), f"  {span}  {rest}")


def interval_text(interval: Interval) -> str:
    """Write out an interval."""
    return f"(90 % interval {duration(interval.lo * 1e6)} to {duration(interval.hi * 1e6)})"


def print_notes(console: Console, notes: Iterable[str], loud: bool | None = None) -> None:
    """Print notes, one per line.

    Args:
        console: Where to.
        notes: The notes.
        loud: Only warnings, or only the others; by default all.
    """
    for note in notes:
        warns = note.startswith(WARNING)
        if loud in (None, warns):
            style = "bold red" if warns else "yellow"
            console.print(Text(note if warns else f"note: {note}", style=style))


def factor_table(title: str, log_ratios: Iterable[tuple[str, float]]) -> Table:
    """Make a table of what a learned model multiplies an analytical estimate by.

    Args:
        title: Heading of the first column.
        log_ratios: Name and natural logarithm of each factor.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column(f"  {title}")
    table.add_column("factor", justify="right")
    table.add_column("log", justify="right")
    for name, value in log_ratios:
        table.add_row(f"  {name}", f"× {math.exp(value):.2f}", f"{value:+.3f}")
    return table
