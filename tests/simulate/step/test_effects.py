"""Effects on a step's costs: factors, the host's time, hand-overs and tokens sent once a box."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.common.interval import Interval
from opcast.features.operators.op import Op
from opcast.simulate.step.compose import step_time
from opcast.simulate.step.costs import CommCall, Costs, StepEffects
from opcast.simulate.step.layer_ops import layer_ops
from opcast.simulate.step.memory import layer_activations
from opcast.simulate.step.plan import Group, Plan, resolved, stage_layers
from opcast.simulate.step.workload import Workload, layer_kinds

SMALL = Workload(layers=4, d_model=256, heads=4, kv_heads=4, d_ff=512, vocab=1000, seq=128, batch=8)
#: Seconds of every operator, and of every collective.
OP, LINK = 1e-3, 1e-2


def costs(effects: StepEffects | None = None, box: int = 0) -> Costs:
    return Costs(
        lambda calls: np.full((len(calls), 3), OP),
        lambda kind, size, group: Interval(LINK * size / 1e6, LINK, LINK),
        effects=effects,
        box=box,
    )


def total(plan: Plan, effects: StepEffects | None = None, workload: Workload = SMALL) -> float:
    return step_time(workload, resolved(workload, plan, plan.devices), costs(effects)).total


def test_a_class_of_operators_is_slowed_by_its_factor() -> None:
    plan = Plan(microbatches=1)
    calls = layer_ops(SMALL, resolved(SMALL, plan, 1))
    kinds = [c.kind for c in (*calls.forward, *calls.backward, *calls.weights)]
    more = total(plan, StepEffects(attention=3.0)) - total(plan)
    assert more == pytest.approx(2 * OP * kinds.count("attention") * SMALL.layers)
    assert kinds.count("attention") == 2 and kinds.count("product") == 3 * 4


def test_the_host_counts_only_where_it_is_slower_than_the_device() -> None:
    plan = Plan(microbatches=1)
    fast = step_time(SMALL, resolved(SMALL, plan, 1), costs(StepEffects(launch_s=1e-6)))
    slow = step_time(SMALL, resolved(SMALL, plan, 1), costs(StepEffects(launch_s=1e-2)))
    assert fast.host == 0.0 and slow.host > 0.0
    parts = slow.compute + slow.exposed + slow.bubble + slow.host
    assert parts == pytest.approx(slow.total)
    # Launching takes over: ten times the launches are nearly ten times the step.
    slower = total(plan, StepEffects(launch_s=1e-1))
    assert slower / slow.total == pytest.approx(10.0, rel=0.01)


def test_handing_over_takes_its_time_once_a_pass_and_micro_batch() -> None:
    plan = Plan(pp=2, microbatches=4)
    # Two stages, four micro-batches: five forward and five backward passes on the critical path.
    more = total(plan, StepEffects(hop_s=0.5)) - total(plan)
    assert more == pytest.approx(0.5 * 2 * 5)


def test_tokens_go_to_a_box_once() -> None:
    call = CommCall("expert", "alltoall", 8e6, Group(32, 1), copies=8)
    # Eight draws from four boxes meet 4 (1 - 0.75^8) of them.
    assert call.across(8) == pytest.approx(4 * (1 - 0.75**8) / 8)
    assert call.across(32) == 1.0
    assert CommCall("tensor", "all_reduce", 8e6, Group(32, 1)).across(8) == 1.0
    assert costs(box=8).link(call) == pytest.approx(LINK * 8 * call.across(8))
    outside = costs(StepEffects(between=2.0, inside=5.0), box=8)
    assert outside.link(call) == pytest.approx(2 * LINK * 8 * call.across(8))


def test_limited_routing_meets_fewer_boxes() -> None:
    call = CommCall("expert", "alltoall", 8e6, Group(64, 1), copies=8, boxes=4)
    # Drawn from four of eight boxes; a limit beyond the boxes that there are changes nothing.
    assert call.across(8) == pytest.approx(4 * (1 - 0.75**8) / 8)
    assert call.across(32) == pytest.approx(2 * (1 - 0.5**8) / 8)
    assert call.across(64) == 1.0


def test_hidden_exchanges_of_experts_show_what_computation_does_not_cover() -> None:
    model = replace(SMALL, experts=8, top_k=2, batch=8)
    shown = Plan(dp=8, ep=8, microbatches=1)
    hidden = replace(shown, hide_experts=True)
    found = [
        step_time(model, resolved(model, plan, 8), costs(StepEffects())) for plan in (shown, hidden)
    ]
    assert found[1].compute == pytest.approx(found[0].compute)
    swapped = found[0].exposed - found[1].exposed
    # A pass hides at most what it computes, both passes of all layers together.
    assert 0 < swapped <= found[0].compute
    without = replace(SMALL, batch=8)
    plain = [
        step_time(without, resolved(without, replace(p, ep=1), 8), costs(StepEffects())).total
        for p in (shown, hidden)
    ]
    assert plain[0] == plain[1]


def test_first_layers_are_dense_and_every_second_has_a_window() -> None:
    model = Workload(
        layers=4, experts=8, top_k=2, shared_experts=1, dense_layers=1, dense_ff=1000,
        window=128, window_share=0.5, seq=1024,
    )  # fmt: skip
    kinds = layer_kinds(model)
    assert [k.experts for k in kinds] == [0, 8, 8, 8]
    assert [k.d_ff for k in kinds] == [1000, 14336, 14336, 14336]
    assert [k.window for k in kinds] == [0, 128, 0, 128]
    # A token sees 128 at most: 128 x 129 / 2 pairs of the first ones, 128 of each other.
    assert kinds[1].visible_pairs() == 128 * 129 / 2 + (1024 - 128) * 128
    assert kinds[0].visible_pairs() == 1024 * 1025 / 2


def test_scores_in_memory_are_kept_and_passed_over() -> None:
    plan = resolved(SMALL, Plan(microbatches=1), 1)
    eager = Workload(**{**SMALL.__dict__, "attention": "eager"})
    names = [c.name for c in layer_ops(eager, plan).forward]
    assert [n for n in names if n in ("scores", "softmax", "values")] == [
        "scores", "softmax", "values",
    ]  # fmt: skip
    # Two bytes of scores, one of mask, two of results for each pair and head (Korthikanti et al.,
    # Reducing Activation Recomputation, 2023, section 4.1), instead of four bytes a row.
    pairs = SMALL.batch * SMALL.heads * SMALL.seq**2
    rows = SMALL.batch * SMALL.heads * SMALL.seq
    more = layer_activations(eager, plan) - layer_activations(SMALL, plan)
    assert more == 5 * pairs - 4 * rows
    assert layer_ops(eager, plan).selective[-len(("scores", "softmax", "values")) :]


def test_products_of_eight_bits_are_quantised_apart() -> None:
    plan = resolved(SMALL, Plan(microbatches=1), 1)
    narrow = layer_ops(Workload(**{**SMALL.__dict__, "products": "fp8"}), plan)
    cast = next(c for c in narrow.forward if c.name == "up_quantize")
    tokens, inner = SMALL.batch * SMALL.seq, 2 * SMALL.d_ff
    # Input and weight are read in two bytes and written twice in one.
    assert cast.shape == (4 * (tokens * SMALL.d_model + inner * SMALL.d_model),)
    up = next(c for c in narrow.forward if c.name == "up")
    assert up == Op("linear", (tokens, inner, SMALL.d_model), "fp8", 1.0, "quantized", name="up")


def test_uneven_interleaved_stages() -> None:
    model = Workload(**{**SMALL.__dict__, "layers": 14})
    plan = Plan(pp=4, schedule="interleaved", virtual=4, microbatches=8)
    assert resolved(model, plan, 4).virtual == 4
    assert sum(stage_layers(14, plan)) == 14 and max(stage_layers(14, plan)) == 4
    with pytest.raises(PlanError, match="is more than layers=14"):
        resolved(model, Plan(pp=4, schedule="interleaved", virtual=8, microbatches=8), 4)


def test_gradients_are_reduced_in_the_type_that_the_plan_says() -> None:
    def seconds(reduce: str) -> float:
        plan = Plan(dp=2, microbatches=2, overlap=False, reduce=reduce)
        return total(plan)

    assert seconds("f32") == seconds("")
    assert seconds("bf16") < seconds("f32")
    with pytest.raises(PlanError, match="reduce='int8'"):
        Plan(reduce="int8")
