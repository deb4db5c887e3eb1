"""Tasks in processes of this machine or on a Ray cluster; rerun if their worker dies.

Pieces of work run in either place with the same results (:func:`run_pieces`); tasks on a cluster
run on any node (:func:`run_tasks`), or one at a time on each host, with all of its devices
(:func:`run_on_hosts`).
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from typing import Any, TypeVar

from .child_process import die_with_parent
from .errors import OpcastError
from .plugins import extra_hint

#: Reruns of a task whose worker dies. Single deaths (memory, preemption) are retried; a task that
#: kills every worker must not retry forever. Engineering estimate.
MOST_LOSSES = 20
#: Seconds between two progress reports while waiting for hosts.
_TICK_S = 1.0
Item = TypeVar("Item")
Job = TypeVar("Job")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """A node of a Ray cluster.

    Attributes:
        number: Index among the nodes with the device, by address.
        node: Ray's id of the node.
        resources: Its CPUs and devices.
    """

    number: int
    node: str
    resources: Mapping[str, float]


def connect(address: str) -> Any:
    """Connect to a Ray cluster; returns Ray.

    Args:
        address: Cluster address, such as ``auto`` or ``ray://host:10001``; ``local`` starts one.

    Raises:
        OpcastError: Ray is not installed, or the cluster cannot be reached.
    """
    # Ray hides GPUs from tasks that request none, and will stop doing so in 2026.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise OpcastError("Ray is not installed", hint=extra_hint("scale")) from None
    try:
        with warnings.catch_warnings():
            # JAX warns about forks, but Ray's children are other programs.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address=None if address == "local" else address, ignore_reinit_error=True)
    except Exception as error:  # Ray raises several unrelated classes
        raise OpcastError(f"no Ray cluster: {error}", where=address) from None
    return ray


def run_tasks(
    work: Callable[[Any, Item], Result],
    shared: object,
    items: Sequence[Item],
    address: str,
    limit_s: float = float("inf"),
) -> Iterator[tuple[int, Result]]:
    """Run one task per item; yields indices and results in order of completion.

    If the caller stops iterating, unfinished tasks are cancelled.

    Args:
        work: Called with ``shared`` and an item; must be importable by the workers.
        shared: Sent to each node once.
        items: Arguments of the tasks.
        address: As for :func:`connect`.
        limit_s: Seconds after which unfinished tasks are cancelled.

    Raises:
        OpcastError: See :func:`connect`; or an error of a task.
    """
    ray = connect(address)
    # The exit of a worker is not an error of its task, which is rerun elsewhere.
    remote = ray.remote(max_retries=MOST_LOSSES, num_cpus=1)(work)
    everywhere = ray.put(shared)
    places = {remote.remote(everywhere, item): i for i, item in enumerate(items)}
    waiting = list(places)
    end = time.monotonic() + limit_s
    try:
        while waiting:
            left = end - time.monotonic()
            # Ray accepts no infinite timeout.
            done, waiting = ray.wait(waiting, timeout=max(left, 0.0) if left < inf else None)
            if not done:
                return
            for reference in done:
                yield places[reference], _result(ray, reference)
    finally:
        # The workers would continue while this process is connected.
        for reference in waiting:
            ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any) -> Any:
    """Result of a task, or its original error if that is one of opcast's."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OpcastError):
            raise error.cause from None
        raise


def hosts_of(address: str, device: str) -> list[Host]:
    """Nodes of a cluster with a device.

    Args:
        address: As for :func:`connect`.
        device: Ray's name of the resource: ``CPU``, ``GPU`` or ``TPU``.

    Raises:
        OpcastError: See :func:`connect`.
    """
    nodes = [node for node in connect(address).nodes() if node["Alive"]]
    nodes = [node for node in nodes if node["Resources"].get(device, 0) >= 1]
    nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    return [
        Host(number, node["NodeID"], dict(node["Resources"])) for number, node in enumerate(nodes)
    ]


def run_on_hosts(
    work: Callable[[Item], Result],
    hosts: Sequence[Host],
    next_item: Callable[[Host], Item | None],
    lost: Callable[[Host], None],
    tick: Callable[[], None],
) -> Iterator[tuple[Host, Result]]:
    """Run items one at a time on each host; yields results in order of completion.

    A task has all CPUs and devices of its host, so that nothing disturbs its measurements. If its
    worker dies, it is rerun there.

    Args:
        work: Called with an item; must be importable by the workers.
        hosts: Hosts of the connected cluster (:func:`hosts_of`).
        next_item: Returns the next item of a host after its last result was read; ``None`` ends
            it.
        lost: Called with a host that is lost, in place of a result.
        tick: Called every second.

    Raises:
        OpcastError: An error of a task.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    running: dict[Any, Host] = {}

    def start(host: Host) -> None:
        item = next_item(host)
        if item is not None:
            own = ray.remote(work).options(
                max_retries=MOST_LOSSES,
                num_cpus=host.resources.get("CPU", 0),
                num_gpus=host.resources.get("GPU", 0),
                resources={"TPU": host.resources["TPU"]} if "TPU" in host.resources else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(host.node, soft=False),
            )
            running[own.remote(item)] = host

    for host in hosts:
        start(host)
    try:
        while running:
            done, _ = ray.wait(list(running), timeout=_TICK_S)
            tick()
            for reference in done:
                host = running.pop(reference)
                try:
                    result = _result(ray, reference)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError:  # Ray raises several classes for a lost node
                    lost(host)
                    continue
                yield host, result
                start(host)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def run_pieces(
    work: Callable[[Job, Item], Result],
    job: Job,
    pieces: Sequence[Item],
    workers: int = 1,
    ray: str = "",
    limit_s: float = float("inf"),
) -> Iterator[tuple[int, Result]]:
    """Run pieces; yields indices and results in order of completion: by index without workers.

    Args:
        work: Called with the job and a piece; a function of a module, so that other processes can
            import it.
        job: Settings shared by all pieces.
        pieces: The pieces of work.
        workers: Number of processes; 1 for this one.
        ray: Address of a Ray cluster instead, such as ``auto`` or ``ray://host:10001``; ``local``
            starts one.
        limit_s: Seconds after which a Ray cluster cancels unfinished pieces.

    Raises:
        OpcastError: Workers die repeatedly; or Ray is not installed, or the cluster cannot be
            reached.
    """
    if ray and pieces:
        yield from run_tasks(work, job, pieces, ray, limit_s)
    elif workers > 1 and len(pieces) > 1:
        yield from _in_processes(work, job, pieces, min(workers, len(pieces)))
    else:
        for place, piece in enumerate(pieces):
            yield place, work(job, piece)


def _in_processes(
    work: Callable[[Job, Item], Result], job: Job, pieces: Sequence[Item], workers: int
) -> Iterator[tuple[int, Result]]:
    """Run pieces on processes; if the caller stops iterating, no further pieces are started."""
    left = dict(enumerate(pieces))
    losses = 0
    while left:
        # A broken pool cannot be reused, so each round starts a new one. Processes are spawned: a
        # fork would copy locks held by threads of native libraries.
        with ProcessPoolExecutor(
            workers, get_context("spawn"), die_with_parent, (os.getpid(),)
        ) as pool:
            # All at once: the pool assigns the next piece as soon as a worker is free.
            running = {pool.submit(work, job, piece): n for n, piece in left.items()}
            try:
                for future in as_completed(running):
                    result = future.result()
                    del left[running[future]]
                    yield running[future], result
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
