"""Print elasticities, and designs beside their base."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ...common.units import duration
from ..designs import REACH, Compared, Comparison, Elasticity, Sensitivity
from .parts import Column, fitted_table, headline


def print_sensitivity(console: Console, found: Sensitivity) -> None:
    """Print the elasticities of a time, one rate a line."""
    console.print(headline(duration(found.latency_us), f"  {found.subject} on {found.device}"))
    columns: tuple[Column[Elasticity], ...] = (
        Column("rate", lambda e: e.rate, justify="left"),
        Column("time for 1 % more", lambda e: f"{_signed(e.value)} %"),
        Column(f"from {REACH:g}× less to more", lambda e: f"{_signed(e.lo)} to {_signed(e.hi)}", 1),
    )
    console.print(fitted_table(console.width, columns, found.elasticities))


def _signed(value: float) -> str:
    """A figure of two decimals, of which zero has no sign."""
    return f"{value:+.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00")


def print_comparison(console: Console, found: Comparison) -> None:
    """Print designs beside their base, one a line."""
    console.print(headline(found.subject, f"  on designs of {found.base}; * no other one beats"))
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
