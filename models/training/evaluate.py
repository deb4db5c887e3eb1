"""Evaluates models: on chosen rows, side by side, and on whole programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...common.types import JsonObject
from ...features.dataset import Dataset
from ..cost_model import CostModel
from ..training_data.metrics import metrics_table
from ..training_data.prepared import PreparedDataset, prepare
from ..training_data.splits import leave_family_out
from .train import _total, prediction_frame, program_frame

#: Estimators that are compared by default: all that learn from a table but networks and ensembles.
MODELS = ("roofline", "ridge", "forest", "xgboost")
#: Splits that are reported by default; the others need several devices or runs.
REPORTED_SPLITS = ("random", "unseen_shape", "unseen_family")


@dataclass
class ProgramReport:
    """Whole programs, each predicted by a model that saw neither its family nor its kernels.

    Attributes:
        metrics: One row a group: ``all``, ``set=zoo``, ``set=generated``, ``device=…``.
        programs: One row a program: name, family, measured and predicted µs, interval, error.
        families: One row a model family: programs and errors.
    """

    metrics: pd.DataFrame
    programs: pd.DataFrame
    families: pd.DataFrame


def evaluate(
    model: CostModel, dataset: Dataset | PreparedDataset, mask: np.ndarray | None = None
) -> pd.DataFrame:
    """Figures of a model on kernel rows.

    Args:
        model: A trained model.
        dataset: Samples.
        mask: Rows of the (prepared) frame, bool or positions; all if not given.

    Returns:
        One row a group (``all``, ``kind=…``, ``device=…``), beside the label noise.
    """
    data = prepare(dataset)
    rows = np.arange(len(data.frame)) if mask is None else np.asarray(mask)
    positions = np.flatnonzero(rows) if rows.dtype == bool else rows
    frame = prediction_frame(model, data, positions)
    return metrics_table(frame, ("kind", "device"), noise=data.kernel_frame)


def compare_models(
    dataset: Dataset | PreparedDataset,
    models: Sequence[str] = MODELS,
    splits: Sequence[str] = REPORTED_SPLITS,
    seed: int = 0,
    n_jobs: int = 1,
    params: dict[str, JsonObject] | None = None,
) -> pd.DataFrame:
    """Train every model on every split and put the figures side by side.

    Args:
        dataset: Samples.
        models: Names of estimators.
        splits: Names of splits.
        seed: Seed of splits and estimators.
        n_jobs: Threads of the estimators.
        params: Parameters by estimator.

    Returns:
        One row a (split, model): figures on the split's test kernels, label noise, program
        figures with the prefix ``program_``, and the seconds it took.
    """
    from .train import train

    data = prepare(dataset)
    rows = []
    for split in splits:
        for model in models:
            result = train(data, model, split, seed, n_jobs, **(params or {}).get(model, {}))
            row = {"split": split, "model": model, **_total(result.metrics)}
            if len(result.program_metrics):
                figures = _total(result.program_metrics)
                row |= {f"program_{k}": v for k, v in figures.items()}
            rows.append({**row, "seconds": result.seconds})
    return pd.DataFrame(rows)


def program_report(
    dataset: Dataset | PreparedDataset,
    model: str = "xgboost",
    folds: int = 5,
    seed: int = 0,
    n_jobs: int = 1,
    inner_folds: int = 3,
    **params: object,
) -> ProgramReport:
    """Cross-validated figures of whole programs, families held out.

    Args:
        dataset: Samples with program rows.
        model: Name of the estimator.
        folds: Folds over families.
        seed: Seed of folds and estimators.
        n_jobs: Threads of the estimators.
        inner_folds: Folds of the cross-fitting within each training.
        params: Parameters of the estimator.
    """
    from .train import fit_bundle

    data = prepare(dataset)
    parts = []
    for fold in leave_family_out(data.frame, folds, seed, inside=data.inside):
        if not data.programs_among(fold.test):
            continue
        bundle = fit_bundle(
            data, fold.train, model, "unseen_family", seed, n_jobs, inner_folds, params
        )
        parts.append(program_frame(bundle, data, fold.test))
    programs = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if not len(programs):
        return ProgramReport(pd.DataFrame(), programs, pd.DataFrame())
    programs["error"] = programs["predicted_us"] / programs["measured_us"] - 1
    metrics = metrics_table(programs, ("set", "device"))
    return ProgramReport(metrics, programs, _families(programs))


def _families(programs: pd.DataFrame) -> pd.DataFrame:
    size = programs["error"].abs()
    grouped = programs.assign(size=size).groupby("family")
    return grouped.agg(
        programs=("size", "size"), mape=("size", "mean"), median_error=("error", "median")
    ).reset_index()
