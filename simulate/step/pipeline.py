"""Runs the orders of a pipeline: one track per stage, however many devices it has.

A task starts when its stage is free and its input has arrived. Times may be arrays with one entry
for each random draw, so that a whole sample of pipelines runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .schedules import BACKWARD, FORWARD, WEIGHTS, Order, Task

#: Seconds as a number, or as an array of draws.
Seconds = Any
#: Seconds of a task by stage and task.
Duration = Callable[[int, Task], Seconds]


@dataclass(frozen=True)
class PipelineRun:
    """Start and end of each task.

    Attributes:
        tasks: Tasks of each stage in the order in which they run, with start and end in seconds.
        makespan: End of the last task.
    """

    tasks: tuple[tuple[tuple[Task, Seconds, Seconds], ...], ...]
    makespan: Seconds

    def end(self, stage: int) -> Seconds:
        """Return the end of a stage's last task."""
        return self.tasks[stage][-1][2]

    def busy(self, stage: int) -> Seconds:
        """Return the seconds that a stage is busy."""
        return sum(end - start for _, start, end in self.tasks[stage])


def run_pipeline(
    orders: Sequence[Order], duration: Duration, hop: float = 0.0, chunks: int = 1
) -> PipelineRun:
    """Place all tasks.

    Args:
        orders: What each stage runs, from :func:`~.schedules.orders`.
        duration: Seconds of a task; arrays of one shape run that many pipelines at once.
        hop: Seconds from one stage to the next, beside the computation.
        chunks: Chunks of a device; the last stage's chunk feeds the first stage's next one.

    Raises:
        ValueError: The orders wait for one another.
    """
    ends: list[Seconds] = []
    tracks: list[list[tuple[Task, Seconds, Seconds]]] = [[] for _ in orders]
    free: list[Seconds] = [0.0] * len(orders)
    for stage, task, needs in _placeable(tuple(orders), chunks):
        start = free[stage]
        for place, apart in needs:
            start = _later(start, ends[place] + hop if apart else ends[place])
        free[stage] = start + duration(stage, task)
        ends.append(free[stage])
        tracks[stage].append((task, start, free[stage]))
    makespan: Seconds = 0.0
    for end in free:
        makespan = _later(makespan, end)
    return PipelineRun(tuple(tuple(t) for t in tracks), makespan)


#: A task of a stage, and where in the list the tasks are that it waits for; whether on others.
_Placed = tuple[int, Task, tuple[tuple[int, bool], ...]]


# A step asks for the same orders with and without hops, and a sweep for few.
@lru_cache(maxsize=64)
def _placeable(orders: tuple[Order, ...], chunks: int) -> tuple[_Placed, ...]:
    """All tasks, each after those that it waits for.

    Raises:
        ValueError: The orders wait for one another.
    """
    stages = len(orders)
    done: dict[tuple[int, Task], int] = {}
    placed: list[_Placed] = []
    place = [0] * stages
    left = sum(len(order) for order in orders)
    # Sweeps over the stages, each running what it can, instead of an event queue: with arrays of
    # draws there is no single time by which events could be sorted.
    while len(placed) < left:
        before = len(placed)
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                task = order[place[stage]]
                needs = producers(stage, task, stages, chunks)
                if any(need not in done for need in needs):
                    break
                done[stage, task] = len(placed)
                placed.append((stage, task, tuple((done[n], n[0] != stage) for n in needs)))
                place[stage] += 1
        if len(placed) == before:
            raise ValueError("the orders of the stages wait for one another")
    return tuple(placed)


def producers(stage: int, task: Task, stages: int, chunks: int) -> list[tuple[int, Task]]:
    """Return the stages and tasks that a task of a stage takes its input from."""
    kind, micro, chunk = task
    if kind == WEIGHTS:
        return [(stage, Task(BACKWARD, micro, chunk))]
    if kind == FORWARD:
        if stage > 0:
            return [(stage - 1, task)]
        # The first stage's next chunk follows the last stage's previous one.
        return [(stages - 1, Task(FORWARD, micro, chunk - 1))] if chunk > 0 else []
    # A backward task needs its own activations and the gradient from the stage behind.
    own = (stage, Task(FORWARD, micro, chunk))
    if stage < stages - 1:
        return [own, (stage + 1, task)]
    return [own, (0, Task(BACKWARD, micro, chunk + 1))] if chunk < chunks - 1 else [own]


def _later(a: Seconds, b: Seconds) -> Seconds:
    # Plain comparison for plain numbers: ``np.maximum`` on scalars is many times slower.
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a >= b else b
