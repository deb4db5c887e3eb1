"""Tabulates errors of operator models by split, family, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from .model import OpModel

#: Columns by which figures are grouped.
BY = ("split", "key", "dtype", "device")


def predictions(model: OpModel, rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate predictions beside measurements.

    Args:
        model: The model.
        rows: As :func:`~opcast.models.operators.rows_of_dataset` gives them; families that the
            model does not know are left out.

    Returns:
        ``id``, ``split``, ``key``, ``dtype``, ``device``, ``backend``, ``measured_us``,
        ``predicted_us``, ``lo_us``, ``hi_us``, ``scope`` and ``in_domain``.
    """
    known = rows[rows["key"].isin(list(model.families))].reset_index(drop=True)
    prediction = model.predict(known)
    columns = [c for c in ("id", "split", "key", "dtype", "device", "backend") if c in known]
    return known[columns].assign(
        measured_us=known["latency_us"].to_numpy(np.float64),
        predicted_us=prediction.latency * 1e6,
        lo_us=prediction.lo * 1e6,
        hi_us=prediction.hi * 1e6,
        scope=prediction.scope,
        in_domain=prediction.in_domain,
    )


def summary(rows: pd.DataFrame, by: Sequence[str] = BY) -> pd.DataFrame:
    """Figures of the rows of :func:`predictions`, one row a group.

    Returns:
        ``by``, ``n``, ``mape``, ``median_ape``, ``bias`` (median relative error), ``coverage``,
        ``width_ratio`` (median of ``hi / lo``), share ``in_domain``, and ``scope``.
    """
    measured, predicted = rows["measured_us"], rows["predicted_us"]
    table = rows.assign(
        error=predicted / measured - 1,
        ape=(predicted / measured - 1).abs(),
        covered=(measured >= rows["lo_us"]) & (measured <= rows["hi_us"]),
        width=rows["hi_us"] / rows["lo_us"],
    )
    return (
        table.groupby(list(by), sort=True)
        .agg(
            n=("ape", "size"),
            mape=("ape", "mean"),
            median_ape=("ape", "median"),
            bias=("error", "median"),
            coverage=("covered", "mean"),
            width_ratio=("width", "median"),
            in_domain=("in_domain", "mean"),
            scope=("scope", only_or_mixed),
        )
        .reset_index()
    )


def side_by_side(
    table: pd.DataFrame, by: Sequence[str], figure: str, across: str = "estimator"
) -> pd.DataFrame:
    """One figure of :func:`summary`, a column for each estimator.

    Args:
        table: Predictions with the columns of ``by`` and ``across``.
        by: Columns whose values make a row.
        figure: ``mape``, ``median_ape``, ``coverage`` …
        across: Column whose values become columns, in the order in which values first appear.

    Returns:
        ``by``, ``n`` (of the column with most rows) and the columns, nan where a group has no rows.
    """
    figures = summary(table, (*by, across))
    wide = figures.pivot(index=list(by), columns=across, values=figure)
    counts = figures.groupby(list(by))["n"].max().reindex(wide.index)
    wide = wide[list(dict.fromkeys(table[across]))]
    wide.columns = pd.Index([str(name) for name in wide.columns])
    wide.insert(0, "n", counts)
    return wide.reset_index()


def only_or_mixed(values: pd.Series) -> str:
    """The value that all rows have, or ``mixed``."""
    return str(values.iloc[0]) if values.nunique() == 1 else "mixed"


def flat(metrics: pd.DataFrame) -> dict[str, float]:
    """Figures by name, ``split/family/dtype/device/figure``, for tracking."""
    figures = {}
    for row in metrics.to_dict("records"):
        prefix = "/".join(str(row[c]) for c in BY if c in row)
        for name in ("mape", "median_ape", "coverage"):
            figures[f"{prefix}/{name}"] = float(row[name])
    return figures


def settings_of(model: OpModel) -> dict[str, object]:
    """Parameters with which a run is tracked: all of the model's provenance but its metrics."""
    return {k: v for k, v in model.info.items() if k != "metrics"}


def left_out_table(model: OpModel) -> pd.DataFrame:
    """Errors on devices that were left out of training in turn, as measured while it was trained.

    Returns:
        ``key``, ``left_out`` (devices of one chip together), ``n``, ``mape`` and ``median_ape``.
    """
    records = [
        {
            "key": key,
            "left_out": devices,
            "n": int(errors["rows"]),
            "mape": errors["mape"],
            "median_ape": errors["median"],
        }
        for key, family in sorted(model.families.items())
        for devices, errors in family.left_out.items()
    ]
    return pd.DataFrame(records)
