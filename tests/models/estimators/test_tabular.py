from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.kernel_table import KernelTable, cells
from opcast.models.core.registry import estimator_class, estimator_names, make_estimator
from opcast.models.core.store import read_manifest
from opcast.models.estimators.forest import export_trees, walk
from opcast.models.estimators.linear import RidgeEstimator, RooflineEstimator, huber_ridge
from opcast.models.estimators.tabular import TabularEstimator

Tables = Callable[..., tuple[KernelTable, np.ndarray]]
SMALL = {
    "roofline": {},
    "ridge": {},
    "forest": {"trees": 8},
    "xgboost": {"rounds": 40, "max_depth": 4},
    "mlp": {"hidden": 32, "epochs": 15, "batch": 64},
}


def fitted(name: str, make_table: Tables, n: int = 800) -> TabularEstimator:
    estimator = make_estimator(name, **SMALL[name])
    assert isinstance(estimator, TabularEstimator)
    table, latency = make_table(n, 0)
    estimator.fit_table(table, latency)
    held, truth = make_table(400, 1)
    assert estimator.domain is not None
    estimator.calibrate(held, truth, estimator.point(held), estimator.domain.score(held))
    return estimator


@pytest.mark.parametrize("name", sorted(SMALL))
def test_invariants(name: str, make_table: Tables) -> None:
    estimator = fitted(name, make_table)
    table, latency = make_table(500, 2)
    found = estimator.predict_table(table)
    assert (found.latency > 0).all()
    assert (found.lo <= found.latency).all() and (found.latency <= found.hi).all()
    assert (found.lo > 0).all()
    assert set(found.source) == {"roofline" if name == "roofline" else "learned"}
    inside = np.mean((latency >= found.lo) & (latency <= found.hi))
    assert 0.82 < inside < 0.97


@pytest.mark.parametrize("name", sorted(SMALL))
def test_save_and_load_predict_bit_for_bit(name: str, make_table: Tables, tmp_path: Path) -> None:
    estimator = fitted(name, make_table)
    estimator.save(tmp_path / "model")
    again = type(estimator).load(tmp_path / "model", schema=estimator.schema)
    table, _ = make_table(300, 3)
    table.X[:20, :6] *= 30  # outside the domain, too
    before, after = estimator.predict_table(table), again.predict_table(table)
    for field in ("latency", "lo", "hi", "in_domain", "source"):
        np.testing.assert_array_equal(getattr(before, field), getattr(after, field))
    assert again.params == estimator.params


@pytest.mark.parametrize("name", ["ridge", "forest", "xgboost", "mlp"])
def test_learning_beats_the_roofline(name: str, make_table: Tables) -> None:
    estimator = fitted(name, make_table, n=1500)
    table, latency = make_table(500, 4)
    learned = np.abs(np.log(estimator.point(table) / latency)).mean()
    physics = np.abs(np.log(table.base_s / latency)).mean()
    assert learned < 0.6 * physics


@pytest.mark.parametrize("name", ["ridge", "forest", "xgboost", "mlp"])
def test_fitting_twice_gives_the_same(name: str, make_table: Tables) -> None:
    table, _ = make_table(100, 5)
    first, second = (fitted(name, make_table).point(table) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_roofline_is_roofline_plus_floor(make_table: Tables) -> None:
    table, _ = make_table(10, 0)
    table.base_s[:] = np.arange(1, 11) * 1e-6 + 2e-6
    found = RooflineEstimator().predict_table(table)
    np.testing.assert_allclose(found.latency, [(i + 2) * 1e-6 for i in range(1, 11)])
    np.testing.assert_allclose(found.hi, found.latency * 4)


def test_kind_never_trained_is_left_to_the_roofline(make_table: Tables) -> None:
    estimator = fitted("xgboost", make_table)
    table, _ = make_table(10, 6)
    table.cell[:] = cells(["sort"] * 5 + ["gemm"] * 5, "cpu")
    found = estimator.predict_table(table)
    assert list(found.source) == ["roofline"] * 5 + ["learned"] * 5
    np.testing.assert_array_equal(found.latency[:5], table.base_s[:5])
    assert not found.in_domain[:5].any()
    assert (found.hi[:5] / found.latency[:5]).min() >= 4  # wide
    table.cell[:] = cells(["gemm"] * 10, "tpu")  # nor is another platform
    assert set(estimator.predict_table(table).source) == {"roofline"}


def test_forest_arrays_give_what_scikit_learn_gives(make_table: Tables) -> None:
    from sklearn.ensemble import ExtraTreesRegressor

    table, latency = make_table(500, 0)
    forest = ExtraTreesRegressor(n_estimators=5, random_state=0).fit(table.X, np.log(latency))
    trees = export_trees([tree.tree_ for tree in forest.estimators_])
    asked = make_table(300, 1)[0].X
    np.testing.assert_allclose(walk(trees, asked), forest.predict(asked), rtol=1e-6)


@pytest.mark.parametrize(("value", "kept"), [(False, True), (True, False)])
def test_keywords_of_earlier_versions_are_read_at_their_default(
    make_table: Tables, tmp_path: Path, value: bool, kept: bool
) -> None:
    model = fitted("xgboost", make_table)
    model.save(tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    manifest["params"] |= {"per_cell": value, "monotone": {}}
    (tmp_path / "model" / "manifest.json").write_text(json.dumps(manifest))
    if kept:
        again = type(model).load(tmp_path / "model", schema=model.schema)
        table, _ = make_table(50, 1)
        np.testing.assert_array_equal(again.point(table), model.point(table))
        return
    with pytest.raises(ModelError, match="per_cell"):
        type(model).load(tmp_path / "model", schema=model.schema)


def test_ridge_is_the_least_squares_line_without_penalty() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0])
    design = np.stack([x, np.ones(4)], axis=1)
    coef = huber_ridge(design, 2 * x + 1, alpha=0.0, delta=1.0)
    np.testing.assert_allclose(coef, [2.0, 1.0], atol=1e-6)
    # One outlier of 100 hardly moves a Huber line.
    x = np.linspace(0, 1, 50)
    y = 2 * x + 1
    y[10] += 100
    coef = huber_ridge(np.stack([x, np.ones(50)], axis=1), y, alpha=0.0, delta=0.01, rounds=50)
    np.testing.assert_allclose(coef, [2.0, 1.0], atol=0.02)


def test_ridge_clips_far_features(make_table: Tables) -> None:
    model = fitted("ridge", make_table)
    table, _ = make_table(5, 0)
    table.X[:, 0] = 1e6
    assert np.isfinite(model.point(table)).all()
    assert model.point(table).max() < 1.0


def test_registry_lists_choices_on_a_wrong_name() -> None:
    assert set(SMALL) <= set(estimator_names())
    assert estimator_class("ridge") is RidgeEstimator
    with pytest.raises(ModelError, match="xgboost"):
        make_estimator("magic")
    with pytest.raises(ModelError, match="depth"):
        make_estimator("ridge", depth=3)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"objective": "sideways"}, "absolute")],
)
def test_xgboost_refuses_impossible_objectives(
    make_table: Tables, params: dict[str, object], message: str
) -> None:
    model = make_estimator("xgboost", **params)
    assert isinstance(model, TabularEstimator)
    with pytest.raises(ModelError, match=message):
        model.fit_table(*make_table(100, 0))


def damaged(folder: Path, make_table: Tables) -> Path:
    fitted("ridge", make_table).save(folder)
    return folder


def test_tampered_weights_are_refused(make_table: Tables, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "m", make_table)
    data = bytearray((folder / "ridge.npz").read_bytes())
    data[-1] ^= 1
    (folder / "ridge.npz").write_bytes(bytes(data))
    with pytest.raises(ModelError, match=r"ridge\.npz.*digest"):
        RidgeEstimator.load(folder, schema="synthetic")
    (folder / "ridge.npz").unlink()
    with pytest.raises(ModelError, match=r"ridge\.npz.*missing"):
        RidgeEstimator.load(folder, schema="synthetic")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 99, "format 99"),
        ("schema_hash", "other", "feature schema other"),
        ("estimator", "forest", "'forest' model, not 'ridge'"),
        ("params", {"depth": 1}, "incomplete"),
    ],
)
def test_wrong_manifest_is_refused(
    make_table: Tables, tmp_path: Path, key: str, value: object, message: str
) -> None:
    folder = damaged(tmp_path / "m", make_table)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=message):
        RidgeEstimator.load(folder, schema="synthetic")


def test_missing_or_broken_manifest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        RidgeEstimator.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        RidgeEstimator.load(tmp_path)


def test_saving_replaces_a_model_but_nothing_else(make_table: Tables, tmp_path: Path) -> None:
    model = fitted("ridge", make_table)
    model.save(tmp_path / "m")
    model.save(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]  # no half-written folder is left
    other = tmp_path / "notes"
    other.mkdir()
    (other / "a.txt").write_text("mine")
    with pytest.raises(ModelError, match="overwrite"):
        model.save(other)
