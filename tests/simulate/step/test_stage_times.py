"""Times of one device of a stage, worked out by hand.

Products run at the peak and everything else is free, so that a time is FLOPs over the peak; a link
carries the bytes of a ring and has no latency.
"""

from dataclasses import replace

import numpy as np
import pytest

from opcast.common.interval import Interval
from opcast.simulate.step.blocks import step_stages
from opcast.simulate.step.costs import CommCall, Costs, StepEffects
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Group, parse_plan, resolved
from opcast.simulate.step.stage_times import stage_times, traffic

PEAK, LINK = 1e14, 1e11
D, VOCAB, SEQ, BATCH, LAYERS = 512, 1024, 256, 8, 4
WORK = make_workload(
    "llama",
    {
        "layers": LAYERS,
        "d_model": D,
        "heads": 8,
        "kv_heads": 4,
        "d_ff": 1024,
        "vocab": VOCAB,
        "seq": SEQ,
        "batch": BATCH,
    },
)
#: Weights of a layer: queries and output 512², keys and values half of that, three of 512 · 1024.
LAYER = 2 * D * D + 2 * D * (D // 2) + 3 * D * 1024


def at_peak(calls):
    return np.array([[c.flops() / PEAK] * 3 for c in calls])


def ring(kind, size, group):
    share = (group.size - 1) / group.size
    seconds = {"all_reduce": 2 * share, "send_recv": 1.0}.get(kind, share) * size / LINK
    return Interval(seconds, seconds, seconds)


def stages_of(text, work=WORK, network=ring, box=0):
    plan = parse_plan(text)
    plan = resolved(work, plan, plan.devices)
    costs = Costs(at_peak, network, box=box)
    return costs, step_stages(work, plan)


def stages(text):
    costs, found = stages_of(text)
    return found[0].plan, [stage_times(stage, costs) for stage in found]


def test_the_head_is_what_the_last_stage_has_more():
    plan, (first, last) = stages("pp=2")
    tokens = SEQ * BATCH / plan.microbatches
    head = 2 * tokens * D * VOCAB / PEAK
    assert last.forward.compute - first.forward.compute == pytest.approx(head)
    # Gradients of its input and of its weights: a product of the same size each.
    assert last.backward.compute - first.backward.compute == pytest.approx(2 * head)


def test_a_layer_takes_two_flops_a_weight_and_token_and_its_attention():
    plan, (first, _) = stages("pp=2")
    tokens = SEQ * BATCH / plan.microbatches
    # Causal attention: two products of 64 · (SEQ + 1) / 2 pairs a token and head.
    attention = 2 * 2 * tokens * (SEQ + 1) / 2 * D
    assert first.forward.compute == pytest.approx(2 * (2 * tokens * LAYER + attention) / PEAK)
    # Two products of the weights, and three times the attention.
    backward = 2 * 2 * tokens * LAYER + 3 * attention
    assert first.backward.compute == pytest.approx(2 * backward / PEAK)


def test_zero_bubble_keeps_gradients_of_weights_apart():
    plan, together = stages("pp=2,schedule=1f1b")
    _, apart = stages("pp=2,schedule=zero-bubble")
    tokens = SEQ * BATCH / plan.microbatches
    assert together[0].weights.total == 0.0
    assert apart[0].weights.compute == pytest.approx(2 * 2 * tokens * LAYER / PEAK)
    for one, two in zip(together, apart, strict=True):
        assert two.backward.compute + two.weights.compute == pytest.approx(one.backward.compute)
        assert two.micro.total == pytest.approx(one.micro.total)


def test_gradients_that_nothing_hides_take_a_ring_all_reduce():
    plan, (stage,) = stages("dp=4,overlap=false,microbatches=1")
    assert plan.microbatches == 1
    held = LAYERS * LAYER + 2 * VOCAB * D
    # Two bytes each; 2 (n - 1) / n of them over the link. Norms' weights are left out.
    assert stage.reduction == pytest.approx(2 * 3 / 4 * 2 * held / LINK, rel=0.002)
    assert stage.tail == stage.reduction + stage.update.total
    _, (several,) = stages("dp=4,overlap=false,microbatches=2")
    # Micro-batches are added up in f32, and reduced once a step.
    assert several.reduction == pytest.approx(2 * stage.reduction)


def test_zero_1_gathers_the_weights_after_the_update():
    _, (stage,) = stages("dp=4,zero=1,overlap=false,microbatches=1")
    held = LAYERS * LAYER + 2 * VOCAB * D
    assert stage.update.exposed == pytest.approx(3 / 4 * 2 * held / LINK, rel=0.002)


def test_zero_3_gathers_weights_before_either_pass():
    _, (plain,) = stages("dp=4,overlap=false,microbatches=1")
    _, (sharded,) = stages("fsdp=4,overlap=false,microbatches=1")
    gather = 3 / 4 * 2 * (LAYERS * LAYER + 2 * VOCAB * D) / LINK
    assert sharded.forward.exposed - plain.forward.exposed == pytest.approx(gather, rel=0.002)
    # The backward pass also scatters the gradients, of the same size.
    more = sharded.backward.exposed - plain.backward.exposed
    assert more == pytest.approx(2 * gather, rel=0.002)
    assert sharded.reduction == 0.0


def test_tensor_parallel_layers_send_activations_that_are_exposed():
    _, (stage,) = stages("tp=2,microbatches=1")
    size = SEQ * BATCH * D * 2
    # A gather and a scatter around attention and feed-forward each, half the bytes over the link.
    each = LAYERS * 4 * size / 2 / LINK
    assert stage.forward.exposed == pytest.approx(each)
    assert stage.backward.exposed == pytest.approx(each)


def test_operands_are_gathered_as_they_are_quantised():
    costs, (stage,) = stages_of("tp=2,microbatches=1", replace(WORK, products="fp8"))
    size = SEQ * BATCH * D
    # A gather of one byte an element and a scatter of two, around attention and feed-forward each.
    assert stage_times(stage, costs).forward.exposed == pytest.approx(
        LAYERS * 2 * (1 + 2) * size / 2 / LINK
    )


def test_tensor_collectives_run_beside_products_that_are_cut():
    def slow(kind, size, group):
        return Interval(*(4 * own for own in ring(kind, size, group)))

    costs, (stage,) = stages_of("tp=2,microbatches=1", network=slow)
    cut = Costs(at_peak, slow, effects=StepEffects(decomposed=1.0))
    whole, pieces = stage_times(stage, costs).forward, stage_times(stage, cut).forward
    # Gathers have half of the products to hide behind, scatters the other half.
    products = 2 * LAYER * SEQ * BATCH / 2 / PEAK
    each = 4 * 2 * SEQ * BATCH * D * 2 / 2 / LINK
    exposed = LAYERS * 2 * (each - products / 2)
    assert pieces.exposed == pytest.approx(exposed) and 0.0 < exposed < whole.exposed
    assert pieces.compute == whole.compute


def test_parameters_of_8_bits_are_gathered_so():
    for products, width in (("", 2), ("fp8", 1), ("nvfp4", 2)):
        _, (stage,) = stages_of(
            "dp=4,zero=1,overlap=false,microbatches=1,quantized_weights=true",
            replace(WORK, products=products),
        )
        held = LAYERS * LAYER + 2 * VOCAB * D
        sent = sum(call.size for unit in stage.units for call in unit.renewed)
        assert sent == pytest.approx(width * held, rel=0.002)


def test_reductions_of_chunks_hide_behind_a_group_of_micro_batches():
    # Two stages, eight micro-batches; the link is so slow that nothing is hidden for long.
    def slow(kind, size, group):
        return Interval(*(100 * own for own in ring(kind, size, group)))

    def reduction(text):
        costs, (stage, _) = stages_of(text, network=slow)
        return stage_times(stage, costs)

    plain = reduction("dp=4,pp=2,microbatches=2")
    chunks = reduction("dp=4,pp=2,microbatches=2,schedule=interleaved,virtual=2")
    # The second micro-batch of a chunk goes before the next chunk: one more backward pass to hide
    # behind, less what the last layer of either has left.
    layers = chunks.backward.compute / 3
    assert chunks.reduction == pytest.approx(plain.reduction - 2 * layers, rel=0.05)


def test_full_recomputation_runs_the_layers_again():
    _, (kept,) = stages("dp=1,microbatches=1")
    plan, (again,) = stages("dp=1,microbatches=1,recompute=full")
    tokens = SEQ * BATCH / plan.microbatches
    head = 2 * tokens * D * VOCAB / PEAK
    layers = kept.forward.compute - head
    assert again.forward == kept.forward
    assert again.backward.compute - kept.backward.compute == pytest.approx(layers)


def test_tied_weights_are_reduced_between_the_ends_in_the_width_of_gradients():
    asked = []

    def network(kind, size, group):
        if kind == "all_reduce":
            asked.append((size, group))
        return ring(kind, size, group)

    tied = replace(WORK, tied=True)
    costs, parts = stages_of("tp=2,pp=4,microbatches=4,overlap=false", tied, network)
    with_table = [stage_times(stage, costs).update.exposed for stage in parts]
    # A half of the table on each device, gradients in f32 as micro-batches are added up; ranks 0
    # and 6 (three stages of two) share it.
    assert set(asked) == {(VOCAB * D / 2 * 4, Group(2, 6))}
    assert with_table == pytest.approx([VOCAB * D / 2 * 4 / LINK, 0, 0, VOCAB * D / 2 * 4 / LINK])
    assert traffic(parts[0], costs)["tied"] == pytest.approx(with_table[0])
    assert "tied" not in traffic(parts[1], costs)
    costs, parts = stages_of("tp=2,pp=4")
    assert all("tied" not in traffic(stage, costs) for stage in parts)


def test_the_ends_of_a_pipeline_in_one_box_do_not_leave_it():
    plan = parse_plan("pp=4")
    costs = Costs(at_peak, ring, effects=StepEffects(inside=1.0, between=10.0), box=4)
    call = CommCall("tied", "all_reduce", 100.0, plan.pipeline_ends)
    assert costs.link(call) == pytest.approx(100.0 / LINK)
    costs = Costs(at_peak, ring, effects=StepEffects(inside=1.0, between=10.0), box=2)
    assert costs.link(call) == pytest.approx(1000.0 / LINK)


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2)])
def test_recomputation_sends_keys_and_values_round_the_ring_again(recompute, forwards):
    costs, (stage,) = stages_of(f"cp=2,microbatches=2,recompute={recompute}")
    # Keys and values of half a sequence in four heads of 64, two bytes each; with their gradients
    # backward.
    send = 2 * (SEQ * BATCH / 2 / 2) * 4 * 64 * 2 / LINK
    assert stage.plan.microbatches == 2
    assert traffic(stage, costs)["context"] == pytest.approx(2 * LAYERS * (forwards + 2) * send)


@pytest.mark.parametrize("slower", [0.01, 100.0])
def test_a_ring_hides_transfers_behind_blocks_of_attention(slower):
    def network(kind, size, group):
        return ring(kind, size, group).times(slower)

    costs, (stage,) = stages_of("cp=4,microbatches=1", network=network)
    core = sum(c.flops() for c in stage.units[1].forward.ops if c.family == "attention")
    # Keys and values of a quarter of the tokens, in four heads of 64.
    send = slower * 2 * (SEQ * BATCH / 4) * 4 * 64 * 2 / LINK
    left = max(0.0, send - core / 4 / PEAK)
    assert (left > 0) == (slower > 1.0)
    assert stage_times(stage, costs).forward.exposed == pytest.approx(LAYERS * 3 * left)
