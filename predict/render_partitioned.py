"""A partitioned program's prediction as a screen of text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .partitioned import PartitionedPrediction
from .render import duration, headline, size


def print_partitioned(console: Console, found: PartitionedPrediction, top: int = 10) -> None:
    """Print the time, the collectives, and the longest nodes of the critical path."""
    r = found.run
    console.print(
        headline(
            duration(r.makespan * 1e6),
            f"  (90 % interval {duration(found.lo * 1e6)} to {duration(found.hi * 1e6)})"
            f"  on {found.cluster}",
        )
    )
    console.print(
        f"computation {duration(r.compute * 1e6)}; collectives "
        f"{duration(float(found.transfer.sum()) * 1e6)} alone, of which "
        f"{duration(r.exposed * 1e6)} exposed; memory {size(found.peak_memory_bytes)} of "
        f"{size(found.capacity_bytes)}; lowering {found.lowering}"
    )
    table = Table("collective", "runs", "bytes", "alone", box=None, header_style="bold")
    for kind, (count, total, seconds) in found.by_collective().items():
        table.add_row(kind, f"{count:.0f}", size(total), duration(seconds * 1e6))
    if found.by_collective():
        console.print(table)
    console.print(_critical(found, top))
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _critical(found: PartitionedPrediction, top: int) -> Table:
    run = found.run
    spans = sorted(run.critical, key=lambda p: run.start[p] - run.end[p])[:top]
    table = Table("share", "time", "on the critical path", box=None, header_style="bold")
    for place in sorted(spans):
        length = float(run.end[place] - run.start[place])
        node = found.nodes[place]
        name = Text(node.name[:60] + (" (collective)" if node.collective else ""))
        share = f"{length / (run.makespan or 1.0):.1%}"
        table.add_row(share, duration(length * 1e6), name)
    return table
