"""Predicts and ranks kernels with tile configurations: the kernel pack's ``tpu`` table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.catalogue import in_catalogue
from ...models.tiles.model import TileModel, ranking
from ...models.tiles.rows import NEEDED, tile_rows
from .pack_tables import TIMES


def is_tiles(columns: set[str]) -> bool:
    """Whether a table is one of kernels with tile configurations, by its columns."""
    return columns >= {*NEEDED, "config"}


def predict_tiles(table: pd.DataFrame, path: Path, model: TileModel) -> pd.DataFrame:
    """Predict a table of kernels with tile configurations.

    Returns:
        Columns as :func:`~.pack_tables.predict_products`.

    Raises:
        DatasetError: A column is missing, or a configuration is no JSON object.
    """
    for column in ("id", *NEEDED):
        if column not in table:
            raise DatasetError(f"column {column!r} is missing", where=str(path))
    rows = table.reset_index(drop=True)
    found = {str(name): in_catalogue(str(name)) for name in rows["device"].unique()}
    good = np.array([found[str(name)] for name in rows["device"]], bool)
    times, scope = np.full((len(rows), len(TIMES)), np.nan), np.full(len(rows), "", object)
    if good.any():
        said = model.predict(tile_rows(rows[good].reset_index(drop=True)))
        times[good] = np.stack([said.seconds, said.lo, said.hi], axis=1)
        scope[good] = said.scope
    reason = np.where(good, "", "device " + rows["device"].astype(str) + " is not in the catalogue")
    rows = rows.assign(reason=reason, scope=scope, suspect=False, family=rows["op"])
    rows[list(TIMES)] = times
    return rows


def rank_note(rows: pd.DataFrame) -> list[str]:
    """Say how candidates of equal problems were ranked, where their times are given."""
    if "latency_us" not in rows:
        return []
    known = (rows["reason"] == "") & (rows["latency_us"] > 0)
    judged = rows[known].reset_index(drop=True)
    if not len(judged):
        return []
    seconds = judged["latency_us"].to_numpy(float) * 1e-6
    order = ranking(tile_rows(judged), judged["latency"].to_numpy(float), seconds)
    if not order.groups:
        return []
    return [
        f"ranking of {order.groups} problems: first choice within 5 % of the best in "
        f"{order.top:.1%}, Kendall's τ {order.kendall:.2f}"
    ]


def rank_configurations(table: pd.DataFrame, model: TileModel) -> pd.DataFrame:
    """Rank implementations and tile configurations of kernels.

    Args:
        table: Candidates, as :func:`~opcast.models.tiles.rows.tile_rows` reads them.
        model: Model of tiles.

    Returns:
        The candidates by device, op and arguments, the predicted fastest first: ``rank``,
        ``latency_us``, ``lo_us``, ``hi_us``, ``ceiling_us`` (the least time that the chip's peak
        and bandwidth allow), ``of_ceiling`` (its share of the predicted time) and ``scope``.

    Raises:
        DatasetError: A column is missing, or a configuration is no JSON object.
        DeviceError: A device is not in the catalogue.
    """
    rows = tile_rows(table.reset_index(drop=True))
    said = model.predict(rows)
    # A measured time gives way to the predicted one, which has the same name.
    frame = table.reset_index(drop=True).assign(
        latency_us=said.seconds * 1e6,
        lo_us=said.lo * 1e6,
        hi_us=said.hi * 1e6,
        ceiling_us=rows.ceiling_s * 1e6,
        of_ceiling=rows.ceiling_s / said.seconds,
        scope=said.scope,
    )
    frame["rank"] = frame["latency_us"].groupby(rows.subject).rank(method="first").astype(int)
    return frame.sort_values(["device", "op", "args", "rank"]).reset_index(drop=True)
