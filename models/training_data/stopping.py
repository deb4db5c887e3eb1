"""Chooses the training rows that are held back for early stopping."""

from __future__ import annotations

import numpy as np

from .splits import draw

#: Share of the groups held back for early stopping; a tenth is usual and costs little data.
STOP_SHARE = 0.1
#: Least rows on either side: with fewer, the validation error is too noisy to stop by.
MIN_STOP_ROWS = 50


def stop_rows(groups: np.ndarray, seed: int) -> np.ndarray:
    """Draw the rows that are held back, whole groups by name.

    The names are salted: a split draws kernels by the same names and seed, and without the salt
    its training part would hold none of the groups that are drawn here.

    Args:
        groups: Group of every row, shape ``(n,)``.
        seed: Seed of the draw.

    Returns:
        Bool, shape ``(n,)``; all false if either side would have fewer than
        :data:`MIN_STOP_ROWS` rows, which means to train without early stopping.
    """
    names, codes = np.unique(groups.astype(str), return_inverse=True)
    drawn = np.array([draw(f"stop:{name}", seed) < STOP_SHARE for name in names], bool)
    stop = drawn[codes]
    enough = min(stop.sum(), (~stop).sum()) >= MIN_STOP_ROWS
    return stop if enough else np.zeros(len(groups), bool)
