"""Data frames as tables on a console, relative figures in percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from rich.console import Console


#: Numeric columns of a metrics table that fit on a terminal, text columns aside.
_SHOWN = (
    "group",
    "n",
    "median_ape",
    "mape",
    "bias",
    "spearman",
    "kendall",
    "top_k_recall",
    "coverage",
    "width_median",
    "noise_median_ape",
    "noise_mape",
    "mean_abs_log",
)


#: Columns that hold shares.
_PERCENT = {
    "median_ape",
    "mape",
    "bias",
    "coverage",
    "width_median",
    "noise_median_ape",
    "noise_mape",
    "top_k_recall",
}


def print_metrics(console: Console, table: pd.DataFrame, title: str) -> None:
    """Print a metrics table, relative figures in percent."""
    keep = [c for c in table.columns if c in _SHOWN or not pd.api.types.is_numeric_dtype(table[c])]
    shown = table[keep].copy()
    for column in keep:
        if column in _PERCENT:
            # v == v is false for NaN: a figure that could not be computed.
            shown[column] = [f"{v:.1%}" if v == v else "–" for v in table[column]]
        elif column == "n":
            shown[column] = table[column].astype(int)
    print_frame(console, shown, title)


def print_frame(console: Console, frame: pd.DataFrame, title: str) -> None:
    """Print a frame as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in frame.columns:
        text = not pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(str(column).replace("_", " "), justify="left" if text else "right")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(f"{v:.3g}" if isinstance(v, float) else str(v)) for v in row))
    console.print(table)


#: Columns that are printed in per cent.
PERCENTAGES = (
    "mape", "median_ape", "median_ape_groups", "largest", "bias", "coverage", "in_domain",
    "before", "after", "unseen", "error_before", "error_after", "covered_before", "covered_after",
)  # fmt: skip


def in_percent(figures: pd.DataFrame) -> pd.DataFrame:
    """Convert shares to percentages with one decimal, for printing."""
    shares = [c for c in PERCENTAGES if c in figures]
    return figures.assign(**{c: (100 * figures[c]).round(1) for c in shares})


def percent(wide: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Write shares in per cent with one decimal, ``–`` where there is none."""
    shown = wide.copy()
    for column in (c for c in wide.columns if c not in names):
        shown[column] = [f"{100 * v:.1f}" if v == v else "–" for v in wide[column]]
    return shown
