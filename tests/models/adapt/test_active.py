"""Which samples to measure, and what the error is with them."""

import numpy as np
import pandas as pd
import pytest

from opcast.models.adapt.active import (
    Errors,
    RemainingVariance,
    allocate,
    choose,
    choose_for,
    choose_programs,
    shares_of,
    spread_evenly,
)
from opcast.models.adapt.covariance import Sites, covariance, noise_variance, start_params
from opcast.models.operators.curves import ALL, Curve, Trial, error_curve, joint_curve

KEYS = 2


def line(positions, name="c"):
    """Kernels on a line, all bound by compute."""
    n = len(positions)
    place = np.zeros((n, KEYS))
    place[:, 0] = positions
    share = np.tile([1.0, 0.0, 0.0], (n, 1))
    names = np.full(n, name, object)
    return Sites(place, share, names, names)


@pytest.fixture
def params():
    return start_params(KEYS)


def test_the_middle_of_the_crowd_comes_first(params):
    some = line([-6.0, -0.1, 0.0, 0.1, 6.0])
    order, gains = choose(some, params, 5)
    assert order[0] == 2
    assert set(order.tolist()) == set(range(5))
    assert order[1] in (0, 4) and order[2] in (0, 4)  # its twins have nothing more to say
    assert (np.diff(gains) < 0).all()


def test_the_gain_of_one_sample_by_hand(params):
    """Of one variant: Σ w cov² / (var + noise)."""
    some = line([0.0, 1.0])
    matrix, noise = covariance(some, some, params), noise_variance(params)
    weight = np.array([0.25, 0.75])
    choice = RemainingVariance(matrix.copy(), noise, weight)
    expected = (0.25 * matrix[0, 0] ** 2 + 0.75 * matrix[0, 1] ** 2) / (matrix[0, 0] + noise)
    assert choice.gain(np.array([0])) == pytest.approx(expected)
    before = np.diag(matrix) @ weight
    choice.measure(np.array([0]))
    assert before - np.diag(choice.posterior) @ weight == pytest.approx(expected)


def test_runs_for_one_question_by_hand():
    # The question, last, shares 0.8 of its variance of 1 with the first run, 0.6 with the second.
    own = Errors(np.array([[1.0, 0.0, 0.8], [0.0, 1.0, 0.6], [0.8, 0.6, 1.0]]), 0.25)
    order, left = choose_for([own], 2)
    assert order.tolist() == [0, 1]
    assert left == pytest.approx([1 - 0.64 / 1.25, 1 - (0.64 + 0.36) / 1.25])
    # At a third of the cost the second one tells more for it.
    order, left = choose_for([own], 1, np.array([3.0, 1.0]))
    assert order.tolist() == [1] and left == pytest.approx([1 - 0.36 / 1.25])


def test_amplitudes_are_those_that_give_the_question_its_variance():
    own = Errors(np.array([[4.0, 1.0], [1.0, 2.0]]), 0.1).given(0.5)
    assert own.covariance.tolist() == [[1.0, 0.25], [0.25, 0.5]] and own.noise == 0.1
    nothing = Errors(np.zeros((2, 2)), 0.1).given(0.5)
    assert not nothing.covariance.any()


def test_what_was_measured_lowers_the_gain(params):
    some, weight = line([0.0, 3.0]), np.array([0.5, 0.5])
    fresh = RemainingVariance.of(some, params, weight)
    later = RemainingVariance.of(some, params, weight, measured=line([0.0]))
    assert later.gain(np.array([0])) < 0.5 * fresh.gain(np.array([0]))


def test_a_program_is_chosen_for_its_kernels_and_its_time(params):
    some = line([0.0, 3.0, 0.0])
    choice = RemainingVariance.of(some, params, np.ones(3) / 3)
    blocks = [np.array([0]), np.array([0, 1]), np.array([1])]
    assert choose_programs(choice, blocks, [1.0, 1.0, 1.0], 10.0, 1) == [1]
    choice = RemainingVariance.of(some, params, np.ones(3) / 3)
    assert choose_programs(choice, blocks, [1.0, 100.0, 1.0], 10.0, 3)[0] == 0  # more for its time
    assert choose_programs(choice, blocks, [5.0, 5.0, 5.0], 4.0, 3) == []


def test_samples_go_where_time_and_doubt_are():
    gains = {"a": np.array([4.0, 1.0, 0.5]), "b": np.array([4.0, 3.0, 2.0])}
    # Worth: a 2, 0.5, 0.25; b 2, 1.5, 1.
    assert allocate(gains, {"a": 0.5, "b": 0.5}, 4) == {"a": 1, "b": 3}
    assert allocate(gains, {"a": 0.9, "b": 0.1}, 3) == {"a": 3, "b": 0}
    assert allocate(gains, {"a": 0.5, "b": 0.5}, 99) == {"a": 3, "b": 3}
    assert shares_of({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert spread_evenly(["a", "b"], 5) == {"a": 3, "b": 2}


def test_samples_needed_are_read_off_the_curve():
    curve = Curve("f", "d", (0, 10, 100), (0.2, 0.1, 0.05), (0.2, 0.15, 0.1))
    assert curve.needed(100) == pytest.approx(10.0)
    assert 0 < curve.needed(10) < 10
    assert Curve("f", "d", (0, 10), (0.2, 0.15), (0.2, 0.1)).needed(10) == float("inf")


def clustered(name, seed, factor, count=300):
    """A crowd of one kind of error and a few others far away that err differently."""
    rng = np.random.default_rng(seed)
    where = np.where(rng.random(count) < 0.85, 0.0, 1.0)
    positions = 12 * where + rng.normal(0, 0.3, count)
    errors = factor * (0.1 + 0.5 * where) + rng.normal(0, 0.01, count)
    return line(positions, name), errors


def trial(name, factor, seconds):
    pool, test = clustered(name, 0, factor), clustered(name, 1, factor)
    rows = pd.DataFrame({"row": np.arange(300)})
    return Trial.of_sites(name, start_params(KEYS), rows, pool, test, seconds, 60)


def test_chosen_samples_beat_random_ones():
    curve = error_curve(trial("a", 1.0, 1.0), "d", (0, 2, 4, 8, 20))
    assert curve.active[0] == pytest.approx(curve.random[0])
    assert curve.active[1] < 0.8 * curve.random[1]
    assert curve.needed(8) < 6


def test_samples_chosen_for_one_operator_beat_random_ones():
    asked = trial("a", 1.0, 1.0).asked((0, 1, 4))
    assert asked.chosen[0] == pytest.approx(asked.random[0]) and asked.narrowed[0] == 1.0
    # One sample of its own kind says what a random one of the crowd cannot.
    assert asked.chosen[1] < 0.8 * asked.random[1]
    assert asked.narrowed[2] < asked.narrowed[1] < 1.0
    assert min(asked.inside) > 0.8


def test_over_families_the_errors_count_by_time():
    heavy, light = trial("a", 1.0, 9.0), trial("b", 1.0, 1.0)
    curve = joint_curve([heavy, light], "d", (0, 4))
    assert curve.family == ALL
    none = [float(np.mean(np.abs(np.exp(-t.test_errors) - 1))) for t in (heavy, light)]
    assert curve.active[0] == pytest.approx(0.9 * none[0] + 0.1 * none[1])
    assert curve.active[1] <= curve.random[1]
