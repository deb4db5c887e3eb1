"""How alike kernels are to a model: the share of its trees that put them into the same leaf.

Boosted trees split where kernels change their behaviour on the devices that they learned from:
where a library takes another tile, splits the reduction, or a wave is full. Those regimes carry
over to a new chip even where their times do not, so that errors of two kernels are alike as far as
the trees do not tell them apart (the proximity of Breiman, Random Forests, 2001). On chips left out
of training this explains errors on a new chip better than a distance of key features does
(docs/operator-learning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

#: Variances of errors of kernels in the same leaves that the samples of a device choose among
#: (engineering estimates).
NEAR = (0.05, 0.2, 0.8)
#: Standard deviations of a label's noise to choose among.
NOISE = (0.06, 0.15)
#: Parts of those variances that all rows, rows of one op, dtype and backend, and rows of one kernel
#: share: most of the error on a new chip is the library's (docs/operator-learning.md).
NEAR_PARTS = (0.3, 0.35, 0.35)
# Stands for a variance of zero, whose logarithm would be infinite.
_NONE = 1e-9


def shared_leaves(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Share of the trees in which kernels end in the same leaf, shape ``(n, m)``.

    Args:
        first: Leaf of each tree, integers, shape ``(n, trees)``.
        second: The same of others, shape ``(m, trees)``.
    """
    same = np.zeros((len(first), len(second)), np.int32)
    # Tree by tree: all at once would take memory of (n, m, trees).
    for a, b in zip(first.T, second.T, strict=True):
        same += a[:, None] == b[None]
    return np.asarray(same / max(first.shape[1], 1))


def leaf_variants(params: np.ndarray) -> Iterator[np.ndarray]:
    """Parameters of the covariance that a device's samples choose among, as logarithms.

    Slopes have no part in it: with leaves to show which kernels are alike, they carry errors to
    kernels that have none (docs/operator-learning.md).

    Args:
        params: Parameters whose length scales are kept; they have no effect between leaves.
    """
    for near, noise in product(NEAR, NOISE):
        yield _params(near, noise, params)


def cautious_params(params: np.ndarray) -> np.ndarray:
    """Return the variant that trusts samples least, for too few of them to choose one by.

    Args:
        params: As for :func:`leaf_variants`.
    """
    return _params(min(NEAR), max(NOISE), params)


def _params(near: float, noise: float, params: np.ndarray) -> np.ndarray:
    variances = [_NONE] * len(NEAR_PARTS) + [near * part for part in NEAR_PARTS]
    amplitudes = 0.5 * np.log(variances)
    return np.concatenate([amplitudes, [np.log(noise)], params[len(amplitudes) + 1 :]])
