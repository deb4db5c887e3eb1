from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from opcast.models.training_data import metrics

MEASURED = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
PREDICTED = np.array([11.0, 18.0, 33.0, 60.0, 50.0])
LO = np.array([9.0, 19.0, 25.0, 41.0, 45.0])
HI = np.array([12.0, 25.0, 35.0, 80.0, 50.0])


def test_errors_of_five_rows() -> None:
    # |11-10|/10, |18-20|/20, |33-30|/30, |60-40|/40, 0
    apes = [0.1, 0.1, 0.1, 0.5, 0.0]
    found = metrics.summary(MEASURED, PREDICTED, LO, HI)
    assert found["n"] == 5
    assert found["mape"] == pytest.approx(sum(apes) / 5)
    assert found["median_ape"] == pytest.approx(0.1)
    # ratios 1.1, 0.9, 1.1, 1.5, 1.0: the median is 1.1
    assert found["bias"] == pytest.approx(0.1)
    assert found["bias_mean"] == pytest.approx((0.1 - 0.1 + 0.1 + 0.5 + 0.0) / 5)


def test_ranks_of_five_rows() -> None:
    # Predicted ranks 1 2 3 5 4 against 1 2 3 4 5: d² = 0 0 0 1 1, one of ten pairs discordant.
    assert metrics.spearman(MEASURED, PREDICTED) == pytest.approx(1 - 6 * 2 / (5 * (25 - 1)))
    assert metrics.kendall(MEASURED, PREDICTED) == pytest.approx((9 - 1) / 10)


def test_top_k_recall() -> None:
    assert metrics.top_k_recall(MEASURED, PREDICTED, k=1) == 0.0  # 50 is slowest, 60 was expected
    assert metrics.top_k_recall(MEASURED, PREDICTED, k=2) == 1.0
    assert metrics.top_k_recall(MEASURED, PREDICTED) == 0.0  # a tenth of five rows is one


def test_intervals_of_five_rows() -> None:
    # Inside: 10 in [9,12], 20 in [19,25], 30 in [25,35], 50 in [45,50]; 40 is not in [41,80].
    found = metrics.summary(MEASURED, PREDICTED, LO, HI)
    widths = [3 / 11, 6 / 18, 10 / 33, 39 / 60, 5 / 50]
    assert found["coverage"] == pytest.approx(4 / 5)
    assert found["width_mean"] == pytest.approx(sum(widths) / 5)
    assert found["width_median"] == pytest.approx(10 / 33)


def test_constant_predictions_have_no_rank_correlation() -> None:
    constant = np.ones(5)
    assert math.isnan(metrics.spearman(MEASURED, constant))
    assert math.isnan(metrics.kendall(MEASURED, constant))
    assert metrics.summary(np.zeros(0), np.zeros(0)) == {"n": 0.0}


def test_label_noise_pairs_the_same_kernel_and_device(
    make_frame: Callable[..., pd.DataFrame],
) -> None:
    frame = make_frame(
        kernel_hash=["a", "a", "a", "b", "c", "c"],
        device=["x", "x", "y", "x", "x", "x"],
        latency_us_p50=[10.0, 12.0, 99.0, 5.0, 20.0, 20.0],
    )
    found = metrics.label_noise(frame)
    # a on x: |10-12| / 11; c on x: 0; a on y and b have no replicate.
    assert found["noise_pairs"] == 2
    assert found["noise_mape"] == pytest.approx((2 / 11 + 0) / 2)
    assert found["noise_median_ape"] == pytest.approx((2 / 11 + 0) / 2)


def test_a_row_is_no_replicate_of_itself(make_frame: Callable[..., pd.DataFrame]) -> None:
    frame = make_frame(sample_id=["s", "s"], kernel_hash=["a", "a"], latency_us_p50=[1.0, 2.0])
    assert metrics.label_noise(frame)["noise_pairs"] == 0


def test_noise_is_that_of_the_kinds_that_were_tested(
    make_frame: Callable[..., pd.DataFrame],
) -> None:
    rows = pd.DataFrame(
        {"kind": ["gemm"], "device": ["x"], "measured_us": [10.0], "predicted_us": [11.0]}
    )
    noise = make_frame(
        kind=["gemm", "gemm", "copy", "copy", "gemm", "gemm"],
        device=["x", "x", "x", "x", "y", "y"],
        kernel_hash=["a", "a", "b", "b", "c", "c"],
        latency_us_p50=[9.0, 11.0, 10.0, 30.0, 10.0, 90.0],
    )
    table = metrics.metrics_table(rows, ("kind", "device"), noise=noise)
    # |9 - 11| / 10, without the copies and without the other device.
    assert table["noise_mape"].tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_table_by_kind_and_flat_names(make_frame: Callable[..., pd.DataFrame]) -> None:
    rows = pd.DataFrame(
        {
            "kind": ["gemm", "gemm", "copy"],
            "measured_us": [10.0, 10.0, 10.0],
            "predicted_us": [11.0, 12.0, 15.0],
            "lo_us": [5.0, 5.0, 5.0],
            "hi_us": [15.0, 15.0, 15.0],
        }
    )
    noise = make_frame(kind=["gemm", "gemm"], kernel_hash=["a", "a"], latency_us_p50=[10.0, 10.0])
    table = metrics.metrics_table(rows, ("kind",), noise=noise)
    assert list(table["group"]) == ["all", "kind=copy", "kind=gemm"]
    flat = metrics.flatten(table, prefix="t/")
    assert flat["t/mape"] == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert flat["t/kind=gemm/mape"] == pytest.approx((0.1 + 0.2) / 2)
    assert flat["t/kind=gemm/noise_pairs"] == 1
    assert "t/kind=copy/spearman" not in flat  # undefined for one row
