"""Output of predictions of library operators and PyTorch programs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ...common.units import duration, size
from ..groups import starring
from ..operator.predict import OpEstimate
from .parts import (
    Column,
    cost_line,
    factor_table,
    fitted_table,
    line_of,
    place_table,
    print_notes,
    span_of,
    timed_headline,
    unfit,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.text import Text

    from ...models.operators.explain import OpExplanation
    from ...models.operators.mixture import Member
    from ..operator.torch_framework import TorchExplanation
    from ..operator.torch_memory import TorchMemory
    from ..operator.torch_price import AtenEstimate, TorchPrediction

#: Maximum reasons for being outside the training domain to print.
SHOWN_REASONS = 4
#: Maximum libraries of a mixture to print.
SHOWN_LIBRARIES = 6


def print_op(console: Console, estimate: OpEstimate) -> None:
    """Print a prediction in two lines."""
    console.print(_headline(estimate, estimate.family))
    console.print(
        f"  roofline {duration(estimate.roofline_us)} [{estimate.bound}]; {_trust(estimate)}"
    )
    if estimate.libraries:
        console.print(f"  {over_libraries(estimate.libraries)}")
    for reason in estimate.outside[:SHOWN_REASONS]:
        console.print(f"  outside: {reason}")
    if len(estimate.outside) > SHOWN_REASONS:
        rest = len(estimate.outside) - SHOWN_REASONS
        console.print(f"  outside: {rest} more reasons (--json)")
    print_notes(console, estimate.notes)


def over_libraries(members: Sequence[Member]) -> str:
    """List the libraries in the mixture that predicts an operator without a named library."""
    # Kernels are named where the framework does not distinguish members.
    frameworks = [member.backend for member in members]
    shown = ", ".join(
        f"{m.backend or m.kernel}"
        + (f" ({m.kernel})" if m.backend and frameworks.count(m.backend) > 1 else "")
        + f" {duration(m.latency_us)}"
        for m in members[:SHOWN_LIBRARIES]
    )
    more = f" and {len(members) - SHOWN_LIBRARIES} more" if len(members) > SHOWN_LIBRARIES else ""
    count = "1 library" if len(members) == 1 else f"{len(members)} libraries"
    return f"over {count}: {shown}{more}; backend=… kernel=… chooses one"


def print_torch(
    console: Console,
    prediction: TorchPrediction,
    top: int = 10,
    by: str = "kernel",
    price: float | None = None,
) -> None:
    """Print the time of a program as PyTorch runs it, and its costliest operators.

    Args:
        console: Console to print to.
        prediction: The prediction.
        top: Number of rows; equal operators of equal modules share a row.
        by: ``kernel`` for operators, ``line`` or ``module``.
        price: Price of a device hour; without it, no cost is printed.
    """
    p = prediction
    rest = f"on {p.device} by {p.framework}"
    headline = timed_headline(p.latency_us, p.lo_us, p.hi_us, rest)
    needed, has = (p.memory.needed_bytes, p.memory.device_bytes) if p.memory else (0.0, 0.0)
    console.print(headline + unfit(needed, has))
    launches = sum(o.launches for o in p.operators)
    console.print(
        f"{len(p.operators)} operators: {duration(p.device_us)} on the device; {launches} "
        f"launches: {duration(p.host_us)} on the host; weights {size(p.parameter_bytes)}"
    )
    if p.memory is not None:
        _print_memory(console, p.memory)
    if price is not None:
        console.print(cost_line(p, price))
    if by == "kernel":
        console.print(_operator_table(p, top, console.width))
    else:
        aside = ("kind", lambda o: o.kind)
        console.print(place_table(p.operators, top, console.width, by, aside))
    shares = ", ".join(f"{group.name} {group.share:.0%}" for group in p.by("kind"))
    console.print(f"by kind: {shares}")
    print_notes(console, p.notes)


def _print_memory(console: Console, m: TorchMemory) -> None:
    """Print peak memory, its parts, and a change that would make it fit."""
    fit = ""
    if m.out_of_memory is not None:
        word = "fits" if m.fits else "does NOT fit"
        fit = f", {word} in {size(m.device_bytes)} (out of memory: {m.out_of_memory:.0%})"
    console.print(
        f"peak memory {size(m.peak_bytes)}  [{size(m.lo_bytes)} – {size(m.hi_bytes)}]{fit}"
    )
    parts = ", ".join(f"{k} {size(v)}" for k, v in sorted(m.parts.items(), key=lambda i: -i[1]))
    console.print(
        f"  allocated {size(m.allocated_bytes)} ({parts}), reserved {size(m.reserved_bytes)}, "
        f"context {size(m.context_bytes)}"
    )
    for held in m.holders[:1]:
        console.print(f"  {held}")
    if m.change:
        console.print(f"  would fit with {m.change}")


def _operator_table(p: TorchPrediction, top: int, width: int) -> Table:
    star = starring((o.module, o.what) for o in p.operators)
    groups: dict[tuple[object, ...], list[AtenEstimate]] = {}
    for own in p.operators:
        key = (own.name, own.shape, own.dtype, own.phase, own.source_line, star(own.module))
        groups.setdefault(key, []).append(own)

    def total(operators: Sequence[AtenEstimate]) -> float:
        return sum(o.latency_us for o in operators)

    def what(group: Sequence[AtenEstimate]) -> str:
        own = group[0]
        return f"{star(own.module) if len(group) > 1 else own.module}{_named(own)}".strip()

    whole = total(p.operators) or 1.0
    # The time, the line and the operator are never omitted.
    columns: tuple[Column[Sequence[AtenEstimate]], ...] = (
        Column("share", lambda g: f"{total(g) / whole:.1%}"),
        Column("time", lambda g: duration(total(g))),
        Column("runs", lambda g: str(len(g)), 1),
        Column("line", lambda g: line_of(g[0].source_line), justify="left"),
        Column("module and operator", what, justify="left", least=24, ends=True),
        Column("shape", lambda g: _shape(g[0]), 2, "left"),
        Column("dtype", lambda g: g[0].dtype, 3, "left"),
        Column("source", lambda g: g[0].source, 4, "left"),
        Column("interval of one", span_of, 5),
    )
    ranked = sorted(groups.values(), key=lambda g: -total(g))
    return fitted_table(width, columns, ranked[:top])


def _named(own: AtenEstimate) -> str:
    """Return phase and name, after the module."""
    return f"{'' if own.phase == 'forward' else f' ({own.phase})'} {own.name}"


def _shape(own: AtenEstimate) -> str:
    return "×".join(map(str, own.shape)) or size(own.bytes)


def print_torch_explanation(console: Console, explained: TorchExplanation) -> None:
    """Print the time of a program as PyTorch runs it, with its costliest operators explained."""
    p = explained.prediction
    console.print(timed_headline(p.latency_us, p.lo_us, p.hi_us, f"on {p.device} by {p.framework}"))
    console.print(
        f"{duration(p.device_us)} on the device, launches {duration(p.host_us)} on the host: the "
        "run takes the longer of both"
    )
    for own in explained.operators:
        one = own.estimate
        console.print()
        console.print(
            f"{one.module}{_named(one)} {_shape(one)} {one.dtype}: {own.share:.1%} of the "
            f"operators' time, {own.count} of {duration(one.latency_us)} "
            f"({duration(one.lo_us)} to {duration(one.hi_us)}), {line_of(one.source_line)}".strip()
        )
        if own.explanation is None:
            console.print(f"  by the roofline of its {size(one.bytes)}")
            continue
        console.print(f"  × {own.factor:.2f} in this program, of the operator alone:")
        print_op_explanation(console, own.explanation)
    print_notes(console, p.notes)


def print_op_explanation(console: Console, estimate: OpExplanation) -> None:
    """Print the breakdown of a prediction."""
    console.print(_headline(estimate, estimate.family))
    console.print(
        f"  {duration(estimate.latency_us)} = analytical estimate {duration(estimate.base_us)} "
        f"[{estimate.bound}] × {estimate.factor:.2f}; roofline {duration(estimate.roofline_us)}"
    )
    terms = ", ".join(f"{name} {duration(us)}" for name, us in _known(estimate.terms).items())
    console.print(f"  estimate of {terms}; what overlaps does not add up")
    parts = [("in other sizes", estimate.baseline)]
    parts += [(c.group, c.log_ratio) for c in estimate.contributions]
    rows = [*parts, ("together", estimate.log_ratio)]
    console.print(factor_table("learned on top, by group", rows))
    console.print(f"  {_trust(estimate)}")
    if estimate.libraries:
        console.print(f"  {over_libraries(estimate.libraries)}")
    for near in estimate.neighbours:
        console.print(
            f"  measured {duration(near.measured_us)} at distance {near.distance:.2f}: {near.label}"
        )
    print_notes(console, estimate.notes)


def _headline(estimate: OpEstimate | OpExplanation, what: str) -> Text:
    rest = f"{what} on {estimate.device}"
    return timed_headline(estimate.latency_us, estimate.lo_us, estimate.hi_us, rest)


def _trust(estimate: OpEstimate | OpExplanation) -> str:
    side = "inside" if estimate.in_domain else "outside"
    return f"device {estimate.scope}, {side} the training domain"


def _known(terms: Mapping[str, float]) -> dict[str, float]:
    return {name: us for name, us in terms.items() if us > 0}


def candidates_table(ranked: pd.DataFrame, width: int) -> Table:
    """Return a table of candidates from ``rank_configurations`` that fits a width."""

    def interval(row: Mapping[Hashable, float]) -> str:
        return f"{duration(row['lo_us'])} to {duration(row['hi_us'])}"

    columns: tuple[Column[Mapping[Hashable, float]], ...] = (
        Column("device", lambda r: str(r["device"]), justify="left"),
        Column("op", lambda r: str(r["op"]), 2, "left"),
        Column("rank", lambda r: str(r["rank"])),
        Column("time", lambda r: duration(r["latency_us"])),
        Column("implementation", lambda r: str(r["implementation"]), 1, "left"),
        Column("settings", lambda r: str(r["config"]), justify="left", least=30),
        Column("of ceiling", lambda r: f"{r['of_ceiling']:.0%}", 3),
        Column("90 % interval", interval, 4, "left"),
        Column("scope", lambda r: str(r["scope"]), 5, "left"),
    )
    return fitted_table(width, columns, ranked.to_dict("records"))
