"""Predicts tables that are no operator tables: matrix products and collectives under XLA.

Their rows have other columns, and some cannot be asked of the models at all: those get a reason
instead of a latency.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, DeviceError
from ...datagen.published.conv_tables import LAYOUTS, SIZES, conv_rows
from ...datagen.published.product_tables import product_rows
from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.catalogue import find_device, in_catalogue
from ...features.operators import family_keys
from ...features.operators.library_conv import DIRECTIONS
from ...features.operators.schema import METHODS
from ...models.collectives.links import Links
from ...models.collectives.measurements import xla_rows
from ...models.collectives.model import CollectiveModel
from ...models.operators import OpModel

#: Bytes below which a collective counts as small in the summary: start-ups take most of its time.
SMALL = 2.0**20
#: Columns of a prediction, in seconds.
TIMES = ("latency", "lo", "hi")


def predict_products(table: pd.DataFrame, path: Path, model: OpModel) -> pd.DataFrame:
    """Predict a table of products.

    Args:
        table: Rows of XLA's ``matmul`` table or of the kernel pack's ``gemm`` table.
        path: Its file, for messages.
        model: Model of operators.

    Returns:
        ``id``, ``device``, ``family`` (source and dtype), ``split`` and ``latency_us`` where given,
        ``suspect``, ``reason`` (empty where there is a prediction), :data:`TIMES` and ``scope``.

    Raises:
        DatasetError: A column is missing or holds no numbers.
    """
    rows = _read(lambda: product_rows(table), path)
    rows["key"] = family_keys(rows)
    reason = np.full(len(rows), "", object)
    sizes = rows[["b", "m", "n", "k"]].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    bad = ~(sizes >= 1).all(axis=1)
    reason[bad] = "a size is no positive number"
    return _asked(rows, reason, model)


def predict_convs(table: pd.DataFrame, path: Path, model: OpModel) -> pd.DataFrame:
    """Predict a table of convolutions; returns columns as :func:`predict_products`."""
    rows = _read(lambda: conv_rows(table), path)
    rows["key"] = family_keys(rows)
    rows["suspect"] = False
    sizes = rows[[*SIZES, "channels_last"]].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    least = np.array([0.0 if c.startswith("pad") else 1.0 for c in SIZES] + [0.0])
    reason = np.full(len(rows), "", object)
    for bad, text in (
        (~(sizes >= least).all(axis=1), "a size is no positive number"),
        (np.isnan(sizes[:, -1]), "the layout is none of " + ", ".join(LAYOUTS)),
        (
            ~rows["op"].isin(DIRECTIONS).to_numpy(),
            "the direction is none of " + ", ".join(DIRECTIONS),
        ),
    ):
        reason[bad] = text
    return _asked(rows, reason, model)


def _asked(rows: pd.DataFrame, reason: np.ndarray, model: OpModel) -> pd.DataFrame:
    """Predict the rows of a pack that have no reason against it, as operators of a model."""
    for bad, text in (
        (~rows["key"].isin(model.families).to_numpy(), "the model has no operators {key}"),
        (~rows["source"].isin(list(METHODS)).to_numpy(), "nothing was learned from {source}"),
        (~rows["dtype"].isin(list(TABLE_FORMATS)).to_numpy(), "the model has no dtype {dtype}"),
        (~_known(rows["device"], model.describes), "device {device} is not in the catalogue"),
    ):
        reason[bad] = _filled(text, rows[bad])
    good = np.flatnonzero(reason == "")
    times, scope = np.full((len(rows), len(TIMES)), np.nan), np.full(len(rows), "", object)
    if len(good):
        asked = rows.iloc[good].reset_index(drop=True)
        asked["device"] = [model.spec(str(name)).name for name in asked["device"]]
        found = model.predict(asked)
        times[good] = np.stack([getattr(found, c) for c in TIMES], axis=1)
        scope[good] = found.scope
    rows["family"] = rows["source"] + " " + rows["dtype"]
    return _answered(rows, reason, scope, times)


def predict_xla_collectives(
    table: pd.DataFrame, path: Path, links: CollectiveModel
) -> pd.DataFrame:
    """Predict a table of XLA's collectives; returns columns as :func:`predict_products`."""
    rows = _read(lambda: xla_rows(table), path)
    reason = np.full(len(rows), "", object)
    size, world = (
        pd.to_numeric(rows[c], errors="coerce").to_numpy(float) for c in ("bytes", "world_size")
    )
    for bad, text in (
        (~(size > 0), "no bytes are moved"),
        (~(world >= 2), "a single device sends nothing"),
        (~_known(rows["device"], in_catalogue), "device {device} is not in the catalogue"),
    ):
        reason[bad] = _filled(text, rows[bad])
    good = np.flatnonzero(reason == "")
    times, scope = np.full((len(rows), len(TIMES)), np.nan), np.full(len(rows), "", object)
    if len(good):
        asked = rows.iloc[good].reset_index(drop=True)
        found = links.predict(asked, lambda name: Links.from_spec(find_device(name)))
        times[good] = found[[f"{c}_s" for c in TIMES]].to_numpy()
        scope[good] = found["scope"]
    names = table["kind"].astype(str).to_numpy(object)
    rows["family"] = names + np.where(size < SMALL, ", below 1 MiB", ", from 1 MiB on")
    return _answered(rows, reason, scope, times)


def _filled(text: str, rows: pd.DataFrame) -> list[str]:
    """The text for each row, with its values in place of their columns' names."""
    named = ("key", "dtype", "device", "source")
    columns = {c: rows[c].astype(str).tolist() for c in named if c in rows}
    return [text.format(**{c: v[i] for c, v in columns.items()}) for i in range(len(rows))]


def _answered(
    rows: pd.DataFrame, reason: np.ndarray, scope: np.ndarray, times: np.ndarray
) -> pd.DataFrame:
    rows = rows.assign(reason=reason, scope=scope)
    rows[list(TIMES)] = times
    return rows


def _known(devices: pd.Series, is_known: Callable[[str], bool]) -> np.ndarray:
    known = {str(name): is_known(str(name)) for name in devices.unique()}
    return np.array([known[str(name)] for name in devices], bool)


def _read(read: Callable[[], pd.DataFrame], path: Path) -> pd.DataFrame:
    try:
        return read()
    except KeyError as error:
        raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
    except (ValueError, TypeError, DeviceError) as error:
        raise DatasetError(f"a row cannot be read: {error}", where=str(path)) from None
