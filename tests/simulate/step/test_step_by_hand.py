"""Parts of a step whose seconds and bytes are worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from opcast.common.interval import Interval
from opcast.simulate.step.compose import step_time
from opcast.simulate.step.costs import Costs
from opcast.simulate.step.fitting import memory_of
from opcast.simulate.step.layer_ops import update_ops
from opcast.simulate.step.memory import layer_activations
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.pipeline import orders, run_pipeline
from opcast.simulate.step.plan import parse_plan, resolved
from opcast.simulate.step.traffic import ring_calls

PEAK, LINK, HOST = 1e14, 1e11, 1e9
WORK = make_workload(
    "llama",
    {"layers": 4, "d_model": 512, "heads": 8, "kv_heads": 4, "d_ff": 1024, "vocab": 1024,
     "seq": 512, "batch": 16},
)  # fmt: skip


def at_peak(calls):
    """Products at the peak, everything else free."""
    return np.array([[c.flops() / PEAK] * 3 for c in calls])


def wire(kind, size, group):
    """Bytes of a ring over a link, no latency."""
    share = (group.size - 1) / group.size
    seconds = {"all_reduce": 2 * share, "send_recv": 1.0}.get(kind, share) * size / LINK
    return Interval(seconds, seconds, seconds)


def step(text, contention=0.0, speeds=None):
    plan = parse_plan(text)
    plan = resolved(WORK, plan, plan.devices)
    costs = Costs(at_peak, wire, HOST, contention)
    return plan, step_time(WORK, plan, costs, speeds=speeds)


def test_offloaded_optimiser_state_crosses_the_link_to_the_host():
    kept, moved = (step(f"dp=1,offload={what}")[1] for what in ("none", "optimizer"))
    # A gradient of f32, since micro-batches add up, goes out, and a weight of two bytes comes back.
    parameters = WORK.parameters - WORK.d_model
    assert moved.total - kept.total == pytest.approx(parameters * (4 + 2) / HOST)
    plan = step("dp=1,offload=optimizer")[0]
    memory = memory_of(WORK, plan)[0]
    assert memory.optimizer == 0.0
    assert memory_of(WORK, plan.changed(offload="none"))[0].optimizer == 12 * parameters


@pytest.mark.parametrize(
    ("dtype", "kept", "moved"),
    # A master weight of 4 bytes and moments of 8; gradient, weight and moments read, the last three
    # written, and a weight of 2 bytes. A weight of f32 is its own master.
    [("bf16", 12, 30), ("f32", 8, 28)],
)
def test_parameters_in_f32_have_no_second_master_weight(dtype, kept, moved):
    work = replace(WORK, dtype=dtype)
    parameters = work.parameters - work.d_model
    assert memory_of(work, resolved(work, parse_plan("dp=1"), 1))[0].optimizer == kept * parameters
    assert update_ops(parameters, work)[0].shape == (moved * parameters,)


def test_offloaded_activations_go_out_and_come_back_once_a_layer_and_micro_batch():
    plan, kept = step("dp=1,overlap=false")
    _, moved = step("dp=1,overlap=false,offload=activations")
    size = layer_activations(WORK, plan)
    # tokens = 1 sequence of 512: residuals and norms 4 * 512, attention 64 * (2 * 8 + 2 * 4),
    # feed-forward 3 * 1024, two bytes each; statistics of 8 heads in f32.
    tokens = 512 * 16 / plan.microbatches
    assert size == tokens * (2 * (4 * 512 + 64 * 24 + 3 * 1024) + 4 * 8)
    assert moved.total - kept.total == pytest.approx(2 * 4 * plan.microbatches * size / HOST)
    # Two layers' worth stays.
    assert memory_of(WORK, plan.changed(offload="activations"))[0].activations == 2 * size


def test_keys_and_values_go_round_the_ring():
    plan, found = step("cp=4,overlap=false")
    # Of each token on a rank: keys and values of 4 heads of 64, two bytes each.
    tokens = 512 * 16 / plan.microbatches / 4
    forward = ring_calls(WORK, plan, backward=False)[0].size
    assert forward == tokens * 2 * 4 * 64 * 2
    # Three hops a layer and micro-batch; backward also the gradients: twice the bytes.
    rounds = 3 * 4 * plan.microbatches
    assert found.communication["context"] == pytest.approx(rounds * 3 * forward / LINK)


def test_zero_bubble_by_hand():
    # Stage 0: F F . B W B W; stage 1: . F B F B W W, where B and W take as long as F.
    run = run_pipeline(orders("zero-bubble", 2, 2), lambda stage, task: 1.0)
    assert run.makespan == 2 * 3 + 1 * (1 + 1 - 1)
    # 1F1B makes both gradients at once: one micro-batch more.
    whole = run_pipeline(orders("1f1b", 2, 2), lambda s, task: 1.0 if task.kind == "F" else 2.0)
    assert whole.makespan == (2 + 2 - 1) * 3


def test_a_stage_of_slower_devices_takes_its_share_longer():
    text = "pp=2,microbatches=1,schedule=gpipe"
    found = step(text)[1]
    one, two = (s.micro.compute for s in found.stages)
    rest = found.total - one - two
    slow = step(text, speeds={1: 0.5})[1]
    # Stage 1 ends last; what it does after its micro-batch takes its share longer, too.
    tail = found.stages[1].update.compute
    assert slow.total == pytest.approx(one + two / 0.5 + rest + tail)
    both = step(text, speeds={0: 0.8, 1: 0.5})[1]
    assert both.total == pytest.approx(one / 0.8 + two / 0.5 + rest + tail)


def test_collectives_take_no_longer_beside_a_slow_device():
    even, slow = step("tp=4")[1], step("tp=4", speeds={2: 0.5})[1]
    assert even.exposed > 0 and slow.exposed == pytest.approx(even.exposed)
    assert slow.total == pytest.approx(even.total + even.compute)


@pytest.mark.parametrize("text", ["dp=4", "fsdp=4", "dp=2,zero=2,microbatches=2"])
def test_hidden_collectives_slow_what_runs_beside_them(text):
    _, free = step(text)
    _, slowed = step(text, contention=0.25)
    sent = sum(free.communication.values())
    assert slowed.compute == free.compute
    assert free.exposed < sent
    if text == "dp=4":
        assert slowed.exposed == pytest.approx(free.exposed + 0.25 * (sent - free.exposed))
    assert free.total < slowed.total <= free.compute + sent
