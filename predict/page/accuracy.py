"""HTML page of tracked runs: predictions against measurements, errors by group, coverage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.types import JsonObject
from ...models.tracking.tracked_runs import TrackedRun, read_runs
from ...models.training_data.metrics import absolute_percentage_error, summary
from .assemble import Page, assemble, rounded, short

SCRIPTS = ("breakdown.js", "accuracy.js")
#: Maximum points drawn per run, which a browser redraws without delay; the figures use all rows
#: that the run keeps. Engineering estimate.
MOST_POINTS = 4000
#: Maximum groups listed per column, those with most rows first.
MOST_GROUPS = 40
#: Quantiles of the absolute percentage error: whiskers, box and median of a box plot.
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_FIGURES = ("n", "median_ape", "mape", "bias", "spearman", "kendall", "coverage", "width_median")
_SHOWN_PARAMS = ("model", "split", "dataset_hash", "seed", "rows", "devices", "studies")


def accuracy_page(
    run: str, tell: Callable[[str], None] = lambda what: None, root: Path | None = None
) -> str:
    """Return the page of a run, or of an experiment's newest runs.

    Args:
        run: Run, as accepted by :func:`~opcast.models.tracking.tracked_runs.read_runs`.
        tell: Called with a description of each stage of the work.
        root: Folder of the MLflow store.

    Raises:
        ModelError: The run does not exist or keeps no predictions.
    """
    tell("reading tracked runs")
    runs = read_runs(run, root=root)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} tracked runs"
    data = {"title": title, "runs": [run_data(own) for own in runs]}
    return assemble(Page(f"Accuracy: {title}", data, SCRIPTS))


def run_data(run: TrackedRun) -> dict[str, object]:
    """Return a run's data by level (``kernel``, ``program``, ``op``)."""
    frame = run.predictions
    # Relative errors of zero or missing times are undefined.
    usable = frame[(frame["measured_us"] > 0) & (frame["predicted_us"] > 0)]
    return {
        "id": run.run_id,
        "name": run.name,
        "when": run.when,
        "params": {k: v for k, v in run.params.items() if k in _SHOWN_PARAMS},
        "rows": run.rows,
        "kept": len(frame),
        "levels": {
            # A run's label noise is that of its kernels.
            str(level): _level(own, run.noise if level != "program" else {})
            for level, own in usable.groupby("level", sort=False)
        },
    }


def _level(frame: pd.DataFrame, noise: dict[str, float]) -> dict[str, object]:
    frame = frame.reset_index(drop=True)
    return {
        "all": _figures("all", frame, noise.get("all")),
        **{column: _groups(frame, column, noise) for column in ("kind", "device", "split")},
        "points": _points(frame),
    }


def _groups(frame: pd.DataFrame, column: str, noise: dict[str, float]) -> list[dict[str, object]]:
    """Return figures per value of a column, the value with most rows first."""
    counts = frame[column].value_counts()
    return [
        _figures(str(value), frame[frame[column] == value], noise.get(f"{column}={value}"))
        for value in counts.index[:MOST_GROUPS]
    ]


def _figures(name: str, frame: pd.DataFrame, noise: float | None) -> dict[str, object]:
    columns = ("measured_us", "predicted_us", "lo_us", "hi_us")
    measured, predicted, lo, hi = (frame[c].to_numpy(np.float64) for c in columns)
    figures = summary(measured, predicted, lo, hi)
    spread = np.quantile(absolute_percentage_error(measured, predicted), QUANTILES)
    return {
        "name": name,
        **{k: short(figures[k]) for k in _FIGURES},
        "quantiles": rounded(spread.tolist()),
        "inside": short(float(frame["in_domain"].astype(bool).mean())),
        "noise": None if noise is None else short(noise),
    }


def _points(frame: pd.DataFrame) -> dict[str, object]:
    """Return the points of a fixed sample of rows; codes index the words in ``names``."""
    if len(frame) > MOST_POINTS:
        # Fixed, so that pages are reproducible; sorted, so that points keep the rows' order.
        drawn = np.random.default_rng(0).permutation(len(frame))[:MOST_POINTS]
        frame = frame.iloc[np.sort(drawn)]
    points: JsonObject = {"names": {}}
    for column in ("kind", "device"):
        codes, words = pd.factorize(frame[column])
        points[column] = codes.tolist()
        points["names"][column] = [str(word) for word in words]
    for column in ("measured_us", "predicted_us", "lo_us", "hi_us"):
        points[column.removesuffix("_us")] = rounded(frame[column].tolist(), 4)
    points["inside"] = frame["in_domain"].astype(bool).astype(int).tolist()
    return points
