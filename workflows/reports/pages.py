"""The pages of accuracy: one for each kind of question, and what leads to them.

Figures of operators are read from the shipped model's file; the others are data beside this module,
as training and evaluation printed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np
import pandas as pd

from ...common.files import parse_yaml

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import PagesSettings

#: Command that writes the pages.
MADE_BY = "opcast report pages docs/accuracy"
#: Marks a page as generated, as the other reports.
MARK = f"> **Generated** by `{MADE_BY}`; do not edit it by hand.\n"
#: What splits of published operators hold.
_SPLITS = {
    "val": "shapes",
    "val_group": "layers, heads, models",
    "dev_larger_shape": "larger shapes",
    "dev_unseen_gpu": "A100 PCIe 80 GB",
}


#: Columns of pages whose figures are data.
_COLUMNS = ("what", "left out", "error", "inside", "width", "noise", "blind")


class Kind(TypedDict, total=False):
    """A page in ``pages.yaml``; ``rows`` has a line for each, with bars between its cells."""

    title: str
    command: str
    models: str
    text: str
    rows: str
    peers: list[list[str]]
    left: str
    noise: str
    more: str


def pages() -> dict[str, str]:
    """Text of every page by the name of its file."""
    data = Path(__file__).with_name("pages.yaml").read_text(encoding="utf-8")
    kinds = cast("dict[str, Kind]", parse_yaml(data))
    index, operators = kinds.pop("index"), kinds.pop("operators")
    metrics = operator_metrics()
    found = {f"{name}.md": _page(kind) for name, kind in kinds.items()}
    found["operators.md"] = _operators(operators, metrics)
    found["index.md"] = _index(index, kinds, metrics)
    return found


def _cells(kind: Kind) -> list[list[str]]:
    """Cells of a page's rows; an empty first cell is that of the row above."""
    rows: list[list[str]] = []
    for line in kind["rows"].splitlines():
        first, *others = (cell.strip() for cell in line.split("|"))
        rows.append([first or rows[-1][0], *others])
    return rows


def _page(kind: Kind) -> str:
    lines = [f"# Accuracy: {kind['title']}", "", MARK]
    lines += [kind["text"]] if "text" in kind else []
    lines += [f"Models: {kind['models']}.", "", *table(_COLUMNS, _cells(kind)), ""]
    lines += ["```", f"$ {kind['command']}", "```", ""]
    if "peers" in kind:
        peers = [[who, says, f"[{at}](../{at})"] for who, says, at in kind["peers"]]
        lines += ["What others publish:", "", *table(["who", "what", "stated in"], peers), ""]
    else:
        lines += ["No predictions of these rows by other projects are known to us.", ""]
    lines += [f"What the figures mean and what limits them: {_links(kind)}.", ""]
    return "\n".join(lines)


def _links(kind: Kind) -> str:
    names = (name.strip() for name in kind["more"].split(","))
    return ", ".join(f"[{name}](../{name})" for name in names)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def operator_metrics() -> pd.DataFrame:
    """Errors of the shipped model of operators, as its file keeps them.

    Returns:
        A row for each family and split, or chip that was left out: ``key``, ``split``, ``n``,
        ``mape``, ``median``, ``coverage`` and ``width``; the latter two are NaN of chips.
    """
    from ...models.core.registry import OPERATOR_MODEL, PRETRAINED
    from ...models.core.store import read_manifest
    from ...models.operators.report import metrics_of

    manifest = read_manifest(PRETRAINED / OPERATOR_MODEL)
    seen = pd.DataFrame(metrics_of(manifest)).rename(
        columns={"median_ape": "median", "width_ratio": "width"}
    )
    rows = [
        {"key": key, "split": split, **_mean(part)}
        for (key, split), part in seen.groupby(["key", "split"])
    ]
    rows += [
        {
            "key": key,
            "split": chip,
            "n": errors["rows"],
            "mape": errors["mape"],
            "median": errors["median"],
            "coverage": np.nan,
            "width": np.nan,
        }
        for key, family in sorted(manifest["families"].items())
        for chip, errors in family.get("left_out", {}).items()
    ]
    return pd.DataFrame(rows)


def _mean(part: pd.DataFrame) -> dict[str, float]:
    """Figures over devices and formats, each by its rows."""
    weight = part["n"].to_numpy(float)
    names = ("mape", "median", "coverage", "width")
    means = {name: float(np.average(part[name].to_numpy(float), weights=weight)) for name in names}
    return {"n": float(weight.sum()), **means}


def _operators(kind: Kind, metrics: pd.DataFrame) -> str:
    splits = metrics[metrics["split"].isin(list(_SPLITS))]
    rows = [
        [
            f"`{row.key}`",
            _SPLITS[str(row.split)],
            f"{row.n:,.0f}",
            f"{100 * row.mape:.1f} ({100 * row.median:.1f})",
            f"{100 * row.coverage:.0f}",
            f"{row.width:.2f}",
        ]
        for row in splits.itertuples()
    ]
    chips = metrics[~metrics["split"].isin(list(_SPLITS))]
    left = [
        [
            f"`{key}`",
            ", ".join(
                f"{_chip(str(row.split))} {100 * row.mape:.0f} ({100 * row.median:.0f})"
                for row in part.itertuples()
            ),
        ]
        for key, part in chips.groupby("key")
    ]
    lines = ["# Accuracy: operators", "", MARK, kind["text"]]
    lines += [*table(["family", "left out", "rows", "error", "inside", "width"], rows), ""]
    lines += [kind["left"], *table(["family", "chip left out: error"], left), ""]
    lines += [kind["noise"], f"More: {_links(kind)}.", ""]
    return "\n".join(lines)


def _chip(devices: str) -> str:
    """A chip by its first device, with how many more have it."""
    first, *others = devices.split("+")
    return first + (f" (+{len(others)})" if others else "")


def _index(index: Kind, kinds: Mapping[str, Kind], metrics: pd.DataFrame) -> str:
    """The first page: of each kind the first row, and the last one that nothing was fitted to."""
    rows: list[list[str]] = []
    for key, name in (("graph/linear", "GEMM"), ("graph/generation_attention", "decode attention")):
        own = metrics[metrics["key"] == key].set_index("split")["mape"] * 100
        chips = own.drop(list(_SPLITS), errors="ignore")
        link = "[operators](operators.md)"
        rows.append([link, f"{name}; left out: layers, heads", f"{own['val_group']:.1f}"])
        span = f"{chips.min():.0f} to {chips.max():.0f}"
        rows.append([link, f"{name}; left out: each chip, which constants knew", span])
    for name, kind in kinds.items():
        own_rows = _cells(kind)
        blind = [row for row in own_rows if row[-1] != "no"]
        for row in (own_rows[0], blind[-1]):
            link = f"[{kind['title']}]({name}.md)"
            rows.append([link, f"{row[0]}; left out: {row[1]}", row[2]])
    lines = ["# Accuracy", "", MARK, index["text"], *table(["page", "what", "error, %"], rows), ""]
    return "\n".join([*lines, index["more"]])


def run_pages(console: Console, settings: PagesSettings) -> None:
    """Write the pages."""
    from ...common.files import write_text
    from ...common.progress import wrote

    settings.out.mkdir(parents=True, exist_ok=True)
    found = pages()
    for name, text in found.items():
        write_text(settings.out / name, text)
    wrote(settings.out, f"{len(found)} pages")
