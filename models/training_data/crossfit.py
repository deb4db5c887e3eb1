"""Predicts every training row by a model fitted without it.

Intervals, the domain's threshold and the program model all need predictions with the error of
unseen kernels; the final model's errors on its own training rows would be far too small. So the
rows are cut into folds like the reported split, each fold is predicted by a model fitted to the
others, and the final model is fitted to all rows (cross-conformal prediction: Vovk, Annals of
Mathematics and Artificial Intelligence 74, 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..core.base import Estimator, KernelPrediction, TableEstimator
from .prepared import PreparedDataset, ProgramSample
from .splits import fold_groups, make_folds, query_names

#: Each fold costs a training. Four leave three quarters of the rows to each model, enough for its
#: errors to represent the final model's. Engineering estimate.
DEFAULT_FOLDS = 4


@dataclass
class CrossFit:
    """Held-out predictions of training rows.

    Attributes:
        rows: Kernel rows, by position in the frame, shape ``(n,)``.
        predicted_s: Their held-out predictions, shape ``(n,)``.
        scores: Their held-out domain scores, shape ``(n,)``; NaN if the estimator has no domain.
        program_kernels: For each program row, the held-out predictions of its kernels (s).
    """

    rows: np.ndarray
    predicted_s: np.ndarray
    scores: np.ndarray
    program_kernels: dict[int, np.ndarray]


def cross_fit(
    factory: Callable[[], Estimator],
    data: PreparedDataset,
    rows: np.ndarray,
    split: str,
    folds: int = DEFAULT_FOLDS,
    seed: int = 0,
) -> CrossFit:
    """Predict every row by a model fitted without its fold.

    A program's kernels are predicted by the model of the fold with the program, which was fitted
    without these kernels, even as parts of other programs.

    Args:
        factory: Makes an unfitted estimator.
        data: The prepared dataset.
        rows: Training rows, by position.
        split: Name of the split that the folds should resemble.
        folds: Number of folds.
        seed: Seed of the folds.
    """
    predicted, scores = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    program_kernels: dict[int, np.ndarray] = {}
    for model, test in fold_models(factory, data, rows, split, folds, seed):
        own = test[data.entry[rows[test]] >= 0]
        entries = data.entry[rows[own]]
        predicted[own] = predict_entries(model, data, entries).latency
        if isinstance(model, TableEstimator) and model.domain is not None and len(own):
            scores[own] = model.domain.score(data.table.take(entries))
        for program in data.programs_among(rows[test]):
            program_kernels[program.row] = predict_program_kernels(model, data, program)
    done = np.isfinite(predicted)
    return CrossFit(rows[done], predicted[done], scores[done], program_kernels)


def fold_models(
    factory: Callable[[], Estimator],
    data: PreparedDataset,
    rows: np.ndarray,
    split: str,
    folds: int,
    seed: int,
) -> Iterator[tuple[Estimator, np.ndarray]]:
    """A model per fold, fitted to the other rows, and the positions of the fold in ``rows``."""
    frame = data.frame.iloc[rows].reset_index(drop=True)
    groups = fold_groups(frame, split)
    for fold in make_folds(frame, groups, folds, seed, inside=data.inside):
        fitting = data.kernel_rows(rows[fold.train])
        # Rows of folds without training rows have no prediction.
        if len(fitting):
            yield fit_rows(factory(), data, fitting, split), fold.test


def fit_and_calibrate(
    estimator: TableEstimator,
    data: PreparedDataset,
    rows: np.ndarray,
    split: str,
    folds: int = DEFAULT_FOLDS,
    seed: int = 0,
) -> CrossFit:
    """Fit an estimator to all rows, with intervals and domain from cross-fitting over them."""
    crossed = cross_fit(estimator.clone, data, rows, split, folds, seed)
    fit_rows(estimator, data, data.kernel_rows(rows), split)
    estimator.calibrate(
        data.table.take(data.entry[crossed.rows]),
        data.latency_s[crossed.rows],
        crossed.predicted_s,
        crossed.scores,
    )
    return crossed


def fit_rows(
    estimator: Estimator, data: PreparedDataset, rows: np.ndarray, split: str
) -> Estimator:
    """Fit an estimator to kernel rows, by the feature table if it uses one."""
    if not isinstance(estimator, TableEstimator):
        return estimator.fit(data.subset(rows))
    frame = data.frame.iloc[rows].reset_index(drop=True)
    table, groups = data.table.take(data.entry[rows]), fold_groups(frame, split)
    if estimator.ranks:
        return estimator.fit_table(table, data.latency_s[rows], groups, query_names(frame))
    return estimator.fit_table(table, data.latency_s[rows], groups)


def predict_entries(
    estimator: Estimator, data: PreparedDataset, entries: np.ndarray
) -> KernelPrediction:
    """Predict entries of the feature table, in their order."""
    if isinstance(estimator, TableEstimator):
        return estimator.predict_table(data.table.take(entries))
    from ...features.kernels.extract import kernels_from_irs

    parts: dict[str, list[int]] = {}
    for place, entry in enumerate(entries.tolist()):
        parts.setdefault(data.entry_device[entry], []).append(place)
    found = KernelPrediction.empty(len(entries))
    for device, places in parts.items():
        kernels = kernels_from_irs([data.irs[entries[p]] for p in places])
        part = estimator.predict(kernels, data.devices[device])
        if part.unclamped is not None and found.unclamped is None:
            found.unclamped = np.empty(len(entries))
        found.put(np.array(places), part)
    return found


def predict_program_kernels(
    estimator: Estimator, data: PreparedDataset, program: ProgramSample
) -> np.ndarray:
    """Latencies of a program's kernels in schedule order, in seconds."""
    # A program repeats its layers: predict each distinct kernel once.
    unique, inverse = np.unique(program.entries, return_inverse=True)
    return predict_entries(estimator, data, unique).latency[inverse]
