"""Predictions as a screen of text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .predictor import KernelEstimate, Prediction

_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))


def duration(us: float) -> str:
    """Microseconds with a readable unit, three significant digits."""
    for scale, unit in _UNITS:
        if abs(us) >= scale:
            return f"{us / scale:.3g} {unit}"
    return f"{us * 1e3:.3g} ns"


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def print_prediction(console: Console, prediction: Prediction, top: int = 10) -> None:
    """Print the total, the kernels that take most time, and the shares by kind."""
    p = prediction
    console.print(
        headline(
            duration(p.latency_us),
            f"  (90 % interval {duration(p.lo_us)} to {duration(p.hi_us)})  on {p.device}",
        )
    )
    executions = sum(k.multiplicity for k in p.kernels)
    console.print(
        f"{len(p.kernels)} kernels, {executions:.0f} executions; lowering {p.lowering}; "
        f"model {p.model}; peak memory {size(p.peak_memory_bytes)} ({p.memory_source}){_fit(p)}"
    )
    console.print(kernel_table(p.top(top), sum(k.total_us for k in p.kernels)))
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in p.share_by_kind.items())
    console.print(f"by kind: {shares}; in domain: {p.in_domain_share:.0%} of the time")
    for note in p.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def headline(figure: str, rest: str) -> Text:
    """A line that begins with a figure that matters."""
    return Text.assemble((figure, "bold"), rest)


def _fit(p: Prediction) -> str:
    if p.fits is None:
        return ""
    return f", {'fits' if p.fits else 'does NOT fit'} in {size(p.device_memory_bytes)}"


def kernel_table(kernels: Iterable[KernelEstimate], total_us: float) -> Table:
    """A table of kernels with share, time, reason and origin."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("share", "right"), ("time", "right"), ("runs", "right"), ("interval of one", "right"),
        ("kernel", "left"), ("kind", "left"), ("bound", "left"), ("source", "left"),
        ("from", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=name != "from")  # type: ignore[arg-type]
    for k in kernels:
        table.add_row(
            f"{k.total_us / (total_us or 1):.1%}",
            duration(k.total_us),
            f"{k.multiplicity:.0f}",
            f"{duration(k.lo_us)}–{duration(k.hi_us)}",
            Text(k.name[:34]),
            k.kind,
            k.bound,
            k.source + ("" if k.in_domain else " (outside)"),
            Text(origin(k)),
        )
    return table


def origin(kernel: KernelEstimate) -> str:
    """StableHLO op and line of the user's program that a kernel mainly came from, briefly."""
    line = kernel.source_line.rsplit("/", 1)[-1]
    op = kernel.source_op.removeprefix("stablehlo.")
    return f"{op} {line}".strip()
