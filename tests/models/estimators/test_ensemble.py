from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import ModelError
from opcast.features.devices.device import DeviceSpec
from opcast.models.core.kernel_table import CELLS, KernelTable
from opcast.models.cost_model import CostModel
from opcast.models.estimators.ensemble import EnsembleEstimator, blend_weights, simplex_weights
from opcast.models.training.ensemble_choice import choose, cross_validate, train_ensemble
from opcast.models.training_data.prepared import PreparedDataset

Tables = Callable[..., tuple[KernelTable, np.ndarray]]
QUICK = {"forest": {"trees": 6}, "xgboost": {"rounds": 40, "max_depth": 4}}


def test_weights_find_the_mix_that_made_the_target() -> None:
    rng = np.random.default_rng(0)
    predictions = rng.normal(size=(2000, 3))
    target = predictions @ np.array([0.7, 0.3, 0.0])
    weights = simplex_weights(predictions, target, shrinkage=0)
    np.testing.assert_allclose(weights, [0.7, 0.3, 0.0], atol=1e-3)


def test_weights_are_never_negative_and_sum_to_one() -> None:
    rng = np.random.default_rng(1)
    predictions = rng.normal(size=(500, 3))
    target = 1.5 * predictions[:, 0] - 0.5 * predictions[:, 1]
    weights = simplex_weights(predictions, target, shrinkage=10)
    assert (weights >= 0).all() and weights[0] > 0.9
    assert weights.sum() == pytest.approx(1.0)


def test_shrinkage_pulls_towards_equal_weights() -> None:
    rng = np.random.default_rng(2)
    predictions = rng.normal(size=(200, 2))
    target = predictions[:, 0]
    first = [simplex_weights(predictions, target, s)[0] for s in (0, 200, 20_000, 2e8)]
    assert first == sorted(first, reverse=True)
    assert first[0] == pytest.approx(1.0, abs=1e-3)
    assert first[-1] == pytest.approx(0.5, abs=1e-3)


def test_small_cells_take_the_weights_of_all() -> None:
    rng = np.random.default_rng(3)
    predictions = rng.normal(size=(1050, 2))
    cell = np.repeat([0, 1], [1000, 50])
    target = np.where(cell == 0, predictions[:, 0], predictions[:, 1])
    weights = blend_weights(predictions, target, cell, shrinkage=0)
    assert weights.shape == (len(CELLS), 2)
    assert weights[0, 0] > 0.99
    np.testing.assert_array_equal(weights[1], weights[-1])
    assert 0.5 < weights[-1, 0] < 1.0 + 1e-9
    np.testing.assert_array_equal(blend_weights(np.zeros((0, 2)), np.zeros(0), cell[:0], 1), 0.5)


@pytest.fixture(scope="module")
def fitted(make_table: Tables) -> EnsembleEstimator:
    table, latency = make_table(800, 0)
    return EnsembleEstimator(member_params=QUICK).fit_table(table, latency)


def test_prediction_is_the_weighted_geometric_mean(
    fitted: EnsembleEstimator, make_table: Tables
) -> None:
    table, _ = make_table(50, 1)
    parts = [fitted.members[name].point(table) for name in ("forest", "xgboost")]
    weights = fitted.weights[table.cell]
    expected = np.exp((np.log(np.stack(parts, axis=1)) * weights).sum(axis=1))
    np.testing.assert_allclose(fitted.point(table), expected, rtol=1e-9)


def test_no_worse_than_the_worst_member(fitted: EnsembleEstimator, make_table: Tables) -> None:
    table, latency = make_table(500, 2)
    error = {n: np.abs(np.log(m.point(table) / latency)).mean() for n, m in fitted.members.items()}
    own = np.abs(np.log(fitted.point(table) / latency)).mean()
    assert own <= max(error.values())


def test_saved_folder_of_folders_predicts_bit_for_bit(
    fitted: EnsembleEstimator, make_table: Tables, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "m")
    again = EnsembleEstimator.load(tmp_path / "m", schema="synthetic")
    table, _ = make_table(100, 3)
    np.testing.assert_array_equal(again.point(table), fitted.point(table))
    assert (tmp_path / "m" / "members" / "forest" / "manifest.json").is_file()
    shown = json.loads((tmp_path / "m" / "manifest.json").read_text())["weights"]
    assert set(shown) == {"cpu/gemm", "cpu/fusion"}
    assert set(shown["cpu/gemm"]) == {"forest", "xgboost"}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"members": ["forest"]}, "two or more"),
        ({"members": ["forest", "forest"]}, "two or more"),
        ({"members": ["forest", "ensemble"]}, "cannot be a member"),
        ({"members": ["forest", "abacus"]}, "abacus"),
        ({"member_params": {"ridge": {}}}, "not a member"),
    ],
)
def test_bad_members_are_refused(params: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        EnsembleEstimator(**params)  # type: ignore[arg-type]


def figures(**errors: dict[str, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"split": split, "model": model, "mean_abs_log": error}
        for split, own in errors.items()
        for model, error in own.items()
    )


def test_the_ensemble_is_kept_only_if_it_wins_everywhere() -> None:
    wins = {"ensemble": 0.1, "forest": 0.2, "xgboost": 0.3}
    loses = {"ensemble": 0.25, "forest": 0.2, "xgboost": 0.1}
    assert choose(figures(unseen_family=wins)) == "ensemble"
    assert choose(figures(unseen_family=wins, unseen_device=wins)) == "ensemble"
    # forest: (0.2 + 0.2) / 2 = 0.2; xgboost: (0.4 + 0.1) / 2 = 0.25
    mixed = {"ensemble": 0.1, "forest": 0.2, "xgboost": 0.4}
    assert choose(figures(unseen_family=mixed, unseen_device=loses)) == "forest"
    assert choose(figures(unseen_family=loses)) == "xgboost"
    tie = {"ensemble": 0.2, "forest": 0.2, "xgboost": 0.3}
    assert choose(figures(unseen_family=tie)) == "forest"


def test_a_useless_ensemble_gives_way_to_its_best_member(
    prepared: PreparedDataset, tmp_path: Path
) -> None:
    """With equal weights forced on it, a member of no use (the roofline) spoils the ensemble."""
    result, choice = train_ensemble(prepared, members=["ridge", "roofline"], shrinkage=1e9, folds=2)
    assert (choice.winner, choice.kept) == ("ridge", False)
    assert "does not beat" in choice.sentence and "saves its member ridge" in choice.sentence
    assert set(choice.table["split"]) == {"unseen_family"}  # one device: nothing to leave out
    assert set(choice.test["model"]) == {"ensemble", "ridge", "roofline"}
    result.model.save(tmp_path / "m")
    again = CostModel.load(tmp_path / "m", schema="synthetic")
    assert again.name == "ridge"
    assert again.info["ensemble_choice"]["winner"] == "ridge"
    assert len(again.info["ensemble_choice"]["cross_validated"]) == 3


def test_an_ensemble_that_wins_is_kept(prepared: PreparedDataset) -> None:
    result, choice = train_ensemble(
        prepared, members=["ridge", "xgboost"], member_params={"xgboost": QUICK["xgboost"]}, folds=2
    )
    errors = choice.table.set_index("model")["mean_abs_log"]
    beats = errors["ensemble"] < min(errors["ridge"], errors["xgboost"])
    assert choice.kept == beats
    assert result.model.name == choice.winner
    assert set(choice.test["n"]) == {len(result.predictions)}
    test = choice.test.set_index("model")["median_ape"]
    total = result.metrics.set_index("group").loc["all"]
    assert test[choice.winner] == pytest.approx(total["median_ape"])


def test_with_two_devices_each_is_left_out_in_turn(
    prepared: PreparedDataset, cpu: DeviceSpec
) -> None:
    other = np.arange(len(prepared.frame)) % 2 == 0
    frame = prepared.frame.assign(device=np.where(other, "cpu-other", cpu.name))
    devices = {cpu.name: cpu, "cpu-other": dataclasses.replace(cpu, name="cpu-other")}
    data = dataclasses.replace(prepared, frame=frame, devices=devices)
    params = {"members": ["ridge", "roofline"]}
    table = cross_validate(data, np.arange(len(frame)), params, folds=2, seed=0)
    counts = table.groupby("split")["n"].first()
    assert set(counts.index) == {"unseen_family", "unseen_device"}
    assert counts["unseen_family"] == (data.entry >= 0).sum()
    assert 0 < counts["unseen_device"] < counts["unseen_family"]  # shared kernels are dealt out
