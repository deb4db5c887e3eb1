"""Print the prediction of a partitioned program."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, size
from ..cluster.partitioned import PartitionedPrediction
from .parts import print_notes, timed_headline, unfit


def print_partitioned(console: Console, prediction: PartitionedPrediction, top: int = 10) -> None:
    """Print the time, the collectives, and the longest nodes of the critical path."""
    r, span = prediction.run, prediction.interval
    capacity = f" of {size(prediction.capacity_bytes)}" if prediction.capacity_bytes else ""
    console.print(
        timed_headline(span.value * 1e6, span.lo * 1e6, span.hi * 1e6, f"on {prediction.cluster}")
        + unfit(prediction.peak_memory_bytes, prediction.capacity_bytes)
    )
    console.print(
        f"computation {duration(r.compute * 1e6)}; collectives "
        f"{duration(float(prediction.transfer.sum()) * 1e6)} alone, of which "
        f"{duration(r.exposed * 1e6)} exposed; memory {size(prediction.peak_memory_bytes)}"
        f"{capacity}; lowering {prediction.lowering}"
    )
    print_notes(console, prediction.notes, loud=True)
    table = Table("collective", "runs", "bytes put in", "alone", box=None, header_style="bold")
    for kind, (count, total, seconds) in prediction.by_collective().items():
        table.add_row(kind, f"{count:.0f}", size(total), duration(seconds * 1e6))
    if prediction.by_collective():
        console.print(table)
    console.print(_critical(prediction, top))
    print_notes(console, prediction.notes, loud=False)


def _critical(prediction: PartitionedPrediction, top: int) -> Table:
    run = prediction.run
    # Longest first (the key is a negative duration); then printed in the order of execution.
    spans = sorted(run.critical, key=lambda p: run.start[p] - run.end[p])[:top]
    table = Table("share", "time", "on the critical path", box=None, header_style="bold")
    for place in sorted(spans):
        length = float(run.end[place] - run.start[place])
        node = prediction.nodes[place]
        # As text: names come from the program and may hold markup.
        name = Text(node.name[:60] + (" (collective)" if node.collective else ""))
        share = f"{length / (run.makespan or 1.0):.1%}"
        table.add_row(share, duration(length * 1e6), name)
    return table
