"""Figures of merit of predicted latencies, always reported together and with the label noise.

All errors are relative to the measured value. ``bias`` is ``exp(median(log(predicted / measured)))
- 1``: +0.1 means that predictions are typically 10 % too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

#: Fraction of the samples that top-k recall considers.
TOP_SHARE = 0.1


def absolute_percentage_error(measured: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """``|predicted - measured| / measured``, shape ``(n,)``."""
    return np.asarray(np.abs(predicted - measured) / measured)


def median_ape(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Median absolute percentage error."""
    return float(np.median(absolute_percentage_error(measured, predicted)))


def mean_abs_log(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Mean absolute log-ratio of predicted to measured."""
    return float(np.abs(np.log(predicted / measured)).mean())


def bias(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Median log-ratio of predicted to measured, as a relative difference."""
    return float(np.expm1(np.median(np.log(predicted / measured))))


def spearman(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Rank correlation: Pearson's of the ranks, ties averaged; NaN if either is constant."""
    ranks = [pd.Series(v).rank().to_numpy() for v in (measured, predicted)]
    if len(measured) < 2 or any(np.ptp(r) == 0 for r in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def kendall(measured: np.ndarray, predicted: np.ndarray) -> float:
    """Kendall's tau-b; NaN if either is constant."""
    from scipy.stats import kendalltau

    if len(measured) < 2 or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
        return float("nan")
    return float(kendalltau(measured, predicted).statistic)


def top_k_recall(measured: np.ndarray, predicted: np.ndarray, k: int | None = None) -> float:
    """Fraction of the ``k`` slowest samples among the ``k`` predicted to be slowest.

    Args:
        measured: Shape ``(n,)``.
        predicted: Shape ``(n,)``.
        k: Number of samples; ``None`` takes a tenth of the samples, at least one.
    """
    count = k or max(1, round(TOP_SHARE * len(measured)))
    slow = set(np.argsort(-np.asarray(measured), kind="stable")[:count].tolist())
    predicted_slow = set(np.argsort(-np.asarray(predicted), kind="stable")[:count].tolist())
    return len(slow & predicted_slow) / len(slow)


def coverage(measured: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> float:
    """Fraction of the measured values inside their interval, including its bounds."""
    return float(np.mean((measured >= lo) & (measured <= hi)))


def summary(
    measured: np.ndarray,
    predicted: np.ndarray,
    lo: np.ndarray | None = None,
    hi: np.ndarray | None = None,
) -> dict[str, float]:
    """Compute all figures of a group of samples.

    Args:
        measured: Latencies in any unit, positive, shape ``(n,)``.
        predicted: Predictions in the same unit, positive, shape ``(n,)``.
        lo: Lower interval bounds.
        hi: Upper interval bounds.

    Returns:
        ``n``, ``median_ape``, ``mape``, ``bias``, ``bias_mean``, ``spearman``, ``kendall``,
        ``top_k_recall`` and, with intervals, ``coverage``, ``width_median`` and ``width_mean``
        (interval width over the prediction). Only ``n`` for empty input.
    """
    measured, predicted = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    if not len(measured):
        return {"n": 0.0}
    errors = absolute_percentage_error(measured, predicted)
    figures = {
        "n": float(len(measured)),
        "median_ape": float(np.median(errors)),
        "mape": float(np.mean(errors)),
        "bias": bias(measured, predicted),
        "bias_mean": float(np.mean((predicted - measured) / measured)),
        "spearman": spearman(measured, predicted),
        "kendall": kendall(measured, predicted),
        "top_k_recall": top_k_recall(measured, predicted),
    }
    if lo is not None and hi is not None:
        width = (hi - lo) / predicted
        figures["coverage"] = coverage(measured, lo, hi)
        figures["width_median"] = float(np.median(width))
        figures["width_mean"] = float(np.mean(width))
    return figures


def replicate_differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Differences between repeated measurements of the same kernel on the same device.

    Two samples are replicates if they agree in ``kernel_hash`` and ``device`` and were measured
    separately (another ``sample_id``). Compares neighbouring pairs in the order of ``sample_id``.

    Args:
        frame: Rows of a dataset.

    Returns:
        Columns ``kind``, ``device`` and ``difference`` = ``|a - b| / ((a + b) / 2)``.
    """
    rows = frame.drop_duplicates("sample_id").sort_values(["kernel_hash", "device", "sample_id"])
    # Neighbours rather than all pairs: otherwise frequently measured kernels would dominate.
    after = rows.shift(-1)
    same = (rows["kernel_hash"] == after["kernel_hash"]) & (rows["device"] == after["device"])
    a = rows.loc[same, "latency_us_p50"].to_numpy(np.float64)
    b = after.loc[same, "latency_us_p50"].to_numpy(np.float64)
    pairs = rows.loc[same, ["kind", "device"]].reset_index(drop=True)
    return pairs.assign(difference=2 * np.abs(a - b) / (a + b))


def label_noise(frame: pd.DataFrame) -> dict[str, float]:
    """Noise floor of the labels from replicate pairs; NaN without any.

    On average, no model can agree better with a measurement than a second measurement does.

    Returns:
        ``noise_median_ape``, ``noise_mape`` and ``noise_pairs``.
    """
    differences = replicate_differences(frame)["difference"].to_numpy(np.float64)
    known = len(differences) > 0
    return {
        "noise_median_ape": float(np.median(differences)) if known else float("nan"),
        "noise_mape": float(np.mean(differences)) if known else float("nan"),
        "noise_pairs": float(len(differences)),
    }


def metrics_table(
    predictions: pd.DataFrame, by: Sequence[str] = ("kind",), noise: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Figures in total and by group.

    Args:
        predictions: One row per sample with ``measured_us``, ``predicted_us``, ``lo_us``, ``hi_us``
            and the columns of ``by``.
        by: Columns to group by, one at a time (``kind``, ``device``, ``split`` …).
        noise: Dataset rows with replicates; adds noise figures, for a group over its kinds and
            devices.

    Returns:
        One row per group: ``group`` (``all`` or ``column=value``) and the figures.
    """
    rows = [{"group": "all", **_figures(predictions, noise)}]
    for column in by:
        for value, part in predictions.groupby(column, sort=True):
            # Without that column, the noise of the group is unknown.
            same = noise if noise is not None and column in noise else None
            rows.append({"group": f"{column}={value}", **_figures(part, same)})
    return pd.DataFrame(rows)


def flatten(table: pd.DataFrame, prefix: str = "") -> dict[str, float]:
    """Figures of a metrics table by name: ``median_ape`` in total, ``kind=gemm/mape`` by group."""
    flat: dict[str, float] = {}
    for row in table.to_dict("records"):
        group = "" if row["group"] == "all" else f"{row['group']}/"
        figures: Iterable[tuple[str, float]] = (
            (str(k), float(v)) for k, v in row.items() if k != "group"
        )
        flat |= {f"{prefix}{group}{k}": v for k, v in figures if v == v}
    return flat


def _figures(rows: pd.DataFrame, noise: pd.DataFrame | None) -> dict[str, float]:
    arrays = [rows[c].to_numpy(np.float64) for c in ("measured_us", "predicted_us")]
    ends = [rows[c].to_numpy(np.float64) for c in ("lo_us", "hi_us")] if "lo_us" in rows else []
    found = label_noise(_matching(noise, rows)) if noise is not None else {}
    return {**summary(*arrays, *ends), **found}


def _matching(noise: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Noise rows of the predicted kinds and devices."""
    for column in {"kind", "device"} & {*noise} & {*predictions}:
        noise = noise[noise[column].isin(predictions[column].unique())]
    return noise
