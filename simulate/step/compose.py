"""Composition of a step from the times of its operators and collectives.

For each stage a micro-batch costs its operators and the exposed part of its collectives; the
schedule orders the micro-batches; gradients are reduced during the last backward pass; the
optimiser comes last. Devices of a stage do the same work, so one per stage is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...common.errors import PlanError
from .blocks import Stage, step_stages
from .costs import Costs
from .pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    PipelineRun,
    Seconds,
    Task,
    forward_orders,
    orders,
    run_pipeline,
)
from .plan import Plan
from .stage_times import StageTimes, stage_times, traffic
from .workload import Workload

#: Maximum number of pipeline tasks that are placed individually; longer pipelines are extrapolated,
#: so that the cost of a plan stays bounded in sweeps (engineering choice).
MOST_TASKS = 8192
#: Bubbles and waits below this fraction of a step are rounding errors and reported as zero.
ROUNDING = 1e-9
#: Rounds of ``pp`` micro-batches that are placed of a longer pipeline. Warm-up takes one round with
#: 1F1B and at most one and a half when interleaved, so that the last rounds placed are steady.
STEADY_ROUNDS = 4


@dataclass(frozen=True)
class StepTime:
    """Time of one step in seconds; the breakdown is that of the device that is busy longest.

    ``compute``, ``exposed``, ``host`` and ``bubble`` add up to ``total``.

    Attributes:
        total: From the first micro-batch to the last update.
        compute: Computation.
        exposed: Communication that is not hidden, including transfers between stages.
        bubble: The rest: waiting for other stages.
        sends: Increase of the total by transfers between stages.
        stages: Times of each stage.
        run: The pipeline; of a very long one its first micro-batches.
        worst: The stage that is busy longest.
        hop: Seconds from one stage to the next.
        host: Stalls for the host.
        communication: All communication, hidden or not, by name.
        work: Work of each stage.
    """

    total: float
    compute: float
    exposed: float
    bubble: float
    sends: float
    stages: tuple[StageTimes, ...]
    run: PipelineRun
    worst: int
    hop: float
    host: float
    communication: dict[str, float] = field(default_factory=dict)
    work: tuple[Stage, ...] = ()

    @property
    def busiest(self) -> Stage:
        """Work of the stage that is busy longest."""
        return self.work[self.worst]


def step_time(
    workload: Workload,
    plan: Plan,
    costs: Costs,
    most_tasks: int = MOST_TASKS,
    speeds: Mapping[int, float] | None = None,
) -> StepTime:
    """Simulate a step.

    Args:
        workload: Model.
        plan: Plan resolved by :func:`~.plan.resolved`.
        costs: Times of calls.
        most_tasks: Maximum number of pipeline tasks to place individually; fewer are faster.
        speeds: Relative speed of devices by rank, 1 if omitted. A stage computes at the speed of
            its slowest device, for which its collectives wait.

    Raises:
        PlanError: A rank is not part of the plan, or a speed is not positive.
    """
    work = step_stages(workload, plan)
    # One batched request: the operator model is vectorised, and a call costs more than a row.
    costs.prepare(c for stage in dict.fromkeys(work) for c in stage.counts())
    known = {stage: stage_times(stage, costs) for stage in dict.fromkeys(work)}
    stages = [known[stage] for stage in work]
    if speeds:
        own = stage_speeds(plan, speeds)
        stages = [s.slowed(1.0 / speed) for s, speed in zip(stages, own, strict=True)]
    hop = costs.link(work[0].hop)
    made = compose(stages, plan, hop, most_tasks, train=workload.mode == "train")
    return replace(made, communication=traffic(work[made.worst], costs), work=work)


def compose(
    stages: Sequence[StageTimes],
    plan: Plan,
    hop: float,
    most_tasks: int = MOST_TASKS,
    *,
    train: bool = True,
) -> StepTime:
    """Compute the time of a step from the times of its stages.

    Args:
        stages: Times of each stage.
        plan: Defines the schedule and the number of micro-batches.
        hop: Seconds from one stage to the next.
        most_tasks: As in :func:`step_time`.
        train: Whether there is a backward pass.
    """
    run, ends = _ends(stages, plan, hop, most_tasks, train=train)
    still = _ends(stages, plan, 0.0, most_tasks, train=train)[1] if hop else ends
    total, free = (
        max(end + s.tail for end, s in zip(found, stages, strict=True)) for found in (ends, still)
    )
    count = plan.microbatches
    busy = [s.micro.total * count + s.tail for s in stages]
    worst = busy.index(max(busy))
    mine, bubble = stages[worst], free - busy[worst]
    waits = mine.micro.exposed * count + mine.reduction + mine.update.exposed + (total - free)
    return StepTime(
        total=total,
        compute=mine.micro.compute * count + mine.update.compute,
        exposed=waits if waits > ROUNDING * total else 0.0,
        bubble=bubble if bubble > ROUNDING * free else 0.0,
        sends=total - free,
        stages=tuple(stages),
        run=run,
        worst=worst,
        hop=hop,
        host=mine.micro.host * count + mine.update.host,
    )


def _ends(
    stages: Sequence[StageTimes], plan: Plan, hop: float, most_tasks: int, *, train: bool
) -> tuple[PipelineRun, list[float]]:
    """Run the pipeline; return it and the time at which each stage ends its last micro-batch.

    A very long pipeline is run twice with fewer micro-batches and extrapolated: in the steady state
    every further round of ``pp`` micro-batches takes as long as the one before.
    """
    # A forward and a backward task for each micro-batch and chunk.
    tasks = plan.pp * plan.microbatches * plan.virtual * 2
    rounds = plan.microbatches // plan.pp
    if tasks <= most_tasks or rounds <= STEADY_ROUNDS:
        run = run_stages(stages, plan, hop, train=train)
        return run, [float(run.end(i)) for i in range(plan.pp)]
    # The remainder is kept in both runs, so that they differ by exactly one round.
    rest = plan.microbatches % plan.pp
    counts = [plan.pp * r + rest for r in (STEADY_ROUNDS - 1, STEADY_ROUNDS)]
    less, run = (run_stages(stages, plan.changed(microbatches=m), hop, train=train) for m in counts)
    more = rounds - STEADY_ROUNDS
    ends = [float(run.end(i) + more * (run.end(i) - less.end(i))) for i in range(plan.pp)]
    return run, ends


def stage_orders(plan: Plan, *, train: bool) -> tuple[Order, ...]:
    """Tasks of each stage, in order."""
    if train:
        return orders(plan.schedule, plan.pp, plan.microbatches, plan.virtual)
    return forward_orders(plan.pp, plan.microbatches, plan.virtual)


def run_stages(
    stages: Sequence[StageTimes],
    plan: Plan,
    hop: float,
    noise: Callable[[], Seconds] = lambda: 1.0,
    *,
    train: bool,
) -> PipelineRun:
    """Run the pipeline of a step.

    Args:
        stages: Times of each stage.
        plan: Defines the schedule.
        hop: Seconds from one stage to the next.
        noise: Draws a factor, or an array of them, for the time of a task.
        train: Whether there is a backward pass.
    """
    # Chunks are equal parts of the stage. Only zero-bubble has W tasks, without chunks.
    seconds = [
        {
            FORWARD: s.forward.total / plan.virtual,
            BACKWARD: s.backward.total / plan.virtual,
            WEIGHTS: s.weights.total,
        }
        for s in stages
    ]

    def duration(stage: int, task: Task) -> Seconds:
        return seconds[stage][task.kind] * noise()

    return run_pipeline(stage_orders(plan, train=train), duration, hop, plan.virtual)


@dataclass(frozen=True)
class StepSpread:
    """Samples of a step's time.

    Attributes:
        samples: Seconds, shape ``(draws,)``.
    """

    samples: np.ndarray

    def to_dict(self) -> dict[str, float]:
        """Mean and percentiles in microseconds."""
        levels = np.percentile(self.samples, (5, 50, 95, 99)) * 1e6
        names = ("p5_us", "p50_us", "p95_us", "p99_us")
        return {
            "mean_us": float(self.samples.mean()) * 1e6,
            **dict(zip(names, map(float, levels), strict=True)),
        }


def stage_speeds(plan: Plan, speeds: Mapping[int, float]) -> list[float]:
    """Relative speed of each stage, which is that of its slowest device.

    Args:
        plan: Defines the ranks of a stage, the outermost index.
        speeds: Relative speed by rank; 1 if omitted.

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
        # Omitted devices run at speed 1, which may be the slowest of the stage.
        rest = [1.0] if len(ranks) < per_stage else []
        slowest_speeds[stage] = min([*rest, *(speeds[r] for r in ranks)])
    return slowest_speeds


def sample_steps(
    plan: Plan, step: StepTime, jitter: float, draws: int = 1000, seed: int = 0
) -> StepSpread:
    """Sample the time of a step on devices with random task times.

    All devices of a stage wait for one another in their collectives, and all replicas at the end of
    the step. The slowest of ``n`` devices with independent normal log errors is drawn directly: if
    ``U`` is uniform, ``U^(1/n)`` is distributed as the quantile level of the largest of ``n`` draws
    (order statistics). The cost does not depend on the number of devices.

    Args:
        plan: Resolved plan.
        step: Its step without jitter, stragglers included.
        jitter: Standard deviation of the logarithm of a task's time on one device.
        draws: Number of samples.
        seed: Seed of the random numbers.

    Raises:
        PlanError: The jitter is negative, or there are no draws.
    """
    if jitter < 0 or draws < 1:
        raise PlanError(f"jitter={jitter}, draws={draws}", hint="jitter is not negative")
    rng = np.random.default_rng(seed)
    # Tensor and context collectives synchronise their ranks within every task. ZeRO 3 gathers
    # parameters in every layer, which adds the data-parallel ranks; otherwise these only meet when
    # gradients are reduced, once a step.
    partners = plan.tp * plan.cp
    if plan.stage >= 3:
        partners *= plan.batch_ranks
    replicas = max(1, plan.batch_ranks * plan.tp * plan.cp // partners)

    # A task ends with the slowest of its synchronised devices; tasks vary independently.
    def noise() -> np.ndarray:
        return np.exp(jitter * slowest(rng, partners, draws)) if jitter else np.ones(draws)

    run = run_stages(step.stages, plan, step.hop, noise, train=step.work[0].train)
    one = np.maximum.reduce([run.end(i) + s.tail for i, s in enumerate(step.stages)])
    return StepSpread(_slowest_replica(rng, one, replicas))


def slowest(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """Draw the largest of ``count`` standard normals, ``draws`` times, shape ``(draws,)``."""
    # Predictions of programs load this module only for its classes, and SciPy is slow to import.
    from scipy.special import ndtri

    # Both guards keep ``ndtri`` finite: a level of 0 is minus infinity, a level that rounds to 1
    # (likely for large counts) is plus infinity.
    level = rng.uniform(1e-12, 1.0, draws) ** (1.0 / count)
    return np.asarray(ndtri(np.minimum(level, 1.0 - 1e-16)))


def _slowest_replica(rng: np.random.Generator, one: np.ndarray, replicas: int) -> np.ndarray:
    """Draw the slowest of ``replicas`` pipelines from a normal with the moments of one.

    A pipeline's time is a sum of many tasks, hence the normal distribution.
    """
    if replicas == 1 or one.std() == 0.0:
        return one
    return np.asarray(one.mean() + one.std() * slowest(rng, replicas, len(one)))
