"""Print the plans of a program."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, energy, size
from ..plan.answer import PlanAnswer
from ..plan.judge import Row
from .parts import print_notes, timed_headline


def print_plan(console: Console, answer: PlanAnswer, top: int = 10) -> None:
    """Print the best plan, the front of time, memory, devices and energy, and the reasons."""
    best = answer.best
    console.print(
        timed_headline(
            float(str(best["latency_us"])),
            float(str(best["lo_us"])),
            float(str(best["hi_us"])),
            f"on {answer.cluster}, memory {_size(best)} a device",
        )
    )
    console.print(Text(f"best plan: {best['plan']}"))
    print_notes(console, answer.notes, loud=True)
    table = Table("time", "memory", "devices", "energy", "plan", box=None, header_style="bold")
    for row in answer.front[:top]:
        joules = row.get("energy_j")
        table.add_row(
            _time(row, "latency_us"),
            _size(row),
            str(row["devices"]),
            energy(joules) if isinstance(joules, float) else "",
            Text(str(row["plan"])),
        )
    if answer.front:
        console.print(f"front of {len(answer.rows)} compiled of {answer.screened} screened plans:")
        console.print(table)
    for line in answer.reasons:
        console.print(line, highlight=False, markup=False)
    failed = [row for row in answer.rows if row["error"]]
    if failed:
        one = failed[0]
        console.print(
            f"{len(failed)} could not be compiled, such as {one['plan']}: {one['error']}",
            highlight=False,
            markup=False,
        )
    print_notes(console, answer.notes, loud=False)


def _time(row: Row, key: str) -> str:
    value = row[key]
    return duration(value) if isinstance(value, float) else ""


def _size(row: Row) -> str:
    value = row["memory_bytes_per_device"]
    return size(value) if isinstance(value, int | float) else ""
