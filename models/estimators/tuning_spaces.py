"""Search spaces of hyper-parameters, by estimator.

An estimator of another package declares its own: a classmethod ``search_space(trial)`` that draws
from an Optuna trial and returns keywords of the class. It takes precedence over the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...common.errors import ModelError
from ..core.registry import estimator_class


class SearchTrial(Protocol):
    """The part of ``optuna.Trial`` that search spaces draw from."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = ...) -> float:
        """A number between two ends."""

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = ..., log: bool = ...
    ) -> int:
        """A whole number between two ends, both included."""

    def suggest_categorical(self, name: str, choices: Any) -> object:
        """One of the choices."""


Space = Callable[[SearchTrial], dict[str, object]]


def search_space(model: str) -> Space:
    """The search space of an estimator.

    Raises:
        ModelError: No such estimator, or it declares no search space.
    """
    cls = estimator_class(model)
    declared = getattr(cls, "search_space", None)
    if callable(declared):
        own: Space = declared
        return own
    if model not in _SPACES:
        raise ModelError(
            f"estimator {model!r} declares no search space",
            hint=f"tune one of: {', '.join(sorted(_SPACES))}",
        )
    return _SPACES[model]


def _ridge(trial: SearchTrial) -> dict[str, object]:
    return {
        "alpha": trial.suggest_float("alpha", 1e-5, 1e-1, log=True),
        "huber": trial.suggest_float("huber", 0.05, 1.0, log=True),
    }


def _forest(trial: SearchTrial) -> dict[str, object]:
    return {
        "trees": trial.suggest_int("trees", 16, 96, step=16),
        "min_samples_leaf": trial.suggest_int("min_samples_leaf", 1, 8),
        "max_features": trial.suggest_float("max_features", 0.1, 0.8),
        "max_depth": trial.suggest_int("max_depth", 12, 32),
    }


def _xgboost(trial: SearchTrial) -> dict[str, object]:
    return {
        "rounds": trial.suggest_int("rounds", 200, 1000, step=100),
        "max_depth": trial.suggest_int("max_depth", 4, 10),
        "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.2, log=True),
        "min_child_weight": trial.suggest_float("min_child_weight", 1.0, 64.0, log=True),
        "subsample": trial.suggest_float("subsample", 0.5, 1.0),
        "colsample": trial.suggest_float("colsample", 0.1, 1.0),
        "reg_lambda": trial.suggest_float("reg_lambda", 0.1, 30.0, log=True),
        "max_bin": trial.suggest_categorical("max_bin", (32, 64, 128, 256)),
    }


def _ensemble(trial: SearchTrial) -> dict[str, object]:
    return {"shrinkage": trial.suggest_float("shrinkage", 10.0, 10_000.0, log=True)}


_SPACES: dict[str, Space] = {
    "ridge": _ridge,
    "forest": _forest,
    "xgboost": _xgboost,
    "ensemble": _ensemble,
}
