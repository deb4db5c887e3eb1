"""Where a plan puts a model: layers of stages, and whether its parts divide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isqrt

from ...common.errors import PlanError
from .plan import Plan
from .workload import Workload, layer_kinds

#: Tokens of a micro-batch that is chosen: enough rows to fill the matrix units of a large GPU
#: (engineering estimate; not fitted).
TOKENS = 8192


def stage_layers(layers: int, plan: Plan) -> list[int]:
    """Return the layers of each stage; first and last get the smaller share if it is uneven."""
    # The ends also hold embedding and head, which take time and memory of their own.
    least, more = divmod(layers, plan.pp)
    middle = sorted(range(plan.pp), key=lambda s: (s in (0, plan.pp - 1), s))
    fuller = set(middle[:more])
    return [least + (s in fuller) for s in range(plan.pp)]


def stage_kinds(workload: Workload, plan: Plan, stage: int) -> tuple[Workload, ...]:
    """Layers of a stage, as :func:`layer_kinds` gives them.

    Chunks of interleaved stages are taken to hold neighbouring layers.
    """
    counts = stage_layers(workload.layers, plan)
    first = sum(counts[:stage])
    return layer_kinds(workload)[first : first + counts[stage]]


def kind_counts(workload: Workload, plan: Plan, stage: int) -> dict[Workload, int]:
    """How many layers of each kind a stage has, in the order of their first."""
    if not workload.mixed:
        return {workload: stage_layers(workload.layers, plan)[stage]}
    return dict(Counter(stage_kinds(workload, plan, stage)))


def resolved(workload: Workload, plan: Plan, devices: int) -> Plan:
    """Return the plan with its micro-batches chosen, checked against model and cluster.

    Args:
        workload: The model.
        plan: The plan.
        devices: Devices of the cluster.

    Raises:
        PlanError: Plan, model and cluster do not fit; the message says what to change.
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
    # More tensor-parallel ranks than key-value heads replicate these, each as often as the others.
    if plan.tp > workload.groups:
        _divides("kv_heads", workload.groups, "tp", plan.tp)
    else:
        _divides("tp", plan.tp, "kv_heads", workload.groups)
    if plan.ep > 1:
        if not workload.experts:
            raise PlanError(f"ep={plan.ep}, but the model has no experts", hint="use ep=1")
        _divides("ep", plan.ep, "experts", workload.experts)
    # Embedding and head may take the places of a layer each (Megatron-LM's
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
        raise PlanError(
            f"{part}={divisor} does not divide {whole}={number}",
            where="plan",
            hint=f"divisors of {whole}: {', '.join(map(str, fits[-8:]))}"
            + ("; another batch: --set batch=…" if whole == "batch" else ""),
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
    """All divisors, in order."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def stage_speeds(plan: Plan, speeds: Mapping[int, float]) -> list[float]:
    """Return the speed of each stage, which is that of its slowest device.

    Args:
        plan: Gives the ranks of a stage, its outermost index.
        speeds: Relative speed by rank; 1 for ranks that are left out.

    Raises:
        PlanError: A rank is not part of the plan, or a speed is not positive.
    """
    per_stage = plan.devices // plan.pp
    slowest_speeds = [1.0] * plan.pp
    named: dict[int, set[int]] = {}
    for rank, speed in speeds.items():
        if not 0 <= rank < plan.devices or not speed > 0:
            raise PlanError(
                f"speed {speed} of rank {rank}",
                where="speeds",
                hint=f"ranks are 0 to {plan.devices - 1}, speeds positive",
            )
        named.setdefault(rank // per_stage, set()).add(rank)
    for stage, ranks in named.items():
        # Devices that are not named run at speed 1, which may be the slowest of the stage.
        rest = [1.0] if len(ranks) < per_stage else []
        slowest_speeds[stage] = min([*rest, *(speeds[r] for r in ranks)])
    return slowest_speeds
