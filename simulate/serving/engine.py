"""Continuous batching, event by event: whole runs of decoding iterations are taken at once.

Between two events (a request ends, one arrives, the cache is full) every decoding iteration runs
the same batch, so that its time grows linearly with the cache and a run of them has a closed form.
The policies are those that engines document: what may be admitted, whether prompts run beside
decoding or before it, and what happens when the cache is full.

Times are sums over classes of cost (products, attention, host …), each with a weight of its own;
what a request waited for is kept by class, so that the share of each in a latency is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import Protocol

import numpy as np

from ...common.errors import PlanError
from .loop import Chunk


class PassCosts(Protocol):
    """Costs of passes by class, shape ``(classes,)``, before their weights."""

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        """Sum over ``steps`` passes that decode ``batch`` sequences.

        Args:
            batch: Sequences.
            cached: Tokens in the caches of all of them before the first pass.
            steps: Passes; each adds a token to every cache.
        """

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        """A pass over chunks of prompts, beside ``batch`` decoding sequences."""


@dataclass(frozen=True)
class Policy:
    """Rules by which an engine batches.

    Attributes:
        max_batch: Most sequences at a time.
        token_budget: Most tokens of a pass, over all ranks.
        chunked: Whether a prompt may be cut where the budget ends.
        mixed: Whether prompts run beside decoding; otherwise decoding waits while there are any.
        reserve: Share of a request's output that the cache must have room for when the request is
            admitted; below 1, the last admitted are evicted and computed again where room runs out.
    """

    max_batch: int = 256
    token_budget: int = 8192
    chunked: bool = True
    mixed: bool = True
    reserve: float = 0.0

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            PlanError: One is below 1, or ``reserve`` is not a share.
        """
        if min(self.max_batch, self.token_budget) < 1 or not 0.0 <= self.reserve <= 1.0:
            raise PlanError(
                f"max_batch={self.max_batch}, token_budget={self.token_budget}, "
                f"reserve={self.reserve}",
                hint="limits are at least 1, reserve is a share",
            )


@dataclass(frozen=True)
class Load:
    """Requests in the order in which they are sent.

    Attributes:
        prompts: Tokens of each prompt, shape ``(n,)``.
        outputs: Tokens that each generates.
        arrivals: Seconds at which each is sent; ignored by a closed loop.
        concurrency: Requests in flight of a closed loop; 0 for an open one.
        ready: Whether prompts are in the cache already, as on a decoding worker.
    """

    prompts: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray
    concurrency: int = 0
    ready: bool = False

    def __post_init__(self) -> None:
        """Check the requests.

        Raises:
            PlanError: There are none, or one has no tokens.
        """
        if not len(self.prompts) or self.prompts.min() < 1 or self.outputs.min() < 1:
            raise PlanError(
                "a load needs requests, each with a token of prompt and output at least",
                where="load",
            )


@dataclass
class Run:
    """What happened to each request; arrays have shape ``(n,)``, in seconds.

    Attributes:
        sent: When it was sent.
        first: When its first token came.
        finished: When its last token came.
        makespan: End of the last pass.
        waits: Classes' share of the mean time to the first token, shape ``(classes,)``, weighted
            seconds.
        tokens: The same of the mean time from the first to the last token.
        busy: The same of all passes.
        iterations: Passes.
        evicted: Times that a request was evicted.
        largest_batch: Most sequences in a pass.
        largest_cache: Most tokens in the cache.
    """

    sent: np.ndarray
    first: np.ndarray
    finished: np.ndarray
    makespan: float = 0.0
    waits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0))
    busy: np.ndarray = field(default_factory=lambda: np.zeros(0))
    iterations: int = 0
    evicted: int = 0
    largest_batch: int = 0
    largest_cache: int = 0


def run_engine(
    load: Load,
    costs: PassCosts,
    weights: np.ndarray,
    cache_tokens: int,
    policy: Policy,
    delay: float = 0.0,
) -> Run:
    """Serve a load on one engine.

    Args:
        load: The requests.
        costs: Of passes, by class.
        weights: Of the classes: what the unit of each costs in seconds.
        cache_tokens: Tokens that the cache holds.
        policy: Rules of the engine.
        delay: Seconds between sending a request and the engine's queue.

    Raises:
        PlanError: A request does not fit the cache.
    """
    most = int((load.prompts + load.outputs).max())
    if most > cache_tokens:
        raise PlanError(
            f"a request needs {most} tokens of cache, there are {cache_tokens}",
            hint="more devices, or shorter requests",
        )
    engine = _Engine(load, costs, weights, cache_tokens, policy, delay)
    engine.run()
    return engine.result()


class _Engine:
    def __init__(
        self,
        load: Load,
        costs: PassCosts,
        weights: np.ndarray,
        cache_tokens: int,
        policy: Policy,
        delay: float,
    ) -> None:
        self.costs, self.weights, self.policy, self.delay = costs, weights, policy, delay
        self.room, self.ready = cache_tokens, load.ready
        self.prompts: list[int] = load.prompts.astype(int).tolist()
        self.outputs: list[int] = load.outputs.astype(int).tolist()
        n = len(self.prompts)
        self.closed = load.concurrency > 0
        times = load.arrivals.tolist()
        if self.closed:
            times = [0.0] * min(load.concurrency, n)
        #: Requests that were not sent yet in a closed loop.
        self.next = len(times)
        self.sent = [0.0] * n
        self.first = [-1.0] * n
        self.finished = [0.0] * n
        self.arriving: deque[tuple[float, int]] = deque()
        self.before = self.clock = np.zeros(len(weights))
        #: Clock of classes when a request was sent, and when its first token came.
        self.at_sent: dict[int, np.ndarray] = {}
        self.at_first: dict[int, np.ndarray] = {}
        self.now = 0.0
        for index, time in enumerate(times):
            self._send(index, time)
        self.waiting: deque[int] = deque()
        #: Prompts that are being run: request and tokens that are left.
        self.partial: deque[list[int]] = deque()
        #: Decoding requests by the step at which they end.
        self.ends: list[tuple[int, int]] = []
        #: Order of admission of decoding requests, for eviction.
        self.admitted: list[int] = []
        self.ending: dict[int, int] = {}
        self.made = [0] * n
        self.step = self.batch = self.cached = 0
        self.held = 0.0
        self.iterations = self.evicted = self.largest_batch = self.largest_cache = 0
        self.waits, self.tokens = np.zeros(len(weights)), np.zeros(len(weights))
        self.left = n

    def _send(self, index: int, time: float) -> None:
        self.sent[index] = time
        self.arriving.append((time + self.delay, index))
        self.at_sent[index] = self.clock

    def run(self) -> None:
        while self.left:
            while self.arriving and self.arriving[0][0] <= self.now:
                self._queue()
            if not (self.batch or self.partial or self.waiting):
                self.now = max(self.now, self.arriving[0][0])
                continue
            chunks = self._chunks()
            if chunks:
                self._mixed(chunks)
            elif self.batch:
                self._decode()

    def _queue(self) -> None:
        """Put the request that arrived first into the queue."""
        time, index = self.arriving.popleft()
        if not self.closed:
            # It came while the last pass ran, or after it.
            self.at_sent[index] = self.before if time < self.now else self.clock
        self.waiting.append(index)

    def _reserved(self, index: int) -> float:
        """Tokens that are set aside for what a request has still to make."""
        return self.policy.reserve * (self.outputs[index] - self.made[index] - 1)

    def _fits(self, index: int) -> bool:
        """Whether a waiting request may be admitted."""
        running = self.batch + len(self.partial)
        if running >= self.policy.max_batch:
            return False
        need = self._prompt(index) + self._reserved(index)
        return not running or self.held + need <= self.room

    def _chunks(self) -> list[tuple[int, Chunk]]:
        """Parts of prompts of the next pass, oldest first; admits what fits."""
        policy = self.policy
        left = policy.token_budget - (self.batch if policy.mixed else 0)
        chunks: list[tuple[int, Chunk]] = []
        for entry in self.partial:
            if left <= 0:
                break
            count = min(entry[1], left)
            chunks.append((entry[0], Chunk(count, self._prompt(entry[0]) - entry[1])))
            left -= count
        while self.waiting and left > 0 and self._fits(self.waiting[0]):
            index = self.waiting[0]
            size = self._prompt(index)
            if size > left and not policy.chunked and chunks:
                break
            self.waiting.popleft()
            self.held += size + self._reserved(index)
            if self.ready:
                self._start(index)
                continue
            count = size if not policy.chunked else min(size, left)
            self.partial.append([index, size])
            chunks.append((index, Chunk(count, 0)))
            left -= count
        return chunks

    def _prompt(self, index: int) -> int:
        """Tokens to run before a request decodes; what was made before an eviction is run again."""
        return self.prompts[index] + self.made[index]

    def _mixed(self, chunks: list[tuple[int, Chunk]]) -> None:
        beside = self.batch if self.policy.mixed else 0
        parts = [chunk for _, chunk in chunks]
        self._advance(self.costs.mixed(parts, beside, float(self.cached)))
        self.largest_batch = max(self.largest_batch, beside + len(chunks))
        if beside:
            self._steps(1)
        done = []
        for (index, chunk), entry in zip(chunks, self.partial, strict=False):
            entry[1] -= chunk.tokens
            if entry[1] == 0:
                done.append(index)
        if done:
            self.partial = deque(entry for entry in self.partial if entry[1])
        for index in done:
            # The pass that ends a prompt also yields a token.
            self._token(index)

    def _token(self, index: int) -> None:
        """The token that the end of a prompt yields."""
        self.made[index] += 1
        if self.first[index] < 0.0:
            self.first[index] = self.now
            self.at_first[index] = self.clock
            self.waits += self.clock - self.at_sent.pop(index)
        if self.made[index] >= self.outputs[index]:
            self.held -= self.prompts[index] + self.made[index] - 1
            self._finish(index)
        else:
            self._start(index)

    def _start(self, index: int) -> None:
        """Begin to decode."""
        if self.ready and self.first[index] < 0.0:
            self.made[index] = 1
            self.first[index] = self.now
            self.at_first[index] = self.clock
            self.waits += self.clock - self.at_sent.pop(index)
            if self.outputs[index] == 1:
                self.held -= self.prompts[index]
                self._finish(index)
                return
        end = self.step + self.outputs[index] - self.made[index]
        heappush(self.ends, (end, index))
        self.ending[index] = end
        self.admitted.append(index)
        self.batch += 1
        self.cached += self.prompts[index] + self.made[index] - 1

    def _decode(self) -> None:
        steps = self.ends[0][0] - self.step
        grown = (1.0 - self.policy.reserve) * self.batch
        if grown > 0.0:
            steps = max(1, min(steps, int((self.room - self.held) / grown)))
        free = self.batch + len(self.partial) < self.policy.max_batch
        if steps > 1 and self.arriving and free:
            steps = self._steps_until(self.arriving[0][0] - self.now, steps)
        self._advance(self.costs.decode(self.batch, float(self.cached), steps))
        self.iterations += steps - 1
        self.largest_batch = max(self.largest_batch, self.batch)
        self._steps(steps)

    def _steps_until(self, gap: float, most: int) -> int:
        """Fewest passes that last ``gap`` seconds, up to ``most``."""
        whole, one = (
            float(self.costs.decode(self.batch, float(self.cached), n) @ self.weights)
            for n in (most, 1)
        )
        if whole <= gap:
            return most
        # Every pass takes a constant longer than the one before: n (one + (n - 1) growth / 2).
        growth = max(0.0, 2.0 * (whole / most - one) / (most - 1))
        base = one - growth / 2.0
        exact = 2.0 * gap / (base + sqrt(base**2 + 2.0 * growth * gap))
        return max(1, min(most, ceil(exact - 1e-9)))

    def _steps(self, steps: int) -> None:
        """Every decoding request makes ``steps`` tokens; those that end leave."""
        self.step += steps
        self.cached += self.batch * steps
        if self.policy.reserve < 1.0:
            self.held += (1.0 - self.policy.reserve) * self.batch * steps
        self.largest_cache = max(self.largest_cache, round(self.held))
        while self.ends and self.ends[0][0] <= self.step:
            end, index = heappop(self.ends)
            if self.ending.get(index) != end:
                continue
            del self.ending[index]
            self.made[index] = self.outputs[index]
            self.batch -= 1
            whole = self.prompts[index] + self.outputs[index] - 1
            self.cached -= whole
            self.held -= whole
            self._finish(index)
        if not self.batch and not self.partial:
            # What rounding of shares leaves does not add up over a run.
            self.held, self.cached = 0.0, 0
        while self.held > self.room and self.batch > 1:
            self._evict()

    def _evict(self) -> None:
        """Send the last admitted request back to the queue; it is computed again."""
        index = self.admitted.pop()
        while index not in self.ending:
            index = self.admitted.pop()
        made = self.outputs[index] - (self.ending.pop(index) - self.step)
        size = self.prompts[index] + made - 1
        self.made[index] = made
        self.batch -= 1
        self.cached -= size
        self.held -= size + self.policy.reserve * (self.outputs[index] - made)
        self.waiting.appendleft(index)
        self.evicted += 1
        # Its entry at the top of the heap would be taken for the next event.
        while self.ends and self.ending.get(self.ends[0][1]) != self.ends[0][0]:
            heappop(self.ends)

    def _finish(self, index: int) -> None:
        self.finished[index] = self.now
        self.tokens += self.clock - self.at_first.pop(index)
        self.left -= 1
        if self.closed and self.next < len(self.prompts):
            self._send(self.next, self.now)
            self.next += 1

    def _advance(self, cost: np.ndarray) -> None:
        self.before, self.clock = self.clock, self.clock + cost
        self.now += float(cost @ self.weights)
        self.iterations += 1

    def result(self) -> Run:
        n = len(self.prompts)
        return Run(
            sent=np.array(self.sent),
            first=np.array(self.first),
            finished=np.array(self.finished),
            makespan=self.now,
            waits=self.waits * self.weights / n,
            tokens=self.tokens * self.weights / n,
            busy=self.clock * self.weights,
            iterations=self.iterations,
            evicted=self.evicted,
            largest_batch=self.largest_batch,
            largest_cache=self.largest_cache,
        )
