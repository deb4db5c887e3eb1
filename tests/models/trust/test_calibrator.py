from __future__ import annotations

import json

import numpy as np
import pytest

from opcast.models.core.kernel_table import CELLS
from opcast.models.trust.calibrator import (
    MIN_SCORES,
    UNCALIBRATED,
    Calibrator,
    Conformal,
    ends,
    few_or_ends,
    grouped_ends,
    including_zero,
    size_bins,
    widest,
    with_error,
)


def heteroscedastic(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise that depends on cell and size: 5 % to 60 %."""
    rng = np.random.default_rng(seed)
    predicted = np.exp(rng.uniform(-14, -6, n))
    cell = rng.integers(0, 4, n)
    spread = 0.05 + 0.1 * cell + 0.03 * (np.log(predicted) + 14)
    return predicted * np.exp(spread * rng.standard_t(5, n)), predicted, cell


def test_finite_sample_quantiles() -> None:
    # 99 scores: ceil(100 * 0.95) = 95th smallest above, and the 5th smallest below.
    scores = np.arange(1.0, 100.0)
    assert ends(scores) == (5.0, 95.0)
    assert ends(scores[::-1]) == (5.0, 95.0)
    assert ends(np.array([1.0, 2.0, 3.0])) == (1.0, 3.0)  # too few for a tail: the extremes


def test_few_scores_take_the_fallback() -> None:
    scores = np.arange(1.0, MIN_SCORES + 1)
    found = Calibrator[str]().pool(
        np.r_[scores, -scores[1:]], ["many"] * MIN_SCORES + ["few"] * (MIN_SCORES - 1)
    )
    assert found.of(("many",), (-9.0, 9.0)) == (0.0, ends(scores)[1])
    assert found.of(("few",), (-9.0, 9.0)) == (-9.0, 9.0)
    # A more special key comes first, one without scores not at all.
    assert found.of(("few", "many"), (-9.0, 9.0)) == found.ends["many"]


def test_a_group_weighs_the_same_with_one_score_as_with_many() -> None:
    # Weights of 1/20 and 1: k - 10.5 is at (k - 0.5) / 40, which is 5 % for k = 2.5.
    scores, groups = np.r_[np.arange(1.0, 21.0) - 10.5, 100.0], np.array(["many"] * 20 + ["one"])
    found = Calibrator[str]().pool(scores, ["all"] * 21, least=1, group=groups)
    assert found.ends["all"] == pytest.approx((-8.0, 100.0))


def test_few_scores_scale_an_interval_by_their_size_and_never_narrow_it() -> None:
    scores = np.linspace(-1.0, 2.0, MIN_SCORES)
    low, high = ends(scores)
    assert few_or_ends(scores, 2.0) == (low / 2.0, high / 2.0)
    # ceil(4 · 0.9) = the fourth smallest of three, the largest size, is 3; 0.5 would narrow.
    assert few_or_ends(np.array([1.0, -3.0, 2.0])) == (-3.0, 3.0)
    assert few_or_ends(np.array([0.5, -0.2])) == (-1.0, 1.0)


def test_independent_errors_add_in_squares() -> None:
    assert with_error((-0.3, 0.3), (0.4, 0.4)) == pytest.approx((-0.5, 0.5))


def test_the_widest_ends_are_of_sets_with_enough_scores_and_hold_the_prediction() -> None:
    low, high = np.linspace(0.1, 0.2, MIN_SCORES), np.linspace(0.3, 0.6, MIN_SCORES)
    assert widest([low, high, np.full(MIN_SCORES - 1, 9.0)]) == (0.0, ends(high)[1])
    assert widest([low[1:]]) is None
    assert including_zero((-2.0, -1.0)) == (-2.0, 0.0)


def test_ends_of_one_more_group_count_each_group_alike() -> None:
    # Of 39 groups and a new one beyond them each counts 1/40, so that two make up 5 %: the third
    # outermost on either side bounds 95 %, however many rows a group has.
    rows = np.where(np.arange(39) % 2, 50, 2)
    group = np.repeat(np.arange(39), rows)
    scores = np.repeat(np.linspace(-0.19, 0.19, 39), rows)
    assert grouped_ends(scores, group) == pytest.approx((-0.18, 0.18))
    # Of 18, too few for a tail, the widest ends of groups with enough rows.
    few = group < 18
    assert grouped_ends(scores[few], group[few]) == widest(
        scores[group == place] for place in range(18)
    )
    assert grouped_ends(scores[:3], group[:3]) is None


def test_ends_of_one_more_group_cover_a_row_of_it() -> None:
    rng = np.random.default_rng(5)
    inside = []
    for _ in range(400):
        level = 0.2 * rng.normal(size=31)
        scores = (level[:, None] + 0.1 * rng.normal(size=(31, 20))).T
        group = np.broadcast_to(np.arange(30), (20, 30))
        lo, hi = grouped_ends(scores[:, :30].ravel(), group.ravel()) or (0.0, 0.0)
        inside.append(np.mean((scores[:, 30] >= lo) & (scores[:, 30] <= hi)))
    assert 0.89 < np.mean(inside) < 0.96


def test_size_bins_hold_equal_counts() -> None:
    edges, place = size_bins(np.arange(100.0), 4)
    assert len(edges) == 3 and np.bincount(place).tolist() == [25, 25, 25, 25]
    edges, place = size_bins(np.ones(10), 4)  # equal sizes: one edge, all above it
    assert edges.tolist() == [1.0] and set(place.tolist()) == {1}


def test_coverage_on_heteroscedastic_data_overall_and_by_cell() -> None:
    conformal = Conformal.fit(*heteroscedastic(6000, 0))
    measured, predicted, cell = heteroscedastic(20000, 1)
    lo, hi = conformal.interval(predicted, cell)
    inside = (measured >= lo) & (measured <= hi)
    assert 0.87 < inside.mean() < 0.93
    for c in range(4):
        assert 0.87 < inside[cell == c].mean() < 0.93
    width = np.log(hi / lo)
    assert width[cell == 3].mean() > 2 * width[cell == 0].mean()


def test_prediction_lies_in_its_interval_even_if_biased() -> None:
    predicted = np.exp(np.linspace(-12, -8, 500))
    conformal = Conformal.fit(predicted * 1.5, predicted, np.zeros(500, int))
    lo, hi = conformal.interval(predicted, np.zeros(500, int))
    assert (lo <= predicted).all() and (predicted <= hi).all()
    np.testing.assert_allclose(hi, predicted * 1.5)


def test_few_scores_fall_back_to_wide_intervals() -> None:
    predicted = np.full(MIN_SCORES - 1, 1e-5)
    conformal = Conformal.fit(predicted * 1.01, predicted, np.zeros(len(predicted), int))
    lo, hi = conformal.interval(predicted[:1], np.zeros(1, int))
    assert hi[0] / predicted[0] == pytest.approx(np.exp(UNCALIBRATED))
    assert lo[0] / predicted[0] == pytest.approx(np.exp(-UNCALIBRATED))


def test_round_trip_through_json_and_missing_cells() -> None:
    conformal = Conformal.fit(*heteroscedastic(2000, 2))
    data = json.loads(json.dumps(conformal.to_dict()))
    again = Conformal.from_dict(data)
    np.testing.assert_array_equal(again.lower, conformal.lower)
    np.testing.assert_array_equal(again.edges, conformal.edges)
    for key in ("cells", "lower_log", "upper_log"):
        data[key] = data[key][:4]
    fewer = Conformal.from_dict(data)
    unknown = len(CELLS) - 1
    np.testing.assert_array_equal(fewer.upper[unknown], conformal.upper[:4].max(axis=0))
