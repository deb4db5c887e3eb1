"""A simulated run of a load on the engines of a deployment, and why its requests wait.

They wait in a closed loop in lock-step, or for the limit that binds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from ...models.serving.effects import Context
from ...models.serving.ends import SATURATED
from ...simulate.serving.fleet import capacity, run_fleet
from ...simulate.serving.latencies import Floors, Served, queued_share, typical_wait
from ...simulate.serving.load import Load, Run, Station
from .deployment import Deployment
from .serving_case import LoadSpec
from .serving_engine import cache_transfer
from .serving_load import RATE_TIE, is_open

#: Utilization (offered rate over maximum throughput) up to which an engine is considered stable:
#: its queues do not grow with the length of the run. Engineering choice.
STABLE = 0.9
#: Coefficient of variation of output lengths up to which the requests of a closed loop stay in
#: lock-step: at 3 %, 16 and 64 requests of Llama 3.1 70B wait 1.1 and 1.2 times as long as at 12 %,
#: at 0 % four times as long.
LOCK_STEP = 0.03
#: Lengths of requests that drift apart, relative to the mean: uniform between these. A choice.
DRIFT = (0.8, 1.2)


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


def drifted(load: Load, seed: int) -> tuple[str, Load] | None:
    """Spread the lengths of a closed loop whose requests start and end together.

    Args:
        load: The requests.
        seed: Random seed of the lengths.

    Returns:
        The option that spreads them, and the load; ``None`` if the requests drift apart already.
        Prompts are spread where outputs are too short to differ.
    """
    outputs = load.outputs
    if not 1 < load.concurrency < len(outputs) or outputs.std() > LOCK_STEP * outputs.mean():
        return None
    for name, lengths in (("output", outputs), ("prompt", load.prompts)):
        least, most = (round(share * float(lengths.mean())) for share in DRIFT)
        if least < most:
            drawn = np.random.default_rng(seed).integers(least, most + 1, len(lengths))
            outputs, prompts = (drawn, load.prompts) if name == "output" else (outputs, drawn)
            option = f"--{name} uniform:{least}:{most}"
            return option, replace(load, prompts=prompts, outputs=outputs)
    return None


def waits(load: Load, run: Run) -> bool:
    """Return whether requests spend most of their time to the first token waiting."""
    share = typical_wait(load, run) if load.concurrency else queued_share(load, run)
    return share > SATURATED


def why_waiting(found: Simulated) -> str:
    """Return a note on a load without arrivals whose requests mostly wait; empty if they do not."""
    if not waits(found.load, found.run):
        return ""
    said = "most of the time to the first token is spent waiting"
    if rule := _batching_rule(found):
        return f"{said} {rule}"
    limit = binding_limit(found)
    return f"the engines are saturated: {said}{f' for room in {limit}' if limit else ''}"


def tail_note(found: Simulated, overload: float) -> tuple[str, ...]:
    """Return a note on why the throughput over a whole run is below the offered rate.

    Args:
        found: The run.
        overload: Probability that its load exceeds the engines' maximum throughput.
    """
    load, makespan = found.load, found.run.makespan
    if not is_open(found.spec, load):
        return ()
    offered, seen = found.spec.rate or load.rate, len(load.prompts) / makespan
    if seen > (1.0 - RATE_TIE) * offered:
        return ()
    # The mean rate of a few random gaps differs from the requested rate.
    drawn = f" ({load.rate:.3g} as drawn)" if f"{load.rate:.3g}" != f"{offered:.3g}" else ""
    kept = "which the engines sustain"
    if overload > 0.5:
        most = STABLE * min(found.room, found.link_room) * offered
        kept = (
            f"of which the engines keep up with about {most:.3g}: the queue and times to first "
            "token grow as long as the load lasts"
        )
    tail = makespan - float(load.arrivals.max())
    return (
        f"the offered rate is {offered:.3g} requests/s{drawn}, {kept}; {seen:.3g} requests/s is "
        f"the mean over the whole run, including the last {tail:.3g} of {makespan:.3g} s after the "
        "last request was sent",
    )


def _batching_rule(found: Simulated) -> str:
    """Return the rule for which prompts wait, if without it they would hardly wait."""
    policy = found.stations[0].policy
    if policy.poll == 1 and not policy.gather:
        return ""
    free = [replace(s, policy=replace(s.policy, poll=1, gather=0)) for s in found.stations]
    if waits(found.load, run_load(found.deployment, found.load, free, found.delay, record=False)):
        return ""
    if policy.poll > 1:
        return f"for the next check for new requests, every {policy.poll} passes (--recv-interval)"
    told = found.deployment.options.batch_wait_iters
    whose = "--batch-wait-iters" if told else f"the default of {found.deployment.framework} with dp"
    return f"to be batched with other prompts, for up to {policy.gather} passes ({whose})"


def binding_limit(found: Simulated) -> str:
    """Return the limit of the engines that keeps requests waiting, and what sets it, or empty."""
    load, run, own = found.load, found.run, found.deployment
    policy, cache = found.stations[0].policy, found.stations[0].cache
    if own.prefill is not None:
        return ""
    asked = load.concurrency or len(load.outputs)
    if run.largest_batch >= policy.max_batch and asked > policy.max_batch * own.engine.count:
        return f"a batch of {policy.max_batch} sequences ({_batch_limit(own)})"
    longest = int((load.prompts + load.outputs).max())
    apart = asked > run.largest_batch * own.engine.count or run.evicted
    if (
        apart
        and run.largest_cache / cache.tokens + cache.share_of(longest) > 1.0 - policy.watermark
    ):
        return f"the KV cache of {cache.tokens} tokens (--memory and --kv-cache change it)"
    return ""


def _batch_limit(own: Deployment) -> str:
    """Return what sets the batch limit of an engine."""
    if own.engine.batch or own.options.max_batch:
        return "--max-batch"
    drafting = own.options.drafts and own.rules.drafting
    whose = f"the default of {own.framework or 'the framework'}{' while drafting' * bool(drafting)}"
    return f"{whose}; --max-batch sets another"
