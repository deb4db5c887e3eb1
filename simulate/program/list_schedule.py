"""List scheduling: dependency counting, and the placement of kernels on workers.

A GPU or TPU core runs a program's kernels one after another; a CPU runs independent ones on several
threads. Kernels are taken in schedule order, and each starts as soon as its operands are ready and
a worker is free (Graham's list scheduling, SIAM J. Appl. Math. 17, 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Worker number of kernels that occupy none because they have no duration.
NO_WORKER = -1


class Dependencies:
    """Counts the operands that each node still waits for (Kahn, CACM 5, 1962).

    Args:
        operands: For each node, the nodes that it needs; one listed twice counts twice.
    """

    def __init__(self, operands: Sequence[Iterable[int]]) -> None:
        self._waiting = [0] * len(operands)
        self._readers: list[list[int]] = [[] for _ in operands]
        for node, needed in enumerate(operands):
            for operand in needed:
                # One entry and one count per use, so that an operand read twice still balances.
                self._readers[operand].append(node)
                self._waiting[node] += 1

    def ready(self) -> list[int]:
        """Nodes without operands, in program order."""
        return [node for node, count in enumerate(self._waiting) if not count]

    def finish(self, node: int) -> list[int]:
        """Mark a node as done and return the nodes it releases, in the order they read it."""
        released = []
        for reader in self._readers[node]:
            self._waiting[reader] -= 1
            if not self._waiting[reader]:
                released.append(reader)
        return released


@dataclass(frozen=True)
class Timeline:
    """When and where each kernel runs; arrays have shape ``(n_kernels,)``, times in seconds.

    Attributes:
        start: Start of each kernel.
        end: End of each kernel, all its executions included.
        worker: Worker that it occupies; the number of workers for the communication channel,
            :data:`NO_WORKER` for kernels that take no time.
        workers: Number of workers.
    """

    start: np.ndarray
    end: np.ndarray
    worker: np.ndarray
    workers: int

    @property
    def makespan(self) -> float:
        """Time from the start of the program to the last end, in seconds."""
        return float(self.end.max()) if len(self.end) else 0.0


def list_schedule(
    durations: Sequence[float] | np.ndarray,
    operands: Sequence[Sequence[int]],
    workers: int = 1,
    channel: Sequence[bool] | None = None,
) -> Timeline:
    """Place kernels on workers, in order.

    Args:
        durations: Seconds of each kernel, all executions included, shape ``(n_kernels,)``.
        operands: Positions of the earlier kernels that each one reads; later ones (loop carries)
            are ignored.
        workers: Number of workers of the device.
        channel: Which kernels use the single communication channel instead of a worker.

    Returns:
        The timeline. Its makespan lies between the critical path and the sum of durations.
    """
    times = [float(d) for d in durations]
    apart = channel if channel is not None else [False] * len(times)
    start, end, where = [0.0] * len(times), [0.0] * len(times), [NO_WORKER] * len(times)
    # A heap of the times at which workers become free; ties go to the lowest number.
    free = [(0.0, worker) for worker in range(workers)]
    channel_free = 0.0
    for i, time in enumerate(times):
        # Operands at or after i are loop carries: their value comes from the last iteration.
        begin = max((end[j] for j in operands[i] if 0 <= j < i), default=0.0)
        if apart[i]:
            begin = max(begin, channel_free)
            channel_free, where[i] = begin + time, workers
        elif time > 0.0:
            # The worker that becomes free first; the kernel may still wait for its operands there,
            # as in a thread pool that takes tasks in order.
            ready, where[i] = heapq.heappop(free)
            begin = max(begin, ready)
            heapq.heappush(free, (begin + time, where[i]))
        start[i], end[i] = begin, begin + time
    return Timeline(np.array(start), np.array(end), np.array(where, np.int64), workers)


def critical_path(
    durations: Sequence[float] | np.ndarray, operands: Sequence[Sequence[int]]
) -> float:
    """Longest chain of dependent kernels in seconds: a lower bound for any number of workers."""
    return list_schedule(durations, operands, workers=len(durations)).makespan
