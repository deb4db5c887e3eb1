"""Printed tables of the report on clusters; each returns its figures as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from rich.console import Console

#: Groupings of the tables of collectives: held-out rows, and machines left out.
KNOWN_BY = (("source",), ("source", "size"), ("machine", "size"), ("op",), ("fabric", "world_size"))
UNSEEN_BY = (("source",), ("machine",), ("machine", "size"), ("fabric", "world_size"))

Rows = list[dict[str, object]]


def print_collectives(console: Console, errors: pd.DataFrame) -> dict[str, Rows]:
    """Print errors on held-out rows beside simpler models, and on machines left out."""
    from ...models.collectives.study import KNOWN, UNSEEN, summary

    tables = {}
    for groups, columns, title in (
        (KNOWN_BY, KNOWN, "collectives, held-out rows"),
        (UNSEEN_BY, UNSEEN, "collectives, machines left out, with four sizes of each, A100 alone"),
    ):
        for by in groups:
            table = summary(errors, by, columns).reset_index()
            name = f"{title}, error in % by {', '.join(by)}"
            _print(console, table, name)
            tables[name] = _plain(table)
    return tables


def print_cost(console: Console, cost: pd.DataFrame) -> Rows:
    """Print seconds and memory of a step by number of devices."""
    _print(console, cost, "cost of one step, 8B decoder")
    return _plain(cost)


def print_sanity(console: Console, rows: pd.DataFrame) -> Rows:
    """Print predictions beside back-of-the-envelope figures."""
    table = rows.assign(ratio=rows["predicted"] / rows["by_hand"])
    _print(console, table, "orders of magnitude")
    return _plain(table)


def print_scaling(console: Console, best: pd.DataFrame, path: Path) -> Rows:
    """Print the best plan at each size, with both efficiencies."""
    table = best.assign(step_s=best["step_us"] / 1e6).sort_values(["batch", "devices"])[
        ["devices", "batch", "step_s", "strong", "weak", "plan"]
    ]
    _print(console, table, "scaling of the 8B decoder, best plans")
    console.print(f"{path}: strong and weak scaling", highlight=False)
    return _plain(table)


def print_best(console: Console, name: str, frame: pd.DataFrame, top: int = 5) -> dict[str, object]:
    """The fastest plans that fit, why the best is the best, and what holds the second one back."""
    from ...predict.sweep.reasons import reasons, runner_up

    fitting = frame[frame["fits"]].sort_values("step_us")
    table = pd.DataFrame(
        {
            "plan": fitting["plan"],
            "step_s": fitting["step_us"] / 1e6,
            "compute_s": fitting["compute_us"] / 1e6,
            "exposed_s": fitting["exposed_communication_us"] / 1e6,
            "bubble_s": fitting["bubble_us"] / 1e6,
            "host_s": fitting["host_us"] / 1e6,
            "mfu": fitting["mfu"],
            "gib": fitting["memory_bytes_per_device"] / 2**30,
        }
    ).head(top)
    cluster = str(frame["cluster"].iloc[0])
    title = f"{name}, batch {int(frame['batch'].iloc[0])}, on {cluster}"
    _print(console, table, f"{title}: best of {len(frame)} plans, {len(fitting)} of which fit")
    said = [*runner_up(frame), *reasons(frame)]
    for line in said:
        console.print(f"  {line}", highlight=False, markup=False)
    return {
        "model": name,
        "plans": len(frame),
        "fit": len(fitting),
        "best": _plain(table),
        "reasons": said,
    }


def _print(console: Console, frame: pd.DataFrame, title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*map(str, frame.columns), title=title, title_justify="left", box=None)
    for values in frame.to_numpy(dtype=object):
        table.add_row(*(Text(_text(v)) for v in values))
    console.print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        # NaN, where a group has no such figure.
        return "–" if value != value else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def _plain(frame: pd.DataFrame) -> Rows:
    columns: Sequence[object] = list(frame.columns)
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return [dict(zip(map(str, columns), row, strict=True)) for row in rows]
