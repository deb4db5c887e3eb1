"""Shrinkage of log-ratios learned on few chips, for a chip that was not learned from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...features.operators.columns import distinct

#: Share of a learned log-ratio that carries over to a chip that was not learned from, by the number
#: of chips on which the same library was seen (0, 1, 2, 3 or more). Chosen as the best on average
#: over A100, Hopper and RTX PRO 6000, each left out, for products, attention and experts
#: (docs/operators.md).
SHRINKAGE = (0.55, 0.55, 0.8, 0.9)


def chips_by_library(library: np.ndarray, chip: np.ndarray) -> dict[str, int]:
    """Number of chips on which each library was seen.

    Args:
        library: Library that runs each row, shape ``(n,)``.
        chip: Any name of its chip, shape ``(n,)``.
    """
    import pandas as pd

    counts = pd.Series(chip).groupby(pd.Series(library)).nunique()
    return {str(name): int(count) for name, count in counts.items()}


def shrinkage(library: np.ndarray, chips: Mapping[str, int]) -> np.ndarray:
    """Factor on learned log-ratios, shape ``(n,)``.

    A regressor cannot tell what a library does on every chip from what it does on the only chip it
    was seen on. The analytical estimate is the better guess there, so the ratio to it is shrunk.

    Args:
        library: Library that runs each row, shape ``(n,)``.
        chips: From :func:`chips_by_library`.
    """
    code, names = distinct(library)
    last = len(SHRINKAGE) - 1
    factors = np.array([SHRINKAGE[min(chips.get(str(name), 0), last)] for name in names])
    return factors[code] if len(names) else np.ones(len(library))
