"""Continuous batching, event by event: runs of decoding passes are simulated in one step.

Between two events (a request ends or arrives, the cache is full) every decoding pass runs the same
batch, so the time of a pass grows linearly with the cache and the total has a closed form. The
policies are those that engines document: when a request is admitted, whether prompts run beside or
before decoding, and what happens when the cache is full.

Times are weighted sums over cost classes (products, attention, host …). Waiting time is recorded
by class, so that the contribution of each class to a latency is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf, sqrt

import numpy as np

from ...common.errors import PlanError
from .load import Chunk, History, Requests, Station
from .occupancy import Occupancy, PrefixCache


class Engine:
    """One engine of a fleet: accepts requests and runs passes.

    Args:
        requests: Shared state of the requests.
        station: Costs, cache and rules that it shares with its replicas.
        ready: Whether prompts are in the cache already.
        prefixes: Prefix cache; ``None`` for none.
        done: Callback for each request that ends, with the request and the time.
        history: Record of the engine's states to fill; ``None`` for none.
    """

    def __init__(
        self,
        requests: Requests,
        station: Station,
        *,
        ready: bool,
        prefixes: PrefixCache | None,
        done: Callable[[int, float], None],
        history: History | None,
    ) -> None:
        self.requests, self.ready = requests, ready
        self.costs, self.weights, self.policy = station.costs, station.weights, station.policy
        self.accepted = station.accepted
        self.taken = Occupancy(station.cache, station.policy, station.accepted)
        self.prefixes, self.done, self.history = prefixes, done, history
        self.before = self.clock = np.zeros(len(self.weights))
        self.began = self.now = 0.0
        #: Accumulated cost by class when a request was sent, and when its first token came.
        self.at_sent: dict[int, np.ndarray] = {}
        self.at_first: dict[int, np.ndarray] = {}
        self.waiting: deque[int] = deque()
        #: Waiting requests that arrived after the next pass had been prepared.
        self.late: set[int] = set()
        #: Evicted requests whose cache is on the host.
        self.swapped: deque[int] = deque()
        #: Prompts in progress: the request and the tokens left to run.
        self.partial: deque[list[int]] = deque()
        #: Decoding requests with the step at which they end, a heap.
        self.ends: list[tuple[int, int]] = []
        #: Decoding requests in order of admission, for eviction.
        self.admitted: list[int] = []
        self.ending: dict[int, int] = {}
        #: Tokens in the cache, and the step, at which a request began to decode.
        self.started: dict[int, tuple[float, int]] = {}
        self.step_count = self.batch = 0
        self.cached = 0.0
        #: Seconds for which prompts have stalled decoding sequences.
        self.stalled = 0.0
        self.outstanding = 0
        #: Waiting requests that have been received: they came before the last check.
        self.received = 0
        #: Decoding passes for which prompts have waited for others, and since the last check for
        #: new requests.
        self.held = self.unchecked = 0
        #: Requests that ended in the last pass.
        self.ended = 0
        #: Load of each prompt without a first token: all its tokens plus those still to run.
        self.ahead: dict[int, int] = {}
        self.unrun = 0
        #: Their sum plus the tokens of decoding requests when the last pass began.
        self.held_before = 0.0
        self.iterations = self.evicted = self.largest_batch = self.largest_cache = 0
        self.hit_tokens = 0
        self._next_end: float | None = None
        #: Sequences and cached tokens, and costs of decoding passes from there by their number.
        self._state = (0, 0.0)
        self._decodings: dict[int, np.ndarray] = {}

    @property
    def busy(self) -> bool:
        """Whether it has any requests."""
        return self.outstanding > 0

    def holds(self, time: float) -> int:
        """Requests it has at a time, including those of the pass that runs at that time."""
        return self.outstanding + (self.ended if time < self.now else 0)

    def load(self, time: float) -> float:
        """Prompt tokens to run plus the tokens that all requests keep in the cache.

        Args:
            time: Time in seconds; a pass that has not ended by then does not count.
        """
        return self.held_before if time < self.now else self.unrun + self.cached

    def uncached(self, index: int) -> int:
        """Prompt tokens without a prefix-cache hit."""
        return self.requests.prompts[index] - self._hit(index)

    def send(self, index: int, time: float) -> None:
        """Accept a request that reached the engine's queue at ``time``.

        Raises:
            PlanError: The request does not fit the cache.
        """
        own = self.requests
        most = own.prompts[index] + own.outputs[index]
        if self.taken.cache.share_of(most) > 1.0:
            raise PlanError(
                f"a request needs {most} tokens of cache, there are {self.taken.cache.tokens}",
                hint="more devices, or shorter requests",
            )
        self._next_end = None
        if not self.busy:
            self.now = self.began = max(self.now, time)
            self.before = self.clock
        # The request arrived during the last pass, or after it.
        whole = self.now - self.began
        share = min(1.0, max(0.0, (time - self.began) / whole)) if whole > 0.0 else 1.0
        self.at_sent[index] = self.before + (self.clock - self.before) * share
        self.waiting.append(index)
        if self.policy.ahead and share > 0.0 and whole > 0.0:
            self.late.add(index)
        self.outstanding += 1
        self.ahead[index] = own.prompts[index] + self.uncached(index)
        self.unrun += self.ahead[index]
        self.held_before += self.ahead[index]

    def next_end(self) -> float:
        """A lower bound on the time at which the next request ends."""
        # Called whenever another engine takes a step, while this one's state is unchanged.
        if self._next_end is None:
            self._next_end = self.now if self.busy else inf
            if self.ends and not (self.partial or self.waiting or self.swapped):
                self._next_end += self._seconds(self.ends[0][0] - self.step_count)
        return self._next_end

    def step(self, until: float) -> None:
        """Run one pass with prompts, or decoding passes until something may change.

        Args:
            until: Time at which a request may arrive.
        """
        self._next_end = None
        if not (self.batch or self.partial):
            self.late.clear()
        chunks = self._chunks()
        if chunks:
            self._mixed(chunks)
        elif self.batch:
            self._decode(until)

    def _need(self, index: int) -> float:
        """Cache tokens that a request takes at admission, with those reserved for its output."""
        own = self.requests
        reserved = self.policy.reserve * (own.outputs[index] - own.made[index] - 1)
        slack = (self.policy.block - 1) / 2.0
        return self._prompt(index) - self._hit(index) + reserved + slack

    def _hit(self, index: int) -> int:
        """Prefix-cache hit of a prompt in tokens; at least one token is always run."""
        own = self.requests
        found = own.hits[index]
        if self.prefixes is not None and own.blocks:
            found = max(found, self.prefixes.match(own.blocks[index]))
        return min(found, own.prompts[index] - 1)

    def _fits(self, index: int) -> bool:
        """Whether a waiting request may be admitted."""
        running = self.batch + len(self.partial)
        if running >= self.policy.max_batch:
            return False
        return not running or self.taken.fits(self._need(index))

    def _patience(self) -> int:
        """Maximum number of decoding passes before waiting prompts run."""
        policy = self.policy
        if not self.waiting or self.partial or self.ready or self.batch < policy.ranks:
            return 0
        checked = self.received or policy.poll == 1
        passes = 0 if checked else max(0, policy.poll - self.unchecked)
        return passes if self._batched() else max(passes, policy.gather - self.held)

    def _batched(self) -> bool:
        """Whether waiting prompts are enough for a pass."""
        policy = self.policy
        if policy.ranks > 1 or not policy.gather:
            return len(self.waiting) >= policy.ranks
        missing = policy.fill * policy.token_budget - self.batch
        for index in self.waiting:
            missing -= self._prompt(index) - self._hit(index)
            if missing <= 0.0:
                break
        return missing <= 0.0

    def _chunks(self) -> list[tuple[int, Chunk]]:
        """Prompt chunks of the next pass, oldest first; admits the requests that fit."""
        policy = self.policy
        if self._patience() > 0:
            return []
        self.held = self.unchecked = 0
        left = policy.token_budget - (self.batch if policy.mixed else 0)
        # A prompt runs on one rank, which has a share of the budget.
        most = policy.token_budget // policy.ranks
        chunks: list[tuple[int, Chunk]] = []
        for entry in self.partial:
            if left <= 0:
                break
            count = min(entry[1], left, most)
            chunks.append((entry[0], Chunk(count, self._prompt(entry[0]) - entry[1])))
            left -= count
        while self.swapped and self._fits(self.swapped[0]):
            self._return(self.swapped.popleft())
        while self.waiting and left > 0 and not self.swapped and self._fits(self.waiting[0]):
            index = self.waiting[0]
            if index in self.late:
                break
            hit = self._hit(index)
            size = self._prompt(index) - hit
            if size > left and not policy.chunked and chunks:
                break
            self.waiting.popleft()
            self.taken.admit(index, self._need(index))
            if self.ready:
                self._start(index)
                continue
            self.hit_tokens += hit
            if self.requests.made[index] == 0.0:
                self.requests.found[index] = hit
            if self.prefixes is not None and self.requests.blocks:
                self.prefixes.add(self.requests.blocks[index], self.taken.left)
            count = min(size, left, most) if policy.chunked else size
            self.partial.append([index, size])
            chunks.append((index, Chunk(count, hit)))
            left -= count
        self.received = len(self.waiting)
        if chunks:
            # The queue is checked after every pass with prompts.
            self.unchecked = policy.poll
        return chunks

    def _prompt(self, index: int) -> int:
        """Prompt tokens to run; includes tokens generated before an eviction."""
        return self.requests.prompts[index] + int(self.requests.made[index])

    def _mixed(self, chunks: list[tuple[int, Chunk]]) -> None:
        beside = self.batch if self.policy.mixed else 0
        parts = [chunk for _, chunk in chunks]
        self._advance(self.costs.mixed(parts, beside, self.cached), 1)
        batch = beside + len(chunks)
        self.largest_batch = max(self.largest_batch, batch)
        self._record(batch, beside, 1, sum(chunk.tokens for chunk in parts))
        if beside:
            self._steps(1)
        done = []
        for (index, chunk), entry in zip(chunks, self.partial, strict=False):
            entry[1] -= chunk.tokens
            if entry[1] == 0:
                done.append(index)
        if done:
            self.partial = deque(entry for entry in self.partial if entry[1])
        own = self.requests
        for index in done:
            # The pass that finishes a prompt also yields a token.
            own.made[index] += 1
            if index in self.at_sent:
                self._first(index)
            if own.made[index] >= own.outputs[index]:
                self._finish(index)
            else:
                self._start(index)

    def _first(self, index: int) -> None:
        own = self.requests
        if own.first[index] < 0.0:
            own.first[index] = self.now
        self.at_first[index] = self.clock
        self.unrun -= self.ahead.pop(index)
        own.waits += self.clock - self.at_sent.pop(index)

    def _start(self, index: int) -> None:
        """Begin to decode a request."""
        own = self.requests
        if self.ready and index in self.at_sent:
            own.made[index] = 1
            self._first(index)
            if own.outputs[index] == 1:
                self._finish(index)
                return
        left = ceil((own.outputs[index] - own.made[index]) / self.accepted - 1e-9)
        size = own.prompts[index] + own.made[index] - 1
        end = self.step_count + left
        heappush(self.ends, (end, index))
        self.ending[index] = end
        self.started[index] = (size, self.step_count)
        self.admitted.append(index)
        self.taken.start(index)
        self.batch += 1
        self.cached += size

    def _passes(self, steps: int) -> np.ndarray:
        """Costs of the next decoding passes; while nothing else runs, they are asked for again."""
        state = self.batch, self.cached
        if state != self._state:
            self._state, self._decodings = state, {}
        if steps not in self._decodings:
            self._decodings[steps] = self.costs.decode(*state, steps)
        return self._decodings[steps]

    def _seconds(self, steps: int) -> float:
        return float(self._passes(steps) @ self.weights)

    def _decode(self, until: float) -> None:
        steps = self.taken.most_steps(self.batch, self.ends[0][0] - self.step_count)
        free = self.batch + len(self.partial) < self.policy.max_batch
        if self.late:
            steps = 1
        patience = self._patience()
        if patience:
            steps = min(steps, patience)
        if steps > 1 and until < inf and free:
            steps = self._steps_until(until - self.now, steps)
        self.unchecked += steps
        if patience:
            self.held += steps
        else:
            self.unchecked %= self.policy.poll
        self._advance(self._passes(steps), steps)
        self.largest_batch = max(self.largest_batch, self.batch)
        self._record(self.batch, self.batch, steps, 0)
        self._steps(steps)

    def _record(self, batch: int, decoding: int, passes: int, chunk: int) -> None:
        """Record the last passes in the history, if there is one."""
        if self.history is None:
            return
        span = self.now - self.began
        if decoding:
            gap = span / passes
            # A stall before decoding lengthens one inter-token gap of each sequence.
            self.history.gaps.append((gap + self.stalled, decoding))
            if passes > 1:
                self.history.gaps.append((gap, decoding * (passes - 1)))
            self.stalled = 0.0
        elif self.batch:
            self.stalled += span
        else:
            self.stalled = 0.0
        queue = len(self.waiting) + len(self.swapped)
        self.history.add(self.now, span, batch, queue, self.taken.used, chunk, passes)

    def _steps_until(self, gap: float, most: int) -> int:
        """Number of passes, at most ``most``, that last at least ``gap`` seconds."""
        whole = self._seconds(most)
        if whole <= gap:
            return most
        one = self._seconds(1)
        # The time of a pass grows by a constant: n (one + (n - 1) growth / 2).
        growth = max(0.0, 2.0 * (whole / most - one) / (most - 1))
        base = one - growth / 2.0
        gap = max(gap, 0.0)
        exact = 2.0 * gap / (base + sqrt(base**2 + 2.0 * growth * gap))
        return max(1, min(most, ceil(exact - 1e-9)))

    def _steps(self, steps: int) -> None:
        """Advance all decoding requests by ``steps`` passes; finished requests leave."""
        grown = self.batch * steps * self.accepted
        self.step_count += steps
        self.cached += grown
        self.taken.grow(self.batch, steps)
        used = self.taken.used
        if used > self.largest_cache:
            self.largest_cache = round(used)
        while self.ends and self.ends[0][0] <= self.step_count:
            end, index = heappop(self.ends)
            if self.ending.get(index) != end:
                continue
            self.requests.made[index] = self.requests.outputs[index]
            self._leave(index)
            self._finish(index)
        if not self.batch and not self.partial:
            # Rounding errors of fractional tokens must not add up over a run.
            self.cached = 0.0
            self.taken.clear()
        while self.batch > 1 and self.taken.used > self.taken.room:
            self._evict()

    def _leave(self, index: int) -> float:
        """Stop decoding a request; returns the tokens in its cache."""
        del self.ending[index]
        size, start = self.started.pop(index)
        grown = (self.step_count - start) * self.accepted
        self.batch -= 1
        self.cached -= size + grown
        return size + grown

    def _evict(self) -> None:
        """Return the request admitted last to the queue, swapped out or to be recomputed."""
        index = self.admitted.pop()
        while index not in self.ending:
            index = self.admitted.pop()
        _, start = self.started[index]
        own = self.requests
        own.made[index] += (self.step_count - start) * self.accepted
        size = self._leave(index)
        self.taken.release(index)
        if self.policy.swap:
            self._advance(self.costs.swap(size), 0)
            self.swapped.append(index)
        else:
            self.waiting.appendleft(index)
            self.received += 1
        self.evicted += 1
        # A stale entry at the top of the heap would be taken for the next event.
        while self.ends and self.ending.get(self.ends[0][1]) != self.ends[0][0]:
            heappop(self.ends)

    def _return(self, index: int) -> None:
        """Swap the cache of a request back in."""
        self.taken.admit(index, self._need(index))
        self._advance(self.costs.swap(float(self._prompt(index))), 0)
        self._start(index)

    def _finish(self, index: int) -> None:
        """Release the cache of a request and report its end."""
        self.taken.release(index)
        own = self.requests
        own.finished[index] = self.now
        own.tokens += self.clock - self.at_first.pop(index)
        self.outstanding -= 1
        self.ended += 1
        self.done(index, self.now)

    def _advance(self, cost: np.ndarray, passes: int) -> None:
        self.before, self.clock = self.clock, self.clock + cost
        self.held_before = self.unrun + self.cached
        self.ended = 0
        self.began = self.now
        self.now += float(cost @ self.weights)
        self.iterations += passes
        if passes:
            self.late.clear()
