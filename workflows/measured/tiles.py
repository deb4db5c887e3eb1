"""Learn a model of kernels with tile configurations, and what it is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from ...common.progress import wrote
from ...common.tables_text import in_percent, print_frame
from ...models.tiles.model import Ranking, TileModel, fit_tiles, ranking
from ...models.tiles.rows import tile_rows

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import TileSettings

#: Fewest rows to learn from.
_FEWEST = 200


def train_tiles(table: pd.DataFrame, seed: int = 0) -> tuple[TileModel, pd.DataFrame, Ranking]:
    """Learn from the rows that have a latency.

    Args:
        table: Rows as :func:`~opcast.models.tiles.rows.tile_rows` reads them, with ``latency_us``.
        seed: Of folds and draws.

    Returns:
        The model; relative errors of rows left out, by ``device`` and what ``lacked`` (``shape`` or
        ``device``); and how candidates of shapes left out were ranked.

    Raises:
        DatasetError: There are too few rows with a latency.
    """
    if "latency_us" not in table:
        raise DatasetError("column 'latency_us' of the table of tiles is missing")
    good = table[table["latency_us"] > 0].reset_index(drop=True)
    if len(good) < _FEWEST:
        raise DatasetError(f"{len(good)} rows with a latency, of {_FEWEST} needed")
    rows = tile_rows(good)
    seconds = good["latency_us"].to_numpy(float) * 1e-6
    model, left = fit_tiles(rows, seconds, seed)
    judged = pd.concat(
        pd.DataFrame({"device": rows.device, "lacked": what, "error": np.exp(-errors) - 1.0})
        for what, errors in (("shape", left.shapes), ("device", left.devices))
    )
    return model, judged, ranking(rows, seconds * np.exp(-left.shapes), seconds)


def run_train_tiles(console: Console, settings: TileSettings) -> None:
    """Learn from a table, print the errors on what was left out, and save the model."""
    model, judged, order = train_tiles(read_table(settings.table), settings.seed)
    model.save(settings.out)
    sized = judged.assign(size=judged["error"].abs())
    summary = sized.groupby(["lacked", "device"]).agg(
        n=("size", "size"), mape=("size", "mean"), median_ape=("size", "median")
    )
    print_frame(console, in_percent(summary.reset_index()), "rows left out, errors in %")
    console.print(
        f"ranking of {order.groups} problems: first choice within 5 % of the best in "
        f"{order.top:.1%}, slower by {order.loss:.1%} on average, Kendall's τ {order.kendall:.2f}"
    )
    wrote(settings.out, f"{model.provenance['rows']} rows")
