"""Stragglers and jitter: samples of the step time with devices of different speed.

All devices of a stage wait for one another in their collectives, and all replicas at the end of the
step. The slowest of ``n`` devices with independent normal log errors is drawn directly: if ``U`` is
uniform, ``U^(1/n)`` is distributed as the quantile level of the largest of ``n`` draws (order
statistics). So no device is drawn by itself, and cost does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from ...common.errors import PlanError
from .compose import StepTime, task_seconds
from .pipeline import run_pipeline
from .plan import Plan
from .schedules import Task, forward_orders, orders
from .workload import Workload


@dataclass(frozen=True)
class StepSpread:
    """Samples of a step's time, in seconds.

    Attributes:
        samples: Shape ``(draws,)``.
    """

    samples: np.ndarray

    def to_dict(self) -> dict[str, float]:
        """Return mean and percentiles in microseconds."""
        levels = np.percentile(self.samples, (5, 50, 95, 99)) * 1e6
        names = ("p5_us", "p50_us", "p95_us", "p99_us")
        return {
            "mean_us": float(self.samples.mean()) * 1e6,
            **dict(zip(names, map(float, levels), strict=True)),
        }


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


def sample_steps(
    workload: Workload,
    plan: Plan,
    step: StepTime,
    jitter: float,
    speeds: Mapping[int, float] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> StepSpread:
    """Draw step times.

    Args:
        workload: The model.
        plan: Resolved.
        step: Its step without jitter.
        jitter: Standard deviation of the logarithm of a task's time on one device.
        speeds: Relative speeds of devices by rank; the slowest of a stage counts.
        draws: Number of samples.
        seed: Seed of the random numbers.

    Raises:
        PlanError: The jitter is negative, there are no draws, or ``speeds`` are not those of the
            plan's ranks.
    """
    if jitter < 0 or draws < 1:
        raise PlanError(f"jitter={jitter}, draws={draws}", hint="jitter is not negative")
    rng = np.random.default_rng(seed)
    slower = 1.0 / np.array(stage_speeds(plan, speeds or {}))
    # Tensor and context collectives synchronise their ranks within every task. ZeRO 3 gathers
    # parameters in every layer, which adds the data-parallel ranks; otherwise these only meet when
    # gradients are reduced, once a step.
    partners = plan.tp * plan.cp
    if plan.stage >= 3:
        partners *= plan.batch_ranks
    replicas = max(1, plan.batch_ranks * plan.tp * plan.cp // partners)
    train = workload.mode == "train"
    order = (
        orders(plan.schedule, plan.pp, plan.microbatches, plan.virtual)
        if train
        else forward_orders(plan.pp, plan.microbatches, plan.virtual)
    )

    # A task ends with the slowest of its synchronised devices; tasks vary independently.
    def duration(stage: int, task: Task) -> np.ndarray:
        factor = np.exp(jitter * slowest(rng, partners, draws)) if jitter else np.ones(draws)
        return np.asarray(
            task_seconds(plan, step.stages[stage], task.kind) * slower[stage] * factor
        )

    run = run_pipeline(order, duration, step.hop, plan.virtual)
    ends = [run.end(i) + s.tail * slower[i] for i, s in enumerate(step.stages)]
    one = np.maximum.reduce(ends)
    return StepSpread(_slowest_replica(rng, one, replicas))


def slowest(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """Draw the largest of ``count`` standard normals, ``draws`` times, shape ``(draws,)``."""
    # Both guards keep ``ndtri`` finite: a level of 0 is minus infinity, a level that rounds to 1
    # (likely for large counts) is plus infinity.
    level = rng.uniform(1e-12, 1.0, draws) ** (1.0 / count)
    return np.asarray(ndtri(np.minimum(level, 1.0 - 1e-16)))


def _slowest_replica(rng: np.random.Generator, one: np.ndarray, replicas: int) -> np.ndarray:
    """Draw the slowest of ``replicas`` pipelines from a normal with the moments of one.

    A pipeline's time sums many tasks, hence the normal distribution.
    """
    if replicas == 1 or one.std() == 0.0:
        return one
    return np.asarray(one.mean() + one.std() * slowest(rng, replicas, len(one)))
