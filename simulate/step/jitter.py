"""Jitter: samples of the step time with devices whose tasks vary.

All devices of a stage wait for one another in their collectives, and all replicas at the end of the
step. The slowest of ``n`` devices with independent normal log errors is drawn directly: if ``U`` is
uniform, ``U^(1/n)`` is distributed as the quantile level of the largest of ``n`` draws (order
statistics). So no device is drawn by itself, and cost does not depend on their number.
"""

from __future__ import annotations

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


def sample_steps(
    workload: Workload,
    plan: Plan,
    step: StepTime,
    jitter: float,
    draws: int = 1000,
    seed: int = 0,
) -> StepSpread:
    """Draw step times.

    Args:
        workload: The model.
        plan: Resolved.
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
    train = workload.mode == "train"
    order = (
        orders(plan.schedule, plan.pp, plan.microbatches, plan.virtual)
        if train
        else forward_orders(plan.pp, plan.microbatches, plan.virtual)
    )

    # A task ends with the slowest of its synchronised devices; tasks vary independently.
    def duration(stage: int, task: Task) -> np.ndarray:
        factor = np.exp(jitter * slowest(rng, partners, draws)) if jitter else np.ones(draws)
        return np.asarray(task_seconds(plan, step.stages[stage], task.kind) * factor)

    run = run_pipeline(order, duration, step.hop, plan.virtual)
    ends = [run.end(i) + s.tail for i, s in enumerate(step.stages)]
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
