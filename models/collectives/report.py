"""Tabulates errors of collectives, and holds the command that fits the shipped parameters.

``python -m opcast.models.collectives.report DEVICES.csv... -- ROWS.csv... [--save FILE]`` prints
the errors on rows whose ``split`` starts with ``val`` (every fifth row of a source without such
rows) and with each architecture left out, beside a plain ring.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .fit import fit_tree
from .model import FindLinks, fit_collectives, leave_one_out, measured_table
from .table import CollectiveTable, device_rows

#: Start-up time of one step of the plain ring, in microseconds. Engineering estimate, not fitted:
#: the ring is the baseline that the curves have to beat.
NAIVE_START_US = 3.0
#: What is compared, as in :func:`collective_errors`.
ESTIMATES = ("val", "unseen_device", "ring")
#: Columns that the tables group by.
TABLES = (
    ("fabric", "backend"),
    ("fabric", "backend", "op", "family"),
    ("family", "fabric", "backend", "world_size"),
)


def naive_ring_us(table: CollectiveTable) -> np.ndarray:
    """The alpha–beta ring with nominal bandwidth, in microseconds, shape ``(n,)``."""
    points = table.points
    return np.asarray(NAIVE_START_US * points.steps + points.wire / points.bandwidth)


def held_out_rows(rows: pd.DataFrame) -> np.ndarray:
    """Mask of the validation rows: split ``val…``, or every fifth row of a source without any."""
    named = rows["split"].astype(str).str.startswith("val").to_numpy()
    source = rows["source"].to_numpy()
    fifth = np.arange(len(rows)) % 5 == 4
    without = [s for s in set(source.tolist()) if not named[source == s].any()]
    return np.asarray(named | (fifth & np.isin(source, without)))


def collective_errors(rows: pd.DataFrame, find: FindLinks) -> pd.DataFrame:
    """Absolute percentage error of every row.

    Args:
        rows: Measured collectives with ``latency_us``, ``split`` and ``source``.
        find: Links by device string.

    Returns:
        ``val`` (validation rows by a model of the others; else NaN), ``unseen_device`` (the
        architecture left out) and ``ring`` (the plain ring) in per cent, with the columns
        ``fabric``, ``backend``, ``op``, ``family``, ``machine`` and ``world_size``.
    """
    table, latency = measured_table(rows, find)
    held = held_out_rows(rows)
    val = np.full(len(rows), np.nan)
    tree = fit_tree(table.take(~held), latency[~held])
    val[held] = tree.predict_us(table.take(held))
    estimates = (val, leave_one_out(table, latency)[0], naive_ring_us(table))
    frame = pd.DataFrame(
        {n: 100 * np.abs(p / latency - 1) for n, p in zip(ESTIMATES, estimates, strict=True)}
    )
    for name in ("fabric", "backend", "op", "family", "machine"):
        frame[name] = getattr(table, name)
    frame["world_size"] = table.points.world.astype(int)
    return frame


def error_table(errors: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Count, and median and mean of the errors, of each group of ``by``, in per cent."""
    grouped = errors.groupby(list(by))
    figures = {"rows": grouped.size()}
    for name in ESTIMATES:
        figures[f"{name}_median"] = grouped[name].median()
        figures[f"{name}_mean"] = grouped[name].mean()
    return pd.DataFrame(figures).round(1)


def main(arguments: Sequence[str]) -> None:
    """Print the report, and save the parameters fitted to all rows with ``--save``."""
    options = list(arguments)
    target = Path(options[options.index("--save") + 1]) if "--save" in options else None
    options = options[: options.index("--save")] if "--save" in options else options
    cut = options.index("--")
    find = device_rows(*(pd.read_csv(p) for p in options[:cut]))
    rows = pd.concat([pd.read_csv(p) for p in options[cut + 1 :]], ignore_index=True)
    with pd.option_context(
        "display.width", 200, "display.max_rows", 500, "display.max_columns", 20
    ):
        errors = collective_errors(rows, find)
        for by in TABLES:
            sys.stdout.write(f"{error_table(errors, by)}\n\n")
    if target is not None:
        names = sorted({str(s) for s in rows["source"]})
        about = {
            "sources": names,
            "rows": len(rows),
            "devices": sorted(set(map(str, rows["platform"]))),
        }
        fit_collectives(rows, find, about).save(target)


if __name__ == "__main__":
    main(sys.argv[1:])
