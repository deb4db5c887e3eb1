"""What one device sends for a layer and for its parameters.

Sizes follow :class:`~.calls.CommCall`. Tensor parallelism: an all-gather before and a
reduce-scatter after attention and feed-forward each with sequence parallelism, an all-reduce after
each without (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., MLSys 2023). Context
parallelism: keys and values go round a ring, ``cp - 1`` times (Liu et al., Ring Attention, 2023).
Experts: tokens go out and come back by all-to-all (Lepikhin et al., GShard, ICLR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .calls import CommCall
from .layer_ops import micro_tokens
from .plan import Group, Plan
from .workload import Workload


@dataclass(frozen=True)
class Parameters:
    """Parameters of one device before sharding over data-parallel ranks.

    Attributes:
        dense: Of everything but experts.
        expert: Of experts.
    """

    dense: float
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        """Sum of both parts."""
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def times(self, factor: float) -> Parameters:
        """Both parts multiplied."""
        return Parameters(self.dense * factor, self.expert * factor)


#: Bytes of a gradient that is added up over micro-batches.
GRADIENT_BYTES = 4


def tensor_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """Collectives of one layer and micro-batch among tensor-parallel ranks, in either pass.

    With sequence parallelism the backward pass gathers the inputs of both blocks again for the
    gradients of their weights; that gather hides behind a product and is left out.
    """
    size = float(micro_tokens(workload, plan)) * workload.d_model * workload.width
    group = plan.tensor_group
    if plan.tp == 1:
        return []
    if plan.sp:
        gather = CommCall("tensor", "all_gather", size, group, 2.0)
        return [gather, CommCall("tensor", "reduce_scatter", size, group, 2.0)]
    return [CommCall("tensor", "all_reduce", size, group, 2.0)]


def expert_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """All-to-alls of one layer and micro-batch, in either pass: tokens out, results back."""
    if plan.ep == 1:
        return []
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.top_k * workload.d_model * workload.width
    return [CommCall("expert", "alltoall", size, plan.expert_group, 2.0)]


def ring_call(workload: Workload, plan: Plan, *, backward: bool) -> CommCall:
    """One step round the ring of one layer: keys and values; backward their gradients as well."""
    groups = max(1, workload.groups // plan.tp)
    size = 2.0 * micro_tokens(workload, plan) * groups * workload.head * workload.width
    pair = plan.context_group._replace(size=min(2, plan.cp))
    return CommCall("context", "send_recv", size * (2.0 if backward else 1.0), pair)


def hop_call(workload: Workload, plan: Plan) -> CommCall:
    """Activations (or their gradients) of a micro-batch from one stage to the next."""
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.d_model * workload.width
    return CommCall("pipeline", "send_recv", size, plan.stage_hop, 1.0 if plan.pp > 1 else 0.0)


def gradient_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of a gradient: as the parameter, but f32 where micro-batches are added up."""
    return GRADIENT_BYTES if plan.microbatches > 1 else workload.width


def parameter_groups(held: Parameters, plan: Plan) -> list[tuple[float, Group, Group]]:
    """Parameters of a device with the ranks that share their state and those that repeat it.

    An expert lies on ``ep`` times fewer data-parallel ranks than everything else does.

    Args:
        held: Of one device before sharding.
        plan: Gives the groups.

    Returns:
        Number, group of shards and group of replicas, for dense parameters and for experts.
    """
    shard, replica = plan.shard_group, plan.replica_group
    groups = [(held.dense, shard, replica)]
    if held.expert:
        fewer = gcd(shard.size, plan.ep)
        left = max(1, replica.size * fewer // plan.ep)
        own = Group(shard.size // fewer, shard.stride * fewer)
        groups.append((held.expert, own, Group(left, replica.stride)))
    return groups


def gather_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """Gathers of sharded parameters."""
    return [
        CommCall("gather", "all_gather", count * workload.width, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def scatter_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """Scatters of their gradients."""
    wide = gradient_bytes(workload, plan)
    return [
        CommCall("scatter", "reduce_scatter", count * wide, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def replica_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """All-reduces of the gradients that replicas share."""
    wide = gradient_bytes(workload, plan)
    return [
        CommCall("gradient", "all_reduce", count * wide / shard.size, replica)
        for count, shard, replica in parameter_groups(held, plan)
    ]


def local_parameters(held: Parameters, plan: Plan) -> float:
    """Parameters whose optimiser state lies on a device."""
    return sum(count / shard.size for count, shard, _ in parameter_groups(held, plan))


def layer_held(workload: Workload, plan: Plan) -> Parameters:
    """Parameters of one layer on one device."""
    experts = workload.expert_parameters / plan.tp
    router = workload.d_model * workload.experts
    attention = workload.attention_parameters / plan.tp
    if not workload.experts:
        return Parameters(attention + experts)
    return Parameters(attention + router, experts * workload.experts / plan.ep)


def table_held(workload: Workload, plan: Plan) -> Parameters:
    """Parameters of the embedding, or of the head, on one device."""
    return Parameters(workload.table_parameters / plan.tp)
