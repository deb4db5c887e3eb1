"""Print the prediction of a program."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, size
from ..program.predictor import KernelEstimate, Prediction, origin
from .parts import print_notes, timed_headline


def print_prediction(console: Console, prediction: Prediction, top: int = 10) -> None:
    """Print the total, the kernels that take most time, and the shares by kind."""
    p = prediction
    console.print(timed_headline(p.latency_us, p.lo_us, p.hi_us, f"on {p.device}"))
    executions = sum(k.multiplicity for k in p.kernels)
    console.print(
        f"{len(p.kernels)} kernels, {executions:.0f} executions; lowering {p.lowering}; "
        f"model {p.model}; peak memory {size(p.peak_memory_bytes)} ({p.memory_source}){_fit(p)}"
    )
    # Before the table, which may be longer than the screen.
    print_notes(console, p.notes, loud=True)
    console.print(kernel_table(p.top(top), sum(k.total_us for k in p.kernels)))
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in p.share_by_kind.items())
    console.print(f"by kind: {shares}; in domain: {p.in_domain_share:.0%} of the time")
    print_notes(console, p.notes, loud=False)


def _fit(p: Prediction) -> str:
    if p.fits is None:
        return ""
    return f", {'fits' if p.fits else 'does NOT fit'} in {size(p.device_memory_bytes)}"


def kernel_table(kernels: Iterable[KernelEstimate], total_us: float) -> Table:
    """Make a table of kernels: share, time, bound, source and origin."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("share", "right"),
        ("time", "right"),
        ("runs", "right"),
        ("interval of one", "right"),
        ("kernel", "left"),
        ("kind", "left"),
        ("bound", "left"),
        ("source", "left"),
        ("from", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "from")  # type: ignore[arg-type]
    for k in kernels:
        table.add_row(
            f"{k.total_us / (total_us or 1):.1%}",
            duration(k.total_us),
            f"{k.multiplicity:.0f}",
            f"{duration(k.lo_us)}–{duration(k.hi_us)}",
            # Names of fusions grow with their ops; the prefix tells them apart within 120 columns.
            Text(k.name[:34]),
            k.kind,
            k.bound,
            k.source + ("" if k.in_domain else " (outside)"),
            Text(origin(k)),
        )
    return table
