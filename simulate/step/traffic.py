"""The collectives of one device: for a layer's activations and for its parameters.

Sizes follow :class:`~.costs.CommCall`. Tensor parallelism: with sequence parallelism an all-gather
before and a reduce-scatter after attention and feed-forward each, without it an all-reduce after
each (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., MLSys 2023). Context parallelism: keys
and values travel round a ring in ``cp - 1`` steps (Liu et al., Ring Attention, 2023). Experts:
tokens go out and come back by all-to-all (Lepikhin et al., GShard, ICLR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .costs import CommCall
from .layer_ops import micro_tokens
from .plan import Group, Plan
from .workload import Workload


@dataclass(frozen=True)
class Parameters:
    """Parameters of one device before sharding over data-parallel ranks.

    Attributes:
        dense: Parameters of everything but experts.
        expert: Parameters of experts.
    """

    dense: float
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        """Sum of both parts."""
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def times(self, factor: float) -> Parameters:
        """Return the parameters with both counts multiplied."""
        return Parameters(self.dense * factor, self.expert * factor)


#: Bytes of a gradient that is accumulated over micro-batches: f32, as in Megatron-LM, because sums
#: in 16 bits lose small contributions.
GRADIENT_BYTES = 4


def tensor_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """List a layer's collectives among tensor-parallel ranks, for a micro-batch in either pass.

    With sequence parallelism the backward pass gathers the inputs of both blocks again for the
    gradients of their weights; that gather hides behind a product and is left out. Operands of
    products are quantised where they are and gathered so (Transformer Engine's ``Linear``); sums
    keep the width of activations.
    """
    elements = float(micro_tokens(workload, plan)) * workload.d_model
    size = elements * workload.width
    group = plan.tensor_group
    if plan.tp == 1:
        return []
    if plan.sp:
        # Twice: once around attention, once around the feed-forward.
        gather = CommCall("tensor", "all_gather", elements * workload.operand_width, group, 2.0)
        return [gather, CommCall("tensor", "reduce_scatter", size, group, 2.0)]
    return [CommCall("tensor", "all_reduce", size, group, 2.0)]


def expert_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """List a layer's all-to-alls for a micro-batch in either pass: tokens out, results back."""
    if plan.ep == 1:
        return []
    # With sequence parallelism each tensor-parallel rank sends its own tokens.
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.top_k * workload.d_model * workload.width
    group, limit = plan.expert_group, workload.expert_boxes
    return [CommCall("expert", "alltoall", size, group, 2.0, workload.top_k, limit)]


def ring_calls(workload: Workload, plan: Plan, *, backward: bool) -> list[CommCall]:
    """List a layer's steps round the ring: keys and values; backward their gradients as well."""
    if plan.cp == 1:
        return []
    groups = max(1, workload.groups // plan.tp)
    size = 2.0 * micro_tokens(workload, plan) * groups * workload.head * workload.width
    size *= 2.0 if backward else 1.0
    return [CommCall("context", "send_recv", size, plan.context_group, plan.cp - 1.0)]


def hop_call(workload: Workload, plan: Plan) -> CommCall:
    """Return the transfer of a micro-batch's activations, or gradients, between stages."""
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.d_model * workload.width
    return CommCall("pipeline", "send_recv", size, plan.pipeline_group)


def gradient_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of a gradient that is reduced.

    As the plan says; else as the parameter, but f32 where micro-batches are added up.
    """
    if plan.reduce:
        return GRADIENT_BYTES if plan.reduce == "f32" else workload.width
    return GRADIENT_BYTES if plan.microbatches > 1 else workload.width


def parameter_groups(held: Parameters, plan: Plan) -> list[tuple[float, Group, Group]]:
    """Group the parameters of a device by the ranks that share and that replicate their state.

    An expert is held by ``ep`` times fewer data-parallel ranks than dense parameters are.

    Args:
        held: Parameters of one device before sharding.
        plan: Gives the groups.

    Returns:
        Number, group of shards and group of replicas, for dense parameters and for experts.
    """
    shard, replica = plan.shard_group, plan.replica_group
    groups = [(held.dense, shard, replica)]
    if held.expert:
        # ``ep`` takes ranks from the shard group first, which lies inside; what it does not divide
        # it takes from the replicas, of which those with the same experts are that much farther
        # apart.
        fewer = gcd(shard.size, plan.ep)
        left = max(1, replica.size * fewer // plan.ep)
        own = Group(shard.size // fewer, shard.stride * fewer)
        groups.append((held.expert, own, Group(left, replica.stride * (replica.size // left))))
    return groups


def gather_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """List the gathers of sharded parameters."""
    # Formats of 4 bits are made of gathered parameters, since their scales lie along both sides.
    eight = plan.quantized_weights and workload.product_bits == 8
    width = workload.operand_width if eight else workload.width
    return [
        CommCall("gather", "all_gather", count * width, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def scatter_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """List the scatters of their gradients."""
    wide = gradient_bytes(workload, plan)
    return [
        CommCall("scatter", "reduce_scatter", count * wide, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def replica_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """List the all-reduces of gradients among replicas."""
    wide = gradient_bytes(workload, plan)
    # After the scatter each rank reduces only its shard with the replicas.
    return [
        CommCall("gradient", "all_reduce", count * wide / shard.size, replica)
        for count, shard, replica in parameter_groups(held, plan)
    ]


def sharding_note(plan: Plan) -> str:
    """Say how often a pipeline gathers parameters and reduces gradients; empty where it is plain.

    DeepSpeed's pipelines and Megatron-LM's distributed optimiser know ZeRO 1 alone.
    """
    if plan.pp == 1 or plan.microbatches == 1 or max(plan.stage, plan.fsdp) < 2:
        return ""
    if plan.stage == 1:
        return (
            "parameters of fsdp are gathered and gradients reduced once a step, and are whole "
            "within it, as torch.distributed.pipelining and Llama 3 have it; zero=3 does so for "
            "every micro-batch"
        )
    return (
        f"zero={plan.zero} reduces gradients for every micro-batch, as Megatron-FSDP does; "
        "pipelines of DeepSpeed, Megatron-LM and torchtitan do it once a step: zero=1"
    )


def tied_calls(workload: Workload, plan: Plan, stage: int) -> list[CommCall]:
    """List the all-reduce of tied weights, of which both ends of a pipeline hold a copy.

    Each end has the gradients of its own use, which are added up in the width of gradients once a
    step (Megatron-LM, ``finalize_model_grads``), whole on every rank. Nothing for other stages.
    """
    if not workload.tied or plan.pp == 1 or stage not in (0, plan.pp - 1):
        return []
    size = table_held(workload, plan).total * gradient_bytes(workload, plan)
    return [CommCall("tied", "all_reduce", size, plan.pipeline_ends)]


def local_parameters(held: Parameters, plan: Plan) -> float:
    """Count the parameters whose optimiser state a device holds."""
    return sum(count / shard.size for count, shard, _ in parameter_groups(held, plan))


def layer_held(workload: Workload, plan: Plan) -> Parameters:
    """Count the parameters of one layer on one device."""
    experts = workload.expert_parameters / plan.tp
    # Every rank routes its own tokens and holds the whole router.
    router = workload.d_model * workload.experts
    attention = workload.attention_parameters / plan.tp + experts * workload.shared_experts
    if not workload.experts:
        return Parameters(attention + experts)
    return Parameters(attention + router, experts * workload.experts / plan.ep)


def table_held(workload: Workload, plan: Plan) -> Parameters:
    """Count the parameters of the embedding, or of the head, on one device."""
    return Parameters(workload.table_parameters / plan.tp)
