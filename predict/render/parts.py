"""Text elements that several outputs share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.errors import WARNING
from ...common.interval import HasLatency, Interval
from ...common.units import duration, plain
from ...models.power.energy import cost_of
from ..groups import Group, K, Timed, grouped
from ..next_runs import NextRuns

T = TypeVar("T")
#: Placeholder for the device of a row while notes are compared.
_DEVICE = "\N{REPLACEMENT CHARACTER}"
#: Maximum rows that a note names.
_NAMED = 6
#: A number that is not part of a name such as ``a100-sxm-80gb``.
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w.-]*\w)")


def headline(figure: str, rest: str) -> Text:
    """Return a line that begins with its most important figure."""
    return Text.assemble((figure, "bold"), rest)


def timed_headline(
    latency_us: float, lo_us: float, hi_us: float, rest: str, what: str = ""
) -> Text:
    """Return the headline of a predicted time in microseconds, of ``what``, with its interval."""
    span = f"(90 % interval {duration(lo_us)} to {duration(hi_us)})"
    return headline(duration(latency_us), f"{what}  {span}  {rest}")


def print_notes(
    console: Console,
    notes: Iterable[str],
    standing: Collection[str] = (),
    *,
    loud: bool | None = None,
) -> None:
    """Print notes, one per line.

    Args:
        console: Console to print to.
        notes: The notes.
        standing: Notes that do not depend on the program, printed in grey.
        loud: True for warnings only, false for all others; by default all.
    """
    for note in notes:
        warns = note.startswith(WARNING)
        if loud in (None, warns):
            style = "bold red" if warns else "bright_black" if note in standing else "yellow"
            console.print(Text(note if warns else f"note: {note}", style=style))


def unfit(needed: float, capacity: float) -> Text:
    """Return a headline's remark that a run does not fit into memory; empty if it does.

    Args:
        needed: Bytes.
        capacity: Bytes of the device; 0 if unknown.
    """
    fits = not capacity or needed <= capacity
    # No figures, so that the line fits 80 columns.
    return Text() if fits else Text(", does NOT fit", style="bold red")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of :func:`fitted_table`.

    Attributes:
        name: Heading.
        cell: Text of a row, taken literally.
        rank: Columns are omitted in order of decreasing rank; columns of rank 0 never.
        justify: Alignment.
        least: Width to which texts may be truncated to make room; 0 to never truncate.
        ends: Whether texts are truncated in the middle, since their ends distinguish them.
    """

    name: str
    cell: Callable[[T], str | Text]
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    least: int = 0
    ends: bool = False


def _cut_inside(text: Text, width: int) -> Text:
    """Return a text truncated in the middle if it is wider than ``width``."""
    if cell_len(text.plain) <= width:
        return text
    end = (width - 1) * 2 // 3
    return Text.assemble(text[: width - 1 - end], "…", text[-end:])


def fitted_table(width: int, columns: Sequence[Column[T]], rows: Iterable[T]) -> Table:
    """Return a table that fits a width: columns are omitted by rank before others are truncated.

    Args:
        width: Width of the console.
        columns: Columns in order.
        rows: Arguments of the columns' cells.
    """
    lines = [[Text.assemble(c.cell(row)) for c in columns] for row in rows]
    full = [
        max([cell_len(c.name), *(cell_len(row[i].plain) for row in lines)])
        for i, c in enumerate(columns)
    ]
    tight = [min(own, c.least) if c.least else own for own, c in zip(full, columns, strict=True)]
    kept = list(range(len(columns)))

    def needed(widths: Sequence[int]) -> int:
        # Two spaces between columns.
        return sum(widths[i] for i in kept) + 2 * (len(kept) - 1)

    while needed(tight) > width and any(columns[i].rank for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].rank))
    for i in kept:
        if columns[i].least:
            # No column is left to omit: truncate to the remaining width.
            tight[i] = max(4, tight[i] - max(0, needed(tight) - width))
    # A column that is still too wide is wrapped: a long name, never a figure.
    folded = max(kept, key=lambda i: tight[i]) if needed(tight) > width else None
    if folded is not None:
        tight[folded] = max(8, tight[folded] - needed(tight) + width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    spare = width - needed(tight)
    for place, i in enumerate(kept):
        own = tight[i]
        if columns[i].least and full[i] > own:
            more = min(full[i] - own, max(0, spare))
            own, spare = own + more, spare - more
            if columns[i].ends:
                for row in lines:
                    row[i] = _cut_inside(row[i], own)
        last = place == len(kept) - 1
        table.add_column(
            columns[i].name,
            justify=columns[i].justify,
            no_wrap=i != folded,
            overflow="fold" if i == folded else "ellipsis",
            # Without the padding that Rich adds to every column.
            width=own if not last or columns[i].least or i == folded else None,
        )
    for row in lines:
        table.add_row(*(row[i] for i in kept))
    return table


def plain_table(
    *names: str, right: Collection[str] = (), fold: Collection[str] = (), indented: bool = False
) -> Table:
    """Return a table without lines.

    Args:
        names: Headings of the columns.
        right: Right-aligned columns, such as figures.
        fold: Columns that are wrapped if too long, such as names.
        indented: Whether columns are spaced widely, for a table below a line of text.
    """
    padding = (0, 2) if indented else (0, 1)
    table = Table(box=None, pad_edge=False, padding=padding, header_style="bold")
    for name in names:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in fold,
            overflow="fold",
        )
    return table


def place_table(
    kernels: Sequence[K], top: int, width: int, by: str, aside: tuple[str, Callable[[K], str]]
) -> Table:
    """Return a table of source lines or modules by their time.

    Args:
        kernels: All kernels of a program.
        top: Number of rows.
        width: Width of the console.
        by: ``line`` or ``module``.
        aside: Heading of an extra column, and its text for a kernel; a group shows the largest.
    """
    root = root_of(kernels)

    def name(group: Group[K]) -> str:
        own = line_of(group.name) if by == "line" else group.name.removeprefix(root)
        return own or "(none)"

    def of_it(group: Group[K]) -> str:
        shares = group.shares(lambda k: k.what)
        return ", ".join(f"{what} {share:.0%}" for what, share in list(shares.items())[:3])

    columns: tuple[Column[Group[K]], ...] = (
        Column("share", lambda g: f"{g.share:.1%}"),
        Column("time", lambda g: duration(g.total_us)),
        Column("kernels", lambda g: str(len(g.kernels)), 2),
        Column(by, name, justify="left", least=0 if by == "line" else 30, ends=True),
        Column(aside[0], lambda g: next(iter(g.shares(aside[1]))), 3, "left"),
        Column("of it", of_it, 1, "left", least=24),
    )
    return fitted_table(width, columns, grouped(kernels, by)[:top])


def root_of(kernels: Iterable[Timed]) -> str:
    """Return the module that contains all others, which is omitted from rows."""
    roots = {k.module.split("/", 1)[0] for k in kernels if k.module}
    return roots.pop() + "/" if len(roots) == 1 else ""


def line_of(source_line: str) -> str:
    """Return file and line without folders."""
    return source_line.rsplit("/", 1)[-1]


def span_of(group: Iterable[HasLatency]) -> str:
    """Return the interval that contains those of all members."""
    members = list(group)
    return f"{duration(min(m.lo_us for m in members))}–{duration(max(m.hi_us for m in members))}"


def runs_priced(cost: float) -> tuple[float, str]:
    """Return the number of runs to state a cost for, so that it is at least a cent, in words."""
    several = ((1e3, "per 1,000 runs"), (1e6, "per million runs"))
    return (1.0, "a run") if cost >= 0.01 else several[cost < 1e-5]


def cost_line(result: HasLatency, price: float) -> str:
    """Return the cost of a run on a rented device, or of many runs if one is below a cent."""
    seconds = Interval(result.latency_us * 1e-6, result.lo_us * 1e-6, result.hi_us * 1e-6)
    count, runs = runs_priced(cost_of(price, seconds, 1).value)
    value, lo, hi = (count * own for own in cost_of(price, seconds, 1))
    return f"cost {plain(value)}  [{plain(lo)} – {plain(hi)}] {runs}"


def factor_table(title: str, log_ratios: Iterable[tuple[str, float]]) -> Table:
    """Return a table of factors that a learned model applies to an analytical estimate.

    Args:
        title: Heading of the first column.
        log_ratios: Name and natural logarithm of each factor.
    """
    table = plain_table(f"  {title}", "factor", "log", right=("factor", "log"), indented=True)
    for name, value in log_ratios:
        table.add_row(f"  {name}", f"× {math.exp(value):.2f}", f"{value:+.3f}")
    return table


class Compared(NamedTuple):
    """A predicted and an observed time of a kernel or program; microseconds of one execution.

    Attributes:
        predicted_us: Prediction.
        lo_us: Lower bound of its interval.
        hi_us: Upper bound.
        observed_us: Measured time, or time in a trace.
        runs: Executions.
        kind: Kind of kernel; empty for a program.
        name: Name of the kernel.
        origin: Its source; empty if unknown.
    """

    predicted_us: float
    lo_us: float
    hi_us: float
    observed_us: float
    runs: float = 1.0
    kind: str = ""
    name: str = ""
    origin: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_us / self.observed_us - 1.0


def compared_table(width: int, kernels: Sequence[Compared], observed: str, kernel: str) -> Table:
    """Return a table of kernels with predicted and observed times.

    Args:
        width: Width of the console.
        kernels: Kernels in order.
        observed: Heading of observed times.
        kernel: Heading of the kernels' names.
    """
    named = any(k.origin for k in kernels)
    origin: Column[Compared] = Column("from", lambda k: k.origin, justify="left", least=20)
    columns: tuple[Column[Compared], ...] = (
        Column("predicted", lambda k: duration(k.predicted_us)),
        Column("interval", lambda k: f"{duration(k.lo_us)}–{duration(k.hi_us)}", 3),
        Column(observed, lambda k: duration(k.observed_us)),
        Column("error", lambda k: f"{k.error:+.0%}" if k.observed_us else ""),
        Column("runs", lambda k: plain(k.runs), 2),
        *((origin,) if named else ()),
        Column("kind", lambda k: k.kind, 1, "left"),
        # Without an origin only the name distinguishes kernels.
        Column(kernel, lambda k: k.name, 4 if named else 0, "left", least=20),
    )
    return fitted_table(width, columns, kernels)


def compared_total(total: Compared, observed: str, span: str = "") -> Text:
    """Return the predicted and the observed time of a whole program in one line.

    Args:
        total: The two times.
        observed: ``measured`` or ``traced``.
        span: Spread of the observed time in words; empty for a single reading.
    """
    return Text.assemble(
        "total: predicted ",
        (duration(total.predicted_us), "bold"),
        f" ({duration(total.lo_us)}–{duration(total.hi_us)}), {observed} ",
        (duration(total.observed_us), "bold"),
        f"{span}, error {total.error:+.0%}",
    )


class Noted(NamedTuple):
    """A row of a table, with its notes.

    Attributes:
        name: Name of the row in notes; rows may share one.
        device: Name of the device.
        notes: Notes on the row.
    """

    name: str
    device: str
    notes: Sequence[str]


def folded(rows: Sequence[Noted]) -> list[str]:
    """Return notes in the order of the rows, each with the rows it applies to unless it is all.

    Args:
        rows: Rows of one table.
    """
    alike: dict[str, list[tuple[Noted, str]]] = {}
    for row in rows:
        own = re.compile(rf"(?<![\w-]){re.escape(row.device)}(?![\w-])")
        for note in dict.fromkeys(row.notes):
            text = own.sub(_DEVICE, note)
            alike.setdefault(_NUMBER.sub("0", text), []).append((row, text))
    every = dict.fromkeys(row.name for row in rows)
    return [_told(group, len(every)) for group in alike.values()]


def _told(group: Sequence[tuple[Noted, str]], count: int) -> str:
    devices = dict.fromkeys(row.device for row, _ in group)
    figures = zip(*(_NUMBER.findall(text) for _, text in group), strict=True)
    spans = iter([_span(own) for own in figures])
    text = _NUMBER.sub(lambda _: next(spans), group[0][1])
    text = text.replace(_DEVICE, next(iter(devices)) if len(devices) == 1 else "the device")
    names = list(dict.fromkeys(row.name for row, _ in group))
    if len(names) == count or (len(names) == 1 and names[0] in text):
        return text
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}: {text}"


def _span(texts: Sequence[str]) -> str:
    """Return a single figure, or the range of several."""
    ordered = sorted(set(texts), key=lambda text: float(text.replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}\N{EN DASH}{ordered[-1]}"


def print_next_runs(console: Console, found: NextRuns) -> None:
    """Print each run with the interval expected after it and the runs before it."""
    now = found.asked
    ends = f"{duration(now.lo * 1e6)} to {duration(now.hi * 1e6)}"
    if found.runs:
        console.print(f"measure next; the interval is {ends} now, and is expected to become:")
    for number, run in enumerate(found.runs, 1):
        cost = "" if run.cost is None else f", costs {run.cost:.2g}"
        console.print(
            f"  {number}. {duration(run.lo * 1e6)} to {duration(run.hi * 1e6)} after {run.what}"
            f" ({run.hours:.2g} device hours{cost})",
            highlight=False,
            soft_wrap=True,
        )
        if run.command:
            console.print(f"     {run.command}", highlight=False, soft_wrap=True, markup=False)
    for command in found.then:
        console.print(f"  then {command}", highlight=False, soft_wrap=True, markup=False)
    print_notes(console, found.notes)
