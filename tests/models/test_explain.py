from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.features.devices.device import DeviceSpec
from opcast.features.table.table import feature_names
from opcast.features.table.tpu import tpu_feature_names
from opcast.models.contributions import KERNEL_GROUPS, OTHER
from opcast.models.cost_model import CostModel
from opcast.models.estimators.tabular import TabularEstimator
from opcast.models.explain import KernelExplanation, explain_table
from opcast.models.training.train import train
from opcast.models.training_data.crossfit import CrossFit
from opcast.models.training_data.prepared import PreparedDataset
from opcast.models.trust import neighbours
from opcast.models.trust.domain import Domain
from opcast.models.trust.neighbours import NeighbourTable

from ..support.cases import later

PARAMS = {
    "roofline": {},
    "ridge": {},
    "forest": {"trees": 6},
    "xgboost": {"rounds": 40, "max_depth": 4},
}


@pytest.fixture(scope="module")
def models(prepared: PreparedDataset) -> dict[str, CostModel]:
    # No program is explained here.
    data = replace(prepared, programs=[])
    return {name: train(data, name, folds=2, **params).model for name, params in PARAMS.items()}


def explained(
    model: CostModel, prepared: PreparedDataset, cpu: DeviceSpec, rows: np.ndarray, k: int = 3
) -> list[KernelExplanation]:
    assert isinstance(model.estimator, TabularEstimator)
    table = prepared.table.take(rows)
    found = model.estimator.predict_table(table)
    return explain_table(model, table, found, [f"h{r}" for r in rows], cpu, k)


def test_every_feature_of_the_schema_has_a_group() -> None:
    names = (*feature_names(), *tpu_feature_names())
    strays = [name for name in names if KERNEL_GROUPS.of(name) == OTHER]
    assert not strays
    columns = KERNEL_GROUPS.columns(names)
    assert sum(map(len, columns.values())) == len(names)
    assert list(columns) == [g for g in KERNEL_GROUPS.names if g != OTHER]
    assert KERNEL_GROUPS.of("device_cores") == "device"
    assert KERNEL_GROUPS.of("log_gemm_m") == "shape"
    assert KERNEL_GROUPS.of("log_n_dot") == "op mix"
    assert KERNEL_GROUPS.of("log_memory_floor") == KERNEL_GROUPS.of("set_over_last") == "size"
    assert KERNEL_GROUPS.of("never_heard_of") == OTHER


@pytest.mark.parametrize("name", [later("ridge"), later("forest"), "xgboost"])
def test_parts_add_up_to_the_log_ratio(
    name: str, models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    found = explained(models[name], prepared, cpu, np.arange(60))
    for e in found:
        total = e.baseline + sum(c.log_ratio for c in e.contributions)
        assert total == pytest.approx(e.log_ratio, abs=2e-4)
        assert e.latency_us == pytest.approx((e.roofline_us + e.floor_us) * e.factor)
        assert e.method == ("treeshap" if name == "xgboost" else "ablation")
        sizes = [abs(c.log_ratio) for c in e.contributions]
        assert sizes == sorted(sizes, reverse=True)


def test_treeshap_by_feature_finds_what_matters(
    models: dict[str, CostModel], prepared: PreparedDataset
) -> None:
    estimator = models["xgboost"].estimator
    assert isinstance(estimator, TabularEstimator)
    parts = estimator.contributions(prepared.table)
    assert parts is not None and parts.shape == (700, 13)
    size = np.abs(parts[:, :-1]).mean(axis=0)
    assert size[:2].min() > size[3:6].max()  # f0 and f1 make the latency, f3 to f5 do not
    assert size[11] == 0  # constant
    np.testing.assert_allclose(parts.sum(axis=1), estimator.log_ratio(prepared.table), atol=1e-4)


def test_the_roofline_has_nothing_to_take_apart(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    (e,) = explained(models["roofline"], prepared, cpu, np.array([30]))
    assert (e.method, e.factor, e.contributions) == ("none", 1.0, ())
    assert e.roofline_us + e.floor_us == pytest.approx(e.latency_us)
    assert e.floor_us == pytest.approx(1.0)


def test_a_training_kernel_is_its_own_neighbour(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    table = models["ridge"].neighbours
    assert table is not None
    rows = np.array([int(h[1:]) for h in table.hashes.astype(str)])[:80]
    for e in explained(models["ridge"], prepared, cpu, rows):
        first = e.neighbours[0]
        assert (first.kernel_hash, first.distance) == (e.kernel_hash, 0.0)
        assert first.kind == e.kind
        distances = [n.distance for n in e.neighbours]
        assert distances == sorted(distances) and len(distances) == 3
        same = prepared.frame[prepared.frame["kernel_hash"] == e.kernel_hash]
        assert first.measured_us == pytest.approx(
            same["latency_us_p50"].median(), rel=0.05
        )  # training rows alone enter, the labels of a kernel vary by 2 %


def test_held_out_kernels_are_not_in_the_table(
    models: dict[str, CostModel], prepared: PreparedDataset
) -> None:
    table = models["ridge"].neighbours
    assert table is not None
    held = prepared.frame[prepared.frame["family"].isin(["net2", "net5", "net8"])]
    assert not set(table.hashes.astype(str)) & set(held["kernel_hash"])


def test_table_is_saved_with_the_model(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec, tmp_path: Path
) -> None:
    models["forest"].save(tmp_path / "m")
    again = CostModel.load(tmp_path / "m", schema="synthetic")
    rows = np.arange(100, 110)
    assert explained(again, prepared, cpu, rows) == explained(models["forest"], prepared, cpu, rows)
    again.save(tmp_path / "again")
    assert (tmp_path / "again" / "neighbours.npz").is_file()


def test_a_model_without_the_table_says_so(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    bare = {name: replace(model, neighbour_file=b"") for name, model in models.items()}
    (e,) = explained(bare["xgboost"], prepared, cpu, np.array([3]))
    assert e.neighbours == () and e.contributions
    assert "train it again" in e.notes[0]
    (e,) = explained(bare["forest"], prepared, cpu, np.array([3]))
    assert (e.method, e.contributions) == ("none", ())
    assert "medians" in e.notes[1]
    assert e.baseline == e.log_ratio
    with pytest.raises(ModelError, match="neighbour table"):
        assert replace(models["ridge"], neighbour_file=b"PK damaged").neighbours


def test_outside_says_which_feature(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    estimator = models["xgboost"].estimator
    assert isinstance(estimator, TabularEstimator) and estimator.domain is not None
    key = int(estimator.domain.keys[0])
    table = prepared.table.take(np.array([50]))
    table.X[0, key] = 99.0
    found = estimator.predict_table(table)
    found.in_domain[:] = True  # enough other pairs are near: the far feature is named all the same
    (e,) = explain_table(models["xgboost"], table, found, ["new"], cpu)
    assert [o.feature for o in e.outside] == [f"f{key}"]
    found.in_domain[:] = False
    (e,) = explain_table(models["xgboost"], table, found, ["new"], cpu)
    worst = e.outside[0]
    assert (worst.feature, worst.value, worst.beyond) == (f"f{key}", 99.0, True)
    assert worst.empty_pairs == 1.0
    assert worst.low < worst.high < 99.0
    assert e.neighbours[0].distance > 1.0


def test_occupancy_is_what_the_score_counts(prepared: PreparedDataset) -> None:
    domain = Domain.fit(prepared.table.take(np.arange(300)))
    rest = prepared.table.take(np.arange(300, 700))
    occupied = domain.occupancy(rest)
    assert occupied.shape == (400, len(domain.pairs))
    np.testing.assert_allclose(occupied.mean(axis=1), domain.score(rest))


def test_an_untrained_kind_is_left_to_the_roofline(
    models: dict[str, CostModel], prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    table = prepared.table.take(np.array([1]))
    table.cell[:] = 20
    estimator = models["xgboost"].estimator
    assert isinstance(estimator, TabularEstimator)
    (e,) = explain_table(models["xgboost"], table, estimator.predict_table(table), ["x"], cpu)
    assert (e.source, e.method, e.factor, e.contributions) == ("roofline", "none", 1.0, ())
    assert "not trained on kernels of this kind" in e.notes[0]
    assert len(e.neighbours) == 3  # of other kinds, for want of its own


def test_large_tables_keep_rare_kinds_whole(
    prepared: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "MAX_ROWS", 60)
    rows = prepared.kernel_rows()
    cell = prepared.table.cell.copy()
    cell[100:110] = 30
    data = replace(prepared, table=replace(prepared.table, cell=cell))
    crossed = CrossFit(rows, prepared.latency_s[rows], np.zeros(len(rows)), {})
    table = NeighbourTable.fit(data, crossed)
    assert len(table) == 60
    measured = set(prepared.entry[rows]) & set(range(100, 110))
    assert (table.cell == 30).sum() == len(measured)
