"""Frames of predictions beside labels, from a model whose answers are known: the roofline."""

from __future__ import annotations

import numpy as np

from opcast.models.core.base import KernelPrediction
from opcast.models.core.kernel_table import KernelTable
from opcast.models.cost_model import CostModel
from opcast.models.estimators.tabular import TabularEstimator
from opcast.models.training.train import prediction_frame, program_frame
from opcast.models.training_data.prepared import PreparedDataset


class Doubled(TabularEstimator):
    """Predicts twice the base of the table."""

    name = "doubled"

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None: ...

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return np.full(len(table), np.log(2.0))

    def _weights(self) -> dict[str, bytes]:
        return {}

    def _restore(self, files: object) -> None: ...


def model_of(data: PreparedDataset) -> CostModel:
    estimator = Doubled().fit_table(data.table, data.table.base_s)
    return CostModel(estimator, devices=data.devices)


def test_kernel_rows_keep_their_order_and_labels(prepared: PreparedDataset) -> None:
    rows = np.arange(len(prepared.frame))[::-1]
    frame = prediction_frame(model_of(prepared), prepared, rows)
    own = rows[prepared.entry[rows] >= 0]
    assert frame["sample_id"].tolist() == prepared.frame["sample_id"].iloc[own].tolist()
    expected = 2 * prepared.table.base_s[prepared.entry[own]] * 1e6
    np.testing.assert_allclose(frame["predicted_us"], expected)
    np.testing.assert_allclose(frame["measured_us"], prepared.latency_s[own] * 1e6)
    assert (frame["lo_us"] <= frame["predicted_us"]).all()
    assert (frame["predicted_us"] <= frame["hi_us"]).all()


def test_programs_add_up_their_kernels(prepared: PreparedDataset) -> None:
    frame = program_frame(model_of(prepared), prepared, np.arange(len(prepared.frame)))
    assert len(frame) == len(prepared.programs)
    sample, row = prepared.programs[0], frame.iloc[0]
    np.testing.assert_allclose(row["sum_us"], 2 * prepared.table.base_s[sample.entries].sum() * 1e6)
    assert row["measured_us"] == sample.wall_s * 1e6 and row["kernels"] == len(sample.entries)
    assert set(frame["set"]) == {"zoo", "generated"}
    assert isinstance(model_of(prepared).estimator.predict([], sample.device), KernelPrediction)
