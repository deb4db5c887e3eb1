"""Print the prediction of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ...common.units import duration, quantity, size
from ..groups import starring
from ..program.predictor import KernelEstimate, Prediction
from .parts import (
    Column,
    cost_line,
    fitted_table,
    line_of,
    place_table,
    print_notes,
    root_of,
    timed_headline,
    unfit,
)

#: What kernels of a table may be put together by.
GROUPS = ("kernel", "line", "module")
#: Columns of kernels. The time, its share, the source line and what runs there are never left out.
_COLUMNS = (
    Column("share"),
    Column("time"),
    Column("runs", 1),
    Column("line", justify="left"),
    Column("module and op", justify="left", least=24, ends=True),
    Column("bound", 2, "left"),
    Column("kind", 3, "left"),
    Column("source", 4, "left"),
    Column("interval of one", 5),
    Column("kernel", 6, "left"),
)


def print_prediction(
    console: Console,
    prediction: Prediction,
    top: int = 10,
    by: str = "kernel",
    price: float | None = None,
) -> None:
    """Print the total, what takes most time, and the shares by kind.

    Args:
        console: Where to.
        prediction: The prediction.
        top: Rows of the table.
        by: One of :data:`GROUPS`: equal kernels, source lines or modules.
        price: Of the device for an hour; without one no cost is printed.
    """
    p = prediction
    first = timed_headline(p.latency_us, p.lo_us, p.hi_us, f"on {p.device}")
    console.print(first + unfit(p.peak_memory_bytes, p.device_memory_bytes))
    executions = sum(k.multiplicity for k in p.kernels)
    console.print(
        f"{len(p.kernels)} kernels, {executions:.0f} executions; lowering {p.lowering}; "
        f"model {p.model}; peak memory {size(p.peak_memory_bytes)} ({p.memory_source}){_fit(p)}"
    )
    for line in _energy_and_cost(p, price):
        console.print(line)
    # Before the table, which may be longer than the screen.
    print_notes(console, p.notes, loud=True)
    if by == "kernel":
        console.print(kernel_table(p.kernels, top, console.width))
    else:
        aside = ("bound", lambda k: k.bound)
        console.print(place_table(p.kernels, top, console.width, by, aside))
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in p.share_by_kind.items())
    console.print(f"by kind: {shares}; in domain: {p.in_domain_share:.0%} of the time")
    print_notes(console, p.notes, p.standing, loud=False)


def _energy_and_cost(p: Prediction, price: float | None) -> list[str]:
    lines = []
    if (joules := p.energy) is not None:
        watts = joules.value / (p.latency_us * 1e-6)
        lines.append(
            f"energy {quantity(joules.value, 'J')}  [{quantity(joules.lo, 'J')} – "
            f"{quantity(joules.hi, 'J')}], {watts:.0f} W"
        )
    if price is not None:
        lines.append(cost_line(p, price))
    return lines


def _fit(p: Prediction) -> str:
    if p.fits is None:
        return ""
    return f", {'fits' if p.fits else 'does NOT fit'} in {size(p.device_memory_bytes)}"


def kernel_table(kernels: Sequence[KernelEstimate], top: int, width: int) -> Table:
    """Make a table of the kernels that take most time, equal ones in one row.

    Kernels are equal that do the same work at the same line of modules that differ in numbers
    alone, such as the layers of a model.

    Args:
        kernels: All kernels of a program.
        top: Rows.
        width: Of the console.
    """
    root = root_of(kernels)
    star = starring((k.module, k.what) for k in kernels)
    groups = _grouped(
        kernels,
        lambda k: (
            star(k.module), k.phase, k.source_op, k.source_line, k.kind, k.bound, k.source,
            k.in_domain, k.flops, k.bytes,
        ),
    )  # fmt: skip
    total = sum(k.total_us for k in kernels) or 1.0
    rows = []
    for group in groups[:top]:
        k, time = group[0], sum(k.total_us for k in group)
        more = f" +{len(group) - 1}" if len(group) > 1 else ""
        spans = f"{duration(min(k.lo_us for k in group))}–{duration(max(k.hi_us for k in group))}"
        rows.append(
            [
                f"{time / total:.1%}",
                duration(time),
                f"{sum(k.multiplicity for k in group):.0f}",
                line_of(k.source_line),
                _what(k, root, star if len(group) > 1 else str),
                k.bound,
                k.kind,
                k.source + ("" if k.in_domain else " (outside)"),
                spans,
                # Names of fusions grow with their ops.
                k.name[:34] + more,
            ]
        )
    return fitted_table(width, _COLUMNS, rows)


def _grouped(
    kernels: Iterable[KernelEstimate], key: Callable[[KernelEstimate], object]
) -> list[list[KernelEstimate]]:
    """Kernels by a key, the costliest group first, the costliest kernel of each first."""
    groups: dict[object, list[KernelEstimate]] = {}
    for k in sorted(kernels, key=lambda k: -k.total_us):
        groups.setdefault(key(k), []).append(k)
    return sorted(groups.values(), key=lambda group: -sum(k.total_us for k in group))


def _module(k: KernelEstimate, root: str, named: Callable[[str], str]) -> str:
    module = named(k.module).removeprefix(named(root))
    phase = f"({k.phase})" if k.phase in ("backward", "recomputed") else ""
    return " ".join(filter(None, (module, phase)))


def _what(k: KernelEstimate, root: str, named: Callable[[str], str]) -> str:
    """Module and op as the user's code names them; the compiler's name where there is neither."""
    return " ".join(filter(None, (_module(k, root, named), _op(k)))) or k.name


def _op(k: KernelEstimate) -> str:
    return k.source_op.removeprefix("stablehlo.")
