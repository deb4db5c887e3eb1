"""Predicts the kernel pack's table of board power: times and watts of operators and modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.catalogue import find_device, in_catalogue
from ...models.operators import OpModel
from ...models.power.model import LEAST, PowerModel
from ...models.power.rows import power_rows
from .pack_tables import TIMES

#: Columns of a row that its power is predicted from.
NEEDED = ("id", "family", "dtype", "device")
#: Columns of predicted watts: estimate and ends of the 90 % interval.
WATTS = ("power_w", "power_lo_w", "power_hi_w")
#: Source of rows in a table that names none: the only one with watts.
_SOURCE = "aiconfigurator"


def is_power(path: Path, columns: set[str]) -> bool:
    """Whether a table is one of board power: by its limits, or its name where queries lack them."""
    return "power_limit_w" in columns or path.name.startswith(("queries_power", "power."))


def predict_power(
    table: pd.DataFrame, path: Path, operators: OpModel, power: PowerModel
) -> pd.DataFrame:
    """Predict a table of board power.

    Args:
        table: Operators and modules; ``power_limit_w``, where given, replaces the limit of the
            catalogue.
        path: Its file, for messages.
        operators: Model of operators, for their times.
        power: Model of power.

    Returns:
        Columns as :func:`~.pack_tables.predict_products`, with :data:`WATTS` and ``given_w``, the
        measured watts where the table has them.

    Raises:
        DatasetError: A column is missing, or a row lacks a parameter of its family.
    """
    for column in NEEDED:
        if column not in table:
            raise DatasetError(f"column {column!r} is missing", where=str(path))
    rows = table.reset_index(drop=True)
    if "source" not in rows:
        rows["source"] = _SOURCE
    reason = np.full(len(rows), "", object)
    for name in rows["device"].astype(str).unique():
        if not in_catalogue(name):
            reason[rows["device"] == name] = f"device {name} is not in the catalogue"
    good = np.flatnonzero(reason == "")
    times = np.full((len(rows), len(TIMES)), np.nan)
    watts, scope = np.full((len(rows), len(WATTS)), np.nan), np.full(len(rows), "", object)
    if len(good):
        asked = rows.iloc[good].reset_index(drop=True)
        made = power_rows(asked, operators)
        if "power_limit_w" in asked:
            limit = pd.to_numeric(asked["power_limit_w"], errors="coerce").to_numpy(float)
            made.limit = np.where(limit > 0, limit, made.limit)
        device = np.array([find_device(str(d)).name for d in asked["device"]], object)
        said = power.predict(made, device)
        times[good] = np.stack([said.seconds, said.seconds_lo, said.seconds_hi], axis=1)
        watts[good] = np.stack([said.watts, said.watts_lo, said.watts_hi], axis=1)
        scope[good] = said.scope
    given = np.full(len(rows), np.nan)
    if "power_w" in rows:
        given = pd.to_numeric(rows["power_w"], errors="coerce").to_numpy(float)
    rows = rows.assign(reason=reason, scope=scope, suspect=False, given_w=given)
    rows[list(TIMES)], rows[list(WATTS)] = times, watts
    return rows


def power_note(rows: pd.DataFrame) -> list[str]:
    """Say how far the predicted watts are from those that a table gives."""
    error = (rows["power_w"] / rows["given_w"] - 1).abs()
    known = error.notna()
    if "est_samples" in rows:
        # Too few readings of the sensor say nothing about a row.
        known &= rows["est_samples"] >= LEAST
    if not known.any():
        return []
    low, high, given = (rows[c][known] for c in ("power_lo_w", "power_hi_w", "given_w"))
    covered = ((low <= given) & (given <= high)).mean()
    return [
        f"power: {int(known.sum())} rows with watts, mean error {error[known].mean():.1%}, median "
        f"{error[known].median():.1%}, coverage {covered:.1%}"
    ]
