"""Models that ship: making the one for GPUs, listing all, printing their cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .features.errors import ModelError

if TYPE_CHECKING:
    from rich.console import Console

    from .features.dataset import Dataset

#: Name of a model's card in its folder.
CARD = "MODEL_CARD.md"


def run_train_passes(
    console: Console, dataset: Dataset, *, out: Path | None, seed: int, register: str | None
) -> Path:
    """Make the model of XLA's GPU kernels from published operators; print its errors.

    Raises:
        DatasetError: The dataset has no passes over memory.
    """
    from .models.gpu.build import build_gpu_model, pass_rows
    from .predict.locate import registered
    from .workflows import print_frame

    rows = pass_rows(dataset)
    model, fit = build_gpu_model(rows, dataset.devices, {"rows": len(rows)}, seed)
    table = pd.DataFrame([
        {"left out": name, "rows": int(e["rows"]), "median %": 100 * e["median"],
         "mean %": 100 * e["mape"]}
        for name, e in fit.errors.items()
    ])  # fmt: skip
    print_frame(console, table, "passes over memory, each chip left out")
    folder = out or (registered() / register if register else Path("models-out") / "gpu-xla")
    model.save(folder)
    console.print(f"saved to {folder}", highlight=False)
    return folder


def model_rows() -> list[dict[str, Any]]:
    """What each available model is, in a few words.

    Raises:
        ModelError: A manifest cannot be read.
    """
    from .models.store import read_manifest
    from .predict.locate import DEFAULT, PLATFORM_DEFAULTS, available

    by_default = {DEFAULT: "cpu", **{name: p for p, name in PLATFORM_DEFAULTS.items()}}
    found = []
    for name, folder in available().items():
        manifest = read_manifest(folder)
        predicts = "operators" if manifest.get("kind") else "programs"
        found.append({
            "name": name,
            "predicts": predicts,
            "estimator": str(manifest.get("estimator") or _estimators(manifest)),
            "devices": ", ".join(sorted(manifest.get("devices", {}))),
            "default for": by_default.get(name, ""),
            "card": (folder / CARD).is_file(),
            "folder": str(folder),
        })  # fmt: skip
    return found


def _estimators(manifest: Mapping[str, Any]) -> str:
    families = manifest.get("families", {}).values()
    return ", ".join(sorted({str(family.get("estimator", "")) for family in families}))


def list_models(console: Console, *, as_json: bool) -> None:
    """Print the models that are there."""
    from .workflows import print_frame

    rows = model_rows()
    if as_json:
        print(json.dumps(rows))
        return
    shown = pd.DataFrame(rows).drop(columns=["folder"])
    shown["card"] = ["yes" if own else "–" for own in shown["card"]]
    print_frame(console, shown, "models; the card of one: opcast models NAME")


def show_model(console: Console, name: str, *, as_json: bool) -> None:
    """Print a model's card, and the figures of its manifest.

    Raises:
        ModelError: There is no such model.
    """
    from .models.store import read_manifest
    from .predict.locate import find_model

    folder = find_model(name)
    manifest = read_manifest(folder)
    if as_json:
        print(json.dumps(manifest))
        return
    card = folder / CARD
    if not card.is_file():
        raise ModelError(
            "the model has no card", where=str(card), hint="its figures: opcast models NAME --json"
        )
    console.print(card.read_text(), markup=False, highlight=False)
