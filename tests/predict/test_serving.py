import pytest

from opcast.features.errors import DatasetError, PlanError
from opcast.predict.serving import (
    ServingPredictor,
    _between,
    poisson_requests,
    read_requests,
)
from opcast.simulate.cluster_catalogue import find_cluster
from opcast.simulate.serving import Request
from opcast.simulate.step.memory import RESERVED_BYTES
from opcast.simulate.step.plan import Plan, parse_plan
from opcast.simulate.step.workload import make_workload

LLAMA = make_workload(
    "llama",
    {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256},
)


@pytest.fixture(scope="module")
def predictor():
    return ServingPredictor(LLAMA, parse_plan("tp=4"), find_cluster("h100-sxm-x4"), None)


def test_cache_by_hand(predictor):
    weights = 8_030_261_248 * 2 / 4
    token = 2 * 32 * 2 * 128 * 2
    assert predictor.cache_tokens() == int((80 * 2**30 - RESERVED_BYTES - weights) / token)
    with pytest.raises(PlanError, match="raise tp"):
        ServingPredictor(LLAMA, Plan(), find_cluster("tpu-v5e-x1"), None).cache_tokens()


def test_decoding_is_bound_by_reading_weights_and_cache(predictor):
    weights = 8_030_261_248 * 2 / 4 / 3.35e12
    one = predictor.seconds(0, 0.0, 1, 1024.0)
    assert one > 0.9 * weights
    assert predictor.seconds(0, 0.0, 64, 1024.0) < 8 * one
    assert predictor.seconds(0, 0.0, 64, 8192.0) > predictor.seconds(0, 0.0, 64, 1024.0)


def test_prompts_are_bound_by_arithmetic(predictor):
    # Twice the tokens take about twice the time; longer reach costs attention.
    short, long = (predictor.seconds(n, n / 2, 0, 0.0) for n in (2048, 4096))
    assert 1.8 < long / short < 2.4
    assert predictor.seconds(2048, 16384.0, 0, 0.0) > short


def test_interpolation_meets_the_grid_and_lies_between():
    assert _between(8, 1.0, lambda a, b: float(a)) == 8.0
    between = _between(100, 1.0, lambda a, b: float(a))
    assert between == pytest.approx(100, rel=0.03)


def test_replicas_share_the_requests(predictor):
    requests = poisson_requests(4.0, 40, 256, 32, seed=1)
    one = predictor.predict(requests)
    two = ServingPredictor(LLAMA, parse_plan("tp=2,dp=2"), find_cluster("h100-sxm-x4"), None)
    found = two.predict(requests)
    assert (one.replicas, found.replicas) == (1, 2)
    assert len(found.result.finished) == 20
    assert found.to_dict()["cache_tokens"] < one.to_dict()["cache_tokens"]


def test_plans_that_serving_does_not_know():
    with pytest.raises(PlanError, match="tp and dp"):
        ServingPredictor(LLAMA, parse_plan("pp=2,tp=2"), find_cluster("h100-sxm-x4"), None)


def test_traces(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt,output\n2.5,10,3\n1.0,20,4\n")
    assert read_requests(path) == [Request(1.0, 20, 4), Request(2.5, 10, 3)]
    path.write_text("arrival_s,prompt\n1,2\n")
    with pytest.raises(DatasetError, match="output"):
        read_requests(path)
    with pytest.raises(DatasetError, match="cannot be read"):
        read_requests(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="rate=0"):
        poisson_requests(0.0, 1, 1, 1)
