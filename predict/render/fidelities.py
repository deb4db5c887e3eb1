"""Print the predictions of several estimators side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration
from ..program.fidelities import Comparison
from .parts import print_notes

#: Marks a kernel's time that was taken from the roofline because the estimator has none.
_BORROWED = "*"


def print_comparison(console: Console, comparison: Comparison, top: int = 10) -> None:
    """Print times of the program and of the kernels that the estimators disagree on most."""
    count = len(comparison.fidelities[0].own)
    rest = f" on {comparison.device}; lowering {comparison.lowering}, {count} kernels"
    console.print(Text.assemble((comparison.program, "bold"), rest), highlight=False)
    console.print(_table(comparison, top))
    console.print(
        f"time: of a run; covered: share of the time of kernels that the estimator models itself; "
        f"{_BORROWED} the roofline, for want of its own",
        highlight=False,
    )
    # Notes on the program and the device come from every estimator; they are printed once.
    shared = set.intersection(*[set(f.prediction.notes) for f in comparison.fidelities])
    first = comparison.fidelities[0].prediction.notes
    print_notes(console, dict.fromkeys(n for n in first if n in shared))
    for fidelity in comparison.fidelities:
        for note in fidelity.prediction.notes:
            if note not in shared:
                console.print(Text(f"{fidelity.name}: {note}", style="yellow"))


def _table(comparison: Comparison, top: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("kind")
    for fidelity in comparison.fidelities:
        table.add_column(fidelity.name, justify="right", no_wrap=True)
    table.add_column("largest / least", justify="right")
    totals = list(comparison.total_us.values())
    table.add_row("time", "", *map(duration, totals), _ratio(totals))
    table.add_row("covered", "", *(f"{f.covered:.0%}" for f in comparison.fidelities), "")
    times = comparison.times_us
    for place in comparison.disputed(top):
        kernel = comparison.fidelities[0].prediction.kernels[place]
        cells = [
            duration(us) + ("" if f.own[place] else _BORROWED)
            for us, f in zip(times[:, place].tolist(), comparison.fidelities, strict=True)
        ]
        ratio = _ratio(times[:, place].tolist())
        table.add_row(Text(kernel.name[:34]), kernel.kind, *cells, ratio)
    return table


def _ratio(times: list[float]) -> str:
    # A kernel that one estimator takes to be free has no ratio.
    return f"{max(times) / min(times):.2f}" if min(times) > 0 else "–"
