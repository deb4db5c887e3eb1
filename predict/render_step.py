"""A predicted step as a screen of text."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .render import duration, headline, size
from .step import StepPrediction

#: Operators that are listed.
TOP = 8


def print_step(console: Console, found: StepPrediction) -> None:
    """Print the step's time, where it goes, what the devices hold, and notes."""
    s, n = found.step, found.plan.devices
    console.print(
        headline(
            duration(s.total * 1e6),
            f" a step  (90 % interval {duration(found.lo * 1e6)} to {duration(found.hi * 1e6)})"
            f"  on {n} × {found.device}",
        )
    )
    mfu = found.flops_per_device / found.peak_flops
    tokens = found.workload.batch * found.workload.seq / s.total
    console.print(
        f"{found.flops_per_device / 1e12:.0f} TFLOP/s a device ({mfu:.1%} of its peak), "
        f"{tokens:,.0f} tokens/s; {found.workload.parameters / 1e9:.2f} billion parameters"
    )
    console.print(f"plan {found.plan.text()} on {found.cluster}", highlight=False)
    console.print(_times(found))
    console.print(_memory(found))
    if not found.fit.fits:
        console.print(headline("does NOT fit", " in the devices' memory: this step cannot run"))
    if found.spread is not None:
        parts = found.spread.to_dict()
        listed = ", ".join(f"{k[:-3]} {duration(v)}" for k, v in parts.items())
        console.print(f"with jitter: {listed}", highlight=False)
    for note in found.notes():
        console.print(Text(f"note: {note}", style="yellow"))


def print_front(console: Console, front: pd.DataFrame, judged: int, fitting: int, top: int) -> None:
    """Print the Pareto front of a sweep, fastest first.

    Args:
        console: Where to.
        front: Rows of :func:`~.sweep.pareto`.
        judged: Number of plans that were judged.
        fitting: How many of them fit.
        top: Rows to print.
    """
    console.print(f"{judged} plans, {fitting} fit the memory, {len(front)} on the Pareto front")
    table = _table("step", "memory", "MFU", "energy", "batch", "cluster", "plan")
    for row in front.head(top).to_dict("records"):
        energy = row["energy_j"]
        table.add_row(
            duration(row["step_us"]),
            size(row["memory_bytes_per_device"]),
            f"{row['mfu']:.1%}",
            "" if energy != energy else f"{energy / 1e3:.4g} kJ",
            str(row["batch"]),
            Text(str(row["cluster"])),
            Text(str(row["plan"])),
        )
    console.print(table)


def breakdown(found: StepPrediction) -> list[tuple[str, float]]:
    """Parts of the step in seconds: computation, exposed communication, bubble."""
    s = found.step
    return [
        ("computation", s.compute), ("exposed communication", s.exposed), ("bubble", s.bubble),
    ]  # fmt: skip


def _times(found: StepPrediction) -> Table:
    table = _table("part", "time", "share", "most of it")
    operators = list(found.operators.items())[:TOP]
    most = {
        "computation": ", ".join(f"{k} {duration(v * 1e6)}" for k, v in operators),
        "exposed communication": "of "
        + (
            ", ".join(f"{k} {duration(v * 1e6)}" for k, v in found.step.communication.items())
            or "none"
        ),
        "bubble": f"{found.plan.pp} stages, {found.plan.microbatches} micro-batches",
    }
    for name, value in breakdown(found):
        share = f"{value / found.step.total:.1%}"
        table.add_row(name, duration(value * 1e6), share, Text(most[name]))
    return table


def _memory(found: StepPrediction) -> Table:
    worst = found.fit.worst
    table = _table("memory", "bytes", "share", "")
    for name, value in worst.to_dict().items():
        says = f"of {size(found.fit.capacity)}" if name == "total" else ""
        share = f"{value / found.fit.capacity:.1%}"
        table.add_row(name, size(value), share, says)
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(names):
        right = place in (1, 2)
        table.add_column(name, justify="right" if right else "left", no_wrap=place < 3)
    return table
