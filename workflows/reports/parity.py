"""Plots of predictions of left-out rows against what was measured, as densities.

Cells of a grid say how many rows lie in them, not which, so that tables that may not be passed on
can be shown.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What answers are called, by metric of the tables.
_NAMES = {
    "step": "step time",
    "tpot": "TPOT",
    "ttft": "TTFT",
    "per_token": "1 / throughput",
    "latency": "latency",
}
#: Cells of the grid along an axis.
_CELLS = 36
#: Width and height of a panel in inches, and its pixels an inch.
_INCHES, _DPI = 3.4, 90
#: Colours of a picture, so that it takes half of the bytes.
_COLOURS = 64
#: Lines beside the diagonal: too fast, or too slow, by so much.
_BESIDE = 1.25


def draw_parity(left: pd.DataFrame, path: Path) -> None:
    """Draw predicted against measured seconds, a panel for each metric.

    Args:
        left: Rows with ``metric``, ``measured`` and ``predicted``, as ``opcast train --left-out``
            writes them, of one way of leaving out.
        path: PNG to write; the same rows give the same bytes.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    from ...common.files import replacing

    parts = list(left.groupby("metric"))
    figure = Figure(figsize=(_INCHES * len(parts), _INCHES), dpi=_DPI, layout="constrained")
    for axes, (metric, part) in zip(
        figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True
    ):
        _panel(axes, part)
        axes.set_title(f"{_NAMES.get(str(metric), str(metric))}, {len(part):,} rows", fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    with replacing(path) as partial, Image.open(drawn) as image:
        image.convert("RGB").quantize(_COLOURS).save(partial, "PNG", optimize=True)


def _panel(axes: Axes, part: pd.DataFrame) -> None:
    measured, predicted = part["measured"].to_numpy(float), part["predicted"].to_numpy(float)
    axes.hexbin(
        measured, predicted, gridsize=_CELLS, xscale="log", yscale="log", bins="log",
        mincnt=1, cmap="viridis", linewidths=0.1,
    )  # fmt: skip
    ends = [
        min(measured.min(), predicted.min()) / _BESIDE,
        max(measured.max(), predicted.max()) * _BESIDE,
    ]
    for factor, width in ((1.0, 0.9), (_BESIDE, 0.4), (1 / _BESIDE, 0.4)):
        axes.plot(ends, [factor * end for end in ends], color="black", linewidth=width)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.set_xlabel("measured (s)", fontsize=8)
    axes.set_ylabel("predicted (s)", fontsize=8)
    axes.tick_params(labelsize=7)
