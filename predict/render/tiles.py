"""Print ranked implementations and tile configurations."""

from __future__ import annotations

import pandas as pd
from rich.table import Table

from ...common.units import duration
from .parts import Column, fitted_table

_COLUMNS = (
    Column("device", justify="left"),
    Column("op", 2, "left"),
    Column("rank"),
    Column("time"),
    Column("implementation", 1, "left"),
    Column("settings", justify="left", least=30),
    Column("of ceiling", 3),
    Column("90 % interval", 4, "left"),
    Column("scope", 5, "left"),
)


def candidates_table(ranked: pd.DataFrame, width: int) -> Table:
    """Make a table of candidates, as ``rank_configurations`` returns them, that fits a width."""
    rows = [
        [
            str(row["device"]),
            str(row["op"]),
            str(row["rank"]),
            duration(row["latency_us"]),
            str(row["implementation"]),
            str(row["config"]),
            f"{row['of_ceiling']:.0%}",
            f"{duration(row['lo_us'])} to {duration(row['hi_us'])}",
            str(row["scope"]),
        ]
        for row in ranked.to_dict("records")
    ]
    return fitted_table(width, _COLUMNS, rows)
