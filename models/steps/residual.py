"""What is left of a cluster with many measured runs: small trees over plan and sizes.

Effects leave out what only one framework on one cluster does, such as a slow hand-over between
pipeline stages across nodes. Where there are enough runs of a cluster, boosted trees learn it, for
that cluster alone; they are kept only if they help on runs that they have not seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Runs of a cluster from which a residual is tried.
LEAST_RUNS = 60
#: Mean error on unseen runs that a residual must at least take away, as a share.
GAIN = 0.1
#: Trees, depth and learning rate; small, for hundreds of rows.
_TREES, _DEPTH, _RATE = 150, 4, 0.08
FOLDS = 5


@dataclass(frozen=True)
class Residual:
    """Trees that add to the logarithm of a step's seconds.

    Attributes:
        text: The trees, as XGBoost's JSON.
    """

    text: str

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Corrections, shape ``(n,)``, of steps with features of shape ``(n, k)``."""
        import xgboost

        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(self.text.encode()))
        return np.asarray(booster.predict(xgboost.DMatrix(features)), float)


def fit_residual(features: np.ndarray, left: np.ndarray, seed: int = 0) -> Residual:
    """Fit trees to what effects leave.

    Args:
        features: Shape ``(n, k)``.
        left: Logarithm of measured over predicted seconds.
        seed: Of the trees' draws.
    """
    import xgboost

    settings: dict[str, object] = {
        # Runs that hang or fall back are 10 to 40 times slower; squares would chase them.
        "objective": "reg:absoluteerror",
        "max_depth": _DEPTH,
        "eta": _RATE,
        "subsample": 0.8,
        "min_child_weight": 3,
        "lambda": 2.0,
        "nthread": 1,
        "seed": seed,
        "verbosity": 0,
    }
    booster = xgboost.train(settings, xgboost.DMatrix(features, left), _TREES)
    return Residual(json.dumps(json.loads(booster.save_raw("json").decode())))


def unseen_corrections(features: np.ndarray, left: np.ndarray, seed: int = 0) -> np.ndarray:
    """Corrections of each run by trees that have not seen it, in folds."""
    fold = np.random.default_rng(seed).permutation(len(left)) % FOLDS
    said = np.zeros(len(left))
    for number in range(FOLDS):
        out = fold == number
        said[out] = fit_residual(features[~out], left[~out], seed).predict(features[out])
    return said


def earns_its_place(left: np.ndarray, corrections: np.ndarray) -> bool:
    """Whether corrections of unseen runs lower the mean error by :data:`GAIN`."""
    plain, corrected = np.abs(left).mean(), np.abs(left - corrections).mean()
    return bool(corrected < (1.0 - GAIN) * plain)


def stacked(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Features of steps as an array of 32-bit floats, as the trees compare them."""
    return np.asarray(rows, np.float32)
