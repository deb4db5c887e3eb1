"""Small boosted trees, for models that are one JSON file."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .xgboost_import import xgboost
from .xgboost_trees import compact, read_booster

if TYPE_CHECKING:
    from xgboost import Booster

#: Learning rate of all of them.
RATE = 0.08


@dataclass
class SavedTrees:
    """Trees as a file holds them; they are read when they are first asked.

    Attributes:
        data: Of :func:`~.xgboost_trees.compact`.
    """

    data: bytes
    _booster: Booster | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, booster: Booster) -> SavedTrees:
        """Trees that were grown."""
        return cls(compact(booster))

    @classmethod
    def from_text(cls, text: str) -> SavedTrees:
        """Read what :meth:`text` gave."""
        return cls(base64.b64decode(text))

    def text(self) -> str:
        """The trees as text."""
        return base64.b64encode(self.data).decode()

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Predictions, shape ``(n,)``, for features of shape ``(n, d)``."""
        if self._booster is None:
            self._booster = read_booster(self.data)
        return applied(self._booster, features)


def grow(
    features: np.ndarray,
    target: np.ndarray,
    rows: np.ndarray,
    trees: int,
    depth: int,
    child_weight: int,
    seed: int,
) -> Booster:
    """Fit trees to the absolute error of some rows.

    Args:
        features: Of ``n`` rows, shape ``(n, d)``.
        target: What to predict, shape ``(n,)``.
        rows: Rows to learn from, bool or positions.
        trees: Their number.
        depth: Their depth.
        child_weight: Least rows of a leaf.
        seed: Of the draws.
    """
    settings = {
        # Labels are off by a factor here and there; squares would chase them.
        "objective": "reg:absoluteerror",
        "max_depth": depth,
        "eta": RATE,
        "subsample": 0.8,
        "min_child_weight": child_weight,
        "nthread": 1,
        "seed": seed,
        "verbosity": 0,
    }
    matrix = xgboost().DMatrix(features[rows], target[rows])
    grown: Booster = xgboost().train(settings, matrix, trees)
    return grown


def applied(booster: Booster, features: np.ndarray) -> np.ndarray:
    """Predictions of trees, shape ``(n,)``."""
    return np.asarray(booster.predict(xgboost().DMatrix(features)), float)
