"""Memory of a device in each pipeline stage, in bytes.

State in mixed precision: a parameter and its gradient in the model's dtype, and 12 bytes of
optimiser state in f32: master weight and two moments of Adam (Rajbhandari et al., ZeRO, SC 2020).
Parameters in f32 are their own master weights.
Weights of quantised products are kept in quantised form, in addition to or instead of these.
Gradients are f32 if several micro-batches accumulate. Activations are the tensors that the
backward pass reads; fused attention keeps no scores.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .layer_ops import micro_tokens
from .pipeline import in_flight
from .plan import Plan, kind_counts
from .traffic import (
    Parameters,
    gradient_bytes,
    layer_held,
    local_parameters,
    parameter_groups,
    table_held,
)
from .workload import WRITTEN_OUT, Workload

#: Bytes per parameter of a master weight, and of two moments of Adam, in f32 (ZeRO, section 3.1).
_MASTER, _MOMENTS = 4, 8
#: CUDA context, library workspaces and allocator fragmentation in bytes (engineering estimate; not
#: fitted).
RESERVED_BYTES = 2.0 * 2**30
#: Bytes of a gradient bucket: the default ``bucket_cap_mb`` of PyTorch's DDP. Two are in use at a
#: time, one being filled and one being reduced.
BUCKET_BYTES = 25.0 * 2**20


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage.

    Attributes:
        parameters: Parameters in the model's dtype.
        gradients: Their gradients.
        optimizer: Master weights and moments.
        activations: Tensors kept for the backward pass, for all micro-batches in flight.
        temporary: Working set of one layer or of the head, and parameters gathered for use.
        buffers: Communication buffers.
        reserved: Other memory of the process: :data:`RESERVED_BYTES` or a fitted value.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    buffers: float
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(asdict(self).values()))

    def to_dict(self) -> dict[str, float]:
        """All parts and the total as plain data."""
        return {**asdict(self), "total": self.total}


def optimizer_bytes(workload: Workload) -> int:
    """Bytes of optimiser state per parameter."""
    return _MOMENTS + (_MASTER if workload.width < _MASTER else 0)


def stage_held(workload: Workload, plan: Plan, stage: int) -> Parameters:
    """Parameters of one device of a stage before sharding over data-parallel ranks."""
    held = Parameters(0.0)
    for layer, count in kind_counts(workload, plan, stage).items():
        held = held + layer_held(layer, plan).times(count)
    ends = (stage == 0) + (stage == plan.pp - 1)
    # Tied weights are shared on one device; in a pipeline both end stages hold a copy.
    if plan.pp == 1 and workload.tied:
        ends = 1
    return held + table_held(workload, plan).times(ends)


def stage_memory(workload: Workload, plan: Plan, stage: int, copies: int = 0) -> StageMemory:
    """Memory on one device of a stage.

    Args:
        workload: Model.
        plan: Resolved plan.
        stage: Stage, from 0.
        copies: Quantised copies of the weights of quantised products.
    """
    held = stage_held(workload, plan, stage)
    train = workload.mode == "train"
    learned = held.trained(workload)
    own = local_parameters(learned, plan)
    zero = plan.stage
    # ZeRO 1 shards optimiser state, 2 also gradients, 3 also parameters.
    kept = local_parameters(held, plan) if zero >= 3 else held.total
    summed = own if zero >= 2 else learned.total
    return StageMemory(
        parameters=kept * workload.width + train * _quantised(workload, plan, stage, copies),
        gradients=summed * gradient_bytes(workload, plan) * train,
        optimizer=own * optimizer_bytes(workload) * (train and plan.offload != "optimizer"),
        activations=stage_activations(workload, plan, stage) if train else 0.0,
        temporary=_temporary(workload, plan, stage),
        buffers=_buffers(workload, plan),
    )


def _quantised(workload: Workload, plan: Plan, stage: int, copies: int) -> float:
    """Bytes of quantised copies of a stage's weights, less the weights that they replace.

    Quantised copies of gathered weights (ZeRO 3) are discarded with them.
    """
    if not copies or workload.operand_width >= workload.width or plan.stage >= 3:
        return 0.0
    kinds = kind_counts(workload, plan, stage).items()
    count = sum(layer_held(layer, plan).total * layers for layer, layers in kinds)
    eight = plan.quantized_weights and workload.product_bits == 8
    return count * (copies * workload.operand_width - (workload.width if eight else 0.0))


def layer_activations(workload: Workload, plan: Plan) -> float:
    """Bytes of one micro-batch that a layer's backward pass needs, on one device.

    ``none`` keeps the inputs of both norms, the input of each block's first product, queries, keys,
    values and the result of attention, both results of the first feed-forward product and the input
    of the second. ``selective`` recomputes the results of norms and activation, ``full`` everything
    but the layer's input (compare Korthikanti et al., MLSys 2023, section 4). Operands of quantised
    products are kept quantised; the result of attention is also kept as it is for its own backward
    pass (Transformer Engine's ``Linear``). Inputs of frozen products without adapters are not kept.
    """
    tokens, width = micro_tokens(workload, plan), workload.width
    narrow = workload.operand_width
    residual = tokens * workload.d_model / plan.sequence_parallel
    if plan.recompute == "full":
        return residual * width
    heads = workload.heads / plan.tp
    groups = max(1.0, workload.groups / plan.tp)
    # Queries and the result by query heads, keys and values by key-value heads.
    attention = tokens * workload.head * (2 * heads + 2 * groups)
    if workload.kv_lora:
        # Queries, keys, values and the result, by heads, and their compressed forms.
        wide = 2 * (workload.head + workload.rope_dim) + 2 * workload.value
        compressed = workload.q_lora + workload.kv_lora + workload.rope_dim
        attention = tokens * (heads * wide + compressed)
    # A token has a copy for each of its experts.
    rows = tokens * max(1, workload.top_k)
    inner = (rows + tokens * workload.shared_experts) * workload.d_ff / plan.tp
    selective = plan.recompute == "selective"
    fed = inner * (workload.matrices - 1)
    # Operands: results of both norms, the input of the second feed-forward product, and a quantised
    # copy of the result of attention.
    frozen = workload.lora_rank > 0 and not workload.adapts_feed_forward
    operands = 0.0 if selective else residual if frozen else 2 * residual + inner
    if narrow < width:
        operands += tokens * heads * workload.value
    # Tokens as sent to their experts and as they come back.
    routed = rows * workload.d_model / plan.sequence_parallel * (2 if workload.experts else 0)
    # Fused attention keeps one f32 per row and head, the log-sum-exp of the scores.
    statistics = 4.0 * tokens * heads
    if workload.attention in WRITTEN_OUT and not selective:
        # Scores before and after dropout, and the dropout mask.
        statistics = tokens * heads * workload.seq / plan.cp * (2 * width + 1.0)
    kept = (2 * residual + attention + fed + routed) * width
    return kept + operands * narrow + statistics


def box_host(workload: Workload, plan: Plan, box: int) -> float:
    """Bytes offloaded to the host of the fullest box.

    Args:
        workload: Model.
        plan: Resolved plan.
        box: Devices per host.
    """
    if plan.offload == "none" or workload.mode != "train":
        return 0.0
    own = np.array([_stage_host(workload, plan, stage) for stage in range(plan.pp)])
    # Stages are outermost in rank order, and ranks fill one box after the other.
    ranks = np.repeat(own, plan.devices // plan.pp)
    return float(np.add.reduceat(ranks, np.arange(0, len(ranks), box)).max())


def _stage_host(workload: Workload, plan: Plan, stage: int) -> float:
    """Bytes that a device of a stage offloads to its host."""
    if plan.offload == "optimizer":
        held = stage_held(workload, plan, stage)
        own = local_parameters(held.trained(workload), plan)
        return own * optimizer_bytes(workload)
    kept = stage_activations(workload, plan.changed(offload="none"), stage)
    return max(0.0, kept - stage_activations(workload, plan, stage))


def stage_activations(workload: Workload, plan: Plan, stage: int) -> float:
    """Bytes of activations on one device of a stage, for all micro-batches in flight."""
    kinds = kind_counts(workload, plan, stage).items()
    layers = [(layer_activations(layer, plan), count) for layer, count in kinds]
    if plan.offload == "activations":
        # Two layers' worth: the one in use and the one in transfer.
        return 2.0 * max((size for size, _ in layers), default=0.0)
    flying = in_flight(plan.schedule, stage, plan.pp, plan.microbatches, plan.virtual)
    # Without a pipeline micro-batches run one by one, whatever the schedule.
    if plan.pp == 1:
        flying = 1.0
    return flying * sum(size * count for size, count in layers)


def _temporary(workload: Workload, plan: Plan, stage: int) -> float:
    """Largest working set in bytes: of a layer that is recomputed, or of the loss."""
    tokens, width = micro_tokens(workload, plan), workload.width
    inner = tokens * max(1, workload.top_k) * workload.d_ff / plan.tp
    # The feed-forward's intermediates, and the residual with the block's result.
    layer = width * (inner * workload.matrices + 2.0 * tokens * workload.d_model)
    # A recomputed layer has all of its activations for a moment.
    if plan.recompute == "full" and workload.mode == "train":
        layer += layer_activations(workload, plan.changed(recompute="none"))
    gathered = 0.0
    if plan.stage >= 3:
        # The layer in use and the one gathered ahead (:func:`~.stage_times.run_passes`).
        gathered = 2.0 * layer_held(workload, plan).total * width
    loss = 0.0
    if stage == plan.pp - 1:
        # Logits, and their softmax in f32.
        loss = tokens * workload.head_share * workload.vocab / plan.tp * (width + 4)
    # Layer and loss never run at the same time and reuse the same memory.
    return max(layer, loss) + gathered


def _buffers(workload: Workload, plan: Plan) -> float:
    size = float(micro_tokens(workload, plan)) * workload.d_model * workload.width
    # Sequence parallelism gathers the full sequence before each block; all-reduces work in place.
    tensor = size if plan.tp > 1 and plan.sp else 0.0
    # One buffer in each direction between stages.
    hops = 2.0 * size / plan.sequence_parallel if plan.pp > 1 else 0.0
    trained = layer_held(workload, plan).trained(workload)
    shared = any(s.size * r.size > 1 for _, s, r in parameter_groups(trained, plan))
    reduced = 2.0 * BUCKET_BYTES if shared and workload.mode == "train" else 0.0
    # Send and receive buffers of the all-to-all.
    routed = 0.0
    if plan.ep > 1:
        routed = 2.0 * size * workload.top_k / plan.sequence_parallel
    return tensor + hops + reduced + routed
