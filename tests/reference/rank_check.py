"""The composition of a step compared with :mod:`.by_rank`, for the same operators and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opcast.common.interval import Interval
from opcast.features.operators.op import Op
from opcast.simulate.step.compose import step_time
from opcast.simulate.step.costs import CommCall, Costs
from opcast.simulate.step.layer_ops import PassOps, embedding_ops, head_ops, layer_ops
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Group, Plan, parse_plan, resolved
from opcast.simulate.step.traffic import (
    Parameters,
    gather_calls,
    hop_call,
    layer_held,
    replica_calls,
    scatter_calls,
    table_held,
    tensor_calls,
)
from opcast.simulate.step.workload import Workload

from .by_rank import LayerSeconds, Wire, step_by_rank

#: FLOP/s of every product; passes over memory are free. A round figure: both sides use it, and it
#: only sets the balance between computation and communication.
PEAK = 2e14
#: Plans on 4, 8, 16 and 64 devices (docs/reports/clusters.md lists the differences).
PLANS = (
    "dp=4",
    "fsdp=4",
    "tp=2,pp=2",
    "tp=4,sp=false",
    "dp=2,zero=2,tp=2",
    "tp=2,pp=2,dp=2",
    "pp=4,dp=2,schedule=gpipe",
    "fsdp=8",
    "tp=2,pp=2,dp=4",
    "tp=4,fsdp=4",
    "pp=4,dp=4",
    "fsdp=4,dp=2,tp=2",
    "tp=4,pp=4,dp=4",
    "tp=2,fsdp=32",
    "pp=8,dp=8",
)
#: A small decoder: by_rank's cost grows with layers, micro-batches and ranks.
_SIZES = {
    "layers": 16,
    "d_model": 1024,
    "heads": 16,
    "kv_heads": 8,
    "d_ff": 4096,
    "vocab": 4096,
    "seq": 512,
    "batch": 64,
}


class Pair(NamedTuple):
    """Seconds of a step, computed both ways.

    Attributes:
        composed: Composed from one rank of each stage.
        by_rank: Simulated with every rank and every message.
    """

    composed: float
    by_rank: float

    @property
    def error(self) -> float:
        """Relative error of the composition."""
        return self.composed / self.by_rank - 1.0


def compare_ranks(text: str, wire: Wire) -> Pair:
    """Compute a step of a small decoder both ways.

    Args:
        text: A plan; every sequence is a separate micro-batch.
        wire: Links between all ranks.
    """
    workload, plan = make_workload("llama", _SIZES), parse_plan(text)
    count = workload.batch // plan.batch_ranks
    plan = resolved(workload, plan.changed(microbatches=count), plan.devices)

    def network(kind: str, size: float, group: Group) -> Interval:
        seconds = wire.seconds(kind, size, group)
        return Interval(seconds, seconds, seconds)

    # No contention between kernels and collectives: by_rank has none.
    composed = step_time(workload, plan, Costs(_products_only, network)).total
    hop = hop_call(workload, plan).size
    return Pair(composed, step_by_rank(plan, _stages(workload, plan), wire, hop, 0.0))


def _products_only(calls: Sequence[Op]) -> np.ndarray:
    return np.repeat(np.array([c.flops() / PEAK for c in calls])[:, None], 3, axis=1)


def _seconds(calls: Sequence[Op]) -> float:
    return sum(c.flops() for c in calls) / PEAK


def _stages(workload: Workload, plan: Plan) -> list[list[LayerSeconds]]:
    """Return the layers of each stage, the embedding in the first and the head in the last."""
    table, tensor = table_held(workload, plan), tensor_calls(workload, plan)
    layer = _unit(workload, plan, layer_ops(workload, plan), layer_held(workload, plan), tensor)
    stages = [[layer] * (workload.layers // plan.pp) for _ in range(plan.pp)]
    stages[0].insert(0, _unit(workload, plan, embedding_ops(workload, plan), table, []))
    stages[-1].append(_unit(workload, plan, head_ops(workload, plan), table, []))
    return stages


def _unit(
    workload: Workload, plan: Plan, ops: PassOps, held: Parameters, calls: Sequence[CommCall]
) -> LayerSeconds:
    return LayerSeconds(
        forward=_seconds(ops.forward),
        backward=_seconds(ops.backward) + _seconds(ops.weights),
        tensor=calls[0].size if calls else 0.0,
        tensor_kinds=tuple(c.kind for c in calls for _ in range(int(c.times))),
        gather=gather_calls(held, workload, plan)[0].size * (plan.stage >= 3),
        scatter=scatter_calls(held, workload, plan)[0].size * (plan.stage >= 2),
        reduce=replica_calls(held, workload, plan)[0].size * (plan.replica_group.size > 1),
    )
