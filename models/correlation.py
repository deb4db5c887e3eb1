"""How strongly the errors of kernels in one program go together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Least programs with two or more kernels to measure it.
MIN_PROGRAMS = 20


def pair_correlation(errors: Sequence[np.ndarray]) -> float:
    """Intraclass correlation: of the errors of two different kernels of the same program.

    The mean product of the errors of all pairs within a program, averaged over programs, over the
    mean square, both about the mean of all (Fisher, Statistical Methods for Research Workers, 1925,
    chapter 7). Every program counts the same, however many kernels it has.

    Args:
        errors: For each program the log-ratios of its distinct kernels; programs with fewer than
            two do not count.

    Returns:
        From 0 to 1; 1, which claims nothing, with fewer than 20 programs.
    """
    several = [e for e in errors if len(e) > 1]
    if len(several) < MIN_PROGRAMS:
        return 1.0
    centre = float(np.mean(np.concatenate(several)))
    pairs, squares = [], []
    for own in several:
        left = own - centre
        square = float((left**2).sum())
        squares.append(square / len(left))
        pairs.append((float(left.sum()) ** 2 - square) / (len(left) * (len(left) - 1)))
    variance = float(np.mean(squares))
    return float(np.clip(np.mean(pairs) / variance, 0.0, 1.0)) if variance > 0 else 1.0
