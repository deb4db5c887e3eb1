"""Plots of a sweep: memory against time, and scaling over clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import DatasetError
from .run import pareto


def plot(frame: pd.DataFrame, path: Path) -> None:
    """Plot memory against step time, with the front; per sequence where batches differ."""
    from matplotlib.figure import Figure

    front = pareto(frame, ("step_us", "memory_bytes_per_device"))
    several = frame["batch"].nunique() > 1
    figure = Figure((7, 5), layout="tight")
    axes = figure.subplots()

    def points(own: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        seconds = own["step_us"] / 1e6 / (own["batch"] if several else 1)
        return seconds, own["memory_bytes_per_device"] / 2**30

    for fits, colour in ((False, "lightgrey"), (True, "tab:blue")):
        part: Any = frame[frame["fits"] == fits]
        label = "fits" if fits else "does not fit"
        axes.scatter(*points(part), s=12, c=colour, label=label)
    axes.plot(*points(front), "k-", lw=1)
    xlabel = "step time per sequence (s)" if several else "step time (s)"
    axes.set(xlabel=xlabel, ylabel="memory per device (GiB)", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)


def best_by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """Find the fastest plan that fits for each number of devices and batch.

    Args:
        frame: Results of a sweep.

    Returns:
        Columns ``devices``, ``batch``, ``step_us``, ``plan``, ``per_device`` (batch per device),
        and ``strong`` and ``weak``: tokens per second and device relative to the smallest cluster
        with the same batch, or with the same batch per device.
    """
    fitting = frame[frame["fits"]].sort_values("step_us")
    best = fitting.groupby(["devices", "batch"], as_index=False).first()
    best = best[["devices", "batch", "step_us", "plan"]].assign(
        per_device=best["batch"] / best["devices"],
        rate=best["batch"] / best["step_us"] / best["devices"],
    )
    # The smallest cluster of each group is the reference of its efficiency, so it comes first.
    first = best.sort_values("devices")
    strong = first.groupby("batch")["rate"].transform("first")
    weak = first.groupby("per_device")["rate"].transform("first")
    best = first.assign(strong=first["rate"] / strong, weak=first["rate"] / weak)
    return best.drop(columns="rate").reset_index(drop=True)


def plot_scaling(frame: pd.DataFrame, path: Path) -> None:
    """Plot strong and weak scaling side by side.

    Raises:
        DatasetError: All fitting plans are on clusters of the same size.
    """
    from matplotlib.figure import Figure

    best = best_by_size(frame)
    if best["devices"].nunique() < 2:
        raise DatasetError("scaling needs plans that fit on clusters of at least two sizes")
    figure = Figure((10, 4), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    top = 1.1 * max(1.0, float(best[["strong", "weak"]].max().max()))
    for side, kind, key in zip(axes, ("strong", "weak"), ("batch", "per_device"), strict=True):
        for value, part in best.groupby(key):
            # A single size has no scaling to show.
            if len(part) > 1:
                label = f"batch {value:g}" + (" per device" if kind == "weak" else "")
                side.plot(part["devices"], part[kind], "o-", label=label)
        side.axhline(1.0, color="grey", lw=0.5)
        side.set(title=f"{kind} scaling", xlabel="devices", xscale="log", ylim=(0, top))
        side.set_xscale("log", base=2)
        # The last line is the reference at 1, which needs no legend.
        if side.lines[:-1]:
            side.legend()
    axes[0].set_ylabel("relative tokens/s per device")
    figure.savefig(path, dpi=120)
