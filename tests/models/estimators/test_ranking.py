from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.kernel_table import KernelTable
from opcast.models.estimators.boosted import XGBoostEstimator
from opcast.models.estimators.ranking import ScoreMap, _Discordance, device_queries, query_order
from opcast.models.training.train import train
from opcast.models.training_data.metrics import kendall
from opcast.models.training_data.prepared import PreparedDataset
from opcast.models.training_data.splits import query_names

Tables = Callable[..., tuple[KernelTable, np.ndarray]]
QUICK = {"rounds": 60, "max_depth": 4, "objective": "pairwise"}


def test_queries_stay_together_and_large_ones_are_dealt_out() -> None:
    names = np.array(["a"] * 5 + ["b"] * 25 + ["a"] * 4)
    order, query = query_order(names, seed=0, limit=10)
    assert sorted(order.tolist()) == list(range(34))
    assert (np.diff(query) >= 0).all()
    own = [set(names[order[query == q]]) for q in np.unique(query)]
    assert own == [{"a"}, {"b"}, {"b"}, {"b"}]  # 9 rows in one, 25 in three
    assert np.bincount(query).tolist() == [9, 9, 8, 8]


def test_queries_are_families_on_a_device(prepared: PreparedDataset) -> None:
    names = query_names(prepared.frame)
    assert set(names) == {f"cpu-test|{f}" for f in set(prepared.frame["family"])}


def test_without_families_a_device_is_a_query(make_table: Tables) -> None:
    table, _ = make_table(6, 0)
    assert device_queries(table).tolist() == [0] * 6
    table.names = ("device_cores", *table.names[1:])
    table.X[:, 0] = [1, 2, 1, 2, 2, 1]
    assert device_queries(table).tolist() == [0, 1, 0, 1, 1, 0]


def test_discordance_counts_pairs_in_the_wrong_order() -> None:
    label, queries = np.array([1.0, 2.0, 3.0, 0.0]), np.array(["a", "a", "a", "b"])
    metric = _Discordance(label, queries, 0)
    assert set(zip(metric.a, metric.b, strict=True)) == {
        (i, j) for i in range(3) for j in range(3) if i != j
    }  # never across queries, never with itself
    assert metric(np.array([1.0, 2.0, 3.0, 9.0]), None) == ("discordance", 0.0)
    assert metric(np.array([3.0, 2.0, 1.0, 9.0]), None) == ("discordance", 1.0)
    # one of three pairs is wrong
    assert metric(np.array([1.0, 3.0, 2.0, 9.0]), None)[1] == pytest.approx(1 / 3, abs=0.02)
    alone = _Discordance(label[:1], queries[:1], 0)
    assert alone(label[:1], None) == ("discordance", 0.0)


def test_the_map_is_increasing_and_finds_the_scale() -> None:
    rng = np.random.default_rng(0)
    score = rng.normal(size=4000)
    cell = np.repeat([0, 1], 2000)
    truth = np.where(cell == 0, 2 * score + 1, score - 3)
    fitted = ScoreMap.fit(score, truth + 0.1 * rng.normal(size=4000), cell)
    asked = np.linspace(-1.5, 1.5, 50)
    first = fitted.log_latency(asked, np.zeros(50, int))
    second = fitted.log_latency(asked, np.ones(50, int))
    np.testing.assert_allclose(first, 2 * asked + 1, atol=0.15)
    np.testing.assert_allclose(second, asked - 3, atol=0.15)
    assert (np.diff(first) > 0).all() and (np.diff(second) > 0).all()
    far = fitted.log_latency(np.array([50.0, 51.0, -50.0]), np.zeros(3, int))
    assert far[1] - far[0] == pytest.approx(1.0) and far[2] < first[0]


def test_few_rows_make_a_shift() -> None:
    fitted = ScoreMap.fit(np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 7.0]), np.zeros(3, int))
    np.testing.assert_allclose(fitted.log_latency(np.array([0.0, 2.0]), np.array([0, 4])), [4, 6])


def test_pairwise_predicts_latencies_in_the_right_order(make_table: Tables) -> None:
    table, latency = make_table(1500, 0)
    model = XGBoostEstimator(**QUICK).fit_table(table, latency)  # type: ignore[arg-type]
    held, truth = make_table(600, 1)
    found = model.point(held)
    assert kendall(truth, found) > 0.9 > kendall(truth, held.base_s)
    error = np.abs(np.log(found / truth))
    assert np.median(error) < 0.15 < np.median(np.abs(np.log(held.base_s / truth)))
    assert model.contributions(held) is None
    own = held.cell == held.cell[0]
    order = np.argsort(model._scores(held)[own])
    assert (np.diff(np.log(found[own])[order]) > -1e-9).all()  # the map keeps the order of a kind


def test_pairwise_saves_its_map(make_table: Tables, tmp_path: Path) -> None:
    table, latency = make_table(400, 0)
    model = XGBoostEstimator(**QUICK).fit_table(table, latency)  # type: ignore[arg-type]
    model.save(tmp_path / "m")
    again = XGBoostEstimator.load(tmp_path / "m", schema="synthetic")
    np.testing.assert_array_equal(again.point(table), model.point(table))
    assert (tmp_path / "m" / "score-map.npz").is_file()


def test_pairwise_does_not_go_with_everything(make_table: Tables) -> None:
    table, latency = make_table(100, 0)
    with pytest.raises(ModelError, match=r"sorted.*absolute, squared, pairwise"):
        XGBoostEstimator(objective="sorted").fit_table(table, latency)


def test_training_passes_queries_on(
    prepared: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    fit = XGBoostEstimator._fit_order

    def spy(self, table, target, groups):  # type: ignore[no-untyped-def]
        seen.append(set(self._queries))
        fit(self, table, target, groups)

    monkeypatch.setattr(XGBoostEstimator, "_fit_order", spy)
    result = train(prepared, "xgboost", folds=2, **QUICK)
    assert len(seen) == 3 and all("cpu-test|random" in names for names in seen)
    assert result.metrics.set_index("group").loc["all", "kendall"] > 0.6
    assert result.model.estimator._queries is None  # type: ignore[attr-defined]
