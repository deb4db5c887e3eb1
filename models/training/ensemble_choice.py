"""Decides whether an ensemble is worth keeping: it must beat its best member on held-out groups.

The choice uses cross-validation over the training rows. Fitting the ensemble also fits its members
to all of a fold's rows, so one pass evaluates them all. Held out are model families and, with two
or more devices among the training rows, each device in turn. The ensemble is kept if its error is
below every member's in each of these; otherwise the member with the least error replaces it. The
test part of the split is only for reporting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from ...common.errors import ModelError
from ...features.dataset import Dataset
from ..core.registry import make_estimator
from ..estimators.ensemble import EnsembleEstimator
from ..training_data.crossfit import DEFAULT_FOLDS, fit_rows
from ..training_data.metrics import mean_abs_log, median_ape
from ..training_data.prepared import PreparedDataset, prepare
from ..training_data.splits import Split, fold_groups, make_folds, make_split
from .train import TrainResult, train

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class EnsembleChoice:
    """The chosen model, and the figures behind the choice.

    Attributes:
        winner: ``ensemble``, or the name of its best member.
        params: Parameters of the winner.
        table: One row per (``split``, ``model``): ``n``, ``mean_abs_log`` and ``median_ape`` by
            cross-validation over training rows.
        test: The same figures on the test part, by model, which were not used for the choice.
    """

    winner: str
    params: dict[str, object]
    table: pd.DataFrame
    test: pd.DataFrame

    @property
    def kept(self) -> bool:
        """Whether the ensemble was kept."""
        return self.winner == ENSEMBLE

    @property
    def sentence(self) -> str:
        """The decision in one sentence."""
        parts = []
        for split, own in self.table.groupby("split", sort=False):
            errors = own.set_index("model")["mean_abs_log"]
            rest = errors.drop(ENSEMBLE)
            parts.append(
                f"{split}: ensemble {errors[ENSEMBLE]:.4f}, best member {rest.idxmin()} "
                f"{rest.min():.4f}"
            )
        verdict = "kept the ensemble" if self.kept else f"saves its member {self.winner} instead"
        beats = "beats" if self.kept else "does not beat"
        return f"the ensemble {beats} its best member ({'; '.join(parts)}): {verdict}"

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest."""
        return {
            "winner": self.winner,
            "cross_validated": self.table.to_dict("records"),
            "test": self.test.to_dict("records"),
        }


def train_ensemble(
    dataset: Dataset | PreparedDataset,
    split: str = "unseen_family",
    seed: int = 0,
    n_jobs: int = 1,
    *,
    folds: int = DEFAULT_FOLDS,
    **params: object,
) -> tuple[TrainResult, EnsembleChoice]:
    """Train an ensemble, or its best member if the ensemble is not better.

    Args:
        dataset: Samples.
        split: Name of the split to report on.
        seed: Seed of the split, the folds and the estimators.
        n_jobs: Threads of the estimators.
        folds: Folds of the cross-validation, and of the cross-fitting of the winner.
        params: Parameters of the ensemble.

    Returns:
        The training result of the winner, with the decision in its manifest, and the decision.

    Raises:
        DatasetError: Too little data for the split.
        ModelError: No such member or parameter.
    """
    data = prepare(dataset)
    parts = make_split(data.frame, split, seed, inside=data.inside)
    rows = parts.fitting
    own = {"seed": seed, "n_jobs": n_jobs, **params}
    table = cross_validate(data, rows, own, folds, seed)
    winner = choose(table)
    # After the choice, only for the report.
    predictions = _predictions(data, rows, parts.test, own, split)
    test = pd.DataFrame([] if predictions is None else _figures(predictions, split=split))
    ensemble = cast("EnsembleEstimator", make_estimator(ENSEMBLE, **own))
    chosen = params if winner == ENSEMBLE else ensemble.member_params(winner)
    choice = EnsembleChoice(winner, dict(chosen), table, test)
    extra = {k: v for k, v in chosen.items() if k not in ("seed", "n_jobs")}
    result = train(data, winner, split, seed, n_jobs, folds=folds, **extra)
    result.model.info["ensemble_choice"] = choice.to_dict()
    return result, choice


def choose(table: pd.DataFrame) -> str:
    """Name of the model to keep, by the figures of :func:`cross_validate`."""
    errors = table.pivot(index="split", columns="model", values="mean_abs_log")
    members = errors.drop(columns=ENSEMBLE)
    # On every split: an ensemble costs more than a member, so it has to be better throughout.
    if (errors[ENSEMBLE] < members.min(axis=1)).all():
        return ENSEMBLE
    return str(members.mean(axis=0).idxmin())


def cross_validate(
    data: PreparedDataset, rows: np.ndarray, params: Mapping[str, object], folds: int, seed: int
) -> pd.DataFrame:
    """Errors of an ensemble and its members on held-out groups of the given rows.

    Args:
        data: The prepared dataset.
        rows: Training rows, by position.
        params: Parameters of the ensemble.
        folds: Folds over families.
        seed: Seed of the folds.

    Returns:
        One row per (``split``, ``model``): ``n``, ``mean_abs_log`` (mean absolute log-ratio of
        predicted to measured) and ``median_ape``.
    """
    frame = data.frame.iloc[rows].reset_index(drop=True)
    by_member: dict[str, list[pd.DataFrame]] = {}
    for name, fold in _held_out(frame, data, folds, seed):
        # Folds have no validation part; splits by device do, and it counts as training data here.
        part = _predictions(data, rows[fold.fitting], rows[fold.test], params, name)
        if part is not None:
            by_member.setdefault(name, []).append(part)
    records: list[dict[str, object]] = []
    for name, pieces in by_member.items():
        records += _figures(pd.concat(pieces), split=name)
    if not records:
        raise ModelError("too few training rows to judge an ensemble", hint="profile more programs")
    return pd.DataFrame(records)


def _held_out(
    frame: pd.DataFrame, data: PreparedDataset, folds: int, seed: int
) -> Iterator[tuple[str, Split]]:
    groups = fold_groups(frame, "unseen_family")
    for fold in make_folds(frame, groups, folds, seed, inside=data.inside):
        yield "unseen_family", fold
    devices = sorted(set(frame["device"]))
    for device in devices if len(devices) > 1 else ():
        yield "unseen_device", make_split(frame, "unseen_device", seed, held_out=device)


def _predictions(
    data: PreparedDataset,
    fitting: np.ndarray,
    held: np.ndarray,
    params: Mapping[str, object],
    split: str,
) -> pd.DataFrame | None:
    """Measured and predicted seconds of the held-out kernels, one column per model."""
    fitting, held = data.kernel_rows(fitting), data.kernel_rows(held)
    if not len(fitting) or not len(held):
        return None
    model = cast("EnsembleEstimator", make_estimator(ENSEMBLE, **params))
    fit_rows(model, data, fitting, split)
    table = data.table.take(data.entry[held])
    # The members were already fitted to all rows of the fold, so they are evaluated at no further
    # cost.
    columns = {name: member.point(table) for name, member in model.members.items()}
    columns = {ENSEMBLE: model.point(table), **columns}
    return pd.DataFrame({"measured": data.latency_s[held], **columns})


def _figures(predictions: pd.DataFrame, **labels: str) -> list[dict[str, object]]:
    measured = predictions["measured"].to_numpy()
    records = []
    for name in predictions.columns.drop("measured"):
        pair = measured, predictions[name].to_numpy()
        figures = {"mean_abs_log": mean_abs_log(*pair), "median_ape": median_ape(*pair)}
        records.append({**labels, "model": str(name), "n": len(predictions), **figures})
    return records
