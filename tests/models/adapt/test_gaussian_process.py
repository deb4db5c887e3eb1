"""Corrections of a model on a device from a few samples."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from opcast.features.operators import op_features
from opcast.models.adapt.covariance import (
    Scale,
    Sites,
    covariance,
    noise_variance,
    start_params,
    time_shares,
)
from opcast.models.adapt.gaussian_process import (
    MAX_SAMPLES,
    ErrorPosterior,
    fit_params,
    left_out_errors,
    negative_log_likelihood,
)
from opcast.models.core.store import pack, unpack

KEYS = 4


def sites(n, seed=0):
    rng = np.random.default_rng(seed)
    names = np.array(["gemm|bf16", "gemm|fp8"], object)[rng.integers(0, 2, n)]
    kernels = names + np.array(["|x", "|y"], object)[rng.integers(0, 2, n)]
    share = rng.dirichlet([1, 1, 1], n)
    return Sites(rng.normal(size=(n, KEYS)), share, names, kernels)


@pytest.fixture
def params():
    return start_params(KEYS)


def test_covariance_is_symmetric_and_positive_definite(params):
    some = sites(120)
    matrix = covariance(some, some, params)
    assert matrix == pytest.approx(matrix.T, abs=1e-12)
    assert np.linalg.eigvalsh(matrix).min() > -1e-9
    assert (np.linalg.eigvalsh(matrix + 1e-6 * np.eye(120)) > 0).all()
    part = covariance(some.take(np.arange(5)), some, params)
    assert part == pytest.approx(matrix[:5])


def test_covariance_by_hand():
    values = np.array([0.2, 0.1, 0.3, 0.4, 0.5, 0.6, 0.1, 2.0])
    one = Sites(np.array([[0.0]]), np.array([[1.0, 0, 0]]), np.array(["c"], object),
                np.array(["c|f"], object))  # fmt: skip
    same_op = Sites(np.array([[4.0]]), np.array([[0.5, 0.5, 0]]), np.array(["c"], object),
                    np.array(["c|g"], object))  # fmt: skip
    found = covariance(one, same_op, np.log(values))[0, 0]
    expected = 0.5 * (0.2**2 + 0.1**2) + np.exp(-4 / 2) * (0.4**2 + 0.5**2)
    assert found == pytest.approx(expected, rel=1e-5)
    alone = covariance(one, one, np.log(values))[0, 0]
    assert alone == pytest.approx(sum(values[:6] ** 2), rel=1e-5)


def test_without_errors_there_is_no_correction(params):
    rng = np.random.default_rng(1)
    for n in (5, 40):
        mean, half = ErrorPosterior.fit(params, sites(n), np.zeros(n)).apply(sites(200, 2))
        assert mean == pytest.approx(np.zeros(200), abs=1e-12)
        assert (half > 0).all()
    noise = ErrorPosterior.fit(params, sites(60), 0.02 * rng.normal(size=60))
    assert np.abs(noise.apply(sites(200, 2))[0]).max() < 0.03


def test_ten_samples_remove_a_constant_bias(params):
    bias = np.log(1.3)
    mean, half = ErrorPosterior.fit(params, sites(10), np.full(10, bias)).apply(sites(500, 3))
    assert np.abs(np.exp(bias - mean) - 1).mean() < 0.1  # of 30 %
    assert (np.abs(bias - mean) < half).all()
    more = ErrorPosterior.fit(params, sites(100), np.full(100, bias)).apply(sites(500, 3))[0]
    assert np.abs(np.exp(bias - more) - 1).mean() < 0.03
    few = ErrorPosterior.fit(params, sites(2), np.full(2, bias)).apply(sites(500, 3))
    assert np.median(few[0]) < np.median(mean)  # two samples say less
    assert half.mean() < few[1].mean()


def test_a_kernel_that_was_measured_is_known_best(params):
    some = sites(30)
    correction = ErrorPosterior.fit(params, some, np.full(30, 0.2))
    prior = ErrorPosterior.fit(params, some.take(np.arange(0)), np.zeros(0)).apply(some)[1]
    assert (correction.apply(some)[1] < correction.apply(sites(30, 9))[1].mean()).mean() > 0.8
    assert (correction.apply(some)[1] < prior).all()


def device_errors(some, seed):
    """A device 25 % slower in compute and 10 % faster in memory, with noise of 8 %."""
    rng = np.random.default_rng(seed)
    smooth = 0.1 * np.sin(some.place[:, 0])
    return some.share @ np.array([0.22, -0.1, 0.3]) + smooth + 0.08 * rng.normal(size=len(some))


@pytest.mark.parametrize("count", [50, 150])
def test_intervals_cover_on_a_device_with_samples(params, count):
    inside, errors = [], []
    for seed in range(6):
        own, new = sites(count, seed), sites(400, 100 + seed)
        mean, half = ErrorPosterior.fit(params, own, device_errors(own, seed)).apply(new)
        left = device_errors(new, 200 + seed) - mean
        inside.append((np.abs(left) <= half).mean())
        errors.append(np.abs(left).mean())
    assert np.mean(inside) > 0.85
    assert np.mean(errors) < 0.12 < np.abs(device_errors(sites(400), 0)).mean()


def test_fitting_finds_where_the_errors_come_from(params):
    """Errors that are slopes of devices: the amplitude of slopes grows, that of noise shrinks."""
    rng = np.random.default_rng(0)
    tasks = []
    for seed in range(4):
        some = sites(120, seed)
        tasks.append((some, some.share @ rng.normal(scale=0.6, size=3)))
    fitted = fit_params(tasks, iterations=8)
    assert fitted[0] > params[0]
    assert fitted[3] < params[3] and fitted[6] < params[6]


@pytest.mark.parametrize("noise", [0.1, 0.01])
@pytest.mark.parametrize("by_leaves", [False, True])
def test_the_likelihood_is_scipys_and_its_gradient_that_of_differences(params, noise, by_leaves):
    rng = np.random.default_rng(1)
    some = sites(40)
    if by_leaves:
        some = replace(some, leaves=rng.integers(0, 4, (40, 6)))
    errors = rng.normal(scale=0.3, size=40)
    at = params + rng.normal(scale=0.3, size=len(params))
    at[6] = np.log(noise)  # the smaller is below the least, where the gradient is 0

    value, gradient = negative_log_likelihood(at, some, errors)
    matrix = covariance(some, some, at) + noise_variance(at) * np.eye(40)
    exact = -multivariate_normal(cov=matrix).logpdf(errors)
    assert value + 20 * np.log(2 * np.pi) == pytest.approx(exact)
    for place, step in enumerate(1e-4 * np.eye(len(at))):
        above, below = (negative_log_likelihood(at + way, some, errors)[0] for way in (step, -step))
        assert gradient[place] == pytest.approx((above - below) / 2e-4, rel=1e-4, abs=1e-5)


def test_left_out_errors_are_those_without_the_group(params):
    """In closed form as by conditioning on the other groups one after the other."""
    some, errors = sites(12), device_errors(sites(12), 0)
    groups = np.arange(12) // 4
    matrix = covariance(some, some, params) + noise_variance(params) * np.eye(12)
    inverse = np.linalg.inv(matrix)
    found = left_out_errors(inverse, inverse @ errors, groups)
    for group in range(3):
        own, rest = np.flatnonzero(groups == group), np.flatnonzero(groups != group)
        weights = np.linalg.solve(matrix[np.ix_(rest, rest)], errors[rest])
        expected = errors[own] - matrix[np.ix_(own, rest)] @ weights
        assert found[own] == pytest.approx(expected)
    single = left_out_errors(inverse, inverse @ errors)
    assert single == pytest.approx(left_out_errors(inverse, inverse @ errors, np.arange(12)))


def test_kernels_that_repeat_one_program_are_not_trusted(params):
    """Sixty samples of three programs, each with an error of its own, say little of a fourth."""
    rng = np.random.default_rng(0)
    groups = np.arange(60) % 3
    place = 3.0 * np.eye(KEYS)[groups] + 0.05 * rng.normal(size=(60, KEYS))
    share, names = np.tile([1.0, 0.0, 0.0], (60, 1)), np.full(60, "gemm", object)
    some, new = Sites(place, share, names, names), sites(200, 9)
    new = Sites(new.place, np.tile([1.0, 0.0, 0.0], (200, 1)), *[np.full(200, "gemm", object)] * 2)
    errors = np.array([0.8, -0.9, 0.1])[groups] + 0.02 * rng.normal(size=60)
    alone = ErrorPosterior.fit(params, some, errors).apply(new)[0]
    grouped = ErrorPosterior.fit(params, some, errors, groups=groups).apply(new)[0]
    assert np.abs(grouped).mean() < 0.5 * np.abs(alone).mean()


def test_large_samples_are_thinned(params):
    n = MAX_SAMPLES + 50
    found = ErrorPosterior.fit(params, sites(n), np.full(n, 0.1))
    assert found.count == len(found.sites) == MAX_SAMPLES


def test_single_outliers_bend_little(params):
    some = sites(100)
    errors = np.full(100, 0.1)
    errors[7] = 5.0
    mean, _ = ErrorPosterior.fit(params, some, errors).apply(sites(300, 5))
    assert np.median(mean) == pytest.approx(0.1, abs=0.03)


def test_ends_are_widened_to_hold_the_left_out_errors(params):
    """Of ten errors the ceil(0.9 × 11)-th by size counts: -0.5, beside a lower end of -0.2."""
    fitted = ErrorPosterior.fit(params, sites(10), np.zeros(10))
    fitted.left_out = np.array([-0.5, 0.1, 0.3, -0.1, 0.2, 0.0, -0.2, 0.1, 0.05, -0.05])
    low, high = np.array([-0.2, -0.6, 0.0]), np.array([0.2, 0.6, 0.4])
    assert fitted.widening(low, high)[:2] == pytest.approx([2.5, 1.0])
    assert fitted.widening(low, high)[2] > 1e6
    few = ErrorPosterior.fit(params, sites(7), np.zeros(7))
    assert np.isinf(few.widening(low, high)).all()


def test_saved_correction_predicts_the_same(params):
    found = ErrorPosterior.fit(params, sites(80), device_errors(sites(80), 1))
    again = ErrorPosterior.from_arrays(unpack(pack(found.to_arrays())))
    assert again.count == 80 and again.scale == pytest.approx(found.scale, rel=1e-5)
    for left, right in zip(again.apply(sites(50, 6)), found.apply(sites(50, 6)), strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("family", ["kernel/linear", "eager/softmax", "graph/moe", "eager/conv"])
def test_shares_of_time_add_up(family, op_rows, round_gpu):
    rows = op_rows(family, 200).assign(device="a")
    features = op_features(rows, family, {"a": round_gpu()})
    shares = time_shares(features)
    assert shares.sum(axis=1) == pytest.approx(np.ones(200), abs=1e-3)
    assert (shares >= 0).all()
    assert shares[:, 2] == pytest.approx(features.floor_s / features.base_s)
    scale = Scale.of(features)
    names = rows["op"].to_numpy(object)
    place = scale.sites(features, names, names).place
    assert np.abs(place).max() <= 6
    assert place.mean(axis=0) == pytest.approx(np.zeros(place.shape[1]), abs=0.1)
