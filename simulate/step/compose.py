"""Composes a step from the times of its operators and collectives.

A micro-batch costs each stage its operators and the exposed part of its collectives; the schedule
orders the micro-batches; gradients are reduced beside the last backward pass; the optimiser comes
last. Devices of a stage do the same work, so one of each stage stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...features.operators.op import Op
from .costs import Costs
from .layer_ops import embedding_ops, head_ops, layer_ops, update_ops
from .memory import stage_held
from .pipeline import PipelineRun, run_pipeline
from .placement import kind_counts, stage_speeds
from .plan import Plan
from .schedules import FORWARD, WEIGHTS, Order, Task, forward_orders, orders
from .stage_times import StageCost, StageTimes
from .traffic import hop_call, local_parameters
from .workload import Workload

#: Most tasks of a pipeline that are all placed; longer ones are extrapolated, so that a plan's cost
#: stays bounded in sweeps (engineering choice).
MOST_TASKS = 8192
#: Bubbles below this share of a step are differences of sums: rounding errors, reported as none.
ROUNDING = 1e-9
#: Rounds of ``pp`` micro-batches that are placed of a longer pipeline. Warm-up takes one round with
#: 1F1B and at most one and a half when interleaved, so that the last rounds placed are steady.
STEADY_ROUNDS = 4


@dataclass(frozen=True)
class StepTime:
    """One step; times in seconds.

    ``compute``, ``exposed``, ``host`` and ``bubble`` add up to ``total``.

    Attributes:
        total: From the first micro-batch to the last update.
        compute: Computation of the device that is busy longest.
        exposed: Communication of that device that nothing hides, transfers between stages included.
        bubble: The rest: waiting for other stages.
        communication: All communication of that device, hidden or not, by name.
        stages: Times of each stage.
        run: The pipeline; of a very long one its first micro-batches.
        worst: The stage that is busy longest.
        hop: Seconds from one stage to the next.
        host: Waiting of that device for its host.
    """

    total: float
    compute: float
    exposed: float
    bubble: float
    communication: dict[str, float]
    stages: tuple[StageTimes, ...]
    run: PipelineRun
    worst: int
    hop: float = 0.0
    host: float = 0.0


def step_time(
    workload: Workload,
    plan: Plan,
    costs: Costs,
    most_tasks: int = MOST_TASKS,
    speeds: Mapping[int, float] | None = None,
) -> StepTime:
    """Time of a step.

    Args:
        workload: The model.
        plan: Resolved by :func:`~.placement.resolved`.
        costs: Times of calls.
        most_tasks: Tasks of a pipeline up to which every one is placed; fewer are faster.
        speeds: Relative speed of devices by rank, 1 where omitted. A stage computes at that of its
            slowest device, for which its collectives wait.

    Raises:
        PlanError: A rank is not part of the plan, or a speed is not positive.
    """
    # One batched request: the operator model is vectorised, and a call costs more than a row.
    costs.prepare(c for s in range(plan.pp) for c in operator_counts(workload, plan, s))
    known: dict[tuple[tuple[tuple[Workload, int], ...], bool, bool], StageTimes] = {}
    stages = []
    for stage in range(plan.pp):
        layers = tuple(kind_counts(workload, plan, stage).items())
        # Stages with the same layers and ends are equal: at most a few differ, whatever ``pp`` is.
        key = (layers, stage == 0, stage == plan.pp - 1)
        if key not in known:
            known[key] = StageCost(workload, plan, costs, stage).times()
        stages.append(known[key])
    if speeds:
        own = stage_speeds(plan, speeds)
        stages = [s.slowed(1.0 / speed) for s, speed in zip(stages, own, strict=True)]
    hop = costs.link(hop_call(workload, plan))
    wait = costs.effects.hop_s if plan.pp > 1 else 0.0
    stages = [s.with_hop(wait) for s in stages]
    run, ends = _ends(workload, plan, stages, hop, most_tasks)
    still = _ends(workload, plan, stages, 0.0, most_tasks)[1] if hop else ends
    total = max(end + s.tail for end, s in zip(ends, stages, strict=True))
    free = max(end + s.tail for end, s in zip(still, stages, strict=True))
    count = plan.microbatches
    worst = max(range(len(stages)), key=lambda i: stages[i].micro.total * count + stages[i].tail)
    mine = stages[worst]
    compute = mine.micro.compute * count + mine.update.compute
    sent = mine.micro.exposed * count + mine.reduction + mine.update.exposed
    host = mine.micro.host * count + mine.update.host
    return StepTime(
        total=total,
        compute=compute,
        exposed=sent + (total - free),
        bubble=_bubble(free, free - compute - sent - host),
        communication=StageCost(workload, plan, costs, worst).traffic(),
        stages=tuple(stages),
        run=run,
        worst=worst,
        hop=hop,
        host=host,
    )


def _bubble(total: float, rest: float) -> float:
    return rest if rest > ROUNDING * total else 0.0


def operator_counts(workload: Workload, plan: Plan, stage: int) -> dict[Op, float]:
    """Count how often a device of a stage runs each operator in a step.

    Args:
        workload: The model.
        plan: Resolved.
        stage: Index of the stage, from 0.
    """
    counts = dict[Op, float]()
    kinds = kind_counts(workload, plan, stage)
    parts = [(layer_ops(w, plan), float(n * plan.microbatches)) for w, n in kinds.items()]
    layers = len(parts)
    if stage == 0:
        parts.append((embedding_ops(workload, plan), float(plan.microbatches)))
    if stage == plan.pp - 1:
        parts.append((head_ops(workload, plan), float(plan.microbatches)))
    train = workload.mode == "train"
    for number, (ops, times) in enumerate(parts):
        again = {"none": (), "selective": ops.selective, "full": ops.forward}[plan.recompute]
        again = again if number < layers else ()
        run = (*ops.forward, *((*ops.backward, *ops.weights, *again) if train else ()))
        for call in run:
            counts[call] = counts.get(call, 0.0) + times
    for call in update_ops(local_parameters(stage_held(workload, plan, stage), plan), workload):
        counts[call] = counts.get(call, 0.0) + 1.0
    return counts


def _ends(
    workload: Workload, plan: Plan, stages: Sequence[StageTimes], hop: float, most_tasks: int
) -> tuple[PipelineRun, list[float]]:
    """Run the pipeline; return it and the time at which each stage ends its last micro-batch.

    A pipeline with very many tasks is run twice with fewer micro-batches and extrapolated: in the
    steady state every further round of ``pp`` micro-batches takes as long as the one before.
    """
    # A forward and a backward task for each micro-batch and chunk.
    tasks = plan.pp * plan.microbatches * plan.virtual * 2
    rounds = plan.microbatches // plan.pp
    if tasks <= most_tasks or rounds <= STEADY_ROUNDS:
        run = run_stages(workload, plan, stages, hop)
        return run, [float(run.end(i)) for i in range(plan.pp)]
    # The remainder is kept in both runs, so that they differ by exactly one round.
    rest = plan.microbatches % plan.pp
    counts = [plan.pp * r + rest for r in (STEADY_ROUNDS - 1, STEADY_ROUNDS)]
    less, run = (run_stages(workload, plan.changed(microbatches=m), stages, hop) for m in counts)
    more = rounds - STEADY_ROUNDS
    ends = [float(run.end(i) + more * (run.end(i) - less.end(i))) for i in range(plan.pp)]
    return run, ends


def task_seconds(plan: Plan, times: StageTimes, kind: str) -> float:
    """Return the seconds of one task of a stage.

    Args:
        plan: Gives the number of chunks.
        times: Times of the stage.
        kind: ``F``, ``B`` or ``W``.
    """
    # Chunks are taken as equal parts of the stage. Only zero-bubble has W tasks, without chunks.
    if kind == FORWARD:
        return times.forward.total / plan.virtual
    if kind == WEIGHTS:
        return times.weights.total
    return times.backward.total / plan.virtual


def stage_orders(workload: Workload, plan: Plan) -> tuple[Order, ...]:
    """Return what each stage runs, in order."""
    if workload.mode == "train":
        return orders(plan.schedule, plan.pp, plan.microbatches, plan.virtual)
    return forward_orders(plan.pp, plan.microbatches, plan.virtual)


def run_stages(
    workload: Workload, plan: Plan, stages: Sequence[StageTimes], hop: float
) -> PipelineRun:
    """Run the pipeline of a step.

    Args:
        workload: Says whether there is a backward pass.
        plan: Gives the schedule.
        stages: Times of each stage.
        hop: Seconds from one stage to the next.
    """
    order = stage_orders(workload, plan)
    seconds = [{k: task_seconds(plan, s, k) for k in "FBW"} for s in stages]

    def duration(stage: int, task: Task) -> float:
        return seconds[stage][task.kind]

    return run_pipeline(order, duration, hop, plan.virtual)
