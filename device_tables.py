"""The report on devices as text: for a console, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .predict.render import duration, size

if TYPE_CHECKING:
    from rich.console import Console

    from .device_checks import Check
    from .device_report import DeviceRow

HEADER = (
    "program", "device", "compiled in s", "from cache in s", "kernels", "roofline", "compiler",
    "learned", "90 % interval", "peak memory", "fits",
)  # fmt: skip
#: Columns of text; the others hold figures.
_LEFT = ("program", "device", "fits")


def print_report(console: Console, table: Sequence[DeviceRow], checks: Sequence[Check]) -> None:
    """Print all programs on all devices, then what physics demands of them."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="predictions for devices", title_justify="left", box=None, pad_edge=False)
    for name in HEADER:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for _, group in groupby(table, key=lambda row: row.program):
        for place, row in enumerate(group):
            cells = cells_of(row)
            shown.add_row(*(Text(c) for c in (cells if not place else ("", *cells[1:]))))
    console.print(shown)
    for row in table:
        if row.error:
            console.print(Text(f"{row.program} on {row.device}: {row.error}", style="yellow"))
    for line in check_lines(checks):
        console.print(Text(line))


def cells_of(row: DeviceRow) -> tuple[str, ...]:
    """A row as text, in the order of :data:`HEADER`."""
    if row.error:
        return (row.program, row.device, *("–" for _ in HEADER[2:-1]), "no: see below")
    return (
        row.program,
        row.device,
        f"{row.compile_s:.1f}",
        f"{row.lower_s:.2f}",
        str(row.kernels),
        duration(row.roofline_us),
        "–" if row.compiler_us is None else duration(row.compiler_us),
        duration(row.learned_us),
        f"{duration(row.learned_lo_us)} – {duration(row.learned_hi_us)}",
        size(row.peak_memory_bytes),
        {True: "yes", False: "no", None: "–"}[row.fits],
    )


def check_lines(checks: Sequence[Check]) -> list[str]:
    """What physics demands, met or not, a line each, and a line for each failure."""
    found = []
    for check in checks:
        state = "met" if check.passed else "NOT met" if check.cases else "not tested"
        found.append(f"{state}: {check.name} ({check.cases} cases)")
        found += [f"  {failure}" for failure in check.failures]
    return found


def markdown(table: Sequence[DeviceRow], checks: Sequence[Check]) -> str:
    """The same as Markdown: a table, errors and checks as lists."""
    rule = "|".join("---" if name in _LEFT else "---:" for name in HEADER)
    lines = [f"| {' | '.join(HEADER)} |", f"|{rule}|"]
    lines += [f"| {' | '.join(cells_of(row))} |" for row in table]
    errors = [f"- {row.program} on {row.device}: {row.error}" for row in table if row.error]
    demands = [f"- {line}" if line[0] != " " else f"  - {line.strip()}" for line in
               check_lines(checks)]  # fmt: skip
    return "\n".join([*lines, "", *errors, *([""] if errors else []), *demands, ""])
