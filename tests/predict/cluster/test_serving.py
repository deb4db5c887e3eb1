import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, DeviceError, PlanError
from opcast.features.devices.catalogue import find_device
from opcast.predict.cluster import serving
from opcast.predict.cluster.serving import ServingPredictor, _Grid, poisson_requests, read_requests
from opcast.predict.operator.step_operators import OperatorLatency, load_step_model
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.serving.loop import Chunk, Request
from opcast.simulate.step.calls import Estimate, OpCall
from opcast.simulate.step.memory import RESERVED_BYTES
from opcast.simulate.step.plan import Plan, parse_plan
from opcast.simulate.step.workload import make_workload

_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
PUBLISHED = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", _DATA)) / "published-serving" / "serving.csv.gz"
)
LLAMA = make_workload(
    "llama",
    {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256},
)


@pytest.fixture(scope="module")
def operators():
    return load_step_model("gpu-operators")


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
    one = predictor.seconds([], 1, 1024.0)
    assert one > 0.9 * weights
    assert predictor.seconds([], 64, 1024.0) < 8 * one
    assert predictor.seconds([], 64, 8192.0) > predictor.seconds([], 64, 1024.0)


def test_prompts_are_bound_by_arithmetic(predictor):
    # Twice the tokens take about twice the time; longer reach costs attention.
    short, long = (predictor.seconds([Chunk(n)], 0, 0.0) for n in (2048, 4096))
    assert 1.8 < long / short < 2.4
    assert predictor.seconds([Chunk(2048, 16384)], 0, 0.0) > short
    low, high = predictor.estimate([Chunk(2048)], 0, 0.0)[1:]
    assert low < short < high


class Flops:
    """Stands for the latencies of a device: a second for each FLOP of attention, none else."""

    def __init__(self, spec, model):
        pass

    def __call__(self, calls):
        kinds = ("attention", "decode")
        found = np.array([c.flops() if c.op in kinds else 1e-30 for c in calls])
        return np.stack([found, found, found], axis=1)


@pytest.fixture
def attention_flops(monkeypatch):
    monkeypatch.setattr(serving, "OperatorLatency", Flops)
    found = ServingPredictor(LLAMA, Plan(), find_cluster("h100-sxm-x1"), None)
    return lambda *iteration: found.seconds(*iteration)


def test_prompts_attend_to_themselves_alone(attention_flops):
    # A causal prompt of n tokens has n (n + 1) / 2 visible pairs, at 4 FLOPs for each of the 128
    # numbers of the 32 heads of the 32 layers.
    one = attention_flops([Chunk(2048)], 0, 0.0)
    assert one == pytest.approx(32 * 4 * 32 * 128 * 2048 * 2049 / 2)
    assert attention_flops([Chunk(2048)] * 84, 0, 0.0) == pytest.approx(84 * one)
    mixed = attention_flops([Chunk(2048)] * 2 + [Chunk(512)] * 6, 0, 0.0)
    other = attention_flops([Chunk(512)], 0, 0.0)
    assert mixed == pytest.approx(2 * one + 6 * other)


def test_parts_of_prompts_attend_to_their_past(attention_flops):
    whole = attention_flops([Chunk(2048)], 0, 0.0)
    parts = [attention_flops([Chunk(512, past)], 0, 0.0) for past in (0, 512, 1024)]
    # The last quarter begins between points of the grid, 1448 and 2048.
    last = attention_flops([Chunk(512, 1536)], 0, 0.0)
    assert parts[1] > 2.9 * parts[0]
    assert sum(parts) + last == pytest.approx(whole, rel=0.01)
    # Beside running requests, each has its own.
    assert attention_flops([Chunk(512)], 8, 1024.0) == pytest.approx(
        parts[0] + 32 * 4 * 8 * 32 * 128 * 1024
    )


def test_many_prompts_take_the_time_of_a_batch(operators):
    cluster = find_cluster("h100-sxm-x1")
    found = ServingPredictor(LLAMA, Plan(), cluster, operators)
    shape = (84, 32, 8, 128, 2048, 2048, 1)
    latency = OperatorLatency(find_device("h100-sxm"), operators)
    batch = 32 * latency([OpCall("attention", "attention", shape)])[0, 0]
    products = found._products(84 * 2048)[0] + found._head(84)[0]
    assert found.seconds([Chunk(2048)] * 84, 0, 0.0) - products == pytest.approx(batch, rel=0.05)


def test_interpolation_meets_the_grid_and_is_exact_for_powers():
    asked = []

    def power(a, b):
        asked.append((a, b))
        return Estimate(a * (b + 1e-9) ** 2, a, b + 1.0)

    grid = _Grid(power)
    assert grid(8, 2)[0] == pytest.approx(32)
    assert grid(100, 3.3)[0] == pytest.approx(100 * 3.3**2)
    assert grid(100, 3.4)[1] == pytest.approx(100)
    assert len(asked) == 1 + 4
    assert grid(8, 0)[2] == pytest.approx(1)


def test_replicas_share_the_requests(predictor):
    requests = poisson_requests(4.0, 40, 256, 32, seed=1)
    one = predictor.predict(requests)
    two = ServingPredictor(LLAMA, parse_plan("tp=2,dp=2"), find_cluster("h100-sxm-x4"), None)
    found = two.predict(requests)
    assert (one.replicas, found.replicas) == (1, 2)
    assert len(found.result.finished) == 20
    assert 0 < found.interval.lo < found.result.latency.mean() < found.interval.hi
    assert found.to_dict()["cache_tokens"] < one.to_dict()["cache_tokens"]


def test_plans_that_serving_does_not_know():
    with pytest.raises(PlanError, match="tp and dp"):
        ServingPredictor(LLAMA, parse_plan("pp=2,tp=2"), find_cluster("h100-sxm-x4"), None)
    with pytest.raises(PlanError, match="tp and dp only, not dp=2,ep=2"):
        ServingPredictor(LLAMA, parse_plan("dp=2,ep=2"), find_cluster("h100-sxm-x4"), None)


def test_loads_that_do_not_fit_are_refused_by_their_place():
    cluster = find_cluster("h100-sxm-x2")
    two = ServingPredictor(LLAMA, parse_plan("dp=2"), cluster, None)
    # Of the second replica, which is not simulated.
    with pytest.raises(PlanError, match="request 1: needs 1000001 tokens of cache"):
        two.predict([Request(0.0, 8, 1), Request(0.0, 10**6, 1)])
    with pytest.raises(PlanError, match="generates nothing"):
        ServingPredictor(replace(LLAMA, causal=False), Plan(dp=2), cluster, None)
    with pytest.raises(DeviceError, match="does not name its device"):
        ServingPredictor(LLAMA, Plan(dp=2), replace(cluster, device=""), None)
    two.memory = 0.0
    with pytest.raises(PlanError, match="memory of the device is not known"):
        two.predict([Request(0.0, 8, 1)])


def test_traces(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt,output\n2.5,10,3\n1.0,20,4\n")
    assert read_requests(path) == [Request(1.0, 20, 4), Request(2.5, 10, 3)]
    path.write_text("arrival_s,prompt\n1,2\n")
    with pytest.raises(DatasetError, match="output"):
        read_requests(path)
    for row in ("0,many,2", "0,3,", "-1,3,2", "0,3.5,2"):
        path.write_text(f"arrival_s,prompt,output\n0,1,1\n{row}\n")
        with pytest.raises(DatasetError, match="row 2 is no request"):
            read_requests(path)
    with pytest.raises(DatasetError, match="cannot be read"):
        read_requests(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="rate=0"):
        poisson_requests(0.0, 1, 1, 1)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="no published measurements of serving here")
def test_whole_batches_as_measured(operators):
    rows = pd.read_csv(PUBLISHED, low_memory=False)
    rows = rows[(rows["load"] == "static-batch") & (rows["model"] == "mistral-7b")]
    rows = rows[(rows["method"] == "gptSessionBenchmark-static") & (rows["osl"] == 128)]
    rows = rows[(rows["device"] == "h100-sxm") & rows["batch_latency_s"].notna()]
    rows = rows[rows["n_gpus"] == 1]
    assert len(rows) >= 2
    for row in rows.to_dict("records"):
        names = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab")
        sizes = {name: int(row[name]) for name in names}
        sizes["dtype"] = "fp8" if row["weight_dtype"] == "fp8" else "bf16"
        work = make_workload("llama", sizes)
        found = ServingPredictor(work, Plan(), find_cluster(f"{row['device']}-x1"), operators)
        count, prompt = int(row["concurrency"]), int(row["isl"])
        requests = [Request(0.0, prompt, int(row["osl"]))] * count
        result = found.predict(requests, count, count * prompt).result
        assert result.makespan == pytest.approx(row["batch_latency_s"], rel=0.3)
