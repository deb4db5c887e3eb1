"""Data frames as console tables with relative figures in percent; Markdown tables."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from rich.console import Console


#: Numeric columns of a metrics table that are always shown.
_ALWAYS = ("group", "n", "median_ape", "mape", "coverage")
#: Columns to leave out on a narrow terminal, in this order.
_SPARE = (
    "mean_abs_log", "top_k_recall", "kendall", "noise_mape", "width_median", "spearman", "bias",
    "noise_median_ape",
)  # fmt: skip
#: Columns of both that are not fractions.
_NO_SHARES = ("group", "n", "spearman", "kendall", "mean_abs_log")
#: Width up to which cells are never broken: figures with their unit.
_SHORT = 10
#: Columns that are printed in per cent.
PERCENTAGES = (
    "mape", "median_ape", "median_ape_groups", "memory_mape", "largest", "bias", "coverage",
    "in_domain", "before", "after", "unseen", "error_before", "error_after", "covered_before",
    "covered_after",
)  # fmt: skip


def print_metrics(console: Console, table: pd.DataFrame, title: str) -> None:
    """Print a metrics table, relative figures in percent."""
    figures = {*_ALWAYS, *_SPARE}
    keep = [c for c in table.columns if c in figures or not pd.api.types.is_numeric_dtype(table[c])]
    shown = table[keep].copy()
    for column in keep:
        if column in figures.difference(_NO_SHARES):
            # v == v is false for NaN: a figure that could not be computed.
            shown[column] = [f"{v:.1%}" if v == v else "–" for v in table[column]]
        elif column == "n":
            shown[column] = table[column].astype(int)
    print_frame(console, shown, title, _SPARE)


def print_frame(
    console: Console, frame: pd.DataFrame, title: str, spare: Sequence[str] = ()
) -> None:
    """Print a frame as a table; wide cells wrap, nothing is cut.

    Args:
        console: Console to print on.
        frame: The table.
        title: Its title; empty for none.
        spare: Columns to leave out, in order, if the console is too narrow.
    """
    from rich.table import Table
    from rich.text import Text

    cells = {
        str(name): [
            "" if pd.isna(v) else f"{v:.3g}" if isinstance(v, float) else str(v)
            for v in frame[name]
        ]
        for name in frame.columns
    }
    # Names of figures break between words if they are wider than the figures.
    wide = {name: max(map(len, own), default=0) for name, own in cells.items()}
    heads = {
        # Names of runs are unchanged, so that they can be copied.
        name: name.replace("_", "\n" if len(name) > wide[name] else " ")
        if name.isidentifier()
        else name
        for name in cells
    }
    least = {name: max(wide[name], *map(len, heads[name].split("\n"))) for name in cells}
    left_out = []
    for name in spare:
        # Two spaces between columns.
        if sum(least.values()) + 2 * len(least) - 2 <= console.width:
            break
        if least.pop(name, None) is not None:
            left_out.append(name.replace("_", " "))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in least:
        text = not pd.api.types.is_numeric_dtype(frame[name])
        # Texts are folded rather than figures.
        table.add_column(
            heads[name],
            justify="left" if text else "right",
            no_wrap=wide[name] <= _SHORT,
            overflow="fold",
        )
    for row in zip(*(cells[name] for name in least), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    if left_out:
        console.print(f"left out for the width: {', '.join(left_out)}")


def in_percent(figures: pd.DataFrame) -> pd.DataFrame:
    """Convert shares to percentages with one decimal, for printing."""
    shares = [c for c in PERCENTAGES if c in figures]
    return figures.assign(**{c: (100 * figures[c]).round(1) for c in shares})


def percent(wide: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Format fractions in per cent with one decimal, ``–`` for missing ones."""
    shown = wide.copy()
    for column in (c for c in wide.columns if c not in names):
        shown[column] = [f"{100 * v:.1f}" if v == v else "–" for v in wide[column]]
    return shown


def markdown_table(
    columns: Collection[str], rows: Iterable[Sequence[str]], right: Container[str] = ()
) -> list[str]:
    """Lines of a Markdown table.

    Args:
        columns: Headers.
        rows: Cells, one per column.
        right: Headers of right-aligned columns.
    """
    rule = "|".join("---:" if name in right else "---" for name in columns)
    return [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]
