"""Boosted trees as small files."""

import lzma

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.estimators.boosted import XGBoostEstimator
from opcast.models.estimators.xgboost_trees import SUFFIX, expand

PARAMS = {"rounds": 40, "max_depth": 6, "stop_rounds": 0, "min_child_weight": 2.0}
SCHEMA = "synthetic"


@pytest.fixture(scope="module")
def data(make_table):
    return make_table(1500, 0)


@pytest.fixture(scope="module")
def models(data):
    return {c: XGBoostEstimator(**PARAMS, compact=c).fit_table(*data) for c in (False, True)}


def size(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_predicts_the_same_and_is_smaller(models, make_table, tmp_path):
    table, _ = make_table(400, 7)
    for compact, model in models.items():
        model.save(tmp_path / str(compact))
    small = XGBoostEstimator.load(tmp_path / "True", SCHEMA)
    assert small.point(table) == pytest.approx(models[True].point(table), rel=1e-3)
    assert models[True].point(table) == pytest.approx(models[False].point(table), rel=1e-9)
    assert size(tmp_path / "True") < 0.5 * size(tmp_path / "False")


def test_saving_again_changes_nothing(models, make_table, tmp_path):
    table, _ = make_table(200, 3)
    models[True].save(tmp_path / "first")
    first = XGBoostEstimator.load(tmp_path / "first", SCHEMA)
    first.save(tmp_path / "second")
    second = XGBoostEstimator.load(tmp_path / "second", SCHEMA)
    assert (second.point(table) == first.point(table)).all()
    name = f"joint{SUFFIX}"
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_file_is_compressed_ubjson(models, tmp_path):
    models[True].save(tmp_path / "m")
    data = (tmp_path / "m" / f"joint{SUFFIX}").read_bytes()
    assert expand(data) == lzma.decompress(data)
    assert expand(data)[:1] == b"{"


def test_contributions_are_not_made_up_without_covers(models, data, tmp_path):
    table = data[0].take(np.arange(20))
    before = models[True].contributions(table)
    assert before is not None and np.abs(before[:, :-1]).sum() > 0
    models[True].save(tmp_path / "m")
    assert XGBoostEstimator.load(tmp_path / "m", SCHEMA).contributions(table) is None


def test_damaged_trees_are_refused(models, tmp_path):
    models[True].save(tmp_path / "m")
    path = tmp_path / "m" / f"joint{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match="joint"):
        XGBoostEstimator.load(tmp_path / "m", SCHEMA)


def test_without_stopping_all_rounds_grow_on_all_rows(models, data):
    table, latency = data
    assert models[False]._fitted.booster.num_boosted_rounds() == PARAMS["rounds"]
    one = XGBoostEstimator(
        **{**PARAMS, "rounds": 1, "max_depth": 20, "min_child_weight": 0.0, "learning_rate": 1.0},
        subsample=1.0, colsample=1.0, reg_lambda=0.0, max_bin=2048, objective="squared",
    ).fit_table(table, latency)  # fmt: skip
    # A tree as deep as it takes knows every row; were any held back, it would miss those.
    assert np.median(np.abs(np.log(one.point(table) / latency))) < 1e-3
    assert np.quantile(np.abs(np.log(one.point(table) / latency)), 0.99) < 0.05
