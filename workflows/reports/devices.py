"""The report on absent devices: programs of the zoo, lowered by each device's own compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from ...common.units import duration, size
from .device_rows import DeviceRow, known_programs, rows

if TYPE_CHECKING:
    from rich.console import Console

    from ...features.devices.device import DeviceSpec
    from .device_checks import Check
    from .settings import DeviceReportSettings


def run_device_report(
    console: Console, settings: DeviceReportSettings
) -> tuple[list[DeviceRow], list[Check]]:
    """Lower, predict and check programs on devices, print and write the figures.

    What a compiler made is cached, so a report that was stopped goes on where it was.

    Args:
        console: Console to print to.
        settings: The programs, the devices and the file for the figures.

    Raises:
        CompilerStartError: A compiler is installed, but does not start.
        OpcastError: A program or device is unknown, or a compiler is missing.
    """
    from ...common.files import write_text
    from ...common.progress import tracked, wrote
    from ...predict.devices import resolve_device, shown_devices
    from ...predict.program.predictor import load
    from .device_checks import physics_checks

    lowering, out = settings.lowering, settings.out
    chosen = known_programs(settings.programs)
    predictor = load()
    names = settings.devices or shown_devices("reports")
    specs = [resolve_device(name, predictor.devices) for name in names]
    # Before the first of a hundred lowerings.
    _require_compilers(specs, lowering)
    count = len(chosen) * len(specs)
    pending = rows(predictor, chosen, specs, lowering)
    table = list(tracked(pending, count, "programs on devices"))
    checks = physics_checks(predictor, table, specs, lowering)
    print_report(console, table, checks)
    if out is not None:
        data = {"rows": [asdict(r) for r in table], "checks": [asdict(c) for c in checks]}
        text = markdown(table, checks) if out.suffix == ".md" else json.dumps(data, indent=1)
        write_text(out, text)
        wrote(out, f"{len(table)} predictions")
    return table, checks


def _require_compilers(devices: Sequence[DeviceSpec], lowering: str) -> None:
    """Raise at once if a compiler is missing, instead of failing for each program."""
    from ...features.lowering.target_compiler.target import target_of

    if lowering == "xla":
        for device in devices:
            target_of(device)


#: Columns by heading: their text for a row without an error.
COLUMNS: dict[str, Callable[[DeviceRow], str]] = {
    "program": lambda r: r.program,
    "device": lambda r: r.device,
    "compiled in s": lambda r: f"{r.compile_s:.1f}",
    "from cache in s": lambda r: f"{r.lower_s:.2f}",
    "kernels": lambda r: str(r.kernels),
    "roofline": lambda r: duration(r.roofline_us),
    "compiler": lambda r: "–" if r.compiler_us is None else duration(r.compiler_us),
    "learned": lambda r: duration(r.learned_us),
    "90 % interval": lambda r: f"{duration(r.learned_lo_us)} – {duration(r.learned_hi_us)}",
    "peak memory": lambda r: size(r.peak_memory_bytes),
    "fits": lambda r: {True: "yes", False: "no", None: "–"}[r.fits],
}
#: Columns of text; the others hold figures.
_LEFT = ("program", "device", "fits")


def print_report(console: Console, table: Sequence[DeviceRow], checks: Sequence[Check]) -> None:
    """Print all programs on all devices, then the physics checks."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="predictions for devices", title_justify="left", box=None, pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for _, group in groupby(table, key=lambda row: row.program):
        for place, row in enumerate(group):
            cells = cells_of(row)
            # A program's name stands once, above all of its devices.
            shown.add_row(*(Text(c) for c in (cells if not place else ("", *cells[1:]))))
    console.print(shown)
    for row in table:
        if row.error:
            console.print(Text(f"{row.program} on {row.device}: {row.error}", style="yellow"))
    for line in check_lines(checks):
        console.print(Text(line))


def cells_of(row: DeviceRow) -> list[str]:
    """Format a row as text, in the order of :data:`COLUMNS`."""
    if row.error:
        return [row.program, row.device, *["–"] * (len(COLUMNS) - 3), "no: see below"]
    return [cell(row) for cell in COLUMNS.values()]


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Format checks: one line each, and one for each failure."""
    lines = []
    for check in checks:
        state = "met" if check.passed else "NOT met" if check.cases else "not tested"
        lines.append(f"{state}: {check.name} ({check.cases} cases)")
        lines += [f"  {failure}" for failure in check.failures]
    return lines


def markdown(table: Sequence[DeviceRow], checks: Sequence[Check]) -> str:
    """Format the report as Markdown: a table, then errors and checks as lists."""
    rule = "|".join("---" if name in _LEFT else "---:" for name in COLUMNS)
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{rule}|"]
    lines += [f"| {' | '.join(cells_of(row))} |" for row in table]
    errors = [f"- {row.program} on {row.device}: {row.error}" for row in table if row.error]
    demands = [
        f"- {line}" if line[0] != " " else f"  - {line.strip()}" for line in check_lines(checks)
    ]
    return "\n".join([*lines, "", *errors, *([""] if errors else []), *demands, ""])
