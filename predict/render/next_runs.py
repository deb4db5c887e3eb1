"""Print the runs that narrow an interval most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.units import duration
from ..next_runs import NextRuns
from .parts import print_notes

if TYPE_CHECKING:
    from rich.console import Console


def print_next_runs(console: Console, found: NextRuns) -> None:
    """Print each run with the interval that is expected after it and those before it."""
    now = found.asked
    ends = f"{duration(now.lo * 1e6)} to {duration(now.hi * 1e6)}"
    if found.runs:
        console.print(f"measure next; the interval is {ends} now, and expected after each:")
    for number, run in enumerate(found.runs, 1):
        cost = "" if run.cost is None else f", costs {run.cost:.2g}"
        console.print(
            f"  {number}. {duration(run.lo * 1e6)} to {duration(run.hi * 1e6)} after {run.what}"
            f" ({run.hours:.2g} device hours{cost})",
            highlight=False,
            soft_wrap=True,
        )
        if run.command:
            console.print(f"     {run.command}", highlight=False, soft_wrap=True, markup=False)
    for command in found.then:
        console.print(f"  then {command}", highlight=False, soft_wrap=True, markup=False)
    print_notes(console, found.notes)
