"""Trees walked by single rows, against XGBoost's own answers."""

from functools import partial

import numpy as np
import pytest
import xgboost as xgb

from opcast.common.errors import ModelError
from opcast.models.estimators.boosted import MANY, _predict
from opcast.models.estimators.xgboost_trees import (
    FEW,
    PATIENCE,
    BoostedTrees,
    RowTrees,
    compact,
    expand,
    read_ubj,
)


@pytest.fixture(scope="module")
def booster():
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=(3000, 12)), 1).astype(np.float32)
    target = values[:, 0] * 2 + np.sin(values[:, 1]) + 0.1 * rng.normal(size=3000)
    data = xgb.QuantileDMatrix(values, target)
    settings = {"objective": "reg:absoluteerror", "max_depth": 7, "nthread": 1}
    return xgb.train(settings, data, 60)


@pytest.fixture(scope="module")
def rows():
    found = np.round(np.random.default_rng(1).normal(size=(200, 12)), 1).astype(np.float32)
    found[0] = 0.0
    found[1] = 1e30
    return found


def saved(booster):
    return bytes(booster.save_raw("ubj"))


def test_sums_are_the_same_to_the_last_bit(booster, rows):
    expected = booster.inplace_predict(rows, validate_features=False)
    trees = RowTrees.of(saved(booster))
    found = np.array([trees.predict(row) for row in rows], np.float32)
    np.testing.assert_array_equal(found, expected)


def test_many_rows_are_answered_in_their_own_order(booster, rows):
    many = np.tile(rows, (MANY // len(rows) + 1, 1))
    expected = booster.inplace_predict(many, validate_features=False)
    np.testing.assert_array_equal(_predict(booster, many), expected.astype(np.float64))


def test_few_rows_are_walked_once_that_has_been_asked_often(booster, rows):
    small = BoostedTrees(booster)
    assert all(small.few(rows[:1]) is None for _ in range(PATIENCE - 1))
    check_few(small, booster, rows)


def test_few_rows_of_a_saved_booster_are_walked_at_once(booster, rows):
    small = BoostedTrees(stored=partial(saved, booster))
    check_few(small, booster, rows)
    # What the trees leave to the booster is as before it was saved.
    expected = booster.inplace_predict(rows, validate_features=False)
    found = small.booster.inplace_predict(rows, validate_features=False)
    np.testing.assert_array_equal(found, expected)
    check_few(small, booster, rows)


def check_few(small, booster, rows):
    expected = booster.inplace_predict(rows[:FEW], validate_features=False)
    np.testing.assert_array_equal(small.few(rows[:FEW]), expected.astype(np.float64))
    assert small.few(rows[: FEW + 1]) is None
    missing = rows[:1].copy()
    missing[0, 3] = np.nan
    assert small.few(missing) is None
    # Rows that lack a feature are XGBoost's to refuse.
    assert small.few(rows[:1, :3]) is None


@pytest.mark.parametrize("name, value", [("left_children", 10**6), ("right_children", -3),
                                         ("split_indices", -1), ("left_children", 0)])  # fmt: skip
def test_nodes_that_lead_nowhere_are_refused(booster, name, value):
    """A child outside its tree, no feature, and a root that is its own child."""
    tree = read_ubj(saved(booster))["learner"]["gradient_booster"]["model"]["trees"][0]
    tree[name] = tree[name].copy()
    tree[name][0] = value
    with pytest.raises(ValueError):
        RowTrees([tree], 0.5)


def test_a_damaged_booster_is_named_when_it_is_asked(booster, rows):
    for data in (saved(booster)[:-500], b"{}", b"no trees"):
        damaged = BoostedTrees(stored=partial(bytes, data))
        assert damaged.few(rows[:1]) is None
        with pytest.raises(ModelError, match="cannot be read"):
            _ = damaged.booster


def test_a_compressed_booster_that_is_cut_off_is_named_when_it_is_asked(booster, rows):
    cut = BoostedTrees(stored=partial(expand, compact(booster)[:-40]))
    assert cut.few(rows[:1]) is None
    with pytest.raises(ModelError, match="cannot be read: a compressed booster is cut off"):
        _ = cut.booster


def test_what_is_more_than_trees_with_numeric_splits_is_left_to_xgboost(rows):
    target = rows[:, 0]
    data = xgb.DMatrix(rows, target)
    assert RowTrees.of(saved(xgb.train({"booster": "gblinear", "nthread": 1}, data, 2))) is None
    kind = np.arange(200.0).reshape(-1, 1) % 5
    categories = xgb.DMatrix(
        kind, (kind[:, 0] % 2 == 0) * 1.0, feature_types=["c"], enable_categorical=True
    )
    settings = {"tree_method": "hist", "max_cat_to_onehot": 1, "nthread": 1}
    assert RowTrees.of(saved(xgb.train(settings, categories, 2))) is None


def test_ubjson_as_its_specification_has_it():
    text = b"{U\x01aI\x00\x02U\x01b[$l#U\x02\x00\x00\x00\x01\xff\xff\xff\xffU\x01c[SU\x02hiTZ]}"
    found = read_ubj(text)
    assert found["a"] == 2 and found["b"].tolist() == [1, -1] and found["c"] == ["hi", True, None]
    for cut in range(1, len(text)):
        with pytest.raises(ValueError):
            read_ubj(text[:cut])
