from dataclasses import replace

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.common.interval import Interval
from opcast.predict.export.timeline import step_events, step_trace
from opcast.simulate.step.compose import sample_steps, slowest, stage_speeds, step_time
from opcast.simulate.step.costs import Costs
from opcast.simulate.step.fitting import find_fit, memory_of
from opcast.simulate.step.layer_ops import layer_ops
from opcast.simulate.step.memory import RESERVED_BYTES, layer_activations
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Plan, parse_plan, resolved
from opcast.simulate.step.traffic import gather_calls, layer_held, scatter_calls, sharding_note

PEAK, LINK = 1e14, 1e11


def ops_at_peak(calls):
    """Products at the peak, everything else free."""
    return np.array([[c.flops() / PEAK] * 3 for c in calls])


def ring_network(kind, size, group):
    """Wire bytes of a ring over a link, no latency."""
    share = (group.size - 1) / group.size
    factor = {"all_reduce": 2 * share, "send_recv": 1.0}.get(kind, share)
    seconds = factor * size / LINK
    return Interval(seconds, seconds, seconds)


def small(**changes):
    sizes = {
        "layers": 4, "d_model": 512, "heads": 8, "kv_heads": 4, "d_ff": 1024, "vocab": 1024,
        "seq": 512, "batch": 16, **changes,
    }  # fmt: skip
    return make_workload("llama", sizes)


def step(workload, text, speeds=None):
    plan = parse_plan(text)
    plan = resolved(workload, plan, plan.devices)
    return plan, step_time(workload, plan, Costs(ops_at_peak, ring_network), speeds=speeds)


def test_one_device_takes_the_model_flops():
    _, found = step(small(), "dp=1")
    assert found.total == pytest.approx(small().model_flops() / PEAK, rel=0.04)
    # Attention's backward pass takes three forward passes where the model's count has two.
    pairs = 16 * 512 * 513 / 2
    extra = 4 * 1.0 * 4 * 512 * pairs
    assert found.total == pytest.approx((small().model_flops() + extra) / PEAK, rel=1e-9)
    assert (found.exposed, found.bubble) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["tp=2", "tp=4,sp=false", "cp=2,dp=2", "pp=2,dp=2", "fsdp=4"])
def test_products_are_shared_out_evenly(text):
    plan, found = step(small(), text)
    _, one = step(small(), "dp=1")
    # The last stage of a pipeline has the head; blocks on the diagonal are counted per rank.
    slack = 0.25 if plan.pp > 1 else 0.002
    assert found.compute == pytest.approx(one.compute / plan.devices, rel=slack)


def test_tensor_collectives_by_hand():
    # 16 micro-batches of 512 tokens: 2 layers' worth of both kinds, forward and backward.
    plan, found = step(small(), "tp=2,microbatches=16")
    size = 512 * 512 * 2
    expected = 16 * 4 * 2 * (2 * 0.5 + 2 * 0.5) * size / LINK
    assert found.communication == {"tensor": pytest.approx(expected)}
    assert found.exposed == pytest.approx(expected)
    assert plan.microbatches == 16
    _, reduced = step(small(), "tp=2,microbatches=16,sp=false")
    assert reduced.exposed == pytest.approx(expected)


def test_fsdp_volumes_by_hand():
    # FSDP moves 1.5 times what data parallelism does: two gathers and a scatter of (n-1)/n each
    # against an all-reduce of 2 (n-1)/n.
    w = small()
    _, sharded = step(w, "fsdp=4,microbatches=1")
    _, whole = step(w, "dp=4,microbatches=1")
    size = w.parameters * 2 - 512 * 2  # the last norm's weights are not counted
    assert whole.communication["gradient"] == pytest.approx(2 * 0.75 * size / LINK)
    assert sharded.communication["gather"] == pytest.approx(2 * 0.75 * size / LINK)
    assert sharded.communication["scatter"] == pytest.approx(0.75 * size / LINK)
    plan = resolved(w, Plan(fsdp=4), 4)
    (gather,) = gather_calls(layer_held(w, plan), w, plan)
    (scatter,) = scatter_calls(layer_held(w, plan), w, plan)
    assert gather.size == w.layer_parameters * 2
    assert scatter.group.size == 4


PLANS = [
    "fsdp=8", "dp=8", "dp=8,zero=1", "dp=8,zero=2,microbatches=2", "tp=2,pp=2,dp=2", "cp=2,dp=4",
    "pp=4,dp=2", "pp=2,dp=4,schedule=gpipe", "pp=4,dp=2,schedule=zero-bubble",
    "pp=2,dp=4,schedule=interleaved,virtual=2", "pp=2,fsdp=4,recompute=full",
]  # fmt: skip


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("layers", [4, 5])
def test_step_lies_between_its_longest_part_and_the_sum(text, layers):
    workload = small(layers=layers + ("interleaved" in text) * (layers % 4 > 0) * 3)
    plan, found = step(workload, text)
    assert found.compute + found.exposed + found.bubble == pytest.approx(found.total)
    assert found.total >= found.compute
    # Besides its own, a device waits for transfers while the pipeline fills and drains.
    others = 2 * (plan.pp - 1) * found.hop
    assert found.exposed <= sum(found.communication.values()) + others + 1e-12
    _, bare = step(workload, text + ",overlap=false")
    assert bare.total >= found.total * (1 - 1e-9)


def test_pipelines_gather_parameters_and_reduce_gradients_once_a_step():
    """As ZeRO 1 does, unless the plan says ZeRO 3: torch.distributed.pipelining, Llama 3."""
    w = small(layers=8, batch=32)
    once, found = step(w, "pp=2,fsdp=4,microbatches=4")
    _, plain = step(w, "pp=2,dp=4,zero=1,microbatches=4")
    assert found.total == plain.total and found.communication == plain.communication
    often, every = step(w, "pp=2,fsdp=4,zero=3,microbatches=4")
    # Both passes of four micro-batches gather what is gathered once else.
    assert every.communication["gather"] == pytest.approx(8 * found.communication["gather"])
    assert every.communication["scatter"] == pytest.approx(4 * found.communication["scatter"])
    assert "once a step" in sharding_note(once) and "every micro-batch" in sharding_note(often)
    assert sharding_note(resolved(w, parse_plan("fsdp=4"), 4)) == ""


def test_zero_bubble_is_shorter_and_interleaving_too():
    w = small(layers=16, batch=32)
    plain = step(w, "pp=4,microbatches=8")[1].total
    assert step(w, "pp=4,microbatches=8,schedule=zero-bubble")[1].total < plain
    assert step(w, "pp=4,microbatches=8,schedule=interleaved,virtual=4")[1].total < plain
    gpipe = step(w, "pp=4,microbatches=8,schedule=gpipe")[1].total
    assert gpipe == pytest.approx(plain, rel=0.02)


def test_full_recomputation_adds_a_forward_pass():
    w = small(vocab=1)
    plain, again = step(w, "dp=1")[1], step(w, "dp=1,recompute=full")[1]
    forward = plain.stages[0].forward.compute
    assert again.compute == pytest.approx(plain.compute + plain_micro(w) * forward, rel=0.01)


def plain_micro(workload):
    return resolved(workload, Plan(), 1).microbatches


def test_experts_share_tokens():
    w = make_workload(
        "moe",
        {"layers": 4, "d_model": 512, "heads": 8, "kv_heads": 4, "d_ff": 1024, "vocab": 1024,
         "seq": 512, "batch": 16, "experts": 8, "top_k": 2},
    )  # fmt: skip
    _, one = step(w, "dp=4")
    plan, spread = step(w, "dp=4,ep=4")
    assert spread.compute == pytest.approx(one.compute)
    # Two all-to-alls a pass: 16 / 4 sequences to two experts, 3/4 of them elsewhere.
    tokens = 4 * 512
    expected = 2 * 4 * 2 * 0.75 * tokens * 2 * 512 * 2 / LINK
    assert spread.communication["expert"] == pytest.approx(expected)
    held = layer_held(w, plan)
    assert held.expert == 8 * 3 * 512 * 1024 / 4
    assert layer_held(w, Plan(dp=4)).expert == 8 * 3 * 512 * 1024


def test_memory_of_one_device_by_hand():
    w = small(batch=1)
    plan = resolved(w, Plan(), 1)
    (memory,) = memory_of(w, plan)
    count = w.parameters - 512
    assert memory.parameters == 2 * count
    assert memory.gradients == 2 * count
    assert memory.optimizer == 12 * count
    tokens, heads = 512, 8
    # Two residuals, two norms' results, q k v and the result, gate, up and their product.
    layer = 2 * tokens * (4 * 512 + (2 * 8 + 2 * 4) * 64 + 3 * 1024) + 4 * tokens * heads
    assert memory.activations == 4 * layer == 4 * layer_activations(w, plan)
    assert memory.reserved == RESERVED_BYTES
    assert memory.total == pytest.approx(sum(memory.to_dict().values()) / 2)


def test_operands_are_kept_as_they_are_quantised():
    w = small(batch=1)
    plan = resolved(w, Plan(), 1)
    found = layer_activations(replace(w, products="fp8"), plan)
    tokens, heads = 512, 8
    # Both norms' results and the product of gate and up in one byte, and the result of attention
    # once more.
    wide = 2 * tokens * (2 * 512 + (2 * 8 + 2 * 4) * 64 + 2 * 1024)
    assert found == wide + tokens * (2 * 512 + 1024 + 512) + 4 * tokens * heads


def test_zero_stages_shard_one_state_after_another():
    w, one = small(), {}
    for zero in range(4):
        (one[zero],) = memory_of(w, resolved(w, Plan(dp=4, zero=zero, microbatches=1), 4))
    assert one[1].optimizer == one[0].optimizer / 4
    assert one[1].gradients == one[0].gradients
    assert one[2].gradients == one[0].gradients / 4
    assert one[2].parameters == one[0].parameters
    assert one[3].parameters == one[0].parameters / 4


def test_1f1b_keeps_fewer_micro_batches_than_gpipe():
    w = small()
    first, *_, last = memory_of(w, resolved(w, Plan(pp=4, microbatches=8), 4))
    assert first.activations == 4 * last.activations
    kept = memory_of(w, resolved(w, Plan(pp=4, microbatches=8, schedule="gpipe"), 4))
    assert kept[0].activations == 8 * last.activations


def test_what_does_not_fit_is_told_with_the_smallest_change():
    w = small()
    plan = resolved(w, Plan(dp=4, microbatches=1), 4)
    seconds = lambda p: step_time(w, p, Costs(ops_at_peak, ring_network)).total  # noqa: E731
    need = memory_of(w, plan)[0].total
    assert find_fit(w, plan, need, seconds).fits
    fit = find_fit(w, plan, need - 1.0, seconds)
    assert not fit.fits
    assert fit.plan is not None
    assert fit.change.count("=") == 1
    assert fit.change in fit.reason()
    assert memory_of(w, fit.plan)[0].total < need
    none = find_fit(w, plan, 1e6, seconds)
    assert "no small change" in none.reason()


def test_fewer_chunks_are_a_change_that_saves_memory():
    w = small(layers=8)
    plan = resolved(w, parse_plan("pp=4,microbatches=8,virtual=2,recompute=full"), 4)
    need = max(stage.total for stage in memory_of(w, plan))
    # A pipeline has no replicas to shard over: only smaller micro-batches and the host are left.
    fit = find_fit(w, plan, need - 1.0, lambda p: 1.0 + (p.schedule != "1f1b"))
    assert fit.change == "schedule=1f1b,virtual=1"


def test_stragglers_slow_their_stage():
    w = small(layers=8)
    plan, found = step(w, "pp=4,dp=2,microbatches=8")
    exact = sample_steps(plan, found, jitter=0.0, draws=1)
    assert exact.samples.tolist() == [pytest.approx(found.total)]
    _, slow = step(w, "pp=4,dp=2,microbatches=8", speeds={7: 0.5})
    assert found.total * 1.3 < slow.total < found.total * 2
    assert slow.worst == 3 and slow.communication == found.communication
    assert stage_speeds(plan, {7: 0.5}) == [1.0, 1.0, 1.0, 0.5]
    with pytest.raises(PlanError, match="rank 8"):
        stage_speeds(plan, {8: 0.5})


def test_jitter_grows_with_the_devices_that_wait_for_one_another():
    w = small(batch=64)
    few, many = (step(w, text) for text in ("tp=2,dp=1", "tp=2,dp=32"))
    means = [
        sample_steps(plan, found, jitter=0.1, draws=2000).to_dict()["mean_us"] / found.total / 1e6
        for plan, found in (few, many)
    ]
    assert 1.0 < means[0] < means[1] < 1.5


def test_the_slowest_of_many_is_drawn_as_if_all_were():
    rng = np.random.default_rng(0)
    drawn = slowest(rng, 64, 20_000)
    brute = np.random.default_rng(1).standard_normal((20_000, 64)).max(axis=1)
    assert drawn.mean() == pytest.approx(brute.mean(), abs=0.02)
    assert drawn.std() == pytest.approx(brute.std(), abs=0.02)


def test_trace_covers_the_step():
    plan, found = step(small(), "tp=2,pp=2,dp=2")
    spans = step_events(found, plan)
    assert max(s["end"] for s in spans) == pytest.approx(found.total * 1e6)
    lengths = sum(s["end"] - s["start"] for s in spans if s["stage"] == found.worst)
    moved = (found.total - found.bubble) * 1e6
    assert lengths <= moved * 1.0001
    names = [
        e["args"]["name"] for e in step_trace(found, plan, "x")["traceEvents"] if e["ph"] == "M"
    ]
    assert names[1:] == [f"stage {i}: {t}" for i in (0, 1) for t in ("compute", "communication")]


def test_operators_of_a_layer_have_the_shapes_of_one_rank():
    w = small()
    calls = {c.name: c for c in layer_ops(w, resolved(w, Plan(tp=4, microbatches=16), 4)).forward}
    assert calls["qkv"].shape == (512, (2 + 2 * 1) * 64, 512)
    assert calls["attention"].shape == (1, 2, 1, 64, 64, 512, 512, 1)
    assert calls["up"].shape == (512, 2 * 1024 // 4, 512)
    assert calls["norm1"].shape == (128, 512)
    forward = replace(w, mode="forward")
    assert step(forward, "pp=2,dp=2")[1].total < step(w, "pp=2,dp=2")[1].total / 2
