"""Print a table of programs and devices."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, plain, size
from ..program.many import NOTES

#: Figures of a design in its name.
_FIGURES = re.compile(r"\((?:[\w.]+=[^(),]*,?)+\)")
#: Rows that are printed; the file has all.
MOST = 60


def print_many(console: Console, frame: pd.DataFrame) -> None:
    """Print the times of programs on devices, in the order of the command line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    priced = "cost" in frame
    names = ("time", "90 % interval", "memory", *(("cost",) if priced else ()), "device", "program")
    for name in names:
        # Long names go on in the next line; figures stay whole.
        named = name in ("device", "program")
        right = name in ("time", "cost")
        table.add_column(
            name, justify="right" if right else "left", no_wrap=not named, overflow="fold"
        )
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
        console.print(f"{len(frame) - MOST} more rows: --out has all", highlight=False)
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
