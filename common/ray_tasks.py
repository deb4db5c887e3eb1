"""Tasks on a Ray cluster: in order, with those of workers and nodes that die run again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .errors import OpcastError
from .extras import extra_hint

#: Times that a task is run again if its worker dies. Single deaths (memory, preemption) are
#: retried; a task that kills every worker must not retry forever. Engineering estimate.
MOST_LOSSES = 20

Item = TypeVar("Item")
Result = TypeVar("Result")


def connect(address: str) -> Any:
    """Connect to a Ray cluster; returns Ray.

    Args:
        address: Cluster address, such as ``auto`` or ``ray://host:10001``; ``local`` starts one.

    Raises:
        OpcastError: Ray is not installed, or the cluster cannot be reached.
    """
    # Ray ends in 2026 what it does now: hiding GPUs from tasks that ask for none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise OpcastError("Ray is not installed", hint=extra_hint("scale")) from None
    try:
        ray.init(address=None if address == "local" else address, ignore_reinit_error=True)
    except Exception as error:  # Ray raises several unrelated classes
        raise OpcastError(f"no Ray cluster: {error}", where=address) from None
    return ray


def run_tasks(
    work: Callable[[Any, Item], Result], shared: object, items: Sequence[Item], address: str
) -> Iterator[tuple[int, Result]]:
    """Run one task for each item; yields places and results in order of completion.

    Args:
        work: Called with ``shared`` and an item; must be importable by the workers.
        shared: Sent to each node once.
        items: What tasks differ in.
        address: As of :func:`connect`.

    Raises:
        OpcastError: See :func:`connect`; or what a task raises.
    """
    ray = connect(address)
    # The exit of a worker is no error of the task: it runs again elsewhere.
    remote = ray.remote(max_retries=MOST_LOSSES, num_cpus=1)(work)
    everywhere = ray.put(shared)
    places = {remote.remote(everywhere, item): i for i, item in enumerate(items)}
    waiting = list(places)
    while waiting:
        done, waiting = ray.wait(waiting)
        for reference in done:
            try:
                yield places[reference], ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, OpcastError):
                    raise error.cause from None
                raise
