"""Predictions of published tables beside the latencies that the tables give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...models.operators.report import only_or_mixed
from .answers import TIMES

#: Prefix of the splits whose rows may be learned from.
CALIBRATION = "calib"


@dataclass
class PublishedPredictions:
    """Predictions of a folder.

    Attributes:
        frame: ``id`` (the number of a row where its table has none), ``latency_us``, ``lo_us`` and
            ``hi_us`` of every row, ``power_w`` with its ends of rows of power tables, and ``table``
            and ``reason`` (why a row has no prediction) for rows of tables other than operators,
            collectives and programs.
        judged: Rows with a known latency: ``table``, ``family``, ``device``, ``split``,
            ``scope``, ``error`` (predicted / measured - 1), ``covered``, ``calibration`` (whether
            the row was learned from).
        calibrated: Number of rows learned from, by what they adapted.
        notes: What was left out of predictions or of the judgement, and why.
    """

    frame: pd.DataFrame
    judged: pd.DataFrame
    calibrated: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> pd.DataFrame:
        """Summarise judged rows by table, family, device and split, and over whole tables."""
        if not len(self.judged):
            return pd.DataFrame()
        # Rows that were learned from would flatter the figures.
        judged = self.judged[~self.judged["calibration"]]
        judged = judged.assign(size=judged["error"].abs())
        whole = judged.assign(family="all", device="all", split="all", scope="")
        grouped = pd.concat([judged, whole]).groupby(["table", "family", "device", "split"])
        return grouped.agg(
            n=("size", "size"),
            mape=("size", "mean"),
            median_ape=("size", "median"),
            largest=("size", "max"),
            bias=("error", "median"),
            coverage=("covered", "mean"),
            scope=("scope", only_or_mixed),
        ).reset_index()


def judged(path: Path, rows: pd.DataFrame) -> PublishedPredictions:
    """Predictions of one table beside the latencies that it gives.

    Args:
        path: Its file.
        rows: ``id``, ``family``, ``device`` (or ``platform``), :data:`~.answers.TIMES` in seconds
            and ``scope``, ``split`` and ``latency_us`` where given; of the packs' tables also
            ``suspect`` and ``reason``: rows that their publisher doubts are not judged, nor are
            those with a reason for having no prediction.

    Raises:
        DatasetError: The rows have no ``id``.
    """
    if "id" not in rows:
        raise DatasetError("column 'id' is missing", where=str(path))
    name = path.name.split(".")[0]
    times = microseconds(*(rows[c].to_numpy() for c in TIMES))
    times.insert(0, "id", rows["id"].astype(str).to_numpy())
    given = rows["latency_us"] if "latency_us" in rows else pd.Series(np.nan, rows.index)
    label = given.to_numpy(np.float64, na_value=np.nan)
    figures = pd.DataFrame(
        {
            "id": times["id"],
            "table": name,
            "family": rows["family"].astype(str).to_numpy(),
            "device": rows["device" if "device" in rows else "platform"].astype(str).to_numpy(),
            "split": rows["split"].astype(str).to_numpy() if "split" in rows else "",
            "scope": rows["scope"].to_numpy(),
            # Where there is no label, error and coverage are NaN and False; such rows are dropped
            # below.
            "error": times["latency_us"] / label - 1,
            "covered": (label >= times["lo_us"]) & (label <= times["hi_us"]),
            "calibration": given_rows(rows.assign(latency_us=label)),
        }
    )
    keep, notes = label > 0, []
    if "reason" in rows:
        doubted, reason = rows["suspect"].to_numpy(bool) & keep, rows["reason"].to_numpy()
        keep &= ~doubted & (reason == "")
        times["table"], times["reason"] = name, reason
        counts = rows["reason"].value_counts()
        notes = [f"{name}: {n} rows not predicted: {why}" for why, n in counts.items() if why]
        if doubted.any():
            notes.append(
                f"{name}: {int(doubted.sum())} rows that their publisher doubts are not judged"
            )
    return PublishedPredictions(times, figures[keep].reset_index(drop=True), notes=notes)


def given_rows(frame: pd.DataFrame) -> np.ndarray:
    """Rows of calibration splits that have a latency, bool, shape ``(n,)``."""
    if "split" not in frame or "latency_us" not in frame:
        return np.zeros(len(frame), bool)
    # NaN compares false, so rows without a label are left out as well.
    known = frame["latency_us"].to_numpy(np.float64, na_value=np.nan) > 0
    return np.asarray(frame["split"].astype(str).str.startswith(CALIBRATION) & known)


def microseconds(latency: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> pd.DataFrame:
    """Latencies and interval ends in seconds, shape ``(n,)`` each, as columns in microseconds."""
    return pd.DataFrame({"latency_us": latency * 1e6, "lo_us": lo * 1e6, "hi_us": hi * 1e6})
