from __future__ import annotations

import numpy as np

from opcast.models.training_data.splits import draw, stop_rows


def test_whole_groups_are_held_back() -> None:
    groups = np.repeat([f"g{i}" for i in range(500)], 4)
    stop = stop_rows(groups, 0)
    assert (stop.reshape(500, 4) == stop.reshape(500, 4)[:, :1]).all()
    assert 0.06 < stop.mean() < 0.14  # a tenth of 500 groups, within three deviations
    np.testing.assert_array_equal(stop, stop_rows(groups, 0))
    assert (stop != stop_rows(groups, 1)).any()


def test_the_draw_is_not_that_of_the_splits() -> None:
    names = np.array([f"k{i}" for i in range(3000)])
    trained = names[np.array([draw(name, 0) >= 0.3 for name in names])]
    assert 0.07 < stop_rows(trained, 0).mean() < 0.13


def test_few_rows_are_all_fitted() -> None:
    assert not stop_rows(np.array([f"g{i}" for i in range(60)]), 0).any()
    assert not stop_rows(np.array(["one family"] * 1000), 0).any()
