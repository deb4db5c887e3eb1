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


def judged_part(
    path: Path,
    frame: pd.DataFrame,
    family: pd.Series,
    latency: np.ndarray,
    lo: np.ndarray,
    hi: np.ndarray,
    scope: pd.Series,
) -> PublishedPredictions:
    """Predictions of one table, in seconds, beside the latencies that it gives."""
    if "id" not in frame:
        raise DatasetError("column 'id' is missing", where=str(path))
    times = microseconds(latency, lo, hi)
    times.insert(0, "id", frame["id"].astype(str).to_numpy())
    label = np.full(len(frame), np.nan)
    if "latency_us" in frame:
        label = frame["latency_us"].to_numpy(np.float64, na_value=np.nan)
    judged = pd.DataFrame(
        {
            "id": times["id"],
            "table": path.name.split(".")[0],
            "family": family.astype(str).to_numpy(),
            "device": frame["device" if "device" in frame else "platform"].astype(str).to_numpy(),
            "split": frame["split"].astype(str).to_numpy() if "split" in frame else "",
            "scope": scope.to_numpy(),
            # Where there is no label, error and coverage are NaN and False; the filter below drops
            # the rows.
            "error": times["latency_us"] / label - 1,
            "covered": (label >= times["lo_us"]) & (label <= times["hi_us"]),
            "calibration": given_rows(frame.assign(latency_us=label)),
        }
    )
    return PublishedPredictions(times, judged[label > 0].reset_index(drop=True))


def judged_pack(path: Path, rows: pd.DataFrame) -> PublishedPredictions:
    """Judge the rows of a pack's table that its publishers do not doubt."""
    name = path.name.split(".")[0]
    latency, lo, hi = (rows[c].to_numpy() for c in TIMES)
    part = judged_part(path, rows, rows["family"], latency, lo, hi, rows["scope"])
    keep = ~rows["suspect"].to_numpy(bool) & (rows["reason"] == "").to_numpy()
    label = np.full(len(rows), np.nan)
    if "latency_us" in rows:
        label = rows["latency_us"].to_numpy(np.float64, na_value=np.nan)
    part.judged = part.judged[keep[label > 0]].reset_index(drop=True)
    part.frame["table"], part.frame["reason"] = name, rows["reason"].to_numpy()
    counts = rows["reason"].value_counts()
    part.notes = [f"{name}: {n} rows not predicted: {why}" for why, n in counts.items() if why]
    doubted = int((rows["suspect"].to_numpy(bool) & (label > 0)).sum())
    if doubted:
        part.notes.append(f"{name}: {doubted} rows that their publisher doubts are not judged")
    return part


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
