from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.kernel_table import KernelTable
from opcast.models.core.store import pack_tensors, unpack_tensors
from opcast.models.neural.base import Bound, best_epoch, learning_rates, shuffled
from opcast.models.neural.batches import Scaling
from opcast.models.neural.estimators import MLPEstimator

Tables = Callable[..., tuple[KernelTable, np.ndarray]]


@pytest.fixture(scope="module")
def fitted(make_table: Tables) -> MLPEstimator:
    return MLPEstimator(hidden=64, epochs=20, batch=64).fit_table(*make_table(1500, 0))


def log_error(model: MLPEstimator, table: KernelTable, latency: np.ndarray) -> float:
    return float(np.abs(np.log(model.point(table) / latency)).mean())


def test_learns_a_law_nearly_to_its_noise(fitted: MLPEstimator, make_table: Tables) -> None:
    table, latency = make_table(500, 1)
    physics = np.abs(np.log(table.base_s / latency)).mean()
    # The labels' own noise is 0.04 on average; a line through the features leaves 0.19.
    assert log_error(fitted, table, latency) < 0.25 * physics


def test_equal_seeds_give_equal_models(make_table: Tables) -> None:
    data, asked = make_table(300, 0), make_table(50, 1)[0]
    small = {"hidden": 16, "layers": 1, "epochs": 2, "batch": 64}
    first, same, other = (MLPEstimator(seed=s, **small).fit_table(*data) for s in (3, 3, 4))
    np.testing.assert_array_equal(first.point(asked), same.point(asked))
    assert not np.array_equal(first.point(asked), other.point(asked))


def test_saved_model_predicts_the_same(
    fitted: MLPEstimator, make_table: Tables, tmp_path: Path
) -> None:
    fitted.save(tmp_path / "m")
    assert (tmp_path / "m" / "network.safetensors").is_file()
    again = MLPEstimator.load(tmp_path / "m", schema=fitted.schema)
    table, _ = make_table(1500, 2)  # more than a chunk
    table.X[:100] *= 50
    np.testing.assert_array_equal(again.point(table), fitted.point(table))


def test_far_outside_the_training_range_nothing_explodes(
    fitted: MLPEstimator, make_table: Tables
) -> None:
    table, _ = make_table(200, 3)
    table.X[:] = np.random.default_rng(0).normal(size=table.X.shape) * 1e6
    ratio = np.log(fitted.point(table) / table.base_s)
    assert fitted.bound.low <= ratio.min() and ratio.max() <= fitted.bound.high
    table.X[0, 0] = np.nan
    assert np.isfinite(fitted.point(table)).all()


def test_no_rows_give_no_predictions(fitted: MLPEstimator, make_table: Tables) -> None:
    table, _ = make_table(5, 0)
    assert fitted.point(table.take(np.zeros(0, np.int64))).shape == (0,)


@pytest.mark.parametrize("layers", [4, 2])
def test_weights_of_another_network_are_refused(
    fitted: MLPEstimator, tmp_path: Path, layers: int
) -> None:
    fitted.save(tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["params"]["layers"] = layers
    file.write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="do not fit its parameters"):
        MLPEstimator.load(tmp_path / "m", schema=fitted.schema)
    with pytest.raises(ModelError, match="feature schema synthetic"):
        MLPEstimator.load(tmp_path / "m")


def test_scaling_by_hand() -> None:
    # Column 1 is constant. Column 0 has mean 2 and deviation 2; a flag set once in 100 rows has
    # range 1, and so a scale of an eighth rather than its deviation of 0.0995.
    values = np.zeros((100, 3), np.float32)
    values[:, 0] = np.tile([0.0, 4.0], 50)
    values[:, 1], values[0, 2] = 7.0, 1.0
    scaling = Scaling.fit(values)
    np.testing.assert_array_equal(scaling.columns, [0, 2])
    np.testing.assert_allclose(scaling.scale, [2.0, 1 / 8])
    asked = np.array([[2.0, 0.0, 1.0], [100.0, 9.0, 0.0], [np.nan, 0.0, 0.01]], np.float32)
    # 100 is clipped to 4 + half a deviation = 5.
    expected = [[0.0, (1 - 0.01) * 8], [1.5, -0.08], [0.0, 0.0]]
    assert scaling.width == 32
    np.testing.assert_allclose(scaling(asked)[:, :2], expected, atol=1e-6)
    assert not scaling(asked)[:, 2:].any()
    same = Scaling.fit(np.ones((5, 4), np.float32))
    np.testing.assert_array_equal(same(np.full((2, 4), 3.0, np.float32)), np.zeros((2, 32)))


def test_bound_by_hand() -> None:
    def logistic(v: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-v))

    target = np.concatenate([np.zeros(1000), np.linspace(-2, 6, 9), np.zeros(990)])
    bound = Bound.fit(target)
    assert bound(np.array(0.0), logistic) == pytest.approx(0.0)  # the median
    rise = (bound(np.array(1e-4), logistic) - bound(np.array(-1e-4), logistic)) / 2e-4
    assert rise == pytest.approx(1.0, rel=1e-4)
    far = bound(np.array([-1e3, 1e3]), lambda v: logistic(np.clip(v, -500, 500)))
    np.testing.assert_allclose(far, [bound.low, bound.high])
    # One in 2000 on either side is left out, before half a log unit of room.
    assert -2.5 <= bound.low <= -1.0 and 4.5 <= bound.high <= 6.5


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = learning_rates(100, 0.5)
    np.testing.assert_allclose(rates[:5], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert rates[5] == pytest.approx(0.5)
    # Half-way between step 5 and step 100.
    assert rates[52] == pytest.approx(0.25 * (1 + np.cos(np.pi * 47 / 95)))
    assert (np.diff(rates[5:]) < 0).all() and rates[-1] < 1e-3


def test_batches_are_full_and_never_repeat_a_row() -> None:
    rows = shuffled(10, 4, np.random.default_rng(0))
    assert rows.shape == (2, 4) and len(set(rows.ravel().tolist())) == 8
    assert shuffled(3, 4, np.random.default_rng(0)).shape == (1, 3)


def test_best_epoch_is_kept_and_patience_ends() -> None:
    errors = [5.0, 3.0, 4.0, 3.5, 1.0]
    seen = []

    def epochs() -> Iterator[int]:
        for number in range(5):
            seen.append(number)
            yield number

    assert best_epoch(epochs(), lambda n: errors[n], patience=2) == 1
    assert seen == [0, 1, 2, 3]
    assert best_epoch(iter(range(5)), lambda n: errors[n], patience=9) == 4
    assert best_epoch(iter(range(5)), None, patience=1) == 4


def test_tensors_round_trip_and_damage_is_told() -> None:
    arrays = {"a/b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "c": np.zeros(0, np.int32)}
    found = unpack_tensors(pack_tensors(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(ValueError, match="safetensors"):
        unpack_tensors(b"nothing of the kind")
