"""Scale predictions of whole models by a few that were measured on the same chip.

    log factor = device + device x framework + device x framework x mode x layout

Each level is the mean of what those above leave, shrunken towards zero.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

#: What the levels are of, coarse to fine, and for how many rows their shrinkage counts: the ratio
#: of the variance of rows of one group (a mean error of some 15 %) to that of the level's effects
#: (20, 10 and 10 %). Engineering estimates.
_LEVELS = (
    (("device",), 0.6),
    (("device", "framework"), 2.0),
    (("device", "framework", "mode", "layout"), 2.0),
)


def log_factors(table: pd.DataFrame, logs: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Logarithms of factors on predictions, shape ``(n,)``.

    Args:
        table: With the columns of the levels.
        logs: ``log(measured / predicted)``, shape ``(n,)``; read where ``learn`` is.
        learn: Rows to learn from, bool, shape ``(n,)``.
    """
    found = np.zeros(len(table))
    for columns, shrinkage in _LEVELS:
        keys = table.groupby(list(columns), dropna=False).ngroup().to_numpy()
        own = learn & (keys >= 0)
        sums = np.bincount(keys[own], (logs - found)[own], keys.max() + 1)
        counts = np.bincount(keys[own], minlength=keys.max() + 1)
        found = found + (sums / (counts + shrinkage))[keys]
    return found


def errors_left_out(table: pd.DataFrame, logs: np.ndarray, learn: np.ndarray) -> np.ndarray:
    """Errors of each learned row by what rows of other models teach, ``log(measured/predicted)``.

    Args:
        table: As of :func:`log_factors`, with ``model``.
        logs: As there.
        learn: As there.
    """
    models = table["model"].astype(str).to_numpy()
    found: np.ndarray = np.full(len(table), np.nan)
    for model in np.unique(models[learn]):
        own = learn & (models == model)
        found[own] = (logs - log_factors(table, logs, learn & ~own))[own]
    return np.asarray(found[learn])
