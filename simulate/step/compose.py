"""Puts a step together from the times of its operators and collectives.

A micro-batch takes each stage its operators and what its collectives leave exposed; the schedule
orders the micro-batches; gradients are reduced beside the last backward pass; the optimiser comes
last. Devices of a stage do the same, so one of each stage stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Costs
from .pipeline import PipelineRun, run_pipeline
from .plan import Plan
from .schedules import FORWARD, WEIGHTS, Task, forward_orders, orders
from .stage_times import StageCost, StageTimes
from .traffic import hop_call
from .workload import Workload, stage_layers


@dataclass(frozen=True)
class StepTime:
    """One step; times in seconds. ``compute``, ``exposed`` and ``bubble`` add up to ``total``.

    Attributes:
        total: From the first micro-batch to the last update.
        compute: Of the device that is busy longest.
        exposed: Communication of that device that nothing hides, transfers between stages included.
        bubble: The rest: waiting for other stages.
        communication: All communication of that device, hidden or not, by name.
        stages: Times of each stage.
        run: The pipeline.
        worst: The stage that is busy longest.
        hop: Seconds from one stage to the next.
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


def step_time(workload: Workload, plan: Plan, costs: Costs) -> StepTime:
    """Time of a step.

    Args:
        workload: The model.
        plan: Resolved by :func:`~.workload.resolved`.
        costs: Times of calls.
    """
    known: dict[tuple[int, bool, bool], StageTimes] = {}
    stages = []
    for stage, layers in enumerate(stage_layers(workload.layers, plan)):
        key = (layers, stage == 0, stage == plan.pp - 1)
        if key not in known:
            known[key] = StageCost(workload, plan, costs, stage).times()
        stages.append(known[key])
    hop = costs.link(hop_call(workload, plan))
    run = run_stages(workload, plan, stages, hop)
    still = run_stages(workload, plan, stages, 0.0) if hop else run
    total = max(run.end(i) + s.tail for i, s in enumerate(stages))
    free = max(still.end(i) + s.tail for i, s in enumerate(stages))
    count = plan.microbatches
    worst = max(range(len(stages)), key=lambda i: stages[i].micro.total * count + stages[i].tail)
    mine = stages[worst]
    compute = mine.micro.compute * count + mine.update.compute
    sent = mine.micro.exposed * count + mine.reduction + mine.update.exposed
    return StepTime(
        total=total,
        compute=compute,
        exposed=sent + (total - free),
        bubble=max(0.0, free - compute - sent),
        communication=StageCost(workload, plan, costs, worst).traffic(),
        stages=tuple(stages),
        run=run,
        worst=worst,
        hop=hop,
    )


def task_seconds(plan: Plan, times: StageTimes, kind: str) -> float:
    """Seconds of one task of a stage.

    Args:
        plan: Gives the schedule and its chunks.
        times: Of the stage.
        kind: ``F``, ``B`` or ``W``.
    """
    if kind == FORWARD:
        return times.forward.total / plan.virtual
    if kind == WEIGHTS:
        return times.weights.total
    return times.backward.total / plan.virtual


def run_stages(
    workload: Workload, plan: Plan, stages: Sequence[StageTimes], hop: float
) -> PipelineRun:
    """The pipeline of a step.

    Args:
        workload: Says whether there is a backward pass.
        plan: Gives the schedule.
        stages: Times of each stage.
        hop: Seconds from one stage to the next.
    """
    if workload.mode == "train":
        order = orders(plan.schedule, plan.pp, plan.microbatches, plan.virtual)
    else:
        order = forward_orders(plan.pp, plan.microbatches, plan.virtual)
    seconds = [{k: task_seconds(plan, s, k) for k in "FBW"} for s in stages]

    def duration(stage: int, task: Task) -> float:
        return seconds[stage][task.kind]

    return run_pipeline(order, duration, hop, plan.virtual)
