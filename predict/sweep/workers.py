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

import numpy as np
from numpy.typing import ArrayLike

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


def run_pieces(
    judge: Judge[J, C, R],
    job: J,
    pieces: Sequence[list[C]],
    workers: int = 1,
    ray: str = "",
    limit_s: float = float("inf"),
) -> Iterator[list[R]]:
    """Run pieces; yields results in order of completion, without workers in that of the pieces.

    Args:
        judge: Evaluates a piece.
        job: Settings that all candidates share.
        pieces: Pieces of candidates.
        workers: Processes; 1 for this one.
        ray: Address of a Ray cluster instead, such as ``auto`` or ``ray://host:10001``; ``local``
            starts one.
        limit_s: Seconds after which a Ray cluster gives up pieces that have not ended.

    Raises:
        OpcastError: Workers die again and again; or Ray is not installed, or the cluster cannot be
            reached.
    """
    if ray:
        for _, rows in run_tasks(judge, job, pieces, ray, limit_s):
            yield rows
    elif workers > 1 and len(pieces) > 1:
        yield from _in_processes(judge, job, pieces, min(workers, len(pieces)))
    else:
        for piece in pieces:
            yield judge(job, piece)


def _in_processes(
    judge: Judge[J, C, R], job: J, pieces: Sequence[list[C]], workers: int
) -> Iterator[list[R]]:
    """Run pieces on processes; if the caller stops iterating, no more pieces are started."""
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


def undominated(points: ArrayLike) -> np.ndarray:
    """Whether each point is on the Pareto front: no other is as small in all and smaller in some.

    Args:
        points: What is minimised, of shape (number of points, number of objectives).

    Returns:
        Of shape (number of points,).
    """
    values = np.asarray(points, float)
    # Quadratic in the number of points, yet negligible beside evaluating them.
    beaten = [((values <= own).all(axis=1) & (values < own).any(axis=1)).any() for own in values]
    return ~np.array(beaten, bool)
