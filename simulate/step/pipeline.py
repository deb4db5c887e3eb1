"""Pipeline schedules: the order of each stage's tasks, and their times; one track per stage.

- ``gpipe``: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).
- ``1f1b``: as many forwards as there are stages ahead, then one backward and one forward in turn
  (Narayanan et al., PipeDream, SOSP 2019; memory-efficient form: PipeDream-2BW, ICML 2021).
- ``interleaved``: each device holds several chunks of layers (Narayanan et al., SC 2021).
- ``zero-bubble``: weight gradients fill the bubble: ZB-H1 (Qi et al., Zero Bubble Pipeline
  Parallelism, ICLR 2024).

A task starts when its stage is free and its input has arrived. Times may be arrays with one entry
per random draw, so that a whole sample of pipelines runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

#: Kinds of tasks, with the letters of the zero-bubble paper: W computes weight gradients.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weight gradients"}
#: Seconds as a number, or as an array of draws.
Seconds = Any


class Task(NamedTuple):
    """One micro-batch through one chunk: ``kind`` is ``F``, ``B`` or ``W``."""

    kind: str
    micro: int
    chunk: int = 0


Order = tuple[Task, ...]


# Sweeps ask for the same few orders repeatedly, and long ones hold thousands of tasks.
@lru_cache(maxsize=64)
def orders(schedule: str, stages: int, micros: int, chunks: int = 1) -> tuple[Order, ...]:
    """Tasks of each stage, in order.

    Args:
        schedule: One of :data:`~.plan.SCHEDULES`.
        stages: Devices of the pipeline.
        micros: Micro-batches; a multiple of ``stages`` for ``interleaved``.
        chunks: Chunks per device, for ``interleaved``.
    """
    make = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zero-bubble": _zero_bubble}
    if schedule == "interleaved":
        return tuple(_interleaved(stage, stages, micros, chunks) for stage in range(stages))
    return tuple(make[schedule](stage, stages, micros) for stage in range(stages))


def forward_orders(stages: int, micros: int, chunks: int = 1) -> tuple[Order, ...]:
    """Tasks of each stage without a backward pass."""
    if chunks == 1:
        return tuple(tuple(Task(FORWARD, m) for m in range(micros)) for _ in range(stages))
    # The order of interleaved training, without its backward tasks.
    one = tuple(_virtual(k, stages, chunks, FORWARD) for k in range(micros * chunks))
    return tuple(one for _ in range(stages))


def in_flight(schedule: str, stage: int, stages: int, micros: int, chunks: int = 1) -> float:
    """Maximum number of micro-batches whose activations a stage keeps at a time.

    Counted in whole stages, so that interleaved chunks are fractions.

    GPipe keeps all; 1F1B ``p - stage``; ZB-H1 ``p`` (inputs wait for the weight gradients);
    interleaving ``(2 (p - stage - 1) + (v - 1) p + 1) / v``.
    """
    if schedule == "gpipe":
        return micros
    if schedule == "interleaved":
        return (min(_warm_up(stage, stages, micros, chunks) + 1, micros * chunks)) / chunks
    return min(micros, stages if schedule == "zero-bubble" else stages - stage)


def _gpipe(stage: int, stages: int, micros: int) -> Order:
    forward = tuple(Task(FORWARD, m) for m in range(micros))
    # Backward in reverse, as backpropagation frees the newest activations first.
    return forward + tuple(Task(BACKWARD, m) for m in reversed(range(micros)))


def _one_forward_one_backward(stage: int, stages: int, micros: int) -> Order:
    # Warm-up: one forward for each stage behind this one, so that the first gradient arrives just
    # when the stage has nothing else to do.
    ahead = min(stages - stage - 1, micros)
    tasks = [Task(FORWARD, m) for m in range(ahead)]
    for m in range(micros - ahead):
        tasks += [Task(FORWARD, m + ahead), Task(BACKWARD, m)]
    return (*tasks, *(Task(BACKWARD, m) for m in range(micros - ahead, micros)))


def _zero_bubble(stage: int, stages: int, micros: int) -> Order:
    """ZB-H1: 1F1B whose weight gradients come ``stage`` micro-batches late.

    Later stages have more of them left when their forwards run out, and fill the bubble with them.
    """
    tasks: list[Task] = []
    done = 0
    for task in _one_forward_one_backward(stage, stages, micros):
        tasks.append(task)
        if task.kind == BACKWARD and task.micro >= stage:
            tasks.append(Task(WEIGHTS, done))
            done += 1
    return (*tasks, *(Task(WEIGHTS, m) for m in range(done, micros)))


def _warm_up(stage: int, stages: int, micros: int, chunks: int) -> int:
    # ``num_warmup_microbatches`` of Megatron-LM's interleaved schedule.
    return int(min(2 * (stages - stage - 1) + (chunks - 1) * stages, micros * chunks))


def _virtual(index: int, stages: int, chunks: int, kind: str) -> Task:
    """The ``index``-th task of a kind: groups of ``stages`` micro-batches, chunk by chunk."""
    turn, place = divmod(index, stages * chunks)
    chunk, micro = divmod(place, stages)
    # Backward goes through the chunks from the last layer to the first.
    chunk = chunk if kind == FORWARD else chunks - 1 - chunk
    return Task(kind, turn * stages + micro, chunk)


def _interleaved(stage: int, stages: int, micros: int, chunks: int) -> Order:
    total, ahead = micros * chunks, _warm_up(stage, stages, micros, chunks)
    tasks = [_virtual(k, stages, chunks, FORWARD) for k in range(ahead)]
    for k in range(total - ahead):
        tasks.append(_virtual(k + ahead, stages, chunks, FORWARD))
        tasks.append(_virtual(k, stages, chunks, BACKWARD))
    rest = (_virtual(k, stages, chunks, BACKWARD) for k in range(total - ahead, total))
    return (*tasks, *rest)


#: Seconds of a task by stage and task.
Duration = Callable[[int, Task], Seconds]


@dataclass(frozen=True)
class PipelineRun:
    """Start and end of each task.

    Attributes:
        tasks: Tasks of each stage in execution order, with start and end in seconds.
        makespan: End of the last task.
    """

    tasks: tuple[tuple[tuple[Task, Seconds, Seconds], ...], ...]
    makespan: Seconds

    def end(self, stage: int) -> Seconds:
        """End of a stage's last task."""
        return self.tasks[stage][-1][2]

    def busy(self, stage: int) -> Seconds:
        """Seconds for which a stage is busy."""
        return sum(end - start for _, start, end in self.tasks[stage])


def run_pipeline(
    orders: Sequence[Order], duration: Duration, hop: float = 0.0, chunks: int = 1
) -> PipelineRun:
    """Compute the start and end of all tasks.

    Args:
        orders: Tasks of each stage, from :func:`orders`.
        duration: Seconds of a task; arrays of one shape run that many pipelines at once.
        hop: Seconds from one stage to the next, which overlap computation.
        chunks: Chunks per device; the last stage's chunk feeds the first stage's next one.

    Raises:
        ValueError: The orders deadlock.
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


#: A stage, its task, and the list positions of the task's inputs, each with whether it is remote.
_Placed = tuple[int, Task, tuple[tuple[int, bool], ...]]


# A step asks for the same orders with and without hops, and a sweep for few.
@lru_cache(maxsize=64)
def _placeable(orders: tuple[Order, ...], chunks: int) -> tuple[_Placed, ...]:
    """All tasks in an order in which each follows its inputs.

    Raises:
        ValueError: The orders deadlock.
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
    """Stages and tasks from which a task takes its input."""
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
