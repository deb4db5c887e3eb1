from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.registry import make_estimator
from opcast.models.cost_model import CostModel
from opcast.models.program import context_trees
from opcast.models.training.train import (
    TrainResult,
    compare_models,
    prediction_frame,
    program_report,
    train,
    train_final,
)
from opcast.models.training_data.crossfit import cross_fit, predict_entries
from opcast.models.training_data.metrics import metrics_table
from opcast.models.training_data.prepared import PreparedDataset

FAST = {"rounds": 60, "max_depth": 4}


@pytest.fixture(scope="module", autouse=True)
def _few_trees() -> Iterator[None]:
    """Of the correction by place: what it learns, ``tests/models/program`` checks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_trees, "ROUNDS", 20)
        yield


@pytest.fixture(scope="module")
def result(prepared: PreparedDataset) -> TrainResult:
    return train(prepared, "xgboost", "unseen_family", folds=3, **FAST)


def test_metrics_stand_beside_the_noise(result: TrainResult) -> None:
    total = result.metrics.set_index("group").loc["all"]
    assert total["n"] == len(result.predictions)
    assert total["median_ape"] < 0.5
    assert 0 < total["noise_median_ape"] < 0.05  # the synthetic labels vary by 2 %
    assert {"kind=gemm", "kind=fusion", "device=cpu-test"} <= set(result.metrics["group"])
    flat = result.flat_metrics
    assert {"median_ape", "mape", "bias", "spearman", "coverage", "program/mape"} <= set(flat)


def test_test_rows_are_of_held_out_families(result: TrainResult) -> None:
    assert set(result.predictions["family"]) == {"net2", "net5", "net8"}
    assert set(result.programs["family"]) == {"net2", "net5", "net8"}
    frame = result.predictions
    assert (frame["lo_us"] <= frame["predicted_us"]).all()
    assert (frame["predicted_us"] <= frame["hi_us"]).all()


def test_program_model_finds_the_overhead(result: TrainResult) -> None:
    programs = result.programs
    error = np.abs(programs["predicted_us"] / programs["measured_us"] - 1).mean()
    plain = np.abs(programs["sum_us"] / programs["measured_us"] - 1).mean()
    assert error < plain


def test_cross_fit_never_sees_what_it_predicts(prepared: PreparedDataset) -> None:
    """A model that memorises: it errs on every kernel unless it has seen it."""

    class Memory:
        name = "memory"
        leaks = 0

        def fit(self, dataset):  # type: ignore[no-untyped-def]
            self.seen = set(dataset.frame["kernel_hash"])
            self.programs = set(dataset.frame["program"])
            return self

        def predict(self, kernels, device):  # type: ignore[no-untyped-def]
            raise AssertionError("kernels are not read in this test")

    models: list[Memory] = []

    def factory() -> Memory:
        models.append(Memory())
        return models[-1]

    def spy(model, data, entries):  # type: ignore[no-untyped-def]
        hashes = {f"h{e}" for e in entries}
        Memory.leaks += len(hashes & model.seen)
        table = data.table.take(entries)
        return make_estimator("roofline").predict_table(table)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opcast.models.training_data.crossfit.predict_entries", spy)
        rows = np.arange(len(prepared.frame))
        crossed = cross_fit(factory, prepared, rows, "unseen_family", folds=4)  # type: ignore[arg-type]
    assert Memory.leaks == 0
    assert len(models) == 4
    assert set(crossed.program_kernels) == {p.row for p in prepared.programs}
    assert len(crossed.rows) == (prepared.entry >= 0).sum()


def test_save_and_load_predict_bit_for_bit(
    result: TrainResult, prepared: PreparedDataset, tmp_path: Path
) -> None:
    result.model.save(tmp_path / "model")
    again = CostModel.load(tmp_path / "model", schema="synthetic")
    entries = np.arange(100)
    before = predict_entries(result.model.estimator, prepared, entries)
    after = predict_entries(again.estimator, prepared, entries)
    for name in ("latency", "lo", "hi", "in_domain"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    program = prepared.programs[0]
    base_s = prepared.table.base_s[program.entries]
    first, second = (
        m.predict_in_program(program.lowered, program.device, after_of(m, prepared), base_s)
        for m in (result.model, again)
    )
    assert first[1] == second[1]
    np.testing.assert_array_equal(first[0].latency, second[0].latency)
    assert again.devices == result.model.devices
    assert again.metrics["unseen_family"] == pytest.approx(
        result.model.metrics["unseen_family"], nan_ok=True
    )
    assert again.name == "xgboost"


def after_of(model: CostModel, prepared: PreparedDataset):  # type: ignore[no-untyped-def]
    return predict_entries(model.estimator, prepared, prepared.programs[0].entries)


def test_damaged_bundle_is_refused(result: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    result.model.save(folder)
    with pytest.raises(ModelError, match="schema"):
        CostModel.load(folder)  # today's features are not the synthetic ones
    weights = folder / "estimator" / "joint.ubj"
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(ModelError, match=r"joint\.ubj"):
        CostModel.load(folder, schema="synthetic")


def test_training_is_reproducible(result: TrainResult, prepared: PreparedDataset) -> None:
    again = train(prepared, "xgboost", "unseen_family", folds=3, **FAST)
    for frame in ("predictions", "programs"):
        first, second = (getattr(r, frame)["predicted_us"] for r in (result, again))
        np.testing.assert_array_equal(first, second)


def test_train_final_keeps_metrics_and_covers(prepared: PreparedDataset) -> None:
    model = train_final(prepared, "ridge", folds=3, metrics={"random": {"mape": 0.1}})
    assert model.metrics == {"random": {"mape": 0.1}}
    assert model.info["rows"] == len(prepared.frame)
    frame = prediction_frame(model, prepared, np.arange(len(prepared.frame)))
    table = metrics_table(frame, ("kind", "device")).set_index("group")
    assert table.loc["all", "coverage"] > 0.85


def test_compare_models_and_splits(prepared: PreparedDataset) -> None:
    frame = compare_models(prepared, ("roofline", "ridge"), ("random", "unseen_shape"))
    assert list(zip(frame["split"], frame["model"], strict=True)) == [
        ("random", "roofline"),
        ("random", "ridge"),
        ("unseen_shape", "roofline"),
        ("unseen_shape", "ridge"),
    ]
    errors = frame.set_index(["split", "model"])["median_ape"]
    assert errors["random", "ridge"] < errors["random", "roofline"]
    assert {"noise_median_ape", "seconds"} <= set(frame)
    assert "program_mape" not in frame  # programs have kernels on both sides of these splits


def test_program_report_covers_every_program(prepared: PreparedDataset) -> None:
    report = program_report(prepared, "ridge", folds=3, inner_folds=2)
    assert len(report.programs) == len(prepared.programs)
    assert set(report.families["family"]) == {*(f"net{i}" for i in range(9)), "random"}
    groups = report.metrics.set_index("group")
    assert groups.loc["set=zoo", "n"] == 45
    assert groups.loc["set=generated", "n"] == 30
    assert groups.loc["all", "mape"] < 0.5


def test_seed_and_threads_go_only_where_they_are_taken(prepared: PreparedDataset) -> None:
    found = train(prepared, "roofline", "random", seed=3, n_jobs=2, folds=2)
    assert found.model.info["seed"] == 3
    with pytest.raises(ModelError, match="depth"):
        train(prepared, "ridge", "random", depth=3)


def test_empty_datasets_say_so(prepared: PreparedDataset) -> None:
    from opcast.common.errors import DatasetError
    from opcast.features.dataset import Dataset
    from opcast.models.training_data.prepared import prepare

    only_programs = prepared.frame[prepared.frame["level"] == "program"].head(3)
    with pytest.raises(DatasetError, match="kernel rows"):
        prepare(Dataset(only_programs.reset_index(drop=True)))
    zero = prepared.frame.assign(latency_us_p50=0.0)
    with pytest.raises(DatasetError, match="positive"):
        prepare(Dataset(zero))
    assert dataclasses.is_dataclass(prepared)
