"""Output of predictions of programs, comparisons and explanations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, plain, quantity, size
from ...models.explain import TREESHAP, KernelExplanation, Outside
from ...models.trust.neighbours import Neighbour
from ..groups import starring
from ..program.explain import ExplainedKernel, ProgramExplanation
from ..program.fidelities import Comparison
from ..program.many import NOTES
from ..program.predictor import KernelEstimate, Prediction
from .parts import (
    Column,
    Noted,
    cost_line,
    factor_table,
    fitted_table,
    folded,
    headline,
    line_of,
    place_table,
    plain_table,
    print_notes,
    root_of,
    runs_priced,
    span_of,
    timed_headline,
    unfit,
)

#: Share of the time below which the sum of the kernels is printed as well.
_MOSTLY = 0.9
#: Maximum rows to print; the file has all.
MOST = 60
#: Marks kernel times from the roofline, where the estimator has none.
_BORROWED = "*"
#: Maximum contributions to print; the others are summed in one row.
_SHOWN = 6
#: Deviation from 1 below which a factor is omitted, since it would print as 1.00 or 1.01.
_SAME = 0.005


def print_prediction(
    console: Console,
    prediction: Prediction,
    top: int = 10,
    by: str = "kernel",
    price: float | None = None,
) -> None:
    """Print the total, the largest items, and the shares by kind.

    Args:
        console: Console to print to.
        prediction: The prediction.
        top: Number of rows of the table.
        by: ``kernel`` for equal kernels, ``line`` or ``module``.
        price: Price of a device hour; without it, no cost is printed.
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
    if (total := _total(p.kernels)) < _MOSTLY * p.latency_us:
        console.print(f"{duration(total)} in kernels, the rest in the host's call and between them")
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
        top: Number of rows.
        width: Width of the console.
    """
    root = root_of(kernels)
    star = starring((k.module, k.what) for k in kernels)
    # The costliest group first, the costliest kernel of each first.
    groups: dict[object, list[KernelEstimate]] = {}
    for k in sorted(kernels, key=lambda k: -k.total_us):
        key = (
            star(k.module), k.phase, k.source_op, k.source_line, k.kind, k.bound, k.source,
            k.in_domain, k.flops, k.bytes,
        )  # fmt: skip
        groups.setdefault(key, []).append(k)
    total = _total(kernels) or 1.0

    def what(group: Sequence[KernelEstimate]) -> str:
        """Module and op as the user's code names them; the compiler's name if there is neither."""
        k, named = group[0], star if len(group) > 1 else str
        module = named(k.module).removeprefix(named(root))
        phase = f"({k.phase})" if k.phase in ("backward", "recomputed") else ""
        op = k.source_op.removeprefix("stablehlo.")
        return " ".join(filter(None, (module, phase, op))) or k.name

    def source(group: Sequence[KernelEstimate]) -> str:
        return group[0].source + ("" if group[0].in_domain else " (outside)")

    def name(group: Sequence[KernelEstimate]) -> str:
        # Names of fusions grow with their ops.
        return group[0].name[:34] + (f" +{len(group) - 1}" if len(group) > 1 else "")

    # The time, its share, the source line and what runs there are never left out.
    columns: tuple[Column[Sequence[KernelEstimate]], ...] = (
        Column("share", lambda g: f"{_total(g) / total:.1%}"),
        Column("time", lambda g: duration(_total(g))),
        Column("runs", lambda g: f"{sum(k.multiplicity for k in g):.0f}", 1),
        Column("line", lambda g: line_of(g[0].source_line), justify="left"),
        Column("module and op", what, justify="left", least=24, ends=True),
        Column("bound", lambda g: g[0].bound, 2, "left"),
        Column("kind", lambda g: g[0].kind, 3, "left"),
        Column("source", source, 4, "left"),
        Column("interval of one", span_of, 5),
        Column("kernel", name, 6, "left"),
    )
    ranked = sorted(groups.values(), key=lambda group: -_total(group))
    return fitted_table(width, columns, ranked[:top])


def _total(kernels: Sequence[KernelEstimate]) -> float:
    return sum(k.total_us for k in kernels)


#: Figures of a design in its name.
_FIGURES = re.compile(r"\((?:[\w.]+=[^(),]*,?)+\)")


def print_many(console: Console, frame: pd.DataFrame) -> None:
    """Print the times of programs on devices, in the order of the command line."""
    priced = "cost" in frame
    count, runs = runs_priced(float(frame["cost"].max())) if priced else (1.0, "")
    costs = (f"cost {runs}",) if priced else ()
    several = frame["framework"].nunique() > 1
    ran = ("framework",) if several else ()
    names = ("time", "90 % interval", "memory", *costs, *ran, "device", "program")
    # Long names go on in the next line; figures stay whole.
    table = plain_table(*names, right=("time", *costs), fold=("device", "program"))
    for row in frame.head(MOST).to_dict("records"):
        program = Text(Path(str(row["program"])).name)
        ran_by = [Text(str(row["framework"]))] if several else []
        place = [*ran_by, Text(str(row["device"])), program]
        if row["error"]:
            empty = [""] * (1 + priced)
            table.add_row("none", Text(str(row["error"]), style="red"), *empty, *place)
            continue
        span = f"{duration(row['lo_us'])} to {duration(row['hi_us'])}"
        cost = [plain(count * row["cost"]) if pd.notna(row["cost"]) else ""] if priced else []
        table.add_row(
            duration(row["latency_us"]),
            span,
            _memory(row["peak_memory_bytes"], row["fits"]),
            *cost,
            *place,
        )
    console.print(table)
    if len(frame) > MOST:
        console.print(f"{len(frame) - MOST} more rows: --out has all")
    failed = int((frame["error"] != "").sum())
    if failed:
        console.print(Text(f"{failed} of {len(frame)} could not be predicted", style="red"))
    print_notes(console, folded(_noted(frame)))


def _noted(frame: pd.DataFrame) -> list[Noted]:
    """Return rows with their notes, each named by the columns that distinguish rows."""
    columns = [c for c in ("program", "device", "framework") if frame[c].nunique() > 1]
    found = []
    for row in frame.assign(notes=frame["notes"].fillna("")).to_dict("records"):
        # Designs of a chip have the same notes except for the numbers in their names.
        texts = {c: _FIGURES.sub("", str(row[c])) for c in (*columns, "device", "notes")}
        texts |= {"program": Path(str(row["program"])).name}
        name = " ".join(texts[c] for c in columns)
        notes = [note for note in texts["notes"].split(NOTES) if note]
        found.append(Noted(name, texts["device"], notes))
    return found


def _memory(peak: object, fits: object) -> Text:
    """Return peak memory and whether it fits; empty if it is not predicted."""
    if not isinstance(peak, float | int) or pd.isna(peak):
        return Text("")
    # ``fits`` is None if the memory of a device is unknown.
    if fits is False:
        return Text(f"{size(peak)} does NOT fit", style="red")
    return Text(f"{size(peak)}{' fits' if fits is True else ''}")


def print_comparison(console: Console, comparison: Comparison, top: int = 10) -> None:
    """Print the program's times, and the kernels that the estimators disagree on most."""
    count = len(comparison.fidelities[0].own)
    rest = f" on {comparison.device}; lowering {comparison.lowering}, {count} kernels"
    console.print(Text.assemble((comparison.program, "bold"), rest))
    console.print(_table(comparison, top))
    console.print(
        f"time: of a run; covered: share of the time of kernels that the estimator models itself; "
        f"{_BORROWED} from the roofline, since the estimator has none"
    )
    # Notes shared by all estimators (on the program and the device) are printed once.
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
    # There is no ratio if an estimator considers a kernel free.
    return f"{max(times) / min(times):.2f}" if min(times) > 0 else "–"


def print_explanation(console: Console, explanation: ProgramExplanation) -> None:
    """Print the total, and the breakdown of each kernel."""
    p = explanation.prediction
    console.print(
        headline(duration(p.latency_us), f" on {p.device}, model {p.model}, lowering {p.lowering}")
    )
    for kernel in explanation.kernels:
        console.print()
        _print_kernel(console, kernel)
    notes = dict.fromkeys(
        [*p.notes, *(n for k in explanation.kernels for n in k.explanation.notes)]
    )
    print_notes(console, notes)


def _print_kernel(console: Console, kernel: ExplainedKernel) -> None:
    e = kernel.explanation
    title = Text(kernel.name, style="bold")
    title.append(
        f"  {e.kind}, {kernel.share:.1%} of the kernel time, {kernel.executions:.0f} executions",
        style="not bold",
    )
    if kernel.origin:
        title.append(f", from {kernel.origin}", style="not bold")
    console.print(title)
    console.print(
        f"  {duration(e.latency_us)} = (roofline {duration(e.roofline_us)} [{e.bound}] + floor "
        f"{duration(e.floor_us)}) × {e.factor:.2f} ({e.source})"
    )
    # Effect of the surrounding program, such as operands left in a cache.
    place = kernel.in_program_us / e.latency_us if e.latency_us > 0 else 1.0
    if abs(place - 1.0) >= _SAME:
        console.print(
            f"  in this program {duration(kernel.in_program_us)}: × {place:.2f} for its context "
            "(operands in caches, loops, neighbouring kernels)"
        )
    if e.contributions:
        console.print(_contributions(e))
    console.print(Text(f"  {_domain_text(e)}"))
    if e.neighbours:
        console.print(_neighbours(e.neighbours))


def _contributions(e: KernelExplanation) -> Table:
    # Both start from a reference: SHAP values from the mean over the training data (Lundberg et
    # al., Nature Machine Intelligence 2020), ablation from the median kernel of the kind.
    how = "TreeSHAP" if e.method == TREESHAP else "ablation to the training median"
    start = "mean of training" if e.method == TREESHAP else "median kernel of its kind"
    rows = [(start, e.baseline), *((c.group, c.log_ratio) for c in e.contributions[:_SHOWN])]
    rest = e.contributions[_SHOWN:]
    if rest:
        rows.append((f"{len(rest)} other groups", sum(c.log_ratio for c in rest)))
    return factor_table(f"learned factor by group ({how})", [*rows, ("together", e.log_ratio)])


def _domain_text(e: KernelExplanation) -> str:
    if e.domain_score is None or e.domain_threshold is None:
        return "in the domain of the model" if e.in_domain else "outside the domain of the model"
    figures = f"score {e.domain_score:.2f}, threshold {e.domain_threshold:.2f}"
    side = "in" if e.in_domain else "outside"
    text = f"{side} the training domain ({figures})"
    # Features beyond their range tell more than a score; else the combination is unusual.
    beyond = [o for o in e.outside if o.beyond]
    if beyond:
        return text + ": " + "; ".join(map(_beyond_text, beyond))
    if e.in_domain:
        return text
    names = ", ".join(o.feature for o in e.outside[:3])
    return f"{text}: no training kernel near it combines {names}"


def _beyond_text(o: Outside) -> str:
    side = "below" if o.value < o.low else "above"
    return f"{o.feature} = {plain(o.value)} is {side} the trained {plain(o.low)} to {plain(o.high)}"


def _neighbours(neighbours: tuple[Neighbour, ...]) -> Table:
    figures = ("label", "predicted unseen", "distance")
    names = ("  nearest kernels of the dataset", "kind", "device", *figures)
    table = plain_table(*names, right=figures, fold=names, indented=True)
    for n in neighbours:
        table.add_row(
            f"  {n.label}",
            n.kind,
            n.device,
            duration(n.measured_us),
            duration(n.predicted_us),
            f"{n.distance:.2f}",
        )
    return table
