"""The composition against every rank and message, for the same operators and links."""

import numpy as np
import pytest

from opcast.simulate.step.by_rank import LayerSeconds, Wire, step_by_rank
from opcast.simulate.step.calls import Estimate
from opcast.simulate.step.compose import step_time
from opcast.simulate.step.costs import Costs
from opcast.simulate.step.layer_ops import embedding_ops, head_ops, layer_ops
from opcast.simulate.step.plan import parse_plan
from opcast.simulate.step.traffic import (
    gather_calls,
    hop_call,
    layer_held,
    replica_calls,
    scatter_calls,
    table_held,
    tensor_calls,
)
from opcast.simulate.step.workload import make_workload, resolved

PEAK = 2e14
#: Devices and plans at which the two are compared.
PLANS = [
    "dp=4", "fsdp=4", "tp=2,pp=2", "tp=4,sp=false", "dp=2,zero=2,tp=2",
    "tp=2,pp=2,dp=2", "pp=4,dp=2,schedule=gpipe", "fsdp=8",
    "tp=2,pp=2,dp=4", "tp=4,fsdp=4", "pp=4,dp=4", "fsdp=4,dp=2,tp=2",
    "tp=4,pp=4,dp=4", "tp=2,fsdp=32", "pp=8,dp=8",
]  # fmt: skip


def products_only(calls):
    """Products and attention at the peak; the optimiser's pass and all others free."""
    return np.repeat(np.array([c.flops() / PEAK for c in calls])[:, None], 3, axis=1)


def seconds(calls):
    return float(products_only(calls)[:, 0].sum()) if calls else 0.0


def both(text, wire, batch=64):
    """Step seconds by the composition and by rank."""
    workload = make_workload(
        "llama",
        {"layers": 16, "d_model": 1024, "heads": 16, "kv_heads": 8, "d_ff": 4096, "vocab": 4096,
         "seq": 512, "batch": batch},
    )  # fmt: skip
    plan = parse_plan(text)
    plan = resolved(workload, plan.changed(microbatches=batch // plan.batch_ranks), plan.devices)

    def network(kind, size, group):
        found = wire.seconds(kind, size, group)
        return Estimate(found, found, found)

    composed = step_time(workload, plan, Costs(products_only, network)).total
    tensor = tensor_calls(workload, plan)

    def unit(ops, held, calls):
        return LayerSeconds(
            forward=seconds(ops.forward),
            backward=seconds(ops.backward) + seconds(ops.weights),
            tensor=calls[0].size if calls else 0.0,
            tensor_kinds=tuple(c.kind for c in calls for _ in range(int(c.times))),
            gather=gather_calls(held, workload, plan)[0].size * (plan.stage >= 3),
            scatter=scatter_calls(held, workload, plan)[0].size * (plan.stage >= 2),
            reduce=replica_calls(held, workload, plan)[0].size * (plan.replica_group.size > 1),
        )

    table = table_held(workload, plan)
    layer = unit(layer_ops(workload, plan), layer_held(workload, plan), tensor)
    stages = [[layer] * (workload.layers // plan.pp) for _ in range(plan.pp)]
    stages[0].insert(0, unit(embedding_ops(workload, plan), table, []))
    stages[-1].append(unit(head_ops(workload, plan), table, []))
    return composed, step_by_rank(plan, stages, wire, hop_call(workload, plan).size, 0.0)


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("bandwidth", [20e9, 200e9])
def test_composition_is_within_three_per_cent_of_every_message(text, bandwidth):
    composed, by_rank = both(text, Wire(2e-6, bandwidth))
    assert composed == pytest.approx(by_rank, rel=0.03)


def test_rings_by_hand():
    wire = Wire(1.0, 8.0)
    # Three ranks, 24 bytes: messages of 8 bytes take 2 s, two rounds of two.
    layer = LayerSeconds(1.0, 2.0, reduce=24.0)
    plan = resolved(make_workload("llama", {"batch": 3}), parse_plan("dp=3"), 3)
    assert step_by_rank(plan, [[layer]], wire, 0.0, 5.0) == 1 + 2 + 2 * 2 * (1 + 1) + 5
