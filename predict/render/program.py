"""Print the prediction of a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, plain, quantity, size
from ..cluster.partitioned import PartitionedPrediction
from ..groups import starring
from ..program.fidelities import Comparison
from ..program.many import NOTES
from ..program.predictor import KernelEstimate, Prediction
from .parts import (
    Column,
    cost_line,
    fitted_table,
    line_of,
    place_table,
    plain_table,
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


#: Figures of a design in its name.
_FIGURES = re.compile(r"\((?:[\w.]+=[^(),]*,?)+\)")
#: Rows that are printed; the file has all.
MOST = 60


def print_many(console: Console, frame: pd.DataFrame) -> None:
    """Print the times of programs on devices, in the order of the command line."""
    priced = "cost" in frame
    names = ("time", "90 % interval", "memory", *(("cost",) if priced else ()), "device", "program")
    # Long names go on in the next line; figures stay whole.
    table = plain_table(*names, right=("time", "cost"), fold=("device", "program"))
    for row in frame.head(MOST).to_dict("records"):
        program = Text(Path(str(row["program"])).name)
        device = Text(str(row["device"]))
        if row["error"]:
            empty = [""] * (1 + priced)
            table.add_row("none", Text(str(row["error"]), style="red"), *empty, device, program)
            continue
        span = f"{duration(row['lo_us'])} to {duration(row['hi_us'])}"
        cost = [plain(row["cost"]) if pd.notna(row["cost"]) else ""] if priced else []
        table.add_row(
            duration(row["latency_us"]),
            span,
            _memory(row["peak_memory_bytes"], row["fits"]),
            *cost,
            device,
            program,
        )
    console.print(table)
    if len(frame) > MOST:
        console.print(f"{len(frame) - MOST} more rows: --out has all")
    failed = int((frame["error"] != "").sum())
    if failed:
        console.print(Text(f"{failed} of {len(frame)} could not be predicted", style="red"))
    # Designs of one chip have the same notes but for the figures in their names.
    texts = [_FIGURES.sub("", text) for text in frame["notes"].fillna("") if text]
    for note in dict.fromkeys(part for text in texts for part in text.split(NOTES)):
        console.print(Text(f"note: {note}", style="dim"))


def _memory(peak: object, fits: object) -> Text:
    """Peak memory and whether it fits; empty where it is not predicted, as of PyTorch's kernels."""
    if not isinstance(peak, float | int) or pd.isna(peak):
        return Text("")
    # ``fits`` is None where the memory of a device is unknown.
    if fits is False:
        return Text(f"{size(peak)} does NOT fit", style="red")
    return Text(f"{size(peak)}{' fits' if fits is True else ''}")


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
    table = plain_table("collective", "runs", "bytes put in", "alone")
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
    names = ("share", "time", "on the critical path")
    table = plain_table(*names, fold=names[2:])
    for place in sorted(spans):
        length = float(run.end[place] - run.start[place])
        node = prediction.nodes[place]
        # As text: names come from the program and may hold markup.
        name = Text(node.name[:60] + (" (collective)" if node.collective else ""))
        share = f"{length / (run.makespan or 1.0):.1%}"
        table.add_row(share, duration(length * 1e6), name)
    return table


#: Marks a kernel's time that was taken from the roofline because the estimator has none.
_BORROWED = "*"


def print_comparison(console: Console, comparison: Comparison, top: int = 10) -> None:
    """Print times of the program and of the kernels that the estimators disagree on most."""
    count = len(comparison.fidelities[0].own)
    rest = f" on {comparison.device}; lowering {comparison.lowering}, {count} kernels"
    console.print(Text.assemble((comparison.program, "bold"), rest))
    console.print(_table(comparison, top))
    console.print(
        f"time: of a run; covered: share of the time of kernels that the estimator models itself; "
        f"{_BORROWED} the roofline, for want of its own"
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
    figures = (*(f.name for f in comparison.fidelities), "largest / least")
    table = plain_table("", "kind", *figures, right=figures, fold=("", "kind"))
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
