"""Continuous batching of requests: iterations with durations go in, latencies of requests come out.

Every iteration runs one token of each running request and, within a budget of tokens, parts of the
prompts of waiting ones (Yu et al., Orca, OSDI 2022; chunked prefill: Agrawal et al., Sarathi-Serve,
OSDI 2024). A request is admitted when the key-value cache has room for its prompt and its whole
output, so that none is ever evicted; requests are served in the order in which they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..common.errors import PlanError


class Chunk(NamedTuple):
    """A part of one request's prompt that an iteration runs.

    Attributes:
        tokens: Of the part.
        past: Tokens of the same prompt that came in earlier iterations; the part attends to them.
    """

    tokens: int
    past: int = 0


#: Seconds of an iteration: parts of prompts, one for each request that still has some; running
#: requests, and the mean length of their caches.
IterationSeconds = Callable[[Sequence[Chunk], int, float], float]


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        arrival: Seconds.
        prompt: Tokens of its prompt, at least 1.
        output: Tokens that it generates, at least 1.
    """

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class ServingResult:
    """What became of the requests; arrays have shape ``(n,)`` in their order.

    Attributes:
        first_token: Seconds from arrival to the first token (TTFT).
        per_token: Seconds for each further token, on average (TPOT); NaN for one token.
        latency: Seconds from arrival to the last token.
        finished: When each was done, in seconds.
        makespan: End of the last iteration.
        output_tokens: Of all requests.
        iterations: Number of iterations.
        largest_batch: Most requests that ran at a time.
        largest_cache: Most tokens that the cache held or had reserved.
    """

    first_token: np.ndarray
    per_token: np.ndarray
    latency: np.ndarray
    finished: np.ndarray
    makespan: float
    output_tokens: int
    iterations: int
    largest_batch: int
    largest_cache: int

    def to_dict(self) -> dict[str, float]:
        """Percentiles in milliseconds, and throughput."""
        percentiles: dict[str, float] = {}
        for name, values in (("ttft", self.first_token), ("tpot", self.per_token)):
            known = values[np.isfinite(values)] * 1e3
            for level in (50, 95, 99):
                percentiles[f"{name}_p{level}_ms"] = (
                    float(np.percentile(known, level)) if len(known) else 0.0
                )
        return {
            **percentiles,
            "requests_per_s": len(self.finished) / self.makespan,
            "output_tokens_per_s": self.output_tokens / self.makespan,
            "makespan_s": self.makespan,
            "iterations": float(self.iterations),
            "largest_batch": float(self.largest_batch),
            "largest_cache_tokens": float(self.largest_cache),
        }


@dataclass(slots=True)
class _Running:
    """A request that has been admitted."""

    index: int
    request: Request
    prefilled: int = 0
    generated: int = 0

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are kept."""
        return self.prefilled + self.generated


def serve(
    requests: Sequence[Request],
    seconds: IterationSeconds,
    cache_tokens: int,
    *,
    max_batch: int = 256,
    token_budget: int = 2048,
) -> ServingResult:
    """Run a trace of requests.

    Args:
        requests: In the order of their arrivals.
        seconds: Duration of an iteration.
        cache_tokens: Tokens that the key-value cache holds.
        max_batch: Most requests at a time.
        token_budget: Most tokens of an iteration, those of running requests included.

    Raises:
        PlanError: A limit is below 1, or as :func:`check_requests`.
    """
    if min(max_batch, token_budget) < 1:
        raise PlanError(
            f"max_batch={max_batch}, token_budget={token_budget}", hint="both are at least 1"
        )
    check_requests(requests, cache_tokens)
    loop = _Loop(requests, seconds, cache_tokens, max_batch, token_budget)
    while loop.waiting or loop.running:
        loop.iterate()
    return loop.result()


def check_requests(requests: Sequence[Request], cache_tokens: int) -> None:
    """Refuse a trace that cannot be served.

    Raises:
        PlanError: There is no request, one has no tokens, or one does not fit the cache at all.
    """
    if not requests:
        raise PlanError("no requests to serve", hint="give a trace, or a rate and a number")
    for place, request in enumerate(requests):
        if request.prompt < 1 or request.output < 1:
            raise PlanError(
                f"prompt={request.prompt}, output={request.output}",
                where=f"request {place}",
                hint="both are at least 1 token",
            )
        if request.prompt + request.output > cache_tokens:
            raise PlanError(
                f"needs {request.prompt + request.output} tokens of cache, there are "
                f"{cache_tokens}",
                where=f"request {place}",
                hint="more devices, or shorter requests",
            )


class _Loop:
    """State between iterations."""

    def __init__(
        self,
        requests: Sequence[Request],
        seconds: IterationSeconds,
        cache_tokens: int,
        max_batch: int,
        token_budget: int,
    ) -> None:
        self.requests, self.seconds = requests, seconds
        self.room, self.max_batch, self.budget = cache_tokens, max_batch, token_budget
        self.waiting = deque(enumerate(requests))
        self.running: list[_Running] = []
        self.now, self.iterations = 0.0, 0
        self.reserved = self.largest_batch = self.largest_cache = 0
        self.first, self.finished = np.full(len(requests), np.nan), np.full(len(requests), np.nan)

    def iterate(self) -> None:
        """Admit, run one iteration, and let go of what is done."""
        if not self.running and self.waiting:
            self.now = max(self.now, self.waiting[0][1].arrival)
        self._admit()
        # Each running request takes a token of the budget; those that came last wait for one.
        decoding = [r for r in self.running if r.prefilled >= r.request.prompt][: self.budget]
        parts = self._prefill(self.budget - len(decoding))
        chunks = [Chunk(count, running.prefilled) for running, count in parts]
        length = sum(r.cached for r in decoding) / len(decoding) if decoding else 0.0
        self.now += self.seconds(chunks, len(decoding), length)
        self.iterations += 1
        for running, count in parts:
            running.prefilled += count
            if running.prefilled == running.request.prompt:
                self._token(running)
        for running in decoding:
            self._token(running)
        self.running = [r for r in self.running if r.generated < r.request.output]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            index, request = self.waiting[0]
            need = request.prompt + request.output
            if request.arrival > self.now or self.reserved + need > self.room:
                break
            self.waiting.popleft()
            self.reserved += need
            self.running.append(_Running(index, request))
        self.largest_batch = max(self.largest_batch, len(self.running))
        self.largest_cache = max(self.largest_cache, self.reserved)

    def _prefill(self, left: int) -> list[tuple[_Running, int]]:
        """Parts of prompts that fit what is left of the budget."""
        parts = []
        for running in self.running:
            rest = running.request.prompt - running.prefilled
            if rest > 0 and left > 0:
                parts.append((running, min(rest, left)))
                left -= min(rest, left)
        return parts

    def _token(self, running: _Running) -> None:
        running.generated += 1
        if running.generated == 1:
            self.first[running.index] = self.now
        if running.generated == running.request.output:
            self.finished[running.index] = self.now
            self.reserved -= running.request.prompt + running.request.output

    def result(self) -> ServingResult:
        arrival = np.array([r.arrival for r in self.requests])
        output = np.array([r.output for r in self.requests], float)
        more = np.where(output > 1, output - 1, np.nan)
        return ServingResult(
            first_token=self.first - arrival,
            per_token=(self.finished - self.first) / more,
            latency=self.finished - arrival,
            finished=self.finished,
            makespan=self.now,
            output_tokens=int(output.sum()),
            iterations=self.iterations,
            largest_batch=self.largest_batch,
            largest_cache=self.largest_cache,
        )
