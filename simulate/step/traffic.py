"""Collectives of one device: for a layer's activations and for its parameters.

Sizes follow :class:`~.costs.CommCall`. Tensor parallelism: with sequence parallelism an all-gather
before and a reduce-scatter after attention and feed-forward each, without it an all-reduce after
each (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., MLSys 2023). Context parallelism: keys
and values go round a ring in ``cp - 1`` steps (Liu et al., Ring Attention, 2023). Expert
parallelism: tokens are sent and returned by all-to-all (Lepikhin et al., GShard, ICLR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .costs import CommCall
from .layer_ops import micro_tokens
from .plan import Group, Plan
from .workload import Workload

#: Bytes of an accumulated gradient: f32, as in Megatron-LM, because sums in 16 bits lose small
#: contributions.
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Parameters:
    """Parameters of one device before sharding over data-parallel ranks.

    Attributes:
        dense: Number of parameters outside experts.
        expert: Number of parameters of experts.
        adapters: Number of ``dense`` that belong to adapters.
    """

    dense: float
    expert: float = 0.0
    adapters: float = 0.0

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        """Sum of two counts, by kind."""
        adapters = self.adapters + other.adapters
        return Parameters(self.dense + other.dense, self.expert + other.expert, adapters)

    def times(self, factor: float) -> Parameters:
        """Multiply both counts."""
        return Parameters(self.dense * factor, self.expert * factor, self.adapters * factor)

    def trained(self, workload: Workload) -> Parameters:
        """Those that a step changes: only adapters if the model has any."""
        return Parameters(self.adapters) if workload.lora_rank else self


def tensor_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """Tensor-parallel collectives of a layer, for one micro-batch in either pass.

    With sequence parallelism the backward pass gathers the inputs of both blocks again for the
    weight gradients; that gather hides behind a product and is left out. Operands of quantised
    products are quantised before they are gathered (Transformer Engine's ``Linear``); sums keep the
    width of activations.
    """
    elements = float(micro_tokens(workload, plan)) * workload.d_model
    size = elements * workload.width
    group = plan.tensor_group
    if plan.tp == 1:
        return []
    if plan.sp:
        # Two each: around attention and around the feed-forward.
        gather = CommCall("tensor", "all_gather", elements * workload.operand_width, group, 2.0)
        return [gather, CommCall("tensor", "reduce_scatter", size, group, 2.0)]
    return [CommCall("tensor", "all_reduce", size, group, 2.0)]


def expert_calls(workload: Workload, plan: Plan) -> list[CommCall]:
    """All-to-alls of a layer for one micro-batch in either pass: dispatch and combine."""
    if plan.ep == 1:
        return []
    # With sequence parallelism each tensor-parallel rank sends a different part of the tokens.
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.top_k * workload.d_model * workload.width
    group, limit = plan.expert_group, workload.expert_boxes
    return [CommCall("expert", "alltoall", size, group, 2.0, workload.top_k, limit)]


def ring_calls(workload: Workload, plan: Plan, *, backward: bool) -> list[CommCall]:
    """Ring transfers of keys and values in a layer; backward also of their gradients."""
    if plan.cp == 1:
        return []
    groups = max(1, workload.groups // plan.tp)
    size = 2.0 * micro_tokens(workload, plan) * groups * workload.head * workload.width
    size *= 2.0 if backward else 1.0
    return [CommCall("context", "send_recv", size, plan.context_group, plan.cp - 1.0)]


def hop_call(workload: Workload, plan: Plan) -> CommCall:
    """Transfer of a micro-batch's activations, or gradients, between stages."""
    tokens = micro_tokens(workload, plan) / plan.sequence_parallel
    size = tokens * workload.d_model * workload.width
    return CommCall("pipeline", "send_recv", size, plan.pipeline_group)


def gradient_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes per gradient in reductions.

    As the plan specifies; by default f32 if micro-batches accumulate, else as the parameter.
    """
    if plan.reduce:
        return GRADIENT_BYTES if plan.reduce == "f32" else workload.width
    return GRADIENT_BYTES if plan.microbatches > 1 else workload.width


def parameter_groups(held: Parameters, plan: Plan) -> list[tuple[float, Group, Group]]:
    """Parameters of a device, each with the ranks that shard and that replicate their state.

    Experts are held by ``ep`` times fewer data-parallel ranks than dense parameters.

    Args:
        held: Parameters of one device before sharding.
        plan: Defines the groups.

    Returns:
        Number, shard group and replica group, for dense parameters and for experts.
    """
    shard, replica = plan.shard_group, plan.replica_group
    groups = [(held.dense, shard, replica)]
    if held.expert:
        # ``ep`` takes ranks from the shard group first, which is innermost; the remaining factor
        # comes from the replicas, so that those with the same experts are that much farther
        # apart.
        fewer = gcd(shard.size, plan.ep)
        left = max(1, replica.size * fewer // plan.ep)
        own = Group(shard.size // fewer, shard.stride * fewer)
        groups.append((held.expert, own, Group(left, replica.stride * (replica.size // left))))
    return groups


def gather_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """Gathers of sharded parameters."""
    # 4-bit formats are made from gathered parameters, since their scales lie along both sides.
    eight = plan.quantized_weights and workload.product_bits == 8
    width = workload.operand_width if eight else workload.width
    return [
        CommCall("gather", "all_gather", count * width, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def scatter_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """Reduce-scatters of the gradients of sharded parameters."""
    wide = gradient_bytes(workload, plan)
    return [
        CommCall("scatter", "reduce_scatter", count * wide, shard)
        for count, shard, _ in parameter_groups(held, plan)
    ]


def replica_calls(held: Parameters, workload: Workload, plan: Plan) -> list[CommCall]:
    """All-reduces of gradients among replicas."""
    wide = gradient_bytes(workload, plan)
    # After the scatter each rank reduces only its shard with the replicas.
    return [
        CommCall("gradient", "all_reduce", count * wide / shard.size, replica)
        for count, shard, replica in parameter_groups(held, plan)
    ]


def sharding_note(plan: Plan) -> str:
    """Note on how often a pipeline gathers parameters and reduces gradients; empty if obvious.

    DeepSpeed's pipelines and Megatron-LM's distributed optimiser support only ZeRO 1.
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
    """All-reduce of tied weights, of which the first and the last stage hold a copy.

    Each has the gradients of its own use, which are added in the width of gradients once a step,
    unsharded on every rank (Megatron-LM, ``finalize_model_grads``). Empty for other stages, and if
    they are frozen.
    """
    if not workload.tied or workload.lora_rank or plan.pp == 1 or stage not in (0, plan.pp - 1):
        return []
    size = table_held(workload, plan).total * gradient_bytes(workload, plan)
    return [CommCall("tied", "all_reduce", size, plan.pipeline_ends)]


def local_parameters(held: Parameters, plan: Plan) -> float:
    """Number of parameters whose optimiser state a device holds."""
    return sum(count / shard.size for count, shard, _ in parameter_groups(held, plan))


def layer_held(workload: Workload, plan: Plan) -> Parameters:
    """Parameters of one layer on one device; adapters are split like the layers beside them."""
    adapters = workload.adapter_parameters / plan.tp
    experts = workload.expert_parameters / plan.tp
    # Every rank routes its own tokens and holds the whole router.
    router = workload.d_model * workload.experts
    attention = workload.attention_parameters / plan.tp + experts * workload.shared_experts
    if not workload.experts:
        return Parameters(attention + adapters + experts, 0.0, adapters)
    own = experts * workload.experts / plan.ep
    return Parameters(attention + adapters + router, own, adapters)


def table_held(workload: Workload, plan: Plan) -> Parameters:
    """Parameters of the embedding, or of the head, on one device."""
    return Parameters(workload.table_parameters / plan.tp)
