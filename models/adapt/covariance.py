"""Covariance of a model's log errors on a device, by shares of time and nearness of kernels.

Nearness is by key features, or by shared tree leaves: boosted trees split where kernels change
their behaviour on the training devices, such as where a library uses another tile, splits the
reduction, or a wave is full. These regimes transfer to a new chip even if their times do not, so
that errors of two kernels are similar if the trees do not separate them (the proximity of Breiman,
Random Forests, 2001). On held-out chips, this explains errors better than a distance of key
features (docs/operator-learning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from ...features.operators import OpFeatures

#: Least standard deviation of a label's noise, in log space: errors have heavier tails than a
#: Gaussian's, and with less noise single outliers distort the correction.
LEAST_NOISE = 0.06
AMPLITUDES = 7  # three of slopes, three of smooth terms, noise
#: Amplitudes before fitting, as standard deviations of log errors: 25 % shared by a device, 15 % by
#: library and kernel, 10 % noise (engineering estimates; :func:`fit_params` adjusts them).
_START = (0.25, 0.15, 0.15, 0.15, 0.15, 0.2, 0.1)
#: Length scale of every key feature before fitting, in standard deviations.
_REACH = 2.5
#: Candidate variances of errors of kernels in the same leaves, selected by the samples of a device
#: (engineering estimates).
NEAR = (0.05, 0.2, 0.8)
#: Candidate standard deviations of a label's noise.
NOISE = (0.06, 0.15)
#: Shares of those variances common to all rows, to rows of one op, dtype and backend, and to rows
#: of one kernel: most of the error on a new chip is the library's (docs/operator-learning.md).
NEAR_PARTS = (0.3, 0.35, 0.35)
# Stands for a variance of zero, whose logarithm would be infinite.
_NONE = 1e-9


@dataclass(slots=True)
class Sites:
    """Positions of ``n`` kernels for the covariance.

    Attributes:
        place: Scaled key features, shape ``(n, d)``.
        share: Shares of compute, memory and launch in the time, shape ``(n, 3)``; operator models
            append the difference of each known chip from the general prediction.
        coarse: Op, dtype and backend of each kernel, object, shape ``(n,)``.
        fine: The same with the kernel's name, object, shape ``(n,)``.
        leaves: Leaf of each tree that a kernel falls into, shape ``(n, trees)``; ``None`` if
            nearness is by distance.
    """

    place: np.ndarray
    share: np.ndarray
    coarse: np.ndarray
    fine: np.ndarray
    leaves: np.ndarray | None = None

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.place)

    def take(self, rows: np.ndarray) -> Sites:
        """The given kernels, by position or mask."""
        leaves = None if self.leaves is None else self.leaves[rows]
        return Sites(self.place[rows], self.share[rows], self.coarse[rows], self.fine[rows], leaves)


def joined_sites(first: Sites, second: Sites) -> Sites:
    """Concatenate the sites of two sets of kernels; both or neither have leaves."""
    leaves = None
    if first.leaves is not None and second.leaves is not None:
        leaves = np.concatenate([first.leaves, second.leaves])
    return Sites(
        np.concatenate([first.place, second.place]),
        np.concatenate([first.share, second.share]),
        np.concatenate([first.coarse, second.coarse]),
        np.concatenate([first.fine, second.fine]),
        leaves,
    )


@dataclass
class Scale:
    """Centre and spread of key features, which make distances dimensionless."""

    centre: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, features: OpFeatures) -> Scale:
        """Compute them from the key features of training rows."""
        keys = features.X[:, features.keys].astype(np.float64)
        # 1e-6 avoids division by zero for a constant feature.
        return cls(keys.mean(axis=0), keys.std(axis=0) + 1e-6)

    def sites(self, features: OpFeatures, coarse: np.ndarray, fine: np.ndarray) -> Sites:
        """Sites of kernels."""
        keys = features.X[:, features.keys].astype(np.float64)
        # Clipped at six standard deviations, beyond which everything is equally far.
        place = np.clip((keys - self.centre) / self.spread, -6, 6)
        return Sites(place, time_shares(features), coarse, fine)


def time_shares(features: OpFeatures) -> np.ndarray:
    """Shares of compute, memory and launch in the analytical estimate, shape ``(n, 3)``.

    Rows sum to 1. Compute and memory overlap, so their shares are by the squares of their times.
    """
    launch = np.clip(features.floor_s / features.base_s, 0, 1)
    compute, memory = (_share(features, n) for n in ("log_tiles_base", "log_memory_base"))
    vector = _share(features, "log_vector_base")
    # Matrix and vector units are both compute; the slower one counts.
    compute = np.maximum(compute, vector)
    rest = (1 - launch) / (compute + memory + 1e-9)
    return np.stack([compute * rest, memory * rest, launch], axis=1)


def _share(features: OpFeatures, name: str) -> np.ndarray:
    if name not in features.names:
        return np.zeros(len(features.X))
    logs = features.X[:, features.names.index(name)].astype(np.float64)
    # The feature is log2(time / base): this is the square of the ratio.
    return np.asarray(np.exp2(2 * logs))


def covariance(
    first: Sites, second: Sites, log_params: np.ndarray, near: np.ndarray | None = None
) -> np.ndarray:
    """Covariance of the errors of two sets of kernels, shape ``(n, m)``.

    Args:
        first: ``n`` kernels.
        second: ``m`` kernels.
        log_params: Parameters.
        near: Result of :func:`nearness`, if it was already computed.
    """
    p = np.exp(log_params)
    near = nearness(first, second, log_params) if near is None else near
    slope = first.share @ second.share.T
    coarse = first.coarse[:, None] == second.coarse[None]
    fine = first.fine[:, None] == second.fine[None]
    return np.asarray(
        slope * (p[0] ** 2 + p[1] ** 2 * coarse + p[2] ** 2 * fine)
        + near * (p[3] ** 2 + p[4] ** 2 * coarse + p[5] ** 2 * fine)
    )


def nearness(first: Sites, second: Sites, log_params: np.ndarray) -> np.ndarray:
    """How close kernels are, from 0 to 1, shape ``(n, m)``: by leaves, else by distance."""
    if first.leaves is not None and second.leaves is not None:
        return shared_leaves(first.leaves, second.leaves)
    # Exponential covariance (Matérn 1/2): errors are rough functions of the features.
    return np.asarray(np.exp(-distance(first, second, log_params)))


def distance(first: Sites, second: Sites, log_params: np.ndarray) -> np.ndarray:
    """Distance of kernels by key features over their length scales, shape ``(n, m)``."""
    scale = np.exp(log_params[AMPLITUDES:])
    a, b = first.place / scale, second.place / scale
    # |a - b|² expanded: one matrix product instead of an (n, m, d) array. Rounding may make it
    # negative; the minimum keeps its reciprocal, which gradients use, finite.
    gap = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(gap, 0.0) + 1e-12))


def start_params(keys: int) -> np.ndarray:
    """Parameters before any fitting, as logarithms, shape ``(7 + keys,)``."""
    return np.asarray(np.log(np.array([*_START, *([_REACH] * keys)])))


def noise_variance(params: np.ndarray) -> float:
    """Variance of a label's noise, in log space."""
    return float(max(np.exp(params[AMPLITUDES - 1]), LEAST_NOISE) ** 2)


def scaled_params(
    params: np.ndarray, slopes: float, noise: float, reach: float = 1.0, smooth: float = 1.0
) -> np.ndarray:
    """Scale groups of parameters.

    Args:
        params: Parameters of the covariance.
        slopes: Factor on the amplitudes of slopes.
        noise: Factor on the standard deviation of noise.
        reach: Factor on the length scales.
        smooth: Factor on the amplitudes of the smooth terms.
    """
    scaled = params.copy()
    scaled[:3] += np.log(slopes)
    scaled[3 : AMPLITUDES - 1] += np.log(smooth)
    # From the variance, not the parameter: a factor must act on the noise after its lower limit.
    scaled[AMPLITUDES - 1] = 0.5 * np.log(noise_variance(params)) + np.log(noise)
    scaled[AMPLITUDES:] += np.log(reach)
    return scaled


def weakened(params: np.ndarray, amplitude: float, noise: float) -> np.ndarray:
    """Parameters with scaled amplitudes and noise."""
    return scaled_params(params, amplitude, noise, smooth=amplitude)


def prior_variance(sites: Sites, params: np.ndarray) -> np.ndarray:
    """Prior variance of each kernel's error, the diagonal of :func:`covariance`, shape ``(n,)``."""
    p = np.exp(params)
    slope = (sites.share**2).sum(axis=1)
    return np.asarray(slope * (p[:3] ** 2).sum() + (p[3:6] ** 2).sum())


def shared_leaves(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Fraction of the trees in which kernels share a leaf, shape ``(n, m)``.

    Args:
        first: Leaf of each tree, integers, shape ``(n, trees)``.
        second: The same of other kernels, shape ``(m, trees)``.
    """
    same = np.zeros((len(first), len(second)), np.int32)
    # Tree by tree: all at once would take (n, m, trees) memory.
    for a, b in zip(first.T, second.T, strict=True):
        same += a[:, None] == b[None]
    return np.asarray(same / max(first.shape[1], 1))


def leaf_variants(params: np.ndarray) -> Iterator[np.ndarray]:
    """Candidate parameters of the covariance, selected by a device's samples, as logarithms.

    They have no slopes: these would transfer errors to kernels without any, while leaves already
    show which kernels are similar (docs/operator-learning.md).

    Args:
        params: Parameters whose length scales are kept; they have no effect with leaves.
    """
    for near, noise in product(NEAR, NOISE):
        yield _params(near, noise, params)


def cautious_params(params: np.ndarray) -> np.ndarray:
    """Return the variant that trusts samples least, for too few samples to select one.

    Args:
        params: As for :func:`leaf_variants`.
    """
    return _params(min(NEAR), max(NOISE), params)


def _params(near: float, noise: float, params: np.ndarray) -> np.ndarray:
    variances = [_NONE] * len(NEAR_PARTS) + [near * part for part in NEAR_PARTS]
    amplitudes = 0.5 * np.log(variances)
    return np.concatenate([amplitudes, [np.log(noise)], params[len(amplitudes) + 1 :]])
