import numpy as np
import pytest

from opcast.common.interval import LATENCY_KEYS, Interval, latency_fields, latency_of, step_fields
from opcast.predict.operator.predict import OpEstimate


def test_seconds_become_three_keys_in_microseconds():
    assert latency_fields(2e-6, 1e-6, 4e-6) == {"latency_us": 2.0, "lo_us": 1.0, "hi_us": 4.0}
    columns = latency_fields(*np.array([[1.0, 2.0], [0.5, 1.0], [3.0, 4.0]]))
    assert {k: v.tolist() for k, v in columns.items()} == {
        "latency_us": [1e6, 2e6], "lo_us": [5e5, 1e6], "hi_us": [3e6, 4e6],
    }  # fmt: skip


def test_a_step_has_its_other_name_beside():
    found = step_fields(Interval(2e-6, 1e-6, 4e-6))
    assert set(found) == {"step_us", *LATENCY_KEYS}
    assert found["step_us"] == found["latency_us"] == 2.0


def test_an_interval_around_an_estimate_stays_positive():
    assert Interval.around(10.0, 3.0, 4.0) == (10.0, 7.0, 14.0)
    assert Interval.around(10.0, 30.0, 4.0) == (10.0, 0.5, 14.0)


def test_a_limit_is_kept_as_often_as_the_interval_says():
    found = Interval(10.0, 5.0, 40.0)
    assert [found.chance_below(x) for x in (0.0, 5.0, 10.0, 40.0)] == pytest.approx(
        [0.0, 0.05, 0.5, 0.95]
    )
    # Half way to the upper end in logarithms: 1.645 / 2 standard deviations.
    assert found.chance_below(20.0) == pytest.approx(0.7946, abs=1e-4)
    assert found.chance_below(float("inf")) == 1.0
    # An end at the estimate leaves no doubt on its side.
    assert Interval(10.0, 10.0, 40.0).chance_below(9.9) == 0.0


def test_results_that_hold_the_keys():
    found = OpEstimate("graph/linear", "h100-sxm", 3.0, 2.0, 5.0, 1.0, "memory", "known", True)
    assert latency_of(found) == {"latency_us": 3.0, "lo_us": 2.0, "hi_us": 5.0}
