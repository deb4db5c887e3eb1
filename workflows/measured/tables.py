"""Train models of board power and tile configurations on tables, and print held-out errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import check_measured, read_table
from ...common.progress import wrote
from ...common.tables_text import in_percent, print_frame
from ...models.operators import OpModel
from ...models.power.model import LEAST, SUSTAINED, PowerModel, fit_power
from ...models.power.rows import power_rows
from ...models.tile_rows import tile_rows
from ...models.tiles import Ranking, TileModel, fit_tiles, ranking
from ...predict.locate import OPERATOR_MODEL, find_model
from ..judging import FIGURES, left_out_rows

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import TableSettings

#: Required columns of a power table, in addition to those of operators.
COLUMNS = ("source", "family", "dtype", "device", "latency_us", "power_w", "power_limit_w", "split")
#: Minimum number of training rows, and of rows of other splits for the intervals.
_FEWEST = 100
#: Minimum number of measured rows to train a tile model.
_FEWEST_TILES = 200


def train_power(
    table: pd.DataFrame, operators: OpModel, seed: int = 0
) -> tuple[PowerModel, pd.DataFrame]:
    """Train a power model on the rows of split ``train``; the others give intervals and errors.

    Args:
        table: Operators with :data:`COLUMNS`, and optionally ``est_samples``, the number of
            readings of the power sensor.
        operators: Operator model, for times.
        seed: Random seed of the trees.

    Returns:
        The model, and as from :func:`~opcast.workflows.judging.left_out_rows` the ``power`` and
        ``time`` (``metric``, in units of the measurement) of held-out rows (``shape``) and of rows
        of held-out devices (``device``), with ``device``, ``family`` and ``sustained``.

    Raises:
        DatasetError: A column is missing, or there are too few rows of split ``train`` or of the
            others.
    """
    for column in COLUMNS:
        if column not in table:
            raise DatasetError(f"column {column!r} of the power table is missing")
    measured = ["latency_us", "power_w", "power_limit_w"]
    check_measured(table, measured, "table of power")
    good = table.dropna(subset=measured).reset_index(drop=True)
    learn = (good["split"] == "train").to_numpy(bool)
    if min(learn.sum(), (~learn).sum()) < _FEWEST:
        raise DatasetError(
            "too few rows of split train or of other splits", hint=f"{_FEWEST} of each are needed"
        )
    rows = power_rows(good, operators)
    seconds = good["latency_us"].to_numpy(float) * 1e-6
    share = (good["power_w"] / good["power_limit_w"]).to_numpy(float)
    readings = np.full(len(good), np.inf)
    if "est_samples" in good:
        readings = good["est_samples"].to_numpy(float)
    model, left, unseen = fit_power(rows, seconds, share, readings, learn, seed)
    model.provenance = {
        "rows": int(learn.sum()),
        "devices": model.devices,
        "sources": sorted(map(str, good["source"].unique())),
    }
    judged = []
    for way, own in (("shape", left), ("device", unseen)):
        if own is None:
            continue
        about = {"device": own.device.astype(str), "family": rows.take(own.at).family().astype(str)}
        known = pd.DataFrame({**about, "sustained": readings[own.at] >= SUSTAINED, "measured": 1.0})
        ends = model.ends_of(own, way == "shape")
        for metric, logs, bounds in zip(
            ("power", "time"), (own.power, own.time), ends, strict=True
        ):
            found = {way: np.column_stack([logs, bounds])}
            judged.append(left_out_rows(known.assign(metric=metric), found))
    return model, pd.concat(judged, ignore_index=True)


def run_train_power(console: Console, settings: TableSettings) -> None:
    """Train a power model on a table, print held-out errors, and save the model."""
    operators = OpModel.load(find_model(OPERATOR_MODEL))
    model, judged = train_power(read_table(settings.table), operators, settings.seed)
    model.save(settings.out)
    parts = judged.assign(
        readings=np.where(judged["sustained"], f"from {SUSTAINED} on", f"{LEAST} to {SUSTAINED}")
    )
    parts = pd.concat([parts, parts.assign(family="all")], ignore_index=True)
    # The shapes first, then the devices.
    parts = parts.sort_values("metric", kind="stable")
    for (metric, way), own in parts.groupby(["metric", "left_out"], sort=False):
        figures = own.groupby(["device", "family", "readings"]).agg(**FIGURES).drop(columns="bias")
        shown = in_percent(figures.reset_index().rename(columns={"rows": "n"}))
        print_frame(console, shown, f"{metric}, {way} held out, %")
    wrote(settings.out, f"{model.provenance['rows']} rows")


def train_tiles(table: pd.DataFrame, seed: int = 0) -> tuple[TileModel, pd.DataFrame, Ranking]:
    """Train a tile model on the measured rows of a table.

    Args:
        table: Rows for :func:`~opcast.models.tile_rows.tile_rows`, with ``latency_us``.
        seed: Random seed.

    Returns:
        The model, the relative errors with shapes or devices held out (``lacked`` is ``shape`` or
        ``device``), and the quality of the ranking of candidates of held-out shapes.

    Raises:
        DatasetError: There are too few measured rows.
    """
    if "latency_us" not in table:
        raise DatasetError("column 'latency_us' of the tile table is missing")
    check_measured(table, ["latency_us"], "table of tiles")
    good = table.dropna(subset=["latency_us"]).reset_index(drop=True)
    if len(good) < _FEWEST_TILES:
        raise DatasetError(f"only {len(good)} rows have a latency, {_FEWEST_TILES} are needed")
    rows = tile_rows(good)
    seconds = good["latency_us"].to_numpy(float) * 1e-6
    model, left = fit_tiles(rows, seconds, seed)
    judged = pd.concat(
        pd.DataFrame({"device": rows.device, "lacked": what, "error": np.exp(-errors) - 1.0})
        for what, errors in (("shape", left.shapes), ("device", left.devices))
    )
    return model, judged, ranking(rows, seconds * np.exp(-left.shapes), seconds)


def run_train_tiles(console: Console, settings: TableSettings) -> None:
    """Train a tile model on a table, print held-out errors, and save the model."""
    model, judged, order = train_tiles(read_table(settings.table), settings.seed)
    model.save(settings.out)
    sized = judged.assign(size=judged["error"].abs())
    summary = sized.groupby(["lacked", "device"]).agg(
        n=("size", "size"), mape=("size", "mean"), median_ape=("size", "median")
    )
    print_frame(console, in_percent(summary.reset_index()), "held-out rows, errors in %")
    console.print(
        f"ranking of {order.groups} problems: first choice within 5 % of the best in "
        f"{order.top:.1%}, slower by {order.loss:.1%} on average, Kendall's τ {order.kendall:.2f}"
    )
    wrote(settings.out, f"{model.provenance['rows']} rows")
