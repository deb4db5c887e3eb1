"""Parallel plans: how a model is distributed over devices, and checks that its parts divide.

Ranks are numbered with the tensor-parallel index innermost, then context, FSDP and data-parallel,
and pipeline stages outermost, so that the busiest groups have the closest devices (Narayanan et
al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021). Expert parallelism
divides the data-parallel ranks and adds no devices (Rajbhandari et al., DeepSpeed-MoE, ICML 2022).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from math import isqrt
from typing import Any, NamedTuple

from ...common.errors import PlanError
from ...common.types import JsonObject
from .settings import build, once, read_pairs
from .workload import Workload, layer_kinds

#: Pipeline schedules; :mod:`.pipeline` cites their papers.
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
#: What the backward pass recomputes (names as in Megatron-LM).
RECOMPUTE = ("none", "selective", "full")
#: What is kept in host memory.
OFFLOAD = ("none", "optimizer", "activations")
#: Dtypes in which gradients are reduced.
REDUCE = ("", "bf16", "f32")
#: Aliases of keys.
ALIASES = {
    "microbatch": "microbatches",
    "accumulation": "microbatches",
    "m": "microbatches",
    "data": "dp",
    "tensor": "tp",
    "pipeline": "pp",
    "expert": "ep",
    "context": "cp",
    "chunks": "virtual",
    "recompute_granularity": "recompute",
}
#: Target size of an automatically chosen micro-batch in tokens: enough rows to fill the matrix
#: units of a large GPU (engineering estimate; not fitted).
TOKENS = 8192


class Group(NamedTuple):
    """Devices that communicate: ``size`` of them, ``stride`` apart in rank order."""

    size: int
    stride: int


@dataclass(frozen=True)
class Plan:
    """A parallel plan; ``dp * fsdp * tp * cp * pp`` is the number of devices.

    Attributes:
        dp: Data-parallel replicas.
        fsdp: Devices over which parameters, gradients and optimiser state are sharded (ZeRO 3, see
            ``stage``); each processes a part of the batch. With ``dp`` the shards are replicated.
        tp: Tensor-parallel devices.
        sp: Whether norms and residuals are split along the sequence if ``tp`` is above 1
            (Korthikanti et al., Reducing Activation Recomputation, MLSys 2023).
        pp: Pipeline stages.
        ep: Expert-parallel devices; divides ``dp * fsdp``.
        cp: Context-parallel devices: parts of the sequence (ring attention).
        zero: ZeRO stage over the ``dp`` ranks, 0 to 3 (Rajbhandari et al., ZeRO, SC 2020).
        microbatches: Micro-batches that a replica processes in turn in a step and whose gradients
            accumulate; 0 chooses: about 8192 tokens each.
        schedule: One of :data:`SCHEDULES`.
        virtual: Model chunks per device for ``interleaved``.
        recompute: One of :data:`RECOMPUTE`.
        offload: One of :data:`OFFLOAD`.
        overlap: Whether communication may overlap computation.
        hide_experts: Whether the exchange of tokens with experts overlaps the computation of
            another micro-batch (DualPipe: DeepSeek-V3, 2024, section 3.2.1).
        reduce: Dtype in which gradients are reduced, ``bf16`` or ``f32``; empty for f32 if
            micro-batches accumulate and the model's dtype otherwise.
        quantized_weights: Whether parameters are gathered, and frozen ones kept, as 8-bit operands
            of quantised products (FP8 parameters of Transformer Engine); ``None`` if unspecified.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sp: bool = True
    pp: int = 1
    ep: int = 1
    cp: int = 1
    zero: int = 0
    microbatches: int = 0
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: str = "none"
    offload: str = "none"
    overlap: bool = True
    hide_experts: bool = False
    reduce: str = ""
    quantized_weights: bool | None = None

    def __post_init__(self) -> None:
        """Check everything that does not depend on a model or a cluster.

        Raises:
            PlanError: A degree is not positive, or settings contradict one another.
        """
        for name in ("dp", "fsdp", "tp", "pp", "ep", "cp", "virtual"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1", where="plan")
        for name, allowed in (
            ("schedule", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("offload", OFFLOAD),
            ("reduce", REDUCE),
        ):
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} is not known",
                    where="plan",
                    hint="choose one of: " + ", ".join(allowed),
                )
        if self.zero not in (0, 1, 2, 3) or self.microbatches < 0:
            raise PlanError(
                f"zero={self.zero}, microbatches={self.microbatches}",
                where="plan",
                hint="zero is 0 to 3, microbatches at least 1 (0 chooses)",
            )
        # zero=3 with fsdp is consistent: in a pipeline it also shards within a step.
        if self.fsdp > 1 and self.zero in (1, 2):
            raise PlanError(
                "fsdp shards parameters, which zero=1 and zero=2 do not",
                where="plan",
                hint="leave zero out, or write dp instead of fsdp",
            )
        if (self.dp * self.fsdp) % self.ep:
            raise PlanError(
                f"ep={self.ep} does not divide dp*fsdp={self.dp * self.fsdp}",
                where="plan",
                hint="expert-parallel groups are made of data-parallel ranks",
            )
        if (self.schedule == "interleaved") != (self.virtual > 1):
            raise PlanError(
                f"schedule={self.schedule} with virtual={self.virtual}",
                where="plan",
                hint="add virtual=2 or more"
                if self.virtual == 1
                else "virtual above 1 needs schedule=interleaved, which it implies where no "
                "schedule is said",
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def batch_ranks(self) -> int:
        """Number of parts into which the batch is split."""
        return self.dp * self.fsdp

    @property
    def sequence_parallel(self) -> int:
        """Parts of a sequence in norms and residuals, in addition to ``cp``."""
        return self.tp if self.sp else 1

    @property
    def rounds_in_chunk(self) -> int:
        """Micro-batches that pass through a chunk of layers before the next chunk starts."""
        # Interleaving takes groups of ``pp`` of them through each chunk (``_virtual`` of pipeline).
        return self.pp if self.virtual > 1 else 1

    @property
    def stage(self) -> int:
        """Effective ZeRO stage: ``zero`` if set; else 3 for ``fsdp``, or 1 for it in a pipeline.

        In a pipeline parameters are gathered and gradients reduced once a step, and both are whole
        within it (``torch.distributed.pipelining``; Grattafiori et al., Llama 3, 2024, section
        3.3.2).
        """
        return self.zero or ((1 if self.pp > 1 else 3) if self.fsdp > 1 else 0)

    @property
    def tensor_group(self) -> Group:
        """Ranks that hold parts of a layer."""
        return Group(self.tp, 1)

    @property
    def context_group(self) -> Group:
        """Ranks that hold parts of a sequence."""
        return Group(self.cp, self.tp)

    @property
    def shard_group(self) -> Group:
        """Ranks over which state is sharded: FSDP or ZeRO ranks, times those of the context."""
        # Context-parallel ranks hold the same parameters and so count as data-parallel ones here.
        if self.fsdp > 1:
            return Group(self.fsdp * self.cp, self.tp)
        return Group(self.dp * self.cp if self.zero else 1, self.tp)

    @property
    def replica_group(self) -> Group:
        """Ranks with the same shard, whose gradients are all-reduced."""
        stride = self.tp * self.shard_group.size
        same = self.dp * self.fsdp * self.cp // self.shard_group.size
        return Group(same, stride)

    @property
    def expert_group(self) -> Group:
        """Ranks over which the experts of a layer are distributed."""
        return Group(self.ep, self.tp * self.cp)

    @property
    def pipeline_group(self) -> Group:
        """A device and its partners in the other stages."""
        # Stages are outermost in rank order, so partners are a whole stage apart.
        return Group(self.pp, self.devices // self.pp)

    @property
    def pipeline_ends(self) -> Group:
        """A device of the first stage and its counterpart in the last."""
        return Group(2, self.pipeline_group.stride * max(1, self.pp - 1))

    def changed(self, **changes: Any) -> Plan:
        """Copy of the plan with some settings changed."""
        return replace(self, **changes)

    def text(self) -> str:
        """Settings that differ from the defaults, and the schedule of a pipeline.

        The schedule is always included, because a text without one leaves it open.
        """
        default = Plan()
        parts = [
            f"{f.name}={str(getattr(self, f.name)).lower()}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
            or (f.name == "schedule" and self.pp > 1)
        ]
        return ",".join(parts) or "dp=1"


def parse_plan(text: str) -> Plan:
    """Parse a plan from ``tp=8,pp=4,dp=4`` or a YAML file.

    Raises:
        PlanError: The text is malformed, or a key or value is unknown.
    """
    values = _read(text)
    # Sequence parallelism is a switch; tools that give a degree can only mean tp.
    if str(values.get("sp", "")).isdigit() and int(values["sp"]) > 1:
        if int(values["sp"]) != int(str(values.get("tp", 1))):
            raise PlanError(
                f"sp={values['sp']} is not tp",
                where="plan",
                hint="sequence parallelism runs over the tensor-parallel ranks: write sp=true",
            )
        values["sp"] = True
    # Only the interleaved schedule has chunks.
    if str(values.get("virtual", 1)) != "1":
        values.setdefault("schedule", "interleaved")
    return build(Plan, values, "plan")


def says_schedule(text: str) -> bool:
    """Whether a well-formed plan specifies its pipeline's schedule or chunks."""
    return not _read(text).keys().isdisjoint(("schedule", "virtual"))


def _read(text: str) -> JsonObject:
    """Settings by the field names of a plan."""
    pairs = read_pairs(text, "plan").items()
    return once(((key.lower(), value) for key, value in pairs), ALIASES, "plan")


def idle_setting(workload: Workload, plan: Plan) -> str:
    """The setting that has no effect, and what it needs, as text; empty if all have an effect."""
    trains = workload.mode == "train"
    alone = plan.dp * plan.fsdp * plan.cp == 1
    unused = not (plan.stage or workload.lora_rank) or workload.product_bits != 8
    for key, idle, needs in (
        ("sp", plan.tp == 1 and not plan.sp, "tp above 1"),
        ("virtual", plan.pp == 1 and plan.virtual > 1, "pp above 1"),
        ("schedule", plan.pp == 1 and plan.schedule != "1f1b", "pp above 1"),
        ("zero", alone and plan.zero, "dp or cp above 1"),
        ("zero", not trains and plan.zero in (1, 2), "mode=train"),
        ("overlap", plan.devices == 1 and not plan.overlap, "several devices"),
        ("hide_experts", plan.ep == 1 and plan.hide_experts, "ep above 1"),
        ("quantized_weights", plan.quantized_weights and unused, "products=fp8 and fsdp or LoRA"),
        ("recompute", not trains and plan.recompute != "none", "mode=train"),
        ("offload", not trains and plan.offload != "none", "mode=train"),
        ("reduce", not trains and plan.reduce, "mode=train"),
    ):
        if idle:
            return f"{key}={str(getattr(plan, key)).lower()} changes nothing without {needs}"
    return ""


def stage_layers(layers: int, plan: Plan) -> list[int]:
    """Layers of each stage; the first and last get the smaller share if it is uneven."""
    # The end stages also hold embedding and head, which take time and memory.
    least, more = divmod(layers, plan.pp)
    middle = sorted(range(plan.pp), key=lambda s: (s in (0, plan.pp - 1), s))
    fuller = set(middle[:more])
    return [least + (s in fuller) for s in range(plan.pp)]


def stage_kinds(workload: Workload, plan: Plan, stage: int) -> tuple[Workload, ...]:
    """Layers of a stage, as :func:`layer_kinds` gives them.

    Chunks of interleaved stages are assumed to hold neighbouring layers.
    """
    counts = stage_layers(workload.layers, plan)
    first = sum(counts[:stage])
    return layer_kinds(workload)[first : first + counts[stage]]


def kind_counts(workload: Workload, plan: Plan, stage: int) -> dict[Workload, int]:
    """Number of layers of each kind in a stage, in order of first occurrence."""
    if not workload.mixed:
        return {workload: stage_layers(workload.layers, plan)[stage]}
    return dict(Counter(stage_kinds(workload, plan, stage)))


def resolved(workload: Workload, plan: Plan, devices: int) -> Plan:
    """Choose the number of micro-batches, and check the plan against model and cluster.

    Args:
        workload: Model.
        plan: Plan.
        devices: Devices of the cluster.

    Raises:
        PlanError: Plan, model and cluster do not match; the message says what to change.
    """
    if plan.devices != devices:
        raise PlanError(
            f"the plan {plan.text()} takes {plan.devices} devices, the cluster has {devices}",
            where="plan",
            hint="dp*fsdp*tp*cp*pp must be the number of devices",
        )
    _divides("tp", plan.tp, "heads", workload.heads)
    _divides("tp", plan.tp, "d_ff", workload.d_ff)
    _divides("cp", plan.cp, "seq", workload.seq)
    _divides("tp*cp", plan.sequence_parallel * plan.cp, "seq", workload.seq)
    _divides("dp*fsdp", plan.batch_ranks, "batch", workload.batch)
    # With more tensor-parallel ranks than key-value heads, each head has equally many copies.
    if plan.tp > workload.groups:
        _divides("kv_heads", workload.groups, "tp", plan.tp)
    else:
        _divides("tp", plan.tp, "kv_heads", workload.groups)
    if plan.ep > 1:
        if not workload.experts:
            raise PlanError(f"ep={plan.ep}, but the model has no experts", hint="use ep=1")
        _divides("ep", plan.ep, "experts", workload.experts)
    # Embedding and head may take the place of a layer each (Megatron-LM's
    # account-for-embedding-in-pipeline-split), so that 126 layers make 128 chunks.
    if plan.pp * plan.virtual > workload.layers + 2 * (plan.virtual > 1):
        raise PlanError(
            f"pp*virtual={plan.pp * plan.virtual} is more than layers={workload.layers}",
            where="plan",
            hint="lower pp or virtual",
        )
    own = workload.batch // plan.batch_ranks
    count = plan.microbatches or _choose_microbatches(own, workload, plan)
    _divides("microbatches", count, "batch/(dp*fsdp)", own)
    # The interleaved order goes through groups of ``pp`` micro-batches (as in Megatron-LM), and its
    # chunks hold equal numbers of layers.
    if plan.schedule == "interleaved":
        _divides("pp", plan.pp, "microbatches", count)
    return plan.changed(microbatches=count)


def _divides(part: str, divisor: int, whole: str, number: int) -> None:
    if number % divisor:
        # Suggest divisors near the requested one: up to four times it, the eight largest of these.
        fits = [d for d in _divisors(number) if d <= 4 * divisor]
        larger = -(-number // divisor) * divisor
        other = f"; or set another batch, such as batch={larger}" if whole == "batch" else ""
        raise PlanError(
            f"{part}={divisor} does not divide {whole}={number}",
            where="plan",
            hint=f"divisors of {whole}: {', '.join(map(str, fits[-8:]))}{other}",
        )


def _choose_microbatches(own: int, workload: Workload, plan: Plan) -> int:
    """Choose the fewest micro-batches of at most :data:`TOKENS` tokens, or of one sequence."""
    # Context parallelism leaves each device 1/cp of a sequence's tokens.
    most = max(1, TOKENS * plan.cp // workload.seq)
    counts = _divisors(own)
    fitting = [m for m in counts if own // m <= most]
    even = [m for m in fitting if m % plan.pp == 0]
    return (even if plan.schedule == "interleaved" and even else fitting)[0]


def _divisors(number: int) -> list[int]:
    """All divisors in increasing order."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
