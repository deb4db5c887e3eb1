"""List the available models and print their cards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..common.paths import PACKAGE
from ..common.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from rich.console import Console


#: Name of a model's card in its folder, and the folder of the cards of shipped models, which is
#: separate because training replaces a model's folder.
CARD = "MODEL_CARD.md"
CARDS = PACKAGE / "models" / "pretrained" / "cards"


def model_rows() -> list[JsonObject]:
    """Describe each available model in a row.

    Raises:
        ModelError: A manifest cannot be read.
    """
    from ..models.core.registry import OPERATOR_MODEL
    from ..models.core.store import predicts_operators, read_manifest
    from ..predict.locate import DEFAULT, PLATFORM_DEFAULTS, available

    by_default = {DEFAULT: "cpu", **{name: p for p, name in PLATFORM_DEFAULTS.items()}}
    rows = []
    for name, folder in available().items():
        manifest = read_manifest(folder)
        operators = predicts_operators(manifest)
        rows.append(
            {
                "name": name,
                "predicts": "operators" if operators else "programs",
                "default for": by_default.get(name, ""),
                "rows": int(manifest.get("rows", 0)),
                "learned from": ", ".join(sorted(manifest.get("devices", {}))) or OPERATOR_MODEL,
                "folder": str(folder),
            }
        )
    return rows


def list_models(console: Console, *, as_json: bool) -> None:
    """Print the available models."""
    from ..common.tables_text import print_frame

    rows = model_rows()
    if as_json:
        print(json.dumps(rows))
        return
    shown = pd.DataFrame(rows).drop(columns=["folder"])
    print_frame(console, shown, "models; to print a card: opcast models NAME")


def show_model(console: Console, name: str, *, as_json: bool, against: str | None = None) -> None:
    """Print a model's card, if it has one, and the figures of its manifest.

    Args:
        console: Console to print to.
        name: Name or folder of the model.
        as_json: Whether to print the card and the manifest as JSON instead.
        against: Another model to compare its figures with.

    Raises:
        ModelError: There is no such model.
    """
    from ..common.tables_text import print_frame
    from ..models.core.store import read_manifest
    from ..predict.locate import find_model

    folder = find_model(name)
    manifest = read_manifest(folder)
    card = card_of(folder)
    if as_json:
        print(json.dumps({"name": folder.name, "card": card, "manifest": manifest}))
        return
    table = figures(manifest)
    if against is not None:
        other = find_model(against)
        table = beside(table, figures(read_manifest(other)))
        print_frame(console, table, f"errors in %: {folder.name}, and {other} (was)")
        return
    if card:
        console.print(card)
    if len(table):
        print_frame(console, table, "figures of its manifest, errors in %")


def card_of(folder: Path) -> str:
    """Read a model's card from its folder or the shipped cards; empty if there is none."""
    places = (folder / CARD, CARDS / f"{folder.name}.md")
    return next((place.read_text() for place in places if place.is_file()), "")


def figures(manifest: JsonMapping) -> pd.DataFrame:
    """Tabulate a manifest's errors: on each split, and on each chip left out of training."""
    rows = []
    for key, family in manifest.get("families", {}).items():
        for chip, errors in family.get("left_out", {}).items():
            rows.append(_figure(f"{key}, {chip} left out", errors))
    metrics = manifest.get("metrics", {})
    if isinstance(metrics, Sequence):
        from ..models.operators.report import metrics_of

        rows += _of_operators(metrics_of(manifest))
    else:
        for split, errors in metrics.items():
            rows.append(_figure(split, errors))
            programs = {k.removeprefix("program/"): v for k, v in errors.items() if "program/" in k}
            if programs:
                rows.append(_figure(f"{split}, programs", programs))
    return pd.DataFrame(rows, columns=["judged on", "rows", "median", "mean", "inside", "width"])


def beside(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Join the figures of two manifests (:func:`figures`); those of the second are ``was``."""
    return table.merge(other, on="judged on", how="outer", suffixes=("", ", was"), sort=False)


def _of_operators(metrics: Sequence[JsonMapping]) -> list[JsonObject]:
    """Errors of each family by split and device, pooled over number formats."""
    parts: dict[str, list[JsonMapping]] = {}
    for own in metrics:
        parts.setdefault(f"{own['key']}, {own['device']}, split {own['split']}", []).append(own)
    return [
        _figure(
            name,
            {
                "n": sum(part["n"] for part in own),
                # Means can be pooled by rows, medians cannot.
                **{name: _weighted(own, name) for name in ("mape", "coverage") if name in own[0]},
                **(own[0] if len(own) == 1 else {}),
            },
        )
        for name, own in sorted(parts.items())
    ]


def _weighted(parts: Sequence[JsonMapping], figure: str) -> float:
    """Mean of a figure over parts, weighted by rows."""
    rows = sum(part["n"] for part in parts)
    return float(sum(part["n"] * part[figure] for part in parts) / rows)


def _figure(name: str, errors: Mapping[str, float]) -> JsonObject:
    median = errors.get("median", errors.get("median_ape", float("nan")))
    count = errors.get("rows", errors.get("n", 0))
    return {
        "judged on": name,
        "rows": int(count),
        "median": 100 * median,
        "mean": 100 * errors.get("mape", float("nan")),
        "inside": 100 * errors.get("coverage", float("nan")),
        "width": errors.get("width", errors.get("width_ratio", float("nan"))),
    }
