"""Plots of an evaluation: parity, error by kind, error by size, interval calibration.

The functions take a frame with one row per sample and the columns ``kind``, ``measured_us``,
``predicted_us``, ``lo_us`` and ``hi_us``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..trust.calibrator import COVERAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..operators.curves import Curve

#: Bins of measured latency.
_BINS = 12
#: Panels per row in the plot of a calibration.
_PANELS = 4


def all_figures(frame: pd.DataFrame, title: str) -> dict[str, Figure]:
    """The four figures by file name, without suffix."""
    return {
        "parity": parity(frame, title),
        "error_by_kind": error_by_kind(frame, title),
        "error_by_size": error_by_size(frame, title),
        "interval_calibration": interval_calibration(frame, title),
    }


def parity(frame: pd.DataFrame, title: str) -> Figure:
    """Predicted against measured latency, coloured by kind."""
    figure, axes = _canvas(title, "measured (µs)", "predicted (µs)")
    for kind, rows in frame.groupby("kind"):
        axes.scatter(rows["measured_us"], rows["predicted_us"], s=5, alpha=0.5, label=str(kind))
    ends = [frame["measured_us"].min(), frame["measured_us"].max()]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=7, markerscale=2)
    return figure


def error_by_kind(frame: pd.DataFrame, title: str) -> Figure:
    """Box plot of the absolute percentage error by kind."""
    figure, axes = _canvas(title, "", "absolute percentage error")
    groups = {str(kind): _ape(rows) for kind, rows in frame.groupby("kind")}
    axes.boxplot(list(groups.values()), showfliers=False)
    labels = [f"{kind}\n{len(errors)}" for kind, errors in groups.items()]
    axes.set_xticks(range(1, len(groups) + 1), labels, fontsize=7)
    return figure


def error_by_size(frame: pd.DataFrame, title: str) -> Figure:
    """Median and 90th percentile of the error over bins of measured latency."""
    figure, axes = _canvas(title, "measured (µs)", "absolute percentage error")
    log = np.log10(frame["measured_us"].to_numpy())
    # The offset keeps the largest sample inside the last bin.
    edges = np.linspace(log.min(), log.max() + 1e-9, _BINS + 1)
    which = np.digitize(log, edges) - 1
    errors = _ape(frame)
    filled = [b for b in range(_BINS) if (which == b).any()]
    centres = [10 ** ((edges[b] + edges[b + 1]) / 2) for b in filled]
    axes.plot(centres, [np.median(errors[which == b]) for b in filled], "o-", label="median")
    axes.plot(centres, [np.quantile(errors[which == b], 0.9) for b in filled], "s--", label="p90")
    axes.set_xscale("log")
    axes.legend()
    return figure


def interval_calibration(frame: pd.DataFrame, title: str) -> Figure:
    """Fraction of samples inside the interval, as it is widened or narrowed in log space.

    The abscissa is the factor on the half-width; the curve crosses 1 at the actual coverage.
    """
    figure, axes = _canvas(title, "factor on the interval's half-width", "share inside")
    log = {c: np.log(frame[f"{c}_us"].to_numpy()) for c in ("measured", "predicted", "lo", "hi")}
    error = log["measured"] - log["predicted"]
    above = log["hi"] - log["predicted"]
    below = log["lo"] - log["predicted"]
    factors = np.linspace(0, 2, 41)
    inside = [np.mean((error <= f * above) & (error >= f * below)) for f in factors]
    axes.plot(factors, inside)
    axes.axhline(COVERAGE, color="black", linewidth=0.8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    return figure


def _ape(frame: pd.DataFrame) -> np.ndarray:
    measured = frame["measured_us"].to_numpy()
    errors: np.ndarray = np.abs(frame["predicted_us"].to_numpy() - measured) / measured
    return errors


def _canvas(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def calibration_plot(curves: Sequence[Curve]) -> Figure:
    """Error against number of samples on a device, chosen and random, one panel per family."""
    from matplotlib.figure import Figure

    across = min(len(curves), _PANELS)
    down = -(-len(curves) // across)
    figure = Figure(figsize=(2.4 * across, 1.9 * down + 0.5), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    for axes, curve in zip(panels, curves, strict=False):
        for choice in ("active", "random"):
            errors = 100 * np.array(getattr(curve, choice))
            axes.plot(curve.counts, errors, marker="o", markersize=3, label=choice)
        axes.set_title(curve.family, fontsize=9)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.suptitle(curves[0].device, fontsize=10)
    figure.supxlabel("samples of each family", fontsize=9)
    figure.supylabel("MAPE (%)", fontsize=9)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the file suffix selects the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
