"""Energy of serving a load, against utilisations by hand."""

from dataclasses import replace

import numpy as np
import pytest

from opcast.common.interval import Interval
from opcast.features.devices.catalogue import find_device
from opcast.models.power.law import Work, board_law, held
from opcast.predict.cluster.deployment import Deployment, Workers
from opcast.predict.cluster.energy import serving_energy
from opcast.simulate.serving.load import CLASSES, Load, Run
from opcast.simulate.serving.served import EnginePlan, ServedModel
from opcast.simulate.step.named_workloads import read_workload

#: All of the time in reading weights.
STREAM = np.eye(len(CLASSES))[CLASSES.index("stream")]


def test_two_engines_that_compute_for_half_of_the_time():
    sizes = ["layers=2,d_model=1024,heads=8,kv_heads=8,d_ff=4096,vocab=32000"]
    model = ServedModel(read_workload("llama", sizes))
    deployment = Deployment(model, "h100-sxm", engine=Workers(EnginePlan(tp=2, moe_tp=2), 2))
    load = Load(np.full(4, 100), np.full(4, 50), np.zeros(4))
    # 10 s, in which both engines together are busy for as long: each for half of it.
    zero = np.zeros(4)
    # Of these 5 s an engine, 1 s waits for the network and 3/8 s for the host between passes.
    busy = np.array([2.0, 1.0, 0.0, 0.0, 2.0, 2.0, 0.0, 2.0, 0.5, 0.25, 0.25])
    run = Run(zero, zero, zero, makespan=10.0, busy=busy, iterations=40_000)
    found = serving_energy(deployment, load, run, Interval(10.0, 9.0, 11.0))
    assert found is not None
    # Weights: 16 bits of 2 layers and both tables; keys and values of 8 heads of 128, twice, by
    # layer: 8192 bytes, over 100 tokens and half of 50.
    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096
    weights = 2 * (2 * layer + 2 * 32000 * 1024)
    assert model.weight_bytes(EnginePlan(tp=2, moe_tp=2)) * 2 == pytest.approx(weights, rel=1e-3)
    moved = 40_000 * weights + 4 * 50 * 125 * 8192
    h100 = find_device("h100-sxm")
    law = board_law(h100)
    flops = 4 * 2.0 * (2 * layer + 32000 * 1024) * 150
    one = np.ones(1)
    matrix = flops / 4 / 3.625 / h100.matrix_peak("bf16")
    memory = moved / 4 / 3.625 / h100.bandwidth
    # Cores wait for weights most of the time.
    work = Work(one * matrix, one * memory, one * (2.3 * matrix / memory) ** 0.15, one < 0)
    at_work = float(held(law.demand(work))[0])
    watts = 700 * (0.3625 * at_work + 0.1 * law.waiting + 0.5375 * law.idle)
    assert found.value == pytest.approx(4 * 10.0 * watts, rel=5e-3)
    assert found.lo < found.value < found.hi <= 4 * 700 * 11.0


def test_a_batch_of_one_draws_less_than_a_large_one():
    """ML.ENERGY's Llama 3.1 8B on an H100: 0.69 of its limit at 8 sequences, 0.99 from 192 on."""
    model = ServedModel(read_workload("llama-3.1-8b"))
    deployment = Deployment(model, "h200-sxm", engine=Workers(EnginePlan()))
    watts = []
    for batch in (1, 256):
        load = Load(np.full(batch, 8), np.full(batch, 1000), np.zeros(batch))
        zero = np.zeros(batch)
        # 16 GB of weights at 4.1 of 4.8 TB/s, with keys and values beside them.
        seconds = 3.9 if batch == 1 else 8.0
        run = Run(zero, zero, zero, seconds, busy=seconds * STREAM, iterations=1000)
        found = serving_energy(deployment, load, run, Interval(seconds, seconds, seconds))
        assert found is not None
        watts.append(found.value / seconds / 700)
    assert 0.6 < watts[0] < 0.8
    assert watts[1] > 0.9


def test_prompts_in_a_prefix_cache_are_not_run():
    """A load of 64 requests, of which a cache holds half of each, costs less in equal time."""
    model = ServedModel(read_workload("llama-3.1-8b"))
    deployment = Deployment(model, "h100-sxm", engine=Workers(EnginePlan()))
    load = Load(np.full(64, 1023), np.full(64, 1), np.zeros(64))
    zero = np.zeros(64)
    # 64 x 1024 tokens of 15 GFLOP are 0.98 PFLOP: 1 s at the dense peak.
    run = Run(zero, zero, zero, 2.0, busy=2.0 * STREAM, iterations=8)
    half = replace(run, found=np.full(64, 512))
    none = replace(run, found=np.zeros(64, int))
    span = Interval(2.0, 2.0, 2.0)
    all_of_it, also, less = (
        serving_energy(deployment, load, one, span) for one in (run, none, half)
    )
    assert all_of_it is not None and less is not None
    assert also == all_of_it
    law = board_law(find_device("h100-sxm"))
    idle = 2.0 * 700 * law.idle
    assert idle < less.value < all_of_it.value
