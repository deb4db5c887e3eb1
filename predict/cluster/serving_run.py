"""A simulated run of a load on the engines of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from ...models.serving.effects import Context
from ...simulate.serving.fleet import capacity, run_fleet
from ...simulate.serving.floor import Floors
from ...simulate.serving.latencies import Served, queued_share
from ...simulate.serving.load import Load, Run, Station
from .deployment import Deployment
from .serving_case import LoadSpec
from .serving_engine import cache_transfer
from .serving_load import is_open


@dataclass(frozen=True)
class Simulated:
    """A load simulated at the learned costs.

    Attributes:
        asked: The deployment as given by the user.
        deployment: The deployment, calibrated to the user's own serving stack if it was measured.
        spec: The load.
        load: Requests of the load.
        context: Levels of the deployment in the model's random effects.
        stations: The engines.
        delay: Seconds from sending a request until it enters an engine's queue.
        run: Simulated times of the requests.
        first: Factor on times to the first token.
        floor: Lower limits of request times, from data sheets.
        seen: Latencies as users see them.
    """

    asked: Deployment
    deployment: Deployment
    spec: LoadSpec
    load: Load
    context: Context
    stations: Sequence[Station]
    delay: float
    run: Run
    first: float
    floor: Floors
    seen: Served

    @property
    def queued(self) -> float:
        """Share of the time to the first token that is spent waiting for other requests."""
        return queued_share(self.load, self.run)

    @cached_property
    def room(self) -> float:
        """Maximum throughput over the offered rate; infinite for loads that are not open."""
        if not is_open(self.spec, self.load):
            return inf
        return capacity(self.load, *self.stations) / (self.spec.rate or self.load.rate)

    @cached_property
    def link_room(self) -> float:
        """Maximum rate of KV cache transfers from prefill workers over the offered rate.

        Infinite for loads that are not open and where no cache is transferred.
        """
        move, prefill = cache_transfer(self.deployment), self.deployment.prefill
        if prefill is None or not is_open(self.spec, self.load):
            return inf
        each = float(np.mean([move(int(tokens)) for tokens in self.load.prompts]))
        return prefill.count / each / (self.spec.rate or self.load.rate) if each else inf

    @property
    def output_tokens(self) -> float:
        """Tokens of all outputs."""
        return float(self.load.outputs @ self.load.counts)

    @property
    def span(self) -> float:
        """Seconds that the whole load takes, including requests that were not simulated one by one.

        A closed loop without a given number of requests keeps its concurrency to the end
        (Little's law).
        """
        times, load = self.run.finished - self.run.sent, self.load
        if not load.concurrency:
            return self.run.makespan
        whole = float(times @ load.counts) / load.concurrency
        if self.spec.count:
            # As the last requests finish, fewer and fewer are in flight.
            whole += self.run.makespan - float(times.sum()) / load.concurrency
        return whole * self.clock

    @property
    def clock(self) -> float:
        """Factor on simulated times: in a closed loop, longer requests also mean fewer of them."""
        if not self.load.concurrency:
            return 1.0
        times = self.run.finished - self.run.sent
        return self.seen.figure("e2e", "mean") / float(np.average(times, weights=self.load.counts))

    def seconds(self, metric: str) -> float:
        """Return the mean of one of :data:`opcast.models.serving.model.METRICS`, in seconds."""
        if metric == "per_token":
            return self.span / self.output_tokens
        return self.seen.figure(metric, "mean")

    def shares(self, metric: str) -> np.ndarray:
        """Return the shares of a metric by cost class, the request's last; they add up to 1."""
        first, later = np.append(self.run.waits, self.delay), np.append(self.run.tokens, 0.0)
        if metric == "per_token":
            parts = first + later if self.load.concurrency else np.append(self.run.busy, 0.0)
        else:
            parts = first if metric == "ttft" else later
        total = parts.sum()
        return parts / total if total > 0.0 else np.full(len(parts), 1.0 / len(parts))

    def again(self, slower: float) -> Run:
        """Simulate the same load on engines that are slower by a factor."""
        return run_load(self.deployment, self.load, self.stations, self.delay, slower, record=False)


def run_load(
    own: Deployment,
    load: Load,
    stations: Sequence[Station],
    delay: float,
    slower: float = 1.0,
    *,
    record: bool,
) -> Run:
    """Simulate a load on engines that are slower than their costs by a factor."""
    engines = [replace(s, weights=s.weights * slower) for s in stations]
    return run_fleet(
        load,
        *engines,
        router=own.options.router,
        delay=delay * slower,
        transfer=cache_transfer(own),
        record=record,
    )
