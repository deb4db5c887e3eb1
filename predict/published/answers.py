"""Predictions for each kind of table in the packs.

Rows that the models do not cover get a reason instead of a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, DeviceError
from ...datagen.published.block_tables import block_rows
from ...datagen.published.packs import CONV_SIZES, conv_rows, pack_data, product_rows
from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.catalogue import find_device, in_catalogue
from ...features.operators import family_keys
from ...features.operators.conv import DIRECTIONS
from ...features.operators.schema import BLOCK_SIZES, BLOCKS, methods, sources
from ...models.collectives.links import Links
from ...models.collectives.measurements import xla_rows
from ...models.collectives.model import CollectiveModel
from ...models.operators import OpModel
from ...models.power.model import LEAST, PowerModel
from ...models.power.rows import power_rows

#: Bytes below which a collective counts as small in the summary: latency dominates its time.
SMALL = 2.0**20
#: Columns of a prediction, in seconds.
TIMES = ("latency", "lo", "hi")
#: The same columns by the names in collective models.
SECONDS = {f"{name}_s": name for name in TIMES}
#: Columns of predicted power (W): estimate and bounds of the 90 % interval.
WATTS = ("power_w", "power_lo_w", "power_hi_w")
_SIZELESS = "a size is not a positive number"

#: Mask of refused rows, and the reason; a column's name in braces stands for its value.
Refused = tuple[np.ndarray, str]


def answered(
    rows: pd.DataFrame,
    refused: Sequence[Refused],
    ask: Callable[[pd.DataFrame], pd.DataFrame],
    columns: Sequence[str] = TIMES,
) -> pd.DataFrame:
    """Predict the rows that are not refused.

    Args:
        rows: ``n`` rows.
        refused: Masks of refused rows with reasons; the last matching reason is used.
        ask: Returns ``columns`` and ``scope`` of the other rows.
        columns: Predicted columns.

    Returns:
        The rows with ``reason`` (empty if there is a prediction), ``scope`` and ``columns``.
    """
    reason = np.full(len(rows), "", object)
    for bad, text in refused:
        reason[bad] = _filled(text, rows[bad])
    good = np.flatnonzero(reason == "")
    found = np.full((len(rows), len(columns)), np.nan)
    scope = np.full(len(rows), "", object)
    if len(good):
        told = ask(rows.iloc[good].reset_index(drop=True))
        found[good], scope[good] = told[list(columns)].to_numpy(), told["scope"]
    rows = rows.assign(reason=reason, scope=scope)
    rows[list(columns)] = found
    return rows


def predict_products(table: pd.DataFrame, path: Path, model: OpModel) -> pd.DataFrame:
    """Predict a table of products.

    Args:
        table: Rows of XLA's ``matmul`` table or of the kernel pack's ``gemm`` table.
        path: File of the table, for messages.
        model: Operator model.

    Returns:
        ``id``, ``device``, ``family`` (source and dtype), ``split`` and ``latency_us`` if given,
        ``suspect``, ``reason`` (empty if there is a prediction), :data:`TIMES` and ``scope``.

    Raises:
        DatasetError: A column is missing or not numeric.
    """
    rows = read_rows(product_rows, table, path)
    sizes = _figures(rows, ("b", "m", "n", "k"))
    return _of_library(rows, [(np.asarray(~(sizes >= 1).all(axis=1)), _SIZELESS)], model)


def predict_convs(table: pd.DataFrame, path: Path, model: OpModel) -> pd.DataFrame:
    """Predict a table of convolutions; for columns see :func:`predict_products`."""
    rows = read_rows(conv_rows, table, path).assign(suspect=False)
    sizes = _figures(rows, (*CONV_SIZES, "channels_last"))
    least = np.array([0.0 if c.startswith("pad") else 1.0 for c in CONV_SIZES] + [0.0])
    layouts, directions = ", ".join(pack_data()["channels_last"]), ", ".join(DIRECTIONS)
    refused = [
        (~(sizes >= least).all(axis=1), _SIZELESS),
        (np.isnan(sizes[:, -1]), f"the layout is not one of {layouts}"),
        (~rows["op"].isin(DIRECTIONS).to_numpy(), f"the direction is not one of {directions}"),
    ]
    return _of_library(rows, refused, model)


def _of_library(rows: pd.DataFrame, refused: Sequence[Refused], model: OpModel) -> pd.DataFrame:
    """Predict rows as operators of a model's families."""
    rows = rows.assign(key=family_keys(rows))
    refused = [
        *refused,
        (~rows["key"].isin(model.families).to_numpy(), "the model has no operators {key}"),
        (~rows["source"].isin(list(methods())).to_numpy(), "the model has no data from {source}"),
        (~rows["dtype"].isin(list(TABLE_FORMATS)).to_numpy(), "the model has no dtype {dtype}"),
        foreign(rows, model.describes),
    ]
    rows["family"] = rows["source"] + " " + rows["dtype"]
    return answered(rows, refused, lambda asked: _predicted(asked, model))


def _predicted(rows: pd.DataFrame, model: OpModel) -> pd.DataFrame:
    names = {name: model.spec(str(name)).name for name in rows["device"].unique()}
    found = model.predict(rows.assign(device=rows["device"].map(names)))
    return pd.DataFrame({**{c: getattr(found, c) for c in TIMES}, "scope": found.scope})


def predict_blocks(rows: pd.DataFrame, model: OpModel) -> pd.DataFrame:
    """Predict rows of attention and experts, of layers or of new attention.

    Args:
        rows: From :func:`~opcast.datagen.published.block_tables.block_rows`.
        model: Model of blocks.

    Returns:
        The rows with ``family`` (the model's, and what ran it); for other columns see
        :func:`predict_products`.
    """
    refused = [
        (_sizeless(rows), _SIZELESS),
        (~rows["key"].isin(model.families).to_numpy(), "the model has no operators {key}"),
        foreign(rows, model.describes),
    ]
    what = rows["key"].astype(str) + " " + rows["backend"].astype(str)
    rows = rows.assign(family=what.str.strip())
    return answered(rows, refused, lambda asked: _predicted(asked, model))


def read_blocks(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return rows of a table as operators of blocks.

    Raises:
        DatasetError: A column is missing or not numeric.
    """
    return read_rows(block_rows, table, path)


def _sizeless(rows: pd.DataFrame) -> np.ndarray:
    """Return a mask of rows that lack a required size or have a negative one."""
    bad = np.zeros(len(rows), bool)
    for key, needed in BLOCK_SIZES.items():
        own = (rows["key"] == key).to_numpy()
        if not own.any():
            continue
        part = rows.loc[own]
        wrong = ~(part[list(needed)].to_numpy(np.float64) >= 1).all(axis=1)
        wrong |= ~(part[list(BLOCKS[key])].to_numpy(np.float64) >= 0).all(axis=1)
        if key == "batch/attention":
            wrong |= (part["batch"] * part["q_len"] + part["n_decode"]).to_numpy() < 1
        bad[own] = wrong
    return bad


def predict_xla_collectives(
    table: pd.DataFrame, path: Path, links: CollectiveModel
) -> pd.DataFrame:
    """Predict a table of XLA's collectives; for columns see :func:`predict_products`."""
    rows = read_rows(xla_rows, table, path)
    size, world = _figures(rows, ("bytes", "world_size")).T
    refused = [
        (~(size > 0), "no bytes are moved"),
        (~(world >= 2), "a single device sends nothing"),
        foreign(rows, in_catalogue),
    ]

    def ask(asked: pd.DataFrame) -> pd.DataFrame:
        found = links.predict(asked, lambda name: Links.from_spec(find_device(name)))
        return found.rename(columns=SECONDS)

    names = table["kind"].astype(str).to_numpy(object)
    rows["family"] = names + np.where(size < SMALL, ", below 1 MiB", ", from 1 MiB on")
    return answered(rows, refused, ask)


def predict_power(
    table: pd.DataFrame, path: Path, operators: OpModel, power: PowerModel
) -> pd.DataFrame:
    """Predict a table of board power: operators and modules.

    Args:
        table: ``power_limit_w``, if given, replaces the limit of the catalogue.
        path: File of the table, for messages.
        operators: Operator model, for times.
        power: Power model.

    Returns:
        Columns as :func:`predict_products`, with :data:`WATTS` and ``given_w``, the measured power
        if the table has it.

    Raises:
        DatasetError: A column is missing, or a row lacks a parameter of its family.
    """
    required(table, ("id", "family", "dtype", "device"), path)
    rows = table.reset_index(drop=True)
    given = _figures(rows, ("power_w",))[:, 0] if "power_w" in rows else np.nan
    rows = rows.assign(suspect=False, given_w=given)
    if "source" not in rows:
        # The only publisher of power.
        rows["source"] = next(name for name, own in sources().items() if own.watts)

    def ask(asked: pd.DataFrame) -> pd.DataFrame:
        made = power_rows(asked, operators)
        if "power_limit_w" in asked:
            limit = _figures(asked, ("power_limit_w",))[:, 0]
            made.limit = np.where(limit > 0, limit, made.limit)
        told = power.predict(made)
        times = (told.seconds, told.seconds_lo, told.seconds_hi)
        watts = (told.watts, told.watts_lo, told.watts_hi)
        figures = dict(zip((*TIMES, *WATTS), (*times, *watts), strict=True))
        return pd.DataFrame({**figures, "scope": told.scope})

    refused = [foreign(rows, in_catalogue)]
    return answered(rows, refused, ask, (*TIMES, *WATTS))


def power_note(rows: pd.DataFrame) -> list[str]:
    """Return a note on the error of predicted power, if the table has measured power."""
    error = (rows["power_w"] / rows["given_w"] - 1).abs()
    known = error.notna()
    if "est_samples" in rows:
        # Rows with too few sensor readings are not evaluated.
        known &= rows["est_samples"] >= LEAST
    if not known.any():
        return []
    low, high, given = (rows[c][known] for c in ("power_lo_w", "power_hi_w", "given_w"))
    covered = ((low <= given) & (given <= high)).mean()
    return [
        f"power: {int(known.sum())} rows with watts, mean error {error[known].mean():.1%}, median "
        f"{error[known].median():.1%}, coverage {covered:.1%}"
    ]


def read_rows(
    read: Callable[[pd.DataFrame], pd.DataFrame], table: pd.DataFrame, path: Path
) -> pd.DataFrame:
    """Apply a table reader, naming the file in its errors.

    Raises:
        DatasetError: A column is missing or not numeric.
    """
    try:
        return read(table)
    except KeyError as error:
        raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
    except (ValueError, TypeError, DeviceError) as error:
        raise DatasetError(f"a row cannot be read: {error}", where=str(path)) from None


def required(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Check that a table has the required columns.

    Raises:
        DatasetError: A column is missing.
    """
    for column in columns:
        if column not in table:
            raise DatasetError(f"column {column!r} is missing", where=str(path))


def _figures(rows: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return columns as numbers, NaN for other values, shape ``(n, len(columns))``."""
    return np.asarray(rows[list(columns)].apply(pd.to_numeric, errors="coerce").to_numpy(float))


def _filled(text: str, rows: pd.DataFrame) -> list[str]:
    """Return the text for each row, with column names in braces replaced by values."""
    named = ("key", "dtype", "device", "source")
    columns = {c: rows[c].astype(str).tolist() for c in named if c in rows}
    return [text.format(**{c: v[i] for c, v in columns.items()}) for i in range(len(rows))]


def foreign(rows: pd.DataFrame, is_known: Callable[[str], bool]) -> Refused:
    """Return a mask of rows with unknown devices, and the reason."""
    known = {str(name): is_known(str(name)) for name in rows["device"].unique()}
    bad = ~rows["device"].astype(str).map(known).to_numpy(bool)
    return bad, "device {device} is not in the catalogue"
