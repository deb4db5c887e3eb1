"""Prompts and decoding on workers of their own: a closed network of two stations.

Mean-value analysis (Reiser and Lavenberg, J. ACM 1980): a request that arrives at a station finds
the queue of a network with one request less. Prompts are served one after another; decoding serves
all of its requests at once, the slower the more there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pool:
    """Workers that run prompts.

    Attributes:
        cost: Of one prompt by class, shape ``(classes,)``.
        servers: Prompts that are served at a time, at this cost each times ``width``.
        width: Prompts that share a pass.
    """

    cost: np.ndarray
    servers: int
    width: int = 1


@dataclass(frozen=True)
class PoolTimes:
    """Latencies of a disaggregated service.

    Attributes:
        ttft: Mean seconds to the first token.
        tpot: Mean seconds of a further token.
        ttft_shares: Shares of the classes in it.
        tpot_shares: The same.
        queued: Share of ``ttft`` that is waiting.
    """

    ttft: float
    tpot: float
    ttft_shares: np.ndarray
    tpot_shares: np.ndarray
    queued: float


def two_pools(
    prefill: Pool,
    decode: Callable[[float], np.ndarray],
    weights: np.ndarray,
    workers: int,
    batch: int,
    output: int,
    concurrency: int,
    waves: int,
    delay: float,
) -> PoolTimes:
    """Latencies of a closed loop of requests.

    Args:
        prefill: Workers that run prompts.
        decode: Cost by class of a pass over so many sequences of one decoding worker.
        weights: Of the classes, in seconds.
        workers: Decoding workers.
        batch: Most sequences of each.
        output: Tokens of a request.
        concurrency: Requests in flight.
        waves: Requests in all over those in flight; all of the first wave arrive at once.
        delay: Seconds of a request before it reaches a worker.
    """
    service = float(prefill.cost @ weights) * prefill.width
    servers = prefill.servers
    ahead = behind = 0.0
    # At most 400 populations: the others lie on a line between them.
    sizes = np.unique(np.rint(np.linspace(1, concurrency, min(concurrency, 400))).astype(int))
    wait = token = response = 0.0
    for size in sizes.tolist():
        # Who is in service has half of it left on average, since prompts take equally long.
        before = max(0.0, ahead - 0.5 * min(ahead, servers)) / servers
        wait = service * max(0.0, before - (0.5 if servers > 1 else 0.0))
        running = min(float(batch), (behind + 1.0) / workers)
        token = float(decode(running) @ weights)
        # Requests beyond the batch limit wait for others to end.
        held = max(0.0, (behind + 1.0) / workers - batch) / batch * output * token
        response = wait + service + held
        total = response + delay + output * token
        ahead = size * (wait + service) / total
        behind = size * (output * token + held) / total
    # The first wave queues as a whole: on average half of it is ahead.
    burst = max(0.0, (concurrency / servers - 1.0) / 2.0) * service
    held = max(0.0, concurrency / workers - batch) / batch * output * token / 2.0
    ttft = ((waves - 1) * response + max(response, burst + service + held)) / waves + delay
    cost = decode(min(float(batch), max(1.0, behind / workers)))
    parts = prefill.cost * weights
    return PoolTimes(
        ttft,
        token,
        parts / parts.sum(),
        cost * weights / float(cost @ weights),
        max(0.0, 1.0 - (service + delay) / ttft),
    )
