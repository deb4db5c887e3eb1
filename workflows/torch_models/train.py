"""Learn factors on PyTorch's kernels from tables of whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ... import __version__
from ...common.errors import DatasetError, DeviceError
from ...common.progress import counting
from ...common.tables_text import in_percent, print_frame
from ...models.pytorch.model import (
    COSTS,
    UNSEEN,
    CpuTorchModel,
    Measured,
    TorchModel,
    end_keys,
    torch_context,
    widened,
)
from ...models.trust.calibrator import Calibrator, ends, including_zero
from ...predict.cluster.case_table import read_cases, read_rows
from ...predict.devices import resolve_device
from ...predict.locate import OPERATOR_MODEL, model_hash
from ..judging import FOLDS, keep_learned
from .rows import Asking, ModelRow, model_row, seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..settings import ModelLearnSettings

#: Runs whose host may take longer than this share of the kernels' time tell little of kernels.
_HOST = 0.7


def measured_models(
    rows: Sequence[ModelRow], seconds: Sequence[object]
) -> tuple[Measured, list[ModelRow]]:
    """Rows that kernels can be learned from, with their seconds by class of cost.

    Args:
        rows: The rows.
        seconds: Of each from :func:`~.rows.seconds_of`.
    """
    found, kept = [], []
    for row, own in zip(rows, seconds, strict=True):
        if not isinstance(own, dict) or not np.isfinite(row.measured_s):
            continue
        times = [float(own.get(cost, 0.0)) for cost in COSTS]
        if own["host"] < _HOST * sum(times):
            found.append(times)
            kept.append(row)
    if not found:
        raise DatasetError(
            "no row with a measured time can be learned from", hint="latency_ms holds milliseconds"
        )
    contexts = []
    for row in kept:
        framework, _, release = row.framework.partition("@")
        contexts.append(torch_context(resolve_device(row.device, {}), framework, release))
    logs = np.log([row.measured_s for row in kept])
    groups = np.array([row.case.model for row in kept])
    return Measured(np.array(found), contexts, logs, groups), kept


def left_out(data: Measured, key: np.ndarray) -> np.ndarray:
    """Errors of rows by what all rows with another value of a key taught, shape ``(n,)``.

    Args:
        data: Measured models.
        key: Of each row.

    Returns:
        ``log(measured / predicted)``; NaN where no other rows are.
    """
    errors = np.full(len(key), np.nan)
    for value in np.unique(key):
        judge = key == value
        if not judge.all():
            errors[judge] = data.errors(data.fit(~judge))[judge]
    return errors


def train_models(
    data: Measured,
    rows: Sequence[ModelRow],
    families: Sequence[str],
    seed: int = 0,
    kind: type[TorchModel] = TorchModel,
) -> tuple[TorchModel, pd.DataFrame]:
    """Learn effects and intervals.

    Args:
        data: Measured models.
        rows: Their rows.
        families: Of each.
        seed: Of the draw of folds of families.
        kind: Of GPUs, or of CPUs.

    Returns:
        The model, and the errors of rows left out in each way.
    """
    codes = pd.factorize(pd.Series(families))[0]
    order = np.random.default_rng(seed).permutation(codes.max() + 1)
    keys = {
        "family": (order[codes] % FOLDS).astype(str),
        "chip": np.array([row.device for row in rows]),
        "mode": np.array([row.case.mode for row in rows]),
        "layout": np.array([row.case.layout for row in rows]),
        "release": np.array([row.case.torch for row in rows]),
    }
    errors = pd.DataFrame({name: left_out(data, key) for name, key in keys.items()})
    model = kind(data.fit(np.ones(len(rows), bool)))
    found = Calibrator[str]()
    trained = np.array([row.case.mode == "train" for row in rows])
    for known, way in (("known", "family"), ("new", "chip")):
        score = errors[way].to_numpy()
        both = [
            end_keys(known, context["framework"], bool(train))
            for context, train in zip(data.contexts, trained, strict=True)
        ]
        at = np.isfinite(score)
        if not at.any():
            continue
        special = [pair[0] for pair, own in zip(both, at, strict=True) if own]
        found.pool(score[at], special)
        found.ends[known] = including_zero(ends(score[at]))
    for key in [key for key in found.ends if key.startswith("known")]:
        new = key.replace("known", "new", 1)
        # Who knows less is not surer.
        found.widen(new, key)
        if len(set(keys["chip"])) < 2:
            # One chip says nothing of how others differ.
            found.ends[new] = widened(found.ends[new], UNSEEN)
    model.ends = found.ends
    own = data.predicted(model.effects)
    shares = (own / own.sum(axis=1, keepdims=True)).max(axis=0)
    model.shares = {cost: float(s) for cost, s in zip(COSTS, shares, strict=True) if s > 0.0}
    model.provenance = {
        "rows": len(rows),
        "models": int(pd.Series([row.case.model for row in rows]).nunique()),
        "devices": sorted({row.device for row in rows}),
        "vendors": sorted({context["all"] for context in data.contexts}),
    }
    return model, errors


def run_train_models(console: Console, settings: ModelLearnSettings) -> dict[str, TorchModel]:
    """Learn from a table of whole models, print errors of what was left out, save and track.

    Returns:
        The models by platform: of GPUs in the file of the settings, of CPUs beside it.
    """
    table = read_cases(settings.table, "models")
    said = read_rows(table, model_row)[0]
    rows = [row for row in said if row is not None and np.isfinite(row.measured_s)]
    kept = settings.out.with_name(f"{settings.out.stem}-seconds.jsonl")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    identity = f"{__version__} {model_hash(OPERATOR_MODEL)}"
    with counting("recording models") as show:
        seconds = Asking("default", settings.ray, kept, identity, seconds_of).predict(rows, show)
    families = dict(zip(table["id"].astype(str), table.get("family", table["model"]), strict=True))
    platforms = [_platform(row) for row in rows]
    found = {}
    for platform, kind in (("gpu", TorchModel), ("cpu", CpuTorchModel)):
        at = [i for i, own in enumerate(platforms) if own == platform]
        if not at and (platform != "gpu" or set(platforms) & {"cpu"}):
            continue
        data, own = measured_models([rows[i] for i in at], [seconds[i] for i in at])
        names = [str(families[r.id]) for r in own]
        model, errors = train_models(data, own, names, settings.seed, kind)
        figures = left_out_figures(errors)
        title = f"whole models that were left out ({platform}), errors in %"
        print_frame(console, in_percent(figures), title)
        long = figures.melt("left_out", ["mape", "median_ape"])
        cpu = "-cpu" if platform == "cpu" else ""
        out = replace(settings, out=settings.out.with_stem(f"{settings.out.stem}{cpu}"))
        keep_learned(console, out, model, len(model.effects.values), len(own), figures, long)
        found[platform] = model
    return found


def _platform(row: ModelRow) -> str:
    """Platform of a row's device; empty where there is no such device."""
    try:
        return resolve_device(row.device, {}).platform
    except DeviceError:
        return ""


def left_out_figures(errors: pd.DataFrame) -> pd.DataFrame:
    """Errors with families, chips … left out; the frame as of :func:`train_models`."""
    records = []
    for name in errors:
        logs = errors[name].dropna().to_numpy()
        apes = np.abs(np.expm1(-logs))
        records.append(
            {
                "left_out": str(name),
                "rows": len(logs),
                "mape": float(apes.mean()) if len(logs) else np.nan,
                "median_ape": float(np.median(apes)) if len(logs) else np.nan,
                "bias": float(np.expm1(-np.median(logs))) if len(logs) else np.nan,
            }
        )
    return pd.DataFrame(records)
