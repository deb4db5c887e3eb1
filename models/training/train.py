"""Trains a cost model on a dataset, and compares models on held-out rows and whole programs."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ...common.types import JsonObject
from ...features.dataset import Dataset
from ..core.base import Estimator
from ..core.registry import estimator_class, make_estimator
from ..cost_model import CostModel
from ..estimators.tabular import TabularEstimator
from ..program.context_choice import choose_context
from ..training_data.crossfit import DEFAULT_FOLDS, cross_fit, fit_and_calibrate, predict_entries
from ..training_data.metrics import flatten, metrics_table
from ..training_data.prepared import PreparedDataset, ProgramSample, prepare
from ..training_data.splits import Split, fold_groups, is_family, make_folds, make_split
from ..trust.neighbours import NeighbourTable

logger = logging.getLogger(__name__)
#: Default estimators to compare: all that learn from a table except networks and ensembles.
MODELS = ("roofline", "ridge", "forest", "xgboost")
#: Default splits to report; the others need several devices or runs.
REPORTED_SPLITS = ("random", "unseen_shape", "unseen_family")


def prediction_frame(model: CostModel, data: PreparedDataset, rows: np.ndarray) -> pd.DataFrame:
    """Predictions and measurements, one row per kernel row among ``rows``."""
    own = data.kernel_rows(rows)
    prediction = predict_entries(model.estimator, data, data.entry[own])
    part = data.frame.iloc[own].reset_index(drop=True)
    frame = part[["sample_id", "kernel_hash", "kind", "device", "level", "family", "program"]]
    return frame.assign(
        measured_us=part["latency_us_p50"].to_numpy(np.float64),
        predicted_us=prediction.latency * 1e6,
        lo_us=prediction.lo * 1e6,
        hi_us=prediction.hi * 1e6,
        bound=prediction.bound,
        source=prediction.source,
        in_domain=prediction.in_domain,
    )


def program_frame(model: CostModel, data: PreparedDataset, rows: np.ndarray) -> pd.DataFrame:
    """Predictions and measurements, one row per program row among ``rows``."""
    records = [_program_record(model, data, p) for p in data.programs_among(rows)]
    return pd.DataFrame(records)


def _program_record(
    model: CostModel, data: PreparedDataset, sample: ProgramSample
) -> dict[str, object]:
    alone = predict_entries(model.estimator, data, sample.entries)
    base_s = data.table.base_s[sample.entries]
    kernels, wall = model.predict_in_program(sample.lowered, sample.device, alone, base_s)
    counts = np.array([k.multiplicity for k in sample.lowered.kernels])
    time = kernels.latency * counts
    return {
        "program": sample.name,
        "family": sample.family,
        "set": "zoo" if is_family(sample.family) else "generated",
        "device": sample.device.name,
        "kind": "program",
        "measured_us": sample.wall_s * 1e6,
        "predicted_us": wall.latency * 1e6,
        "lo_us": wall.lo * 1e6,
        "hi_us": wall.hi * 1e6,
        "sum_us": float(time.sum()) * 1e6,
        "labels_us": data.label_sum_s(sample) * 1e6,
        "kernels": len(time),
        # The guard is for programs that take no time.
        "in_domain_share": float(time[kernels.in_domain].sum() / max(time.sum(), 1e-12)),
    }


def _total(table: pd.DataFrame) -> dict[str, float]:
    row = table[table["group"] == "all"].iloc[0]
    return {str(k): float(v) for k, v in row.items() if k != "group"}


@dataclass
class TrainResult:
    """A trained model and its errors on the test part of its split.

    Attributes:
        model: The cost model, fitted to train and validation rows.
        split: Row positions of the parts.
        metrics: One row per group (``all``, ``kind=…``, ``device=…``), kernels of the test part,
            with the label noise.
        predictions: One row per test kernel: ``kind``, ``measured_us``, ``predicted_us``,
            ``lo_us``, ``hi_us``, ``source``, ``in_domain``, ``family``, ``program``, ``device``.
        programs: One row per test program, same columns; empty without program rows.
        program_metrics: Like ``metrics``, for the programs.
        seconds: Wall time of training.
        params: Parameters given to the estimator.
    """

    model: CostModel
    split: Split
    metrics: pd.DataFrame
    predictions: pd.DataFrame
    programs: pd.DataFrame
    program_metrics: pd.DataFrame
    seconds: float = 0.0
    params: JsonObject = field(default_factory=dict)

    @property
    def flat_metrics(self) -> dict[str, float]:
        """Figures by name, for tracking; figures of programs start with ``program/``."""
        flat = flatten(self.metrics)
        if len(self.program_metrics):
            flat |= flatten(self.program_metrics, prefix="program/")
        return flat


def train(
    dataset: Dataset | PreparedDataset,
    model: str = "xgboost",
    split: str = "unseen_family",
    seed: int = 0,
    n_jobs: int = 1,
    *,
    folds: int = DEFAULT_FOLDS,
    **params: object,
) -> TrainResult:
    """Train on the train and validation parts of a split, and evaluate on its test part.

    Args:
        dataset: Samples; call :func:`prepare` once to train on them several times.
        model: Name of the estimator.
        split: Name of the split, one of ``splits.SPLITS``.
        seed: Seed of the split, the folds and the estimator.
        n_jobs: Threads of the estimator.
        folds: Folds of the cross-fitting for intervals and the program model.
        params: Parameters of the estimator.

    Raises:
        DatasetError: Too little data for the split.
        ModelError: No such estimator or parameter.
    """
    data = prepare(dataset)
    parts = make_split(data.frame, split, seed, inside=data.inside)
    rows = parts.fitting
    # Preparation is not timed: it is shared by all models trained on the dataset.
    start = time.perf_counter()
    bundle = fit_bundle(data, rows, model, split, seed, n_jobs, folds, params)
    seconds = time.perf_counter() - start
    predictions = prediction_frame(bundle, data, parts.test)
    programs = program_frame(bundle, data, parts.test)
    metrics = metrics_table(predictions, ("kind", "device"), noise=data.kernel_frame)
    program_metrics = metrics_table(programs, ("device",)) if len(programs) else pd.DataFrame()
    result = TrainResult(
        bundle, parts, metrics, predictions, programs, program_metrics, seconds, dict(params)
    )
    bundle.info["metrics"] = {split: result.flat_metrics}
    logger.info("trained %s on %d rows in %.1f s", model, len(rows), seconds)
    return result


def train_final(
    dataset: Dataset | PreparedDataset,
    model: str = "xgboost",
    seed: int = 0,
    n_jobs: int = 1,
    *,
    folds: int = DEFAULT_FOLDS,
    metrics: Mapping[str, Mapping[str, float]] | None = None,
    **params: object,
) -> CostModel:
    """Train on every row, for shipping. Intervals come from held-out families.

    Args:
        dataset: Samples.
        model: Name of the estimator.
        seed: Seed of the folds and the estimator.
        n_jobs: Threads of the estimator.
        folds: Folds of the cross-fitting.
        metrics: Figures by split from evaluations with the same settings, to store with the model.
        params: Parameters of the estimator.
    """
    data = prepare(dataset)
    rows = np.arange(len(data.frame))
    names = set(fold_groups(data.frame, "unseen_family").astype(str))
    # Intervals should apply to new models: hold out whole families if there are several.
    split = "unseen_family" if len(names) > 1 else "random"
    bundle = fit_bundle(data, rows, model, split, seed, n_jobs, folds, params)
    bundle.info["split"] = "all"
    bundle.info["metrics"] = {name: dict(figures) for name, figures in (metrics or {}).items()}
    return bundle


def fit_bundle(
    data: PreparedDataset,
    rows: np.ndarray,
    model: str,
    split: str,
    seed: int,
    n_jobs: int,
    folds: int,
    params: Mapping[str, object],
) -> CostModel:
    """Fit estimator, intervals, domain, context correction and program model to given rows."""
    factory = estimator_factory(model, seed, n_jobs, params)
    estimator = factory()
    if isinstance(estimator, TabularEstimator):
        crossed = fit_and_calibrate(estimator, data, rows, split, folds, seed)
    else:
        crossed = cross_fit(factory, data, rows, split, folds, seed)
        # An estimator without a table calibrates itself: the folds are for the program model and
        # the table of neighbours.
        estimator = estimator.fit(data.subset(data.kernel_rows(rows)))
    choice = choose_context(data, crossed, seed=seed, n_jobs=n_jobs)
    # Some estimators have default overheads of platforms without measured programs; fitted
    # corrections take precedence.
    choice.program_model.overheads.update(getattr(estimator, "overheads", {}))
    used = sorted(set(data.frame["device"].iloc[rows]))
    return CostModel(
        estimator=estimator,
        program_model=choice.program_model,
        devices={name: data.devices[name] for name in used},
        info={
            "dataset_hash": data.dataset_hash,
            "rows": len(rows),
            "split": split,
            "seed": seed,
            "folds": folds,
            "context_choice": choice.to_dict(),
        },
        neighbour_file=NeighbourTable.fit(data, crossed).to_bytes() if len(crossed.rows) else b"",
        context=choice.correction,
    )


def estimator_factory(
    model: str, seed: int, n_jobs: int, params: Mapping[str, object]
) -> Callable[[], Estimator]:
    """Return a function that makes unfitted estimators, with seed and threads where accepted."""
    accepted = inspect.signature(estimator_class(model)).parameters
    general = {"seed": seed, "n_jobs": n_jobs}
    own = {**{k: v for k, v in general.items() if k in accepted}, **params}
    return lambda: make_estimator(model, **own)


@dataclass
class ProgramReport:
    """Whole programs, each predicted by a model fitted without its family and its kernels.

    Attributes:
        metrics: One row per group: ``all``, ``set=zoo``, ``set=generated``, ``device=…``.
        programs: One row per program: name, family, measured and predicted µs, interval, error.
        families: One row per model family: programs and errors.
    """

    metrics: pd.DataFrame
    programs: pd.DataFrame
    families: pd.DataFrame


def compare_models(
    dataset: Dataset | PreparedDataset,
    models: Sequence[str] = MODELS,
    splits: Sequence[str] = REPORTED_SPLITS,
    n_jobs: int = 1,
) -> pd.DataFrame:
    """Train every model on every split and put the figures side by side.

    Args:
        dataset: Samples.
        models: Names of estimators.
        splits: Names of splits.
        n_jobs: Threads of the estimators.

    Returns:
        One row per (split, model): figures on the split's test kernels, label noise, program
        figures with the prefix ``program_``, and the seconds it took.
    """
    data = prepare(dataset)
    rows = []
    for split in splits:
        for model in models:
            result = train(data, model, split, n_jobs=n_jobs)
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
    n_jobs: int = 1,
    inner_folds: int = 3,
) -> ProgramReport:
    """Cross-validated figures of whole programs, with families held out.

    Args:
        dataset: Samples with program rows.
        model: Name of the estimator.
        folds: Folds over families.
        n_jobs: Threads of the estimators.
        inner_folds: Folds of the cross-fitting within each training.
    """
    data = prepare(dataset)
    parts = []
    for fold in make_folds(data.frame, fold_groups(data.frame), folds, inside=data.inside):
        if not data.programs_among(fold.test):
            continue
        bundle = fit_bundle(data, fold.train, model, "unseen_family", 0, n_jobs, inner_folds, {})
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
