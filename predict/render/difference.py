"""Output of changes of a time: two versions of a program, designs of a device, and memory fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from rich.console import Console
from rich.text import Text

from ...common.interval import Interval
from ...common.tables_text import markdown_table
from ...common.units import duration, likely, plain, size
from ..designs import REACH, Compared, Comparison, Elasticity, Sensitivity
from ..difference import Change, Difference, Judged
from ..fit import MemoryFit
from .parts import Column, fitted_table, headline, print_notes

#: Relative change of peak memory from which it is reported. Engineering choice.
_TELLING = 0.01
#: Change from which it is reported, relative to the time: half of the last digit of the verdict.
_SHOWN = 0.0005
#: Maximum source lines to name in a change.
_LINES = 3
#: Minimum share of the peak from which a part is reported.
_LEAST = 0.001


def print_difference(console: Console, judged: Judged, top: int) -> None:
    """Print two versions on a device with what changed between them.

    Args:
        console: Console to print to.
        judged: The versions.
        top: Number of rows of the table of changes.
    """
    found, excess = judged.difference, judged.excess
    if found is None:
        console.print(headline("error", f"  {judged.name} on {judged.device}"))
        console.print(Text(str(judged.error), style="bold red"))
        return
    console.print(headline(_verdict(found), f"  {judged.name} on {found.device}"))
    console.print(
        f"{_timed(found.old)} → {_timed(found.new)}; lowering {found.lowering}; "
        f"{found.same} kernel{'s are' if found.same != 1 else ' is'} the same"
    )
    if memory := _memory(found):
        console.print(memory)
    for reason in found.reasons:
        console.print(reason)
    if excess:
        console.print(Text(f"over budget: {excess}", style="bold red"))
    columns: tuple[Column[Change], ...] = (
        Column("more", lambda c: signed(c.more_us)),
        Column("before", lambda c: duration(c.old_us), 2),
        Column("after", lambda c: duration(c.new_us), 2),
        Column("kernels", _kernels, 3),
        Column("line", _lines, justify="left"),
        Column("what changed", lambda c: "; ".join(c.reasons), justify="left", least=30),
    )
    if told := _told(found, top):
        console.print(fitted_table(console.width, columns, told))
    if rest := _rest(found, top):
        console.print(rest)
    print_notes(console, found.notes)


def markdown_differences(rows: Sequence[Judged], top: int) -> str:
    """Return differences as Markdown, for a comment on a pull request.

    Args:
        rows: Programs on devices.
        top: Number of rows of each table of changes.
    """
    counts = {
        "over budget": sum(bool(own.excess) for own in rows),
        "not predicted": sum(own.error is not None for own in rows),
    }
    told = [f"{n} of {len(rows)} {what}" for what, n in counts.items() if n]
    title = ", ".join(told) or "predicted times"
    table = [(own.name, own.device, *_cells(own)) for own in rows]
    heads = ("program", "device", "before", "after", "change", "90 % interval", "slower?", "")
    lines = [f"### opcast: {title}", "", *_table(heads, table)]
    for own in rows:
        if own.difference is not None:
            lines += ["", *_details(own.name, own.difference, bool(own.excess), top)]
    return "\n".join(lines) + "\n"


def _cells(judged: Judged) -> tuple[str, ...]:
    """Return the cells of a row after the program and the device."""
    found, excess = judged.difference, judged.excess
    if found is None:
        return (*["–"] * 5, f"**error**: {judged.error}")
    return (
        duration(found.old.value), duration(found.new.value), _percent(found.ratio.value),
        _span(found.ratio), "–" if _equal(found) else likely(found.slower),
        f"**over**: {excess}" if excess else "",
    )  # fmt: skip


def _details(name: str, found: Difference, opened: bool, top: int) -> list[str]:
    rows = [
        (
            signed(c.more_us), duration(c.old_us), duration(c.new_us), _lines(c),
            "; ".join(c.reasons),
        )
        for c in _told(found, top)
    ]  # fmt: skip
    said = [_memory(found), *found.reasons, _rest(found, top)]
    heads = ("more", "before", "after", "line", "what changed")
    return [
        f"<details{' open' if opened else ''}><summary>{_escaped(name)} on {found.device}: "
        f"{_escaped(_verdict(found))}</summary>",
        "",
        *(f"- {_escaped(line)}" for line in said if line),
        "",
        *(_table(heads, rows) if rows else ()),
        "",
        *(f"> {_escaped(note)}  " for note in found.notes),
        "",
        "</details>",
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return markdown_table(heads, ([_escaped(cell) for cell in row] for row in rows))


def _escaped(text: str) -> str:
    """Escape Markdown and HTML markup in names of kernels and files."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("\n", " ")


def _verdict(found: Difference) -> str:
    if _equal(found):
        return "no kernel differs"
    more = found.ratio.value - 1.0
    word = "slower" if more > 0 else "faster"
    chance = likely(found.slower if more > 0 else 1.0 - found.slower)
    return f"{100 * abs(more):.1f} % {word} ({_span(found.ratio)}; {word}: {chance} likely)"


def _equal(found: Difference) -> bool:
    return not found.changes and found.ratio.value == 1.0


def _span(ratio: Interval) -> str:
    return f"{_percent(ratio.lo)} to {_percent(ratio.hi)}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def _timed(time: Interval) -> str:
    return f"{duration(time.value)} ({duration(time.lo)} to {duration(time.hi)})"


def _memory(found: Difference) -> str:
    more = found.new_bytes - found.old_bytes
    told = abs(more) > _TELLING * max(found.new_bytes, 1.0)
    if not told and found.fits is not False:
        return ""
    of = f" of {size(found.device_bytes)}" if found.device_bytes else ""
    unfit = ", does NOT fit" if found.fits is False else ""
    return f"peak memory {size(found.old_bytes)} → {size(found.new_bytes)}{of}{unfit}"


def _kernels(change: Change) -> str:
    if change.old_kernels == change.new_kernels:
        return plain(change.new_kernels)
    return f"{plain(change.old_kernels)} → {plain(change.new_kernels)}"


def _lines(change: Change) -> str:
    if not change.lines:
        return change.module or change.kernels[0]
    more = len(change.lines) - _LINES
    return ", ".join(change.lines[:_LINES]) + (f" +{more}" if more > 0 else "")


def _told(found: Difference, top: int) -> tuple[Change, ...]:
    """Return the changes to show: the largest, without negligible ones."""
    least = _SHOWN * found.new.value
    return tuple(own for own in found.changes[:top] if abs(own.more_us) >= least)


def _rest(found: Difference, top: int) -> str:
    parts = []
    if left := found.changes[len(_told(found, top)) :]:
        more, least = sum(c.more_us for c in left), _SHOWN * found.new.value
        other = "more " if len(left) < len(found.changes) else ""
        count = f"{len(left)} {other}change{'s' if len(left) > 1 else ''}"
        small = f"of less than {duration(least)} together"
        parts.append(f"{count} {signed(more) if abs(more) >= least else small}")
    if abs(found.rest_us) >= 1e-3 * found.new.value:
        parts.append(f"gaps, overlap and neighbours of equal kernels {signed(found.rest_us)}")
    return "; ".join(parts)


def signed(us: float) -> str:
    """Return a difference of times with its sign."""
    return f"{'−' if us < 0 else '+'}{duration(abs(us))}"


def print_sensitivity(console: Console, found: Sensitivity) -> None:
    """Print the elasticities of a time, one rate per line."""
    console.print(headline(duration(found.latency_us), f"  {found.subject} on {found.device}"))
    columns: tuple[Column[Elasticity], ...] = (
        Column("rate", lambda e: e.rate, justify="left"),
        Column("time for 1 % more", lambda e: f"{_signed(e.value)} %"),
        Column(f"from {REACH:g}× less to more", lambda e: f"{_signed(e.lo)} to {_signed(e.hi)}", 1),
    )
    console.print(fitted_table(console.width, columns, found.elasticities))


def _signed(value: float) -> str:
    """Return a number with two decimals and a sign, except for zero."""
    return f"{value:+.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00")


def print_comparison(console: Console, found: Comparison) -> None:
    """Print designs next to their base, one per line."""
    console.print(headline(found.subject, f"  on designs of {found.base}; * on the Pareto front"))
    columns: list[Column[Compared]] = [
        Column("design", lambda d: ("* " if d.efficient else "  ") + d.device, justify="left"),
        Column("time", lambda d: duration(d.latency_us)),
        Column("over base", lambda d: f"{d.ratio:.3f}"),
        Column("90 % interval", lambda d: f"{d.ratio_lo:.3f} to {d.ratio_hi:.3f}", 2),
    ]
    if found.designs[0].energy_j is not None:
        columns.append(Column("J", lambda d: "" if d.energy_j is None else f"{d.energy_j:.3g}", 1))
    columns += [Column(name, partial(_modelled, name)) for name in found.designs[0].modelled]
    console.print(fitted_table(console.width, columns, found.designs))


def _modelled(name: str, design: Compared) -> str:
    return f"{design.modelled[name]:.4g}"


def print_fit(console: Console, found: MemoryFit) -> None:
    """Print the verdict, the parts of memory, and a change that would fit."""
    verdict = ("fits", "bold green") if found.fits else ("does NOT fit", "bold red")
    peak, needed = found.peak, found.needed
    console.print(
        Text.assemble(
            verdict,
            f"  {found.subject} on {found.device}: out of memory {likely(found.out_of_memory)}",
        )
    )
    console.print(
        f"peak memory {size(peak.value)}  [{size(peak.lo)} – {size(peak.hi)}] of "
        f"{size(found.capacity)} ({found.source})"
    )
    if peak.value - needed.value > _LEAST * peak.value:
        console.print(
            f"  can run in {size(needed.value)}  [{size(needed.lo)} – {size(needed.hi)}]: free "
            "segments are released first"
        )
    told = {k: v for k, v in found.parts.items() if v > _LEAST * peak.value}
    parts = sorted(told.items(), key=lambda own: -own[1])
    console.print("  " + ", ".join(f"{name} {size(own)}" for name, own in parts))
    if found.holder:
        console.print(f"  {found.holder}")
    if found.beside:
        console.print(f"  {found.beside}")
    if found.change:
        console.print(f"  would fit with {found.change}")
    elif not found.fits:
        console.print("  no small change would fit")
    print_notes(console, found.notes)
