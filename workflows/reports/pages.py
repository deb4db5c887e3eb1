"""Generate the accuracy pages: one for each kind of prediction, and their index.

Figures of operators are read from the shipped model; the others are in ``pages.yaml``, as printed
by training and evaluation. Plots of predictions against measurements show densities, which do not
reveal single rows of tables that may not be redistributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import own_data
from ...common.tables_text import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

    from .settings import PagesSettings


#: Command that writes the pages.
MADE_BY = "opcast report pages --out docs/accuracy"
#: Marks a page as generated.
MARK = f"> **Generated** by `{MADE_BY}`; do not edit it by hand.\n"
#: What is held out in the splits of published operators.
_SPLITS = {
    "val": "shapes",
    "val_group": "layers, heads, models",
    "dev_larger_shape": "larger shapes",
    "dev_unseen_gpu": "A100 PCIe 80 GB",
}
#: Columns to group the metrics of a manifest by, and the figures to average.
_OF_FAMILY, _FIGURES = ["key", "split"], ("mape", "median_ape", "coverage", "width_ratio")
#: Columns of the pages with figures from ``pages.yaml``.
_COLUMNS = ("what", "held out", "error", "inside", "width", "noise", "blind")
#: Columns of comparisons with other projects.
_PEERS = ("project", "rows", "its error", "opcast's", "held out of opcast")
#: Names of metrics in plots.
_NAMES = {
    "step": "step time",
    "tpot": "TPOT",
    "ttft": "TTFT",
    "per_token": "1 / throughput",
    "latency": "latency",
}
#: Cells of the density grid along an axis.
_CELLS = 36
#: Width and height of a panel in inches, and pixels per inch.
_INCHES, _DPI = 3.4, 90
#: Number of colours of a picture, which halves its size.
_COLOURS = 64
#: Ratio marked by the lines beside the diagonal.
_BESIDE = 1.25


class Plot(TypedDict):
    """Plot of a page: what is held out, and the caption."""

    left_out: str
    caption: str


class Kind(TypedDict, total=False):
    """A page in ``pages.yaml``; bars separate the cells in the lines of ``rows`` and ``peers``."""

    title: str
    command: str
    models: str
    text: str
    rows: str
    plot: Plot
    peers: str
    beside: str
    left: str
    noise: str
    more: str


def pages() -> dict[str, str]:
    """Make the text of every page, by file name."""
    kinds = _kinds()
    index, operators = kinds.pop("index"), kinds.pop("operators")
    errors = operator_errors()
    found = {f"{name}.md": _page(name, kind) for name, kind in kinds.items()}
    found["operators.md"] = _operators(operators, errors)
    found["index.md"] = _index(index, kinds, errors)
    return found


def _kinds() -> dict[str, Kind]:
    """Load the data of the pages by name."""
    return dict(own_data("workflows/reports/pages.yaml"))


def _cells(text: str) -> list[list[str]]:
    """Split lines into cells; an empty first cell repeats that of the row above."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        first, *others = (cell.strip() for cell in line.split("|"))
        rows.append([first or rows[-1][0], *others])
    return rows


def _page(name: str, kind: Kind) -> str:
    lines = [f"# Accuracy: {kind['title']}", "", MARK]
    lines += [kind["text"]] if "text" in kind else []
    lines += [f"Models: {kind['models']}.", "", *markdown_table(_COLUMNS, _cells(kind["rows"])), ""]
    lines += ["```", f"$ {kind['command']}", "```", ""]
    if "plot" in kind:
        lines += [f"![Predicted against measured]({name}.png)", "", kind["plot"]["caption"]]
    if "peers" in kind:
        lines += ["Errors of other projects on the same rows:", ""]
        lines += [*markdown_table(_PEERS, _cells(kind["peers"])), "", kind["beside"]]
    else:
        lines += ["We know of no predictions of these rows by other projects.", ""]
    lines += [f"For the methods and their limits, see {_links(kind)}.", ""]
    return "\n".join(lines)


def _links(kind: Kind) -> str:
    names = (name.strip() for name in kind["more"].split(","))
    return ", ".join(f"[{name}](../{name})" for name in names)


class Errors(NamedTuple):
    """Held-out errors of a family of operators.

    Attributes:
        key: The family.
        left: Split, or the devices of the held-out chip joined by ``+``.
        rows: Number of test rows.
        mape: Mean absolute relative error.
        median: Median absolute relative error.
        coverage: Coverage of the 90 % interval; 0 (not shown) for chips.
        width: Ratio of its bounds; 0 (not shown) for chips.
    """

    key: str
    left: str
    rows: float
    mape: float
    median: float
    coverage: float = 0.0
    width: float = 0.0

    @property
    def text(self) -> str:
        """Mean and, in brackets, median in percent."""
        return f"{100 * self.mape:.1f} ({100 * self.median:.1f})"


def operator_errors() -> list[Errors]:
    """Read the errors of the shipped operator model from its manifest."""
    from ...models.core.registry import OPERATOR_MODEL, PRETRAINED
    from ...models.core.store import read_manifest
    from ...models.operators.report import metrics_of

    manifest = read_manifest(PRETRAINED / OPERATOR_MODEL)
    seen = pd.DataFrame(metrics_of(manifest))
    found = [_mean(str(key), str(split), own) for (key, split), own in seen.groupby(_OF_FAMILY)]
    return found + [
        Errors(key, chip, own["rows"], own["mape"], own["median"])
        for key, family in sorted(manifest["families"].items())
        for chip, own in family.get("left_out", {}).items()
    ]


def _mean(key: str, split: str, part: pd.DataFrame) -> Errors:
    """Mean figures over devices and number formats, weighted by rows."""
    weight = part["n"].to_numpy(float)
    mape, median, coverage, width = (
        float(np.average(part[name].to_numpy(float), weights=weight)) for name in _FIGURES
    )
    return Errors(key, split, float(weight.sum()), mape, median, coverage, width)


def _operators(kind: Kind, errors: Sequence[Errors]) -> str:
    rows = [
        [
            *(f"`{e.key}`", _SPLITS[e.left], f"{e.rows:,.0f}", e.text),
            *(f"{100 * e.coverage:.0f}", f"{e.width:.2f}"),
        ]
        for e in errors
        if e.left in _SPLITS
    ]
    chips: dict[str, list[str]] = {}
    for e in errors:
        if e.left not in _SPLITS:
            chips.setdefault(e.key, []).append(f"{_chip(e.left)} {e.text}")
    left = [[f"`{key}`", ", ".join(own)] for key, own in chips.items()]
    lines = ["# Accuracy: operators", "", MARK, kind["text"]]
    lines += [*markdown_table(["family", "held out", "rows", "error", "inside", "width"], rows), ""]
    lines += [kind["left"], *markdown_table(["family", "held-out chip: error"], left), ""]
    lines += [kind["noise"], f"For details, see {_links(kind)}.", ""]
    return "\n".join(lines)


def _chip(devices: str) -> str:
    """Name a chip by its first device, followed by the number of others."""
    first, *others = devices.split("+")
    return first + (f" (+{len(others)})" if others else "")


def _index(index: Kind, kinds: Mapping[str, Kind], errors: Sequence[Errors]) -> str:
    """Make the index: for each page, the first row and the last one that is entirely blind."""
    rows: list[list[str]] = []
    for key, name in (("graph/linear", "GEMM"), ("graph/generation_attention", "decode attention")):
        own = {e.left: 100 * e.mape for e in errors if e.key == key}
        chips = [error for left, error in own.items() if left not in _SPLITS]
        link = "[operators](operators.md)"
        rows.append([link, f"{name}; held out: layers, heads", f"{own['val_group']:.1f}"])
        span = f"{min(chips):.0f} to {max(chips):.0f}"
        what = f"{name}; held out: each chip, but not from constants of the physics"
        rows.append([link, what, span])
    for name, kind in kinds.items():
        own_rows = _cells(kind["rows"])
        blind = [row for row in own_rows if row[-1] != "no"]
        for row in (own_rows[0], blind[-1]):
            link = f"[{kind['title']}]({name}.md)"
            rows.append([link, f"{row[0]}; held out: {row[1]}", row[2]])
    lines = [
        "# Accuracy",
        "",
        MARK,
        index["text"],
        *markdown_table(["page", "what", "error, %"], rows),
        "",
    ]
    return "\n".join([*lines, index["more"]])


def run_pages(console: Console, settings: PagesSettings) -> None:
    """Write the pages."""
    from ...common.files import write_text
    from ...common.progress import wrote

    settings.out.mkdir(parents=True, exist_ok=True)
    found = pages()
    for name, text in found.items():
        write_text(settings.out / name, text)
    drawn = _draw(settings) if settings.left_out else 0
    wrote(settings.out, f"{len(found)} pages, {drawn} plots")


def _draw(settings: PagesSettings) -> int:
    """Draw the plots whose tables of held-out rows exist; return their number."""
    from ...common.parquet import read_table

    assert settings.left_out is not None
    plots = {name: kind["plot"] for name, kind in _kinds().items() if "plot" in kind}
    tables = {name: settings.left_out / f"{name}.parquet" for name in plots}
    there = {name: path for name, path in tables.items() if path.exists()}
    if not there:
        raise DatasetError(
            f"contains none of {', '.join(path.name for path in tables.values())}",
            where=str(settings.left_out),
            hint="write them with opcast train --left-out",
        )
    for name, path in there.items():
        left = read_table(path, ("metric", "left_out", "measured", "predicted"))
        way = plots[name]["left_out"]
        own = left[left["left_out"] == way]
        if own.empty:
            raise DatasetError(f"has no row with left_out={way}", where=str(path))
        draw_parity(own, settings.out / f"{name}.png")
    return len(there)


def draw_parity(left: pd.DataFrame, path: Path) -> None:
    """Draw predicted against measured seconds, with a panel for each metric.

    Args:
        left: Rows of ``opcast train --left-out`` for one way of holding out, with ``metric``,
            ``measured`` and ``predicted``.
        path: PNG file to write; the same rows give the same bytes.
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
