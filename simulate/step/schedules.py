"""Orders of micro-batches in a pipeline.

- ``gpipe``: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).
- ``1f1b``: as many forwards as there are stages ahead, then one backward and one forward in turn
  (Narayanan et al., PipeDream, SOSP 2019; memory-efficient form: PipeDream-2BW, ICML 2021).
- ``interleaved``: each device holds several chunks of layers (Narayanan et al., SC 2021).
- ``zero-bubble``: gradients of weights fill the bubble: ZB-H1 (Qi et al., Zero Bubble Pipeline
  Parallelism, ICLR 2024).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

#: Kinds of tasks, with the letters of the zero-bubble paper: W makes gradients of weights.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


class Task(NamedTuple):
    """One micro-batch through one chunk: ``kind`` is ``F``, ``B`` or ``W``."""

    kind: str
    micro: int
    chunk: int = 0


Order = tuple[Task, ...]


# Sweeps ask for the same few orders again and again, and long ones hold thousands of tasks.
@lru_cache(maxsize=64)
def orders(schedule: str, stages: int, micros: int, chunks: int = 1) -> tuple[Order, ...]:
    """Return what each stage runs, in order.

    Args:
        schedule: One of :data:`~.plan.SCHEDULES`.
        stages: Devices of the pipeline.
        micros: Micro-batches; a multiple of ``stages`` for ``interleaved``.
        chunks: Chunks of a device, for ``interleaved``.
    """
    make = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zero-bubble": _zero_bubble}
    if schedule == "interleaved":
        return tuple(_interleaved(stage, stages, micros, chunks) for stage in range(stages))
    return tuple(make[schedule](stage, stages, micros) for stage in range(stages))


def forward_orders(stages: int, micros: int, chunks: int = 1) -> tuple[Order, ...]:
    """Return what each stage runs where there is no backward pass."""
    if chunks == 1:
        return tuple(tuple(Task(FORWARD, m) for m in range(micros)) for _ in range(stages))
    # The order of interleaved training, without its backward tasks.
    one = tuple(_virtual(k, stages, chunks, FORWARD) for k in range(micros * chunks))
    return tuple(one for _ in range(stages))


def in_flight(schedule: str, stage: int, stages: int, micros: int, chunks: int = 1) -> float:
    """Return the most micro-batches whose activations a stage keeps at a time.

    Counted in whole stages, so that interleaved chunks are fractions.

    GPipe keeps all; 1F1B ``p - stage``; ZB-H1 ``p`` (inputs wait for the gradients of weights);
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
    """ZB-H1: 1F1B whose gradients of weights come ``stage`` micro-batches late.

    Later stages owe more of them when their forwards run out, and fill the bubble with these.
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
    """Return a kind's ``index``-th task: groups of ``stages`` micro-batches, chunk by chunk."""
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
