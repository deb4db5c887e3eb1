"""Run the pieces of a sweep here, in processes of this machine, or on a Ray cluster.

A piece whose worker dies is given to another one; results are the same everywhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from ...common.child_process import die_with_parent
from ...common.errors import OpcastError
from ...common.ray_tasks import MOST_LOSSES, run_tasks

logger = logging.getLogger(__name__)

Rows = list[dict[str, object]]
J = TypeVar("J")
C = TypeVar("C")
R = TypeVar("R")
#: Evaluates the candidates of a piece under the settings that all share; one row for each. It must
#: be a function of a module, so that it can be sent to another process.
Judge = Callable[[J, Sequence[C]], list[R]]


def run_here(judge: Judge[J, C, R], job: J, pieces: Sequence[list[C]]) -> Iterator[list[R]]:
    """Run one piece after the other in this process."""
    for piece in pieces:
        yield judge(job, piece)


def run_processes(
    judge: Judge[J, C, R], job: J, pieces: Sequence[list[C]], workers: int
) -> Iterator[list[R]]:
    """Run pieces on processes of this machine; yields results in order of completion.

    If the caller stops iterating, no more pieces are started.

    Raises:
        OpcastError: Workers die again and again.
    """
    left = dict(enumerate(pieces))
    losses = 0
    while left:
        # A broken pool cannot be used again, so each round starts a new one. Processes are spawned:
        # a fork would copy locks that threads of native libraries may hold.
        with ProcessPoolExecutor(
            workers, get_context("spawn"), die_with_parent, (os.getpid(),)
        ) as pool:
            # All at once: the pool hands out the next piece as soon as a worker is free.
            running = {pool.submit(judge, job, piece): n for n, piece in left.items()}
            try:
                for number, rows in _finished(running):
                    del left[number]
                    yield rows
            except BrokenProcessPool:
                losses += 1
                logger.warning("a worker died; %d pieces are left and run again", len(left))
                if losses > MOST_LOSSES:
                    raise OpcastError(
                        f"workers died {losses} times",
                        where="sweep",
                        hint="fewer workers may leave each enough memory",
                    ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _finished(running: dict[Future[list[R]], int]) -> Iterator[tuple[int, list[R]]]:
    waiting = set(running)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield running[future], future.result()


def run_ray(
    judge: Judge[J, C, R],
    job: J,
    pieces: Sequence[list[C]],
    address: str,
    limit_s: float = float("inf"),
) -> Iterator[list[R]]:
    """Run pieces on a Ray cluster; yields results in order of completion.

    Args:
        judge: Evaluates a piece.
        job: Settings that all candidates share.
        pieces: Pieces of candidates.
        address: Cluster address, such as ``auto`` or ``ray://host:10001``; ``local`` starts one.
        limit_s: Seconds after which pieces that have not ended are given up.

    Raises:
        OpcastError: Ray is not installed, or the cluster cannot be reached.
    """
    for _, rows in run_tasks(judge, job, pieces, address, limit_s):
        yield rows
