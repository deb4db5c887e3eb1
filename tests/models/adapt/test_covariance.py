"""Covariance by shared leaves: by hand, and in the posterior of errors."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.models.adapt.covariance import (
    Sites,
    covariance,
    leaf_variants,
    nearness,
    shared_leaves,
    start_params,
)
from opcast.models.adapt.gaussian_process import ErrorPosterior


def sites(leaves: np.ndarray) -> Sites:
    n = len(leaves)
    return Sites(
        np.zeros((n, 2)), np.tile([0.0, 0.0, 1.0], (n, 1)), *[np.full(n, "x", object)] * 2, leaves
    )


def test_shares_of_trees() -> None:
    first, second = np.array([[1, 2, 3, 4]]), np.array([[1, 2, 3, 4], [1, 0, 3, 0], [9, 9, 9, 9]])
    assert shared_leaves(first, second).tolist() == [[1.0, 0.5, 0.0]]


def test_variants_keep_the_length_scales() -> None:
    params = start_params(2)
    found = list(leaf_variants(params))
    assert len(found) == 3 * 2
    assert all(len(v) == len(params) and np.isfinite(v).all() for v in found)
    assert all((v[7:] == params[7:]).all() for v in found)


def test_leaves_take_the_place_of_distance() -> None:
    one, two = sites(np.array([[1, 1]])), sites(np.array([[1, 2]]))
    assert nearness(one, two, start_params(2))[0, 0] == 0.5
    two.leaves = None
    assert nearness(one, two, start_params(2))[0, 0] == pytest.approx(1.0, abs=1e-5)


def test_regimes_are_told_apart_by_their_leaves() -> None:
    """Two regimes at the same place, 30 % slow and 20 % fast; the corrected error is small."""
    rng = np.random.default_rng(0)
    regime = rng.integers(0, 2, 80)
    leaves = np.stack([regime * 10 + rng.integers(0, 2, 80) for _ in range(20)], axis=1)
    errors = np.where(regime == 1, 0.3, -0.2) + rng.normal(0, 0.02, 80)
    some = sites(leaves)
    posterior = ErrorPosterior.fit(start_params(2), some.take(np.arange(40)), errors[:40])
    mean, half = posterior.apply(some.take(np.arange(40, 80)))
    assert np.abs(mean - errors[40:]).mean() < 0.04
    assert (np.abs(mean - errors[40:]) <= half).mean() > 0.8
    again = ErrorPosterior.from_arrays(posterior.to_arrays())
    assert again.apply(some)[0] == pytest.approx(posterior.apply(some)[0])
    matrix = covariance(some, some, posterior.params)
    assert np.linalg.eigvalsh(matrix).min() > -1e-8


def test_a_handful_of_samples_is_trusted_little() -> None:
    """One sample in the leaves of the query: 0.05 of the variance against a noise of 0.15."""
    some = sites(np.ones((2, 4), int))
    posterior = ErrorPosterior.fit(start_params(2), some.take(np.array([0])), np.array([0.4]))
    mean, _ = posterior.apply(some.take(np.array([1])))
    assert mean[0] == pytest.approx(0.4 * 0.05 / (0.05 + 0.15**2), rel=1e-6)


def test_few_samples_widen_intervals_to_their_own_errors() -> None:
    rng = np.random.default_rng(1)
    some = sites(rng.integers(0, 50, (200, 20)))
    errors = rng.standard_t(2, 200) * 0.3
    posterior = ErrorPosterior.fit(start_params(2), some.take(np.arange(20)), errors[:20])
    mean, half = posterior.apply(some.take(np.arange(20, 200)))
    assert (np.abs(mean - errors[20:]) <= half).mean() > 0.8
