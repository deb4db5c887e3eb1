"""The result of a search for hyper-parameters, and the file that hands it to training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...common.errors import ModelError
from ...common.files import parse_json, write_text

#: Settings of training that are not parameters of an estimator, and so do not belong in the file.
_SETTINGS = {"dataset", "model", "split", "seed", "n_jobs", "folds", "held_out"}


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial.

    Attributes:
        number: Its number in the study.
        params: Keywords that were tried.
        error: Cross-validated error; of the folds done, if it was stopped early.
        pruned: Whether it was stopped early.
        seconds: Wall time of the trial.
    """

    number: int
    params: dict[str, object]
    error: float
    pruned: bool
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        model: Name of the estimator.
        split: Name of the split.
        objective: Name of the error that was minimised.
        best: Keywords of the estimator to train with; empty if its defaults were not beaten.
        error: Cross-validated error of ``best``.
        default_error: Cross-validated error of the defaults, on the same folds.
        trials: All finished trials of the study.
        study: Its SQLite file.
    """

    model: str
    split: str
    objective: str
    best: dict[str, Any]
    error: float
    default_error: float
    trials: tuple[TrialRecord, ...]
    study: Path

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast train --params`` reads it."""
        return {
            "model": self.model,
            "params": self.best,
            "split": self.split,
            "objective": self.objective,
            "error": self.error,
            "default_error": self.default_error,
            "trials": len(self.trials),
        }

    def table(self, count: int = 10) -> pd.DataFrame:
        """The best finished trials, one row each, least error first."""
        done = sorted((t for t in self.trials if not t.pruned), key=lambda t: t.error)[:count]
        return pd.DataFrame([{"trial": t.number, "error": t.error, **t.params} for t in done])


def write_params(path: Path, tuning: Tuning) -> None:
    """Write what ``opcast train --params`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(tuning.to_dict(), indent=1) + "\n")


def read_params(path: Path, model: str) -> dict[str, Any]:
    """Parameters of an estimator from a JSON file.

    Args:
        path: File of :func:`write_params`, or an object of the estimator's keywords.
        model: Name of the estimator that they are for.

    Raises:
        ModelError: The file is missing or no such object, or was tuned for another estimator.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("no such parameter file", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"parameters cannot be read: {error}", where=str(path)) from None
    params = data.get("params", data) if isinstance(data, dict) else None
    if not isinstance(params, dict):
        raise ModelError("not a JSON object of parameters", where=str(path))
    if params is not data and data.get("model", model) != model:
        raise ModelError(
            f"parameters are for {data['model']!r}, not {model!r}",
            where=str(path),
            hint=f"pass --model {data['model']}",
        )
    for name in sorted(_SETTINGS & set(params)):
        raise ModelError(
            f"{name!r} is a setting of the training, not a parameter of the estimator",
            where=str(path),
            hint="take it out of the file, and pass it on the command line",
        )
    return dict(params)
