"""Engines behind a router, in one order of time: closed loops, open loads, prompts apart.

The engine that lags is always the next to run, up to the first time at which anything may reach it;
so that engines influence each other in the right order although each takes many passes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from ...common.errors import PlanError
from .engine import Engine
from .load import History, Load, Requests, Run, Station
from .occupancy import PrefixCache
from .policies import ROUTERS

#: Seconds that the cache of a prompt of so many tokens takes from one worker to another.
Transfer = Callable[[int], float]


def run_fleet(
    load: Load,
    station: Station,
    prefill: Station | None = None,
    *,
    router: str = "round-robin",
    delay: float = 0.0,
    transfer: Transfer = lambda tokens: 0.0,
    record: bool = False,
) -> Run:
    """Serve a load.

    Args:
        load: The requests.
        station: Engines that decode, and run prompts as well unless ``prefill`` does.
        prefill: Engines that run prompts alone; their caches move to the others.
        router: One of :data:`ROUTERS`; decoding engines after ``prefill`` are always chosen by
            fewest requests.
        delay: Seconds between sending a request and an engine's queue.
        transfer: Of a prompt's cache.
        record: Whether to keep the engines' histories.

    Raises:
        PlanError: A request does not fit the cache, or the router is not known.
    """
    if router not in ROUTERS:
        raise PlanError(f"a router {router!r} is not known", hint=", ".join(ROUTERS))
    return _Fleet(load, station, prefill, router, delay, transfer, record).run()


class _Fleet:
    def __init__(
        self,
        load: Load,
        station: Station,
        prefill: Station | None,
        router: str,
        delay: float,
        transfer: Transfer,
        record: bool,
    ) -> None:
        self.load, self.router, self.transfer = load, router, transfer
        self.delay = delay
        n = len(load.prompts)
        self.requests = Requests(load, len(station.weights))
        #: Time, order, request, and whether its prompt was run.
        self.events: list[tuple[float, int, int, bool]] = []
        self.order = self.turn = 0
        self.left = n
        self.histories: list[History] = []
        self.decoders = self._engines(station, record, load.ready or prefill is not None)
        self.fronts = self.decoders
        self.prefiller: _Prompts | None = None
        if prefill is not None:
            self.prefiller = _Prompts(load, len(prefill.weights))
            self.fronts = self._engines(prefill, record, False, self.prefiller)
        self.engines = self.decoders + (self.fronts if prefill is not None else [])
        #: When the link of each worker that runs prompts is free, a heap.
        self.links = [0.0] * len(self.fronts)
        self.moves: list[tuple[float, float]] = []
        closed = load.concurrency > 0
        times = [0.0] * min(load.concurrency, n) if closed else load.arrivals.tolist()
        self.next = len(times) if closed else n
        # Whether the end of one request is the beginning of another's work.
        self.coupled = prefill is not None or (closed and self.next < n)
        for index, time in enumerate(times):
            self._send(index, time)

    def _engines(
        self, station: Station, record: bool, ready: bool, own: _Prompts | None = None
    ) -> list[Engine]:
        keeps = bool(self.load.blocks) and not ready
        engines = [
            Engine(
                own or self.requests,
                replace(station, accepted=1.0) if own else station,
                ready=ready,
                prefixes=PrefixCache(self.load.block_tokens) if keeps else None,
                done=self._prompt_done if own else self._done,
                history=History() if record else None,
            )
            for _ in range(station.count)
        ]
        self.histories += [engine.history for engine in engines if engine.history is not None]
        return engines

    def _send(self, index: int, time: float) -> None:
        self.requests.sent[index] = time
        self._event(time + self.delay, index, False)

    def _event(self, time: float, index: int, after: bool) -> None:
        heappush(self.events, (time, self.order, index, after))
        self.order += 1

    def run(self) -> Run:
        places = {engine: place for place, engine in enumerate(self.engines)}
        # Engines that have requests, by their clocks, which only their own steps move.
        busy: list[tuple[float, int]] = []
        while self.left:
            if self.events and (not busy or self.events[0][0] <= busy[0][0]):
                time, _, index, after = heappop(self.events)
                engine = self._route(index, after, time)
                idle = not engine.busy
                engine.send(index, time)
                if idle:
                    heappush(busy, (engine.now, places[engine]))
                continue
            place = heappop(busy)[1]
            engine = self.engines[place]
            until = self.events[0][0] if self.events else inf
            if self.coupled and len(self.engines) > 1:
                until = min([until, *(e.next_end() for e in self.engines if e is not engine)])
            engine.step(until)
            if engine.busy:
                heappush(busy, (engine.now, place))
        return self._result()

    def _route(self, index: int, after: bool, time: float) -> Engine:
        engines = self.decoders if after else self.fronts
        if len(engines) == 1:
            return engines[0]
        places = range(len(engines))
        if self.router == "round-robin" and not after:
            place = self.turn % len(engines)
            self.turn += 1
        elif self.router == "prefix-aware" and not after:
            # NVIDIA Dynamo's KV router (https://docs.nvidia.com/dynamo, routing concepts), whose
            # weights are 1: prompt tokens that no cache has, of the request and of those ahead of
            # it, and tokens that the engine's requests keep.
            place = min(places, key=lambda at: engines[at].load(time) + engines[at].uncached(index))
        else:
            place = min(places, key=lambda at: engines[at].holds(time))
        if engines is self.decoders:
            self.requests.engine[index] = place
        return engines[place]

    def _prompt_done(self, index: int, time: float) -> None:
        """A prompt was run by a worker of its own: its cache moves to one that decodes."""
        assert self.prefiller is not None
        # A link moves one cache after the other, at the same mean rate as all of them at once.
        start = max(time, heappop(self.links))
        self.moves.append((time, start))
        end = start + self.transfer(self.requests.prompts[index])
        heappush(self.links, end)
        self._event(end, index, True)

    def _done(self, index: int, time: float) -> None:
        self.left -= 1
        if self.next < len(self.requests.prompts):
            self._send(self.next, time)
            self.next += 1
            if self.next == len(self.requests.prompts) and self.prefiller is None:
                self.coupled = False

    def _result(self) -> Run:
        own, n = self.requests, len(self.requests.prompts)
        weights = self.decoders[0].weights
        waits = own.waits * weights
        busy = sum((e.clock * e.weights for e in self.decoders), np.zeros(len(weights)))
        if self.prefiller is not None:
            front = self.fronts[0].weights
            waits = waits + self.prefiller.waits * front
            busy = busy + sum((e.clock * e.weights for e in self.fronts), np.zeros(len(front)))
        return Run(
            sent=np.array(own.sent),
            first=np.array(own.first),
            finished=np.array(own.finished),
            makespan=max(e.now for e in self.engines),
            waits=waits / n,
            tokens=own.tokens * weights / n,
            busy=busy,
            iterations=sum(e.iterations for e in self.engines),
            evicted=sum(e.evicted for e in self.engines),
            largest_batch=max(e.largest_batch for e in self.engines),
            largest_cache=max(e.largest_cache for e in self.engines),
            hit_tokens=sum(e.hit_tokens for e in self.engines),
            found=np.array((self.prefiller or own).found),
            engine=np.array(own.engine),
            histories=self.histories,
            moves=np.array(self.moves).reshape(-1, 2),
        )


class _Prompts(Requests):
    """The requests as workers see them that run prompts alone: one token each."""

    def __init__(self, load: Load, classes: int) -> None:
        super().__init__(load, classes)
        self.outputs = [1] * len(self.outputs)


#: Times that the largest batch of an engine is filled; engineering choice.
_FILLS = 4


def capacity(load: Load, station: Station, prefill: Station | None = None) -> float:
    """Requests a second that engines serve at most, in requests such as those of a load.

    Equal engines behind a router serve so many times what one serves, and of two kinds in a row the
    slower decides.

    Args:
        load: The requests.
        station: Engines that decode, and run prompts as well unless ``prefill`` does.
        prefill: Engines that run prompts alone.
    """
    if prefill is None:
        return _of_one(load, station) * station.count
    ahead = replace(load, outputs=np.ones_like(load.outputs))
    behind = replace(load, ready=True, blocks=())
    return min(
        _of_one(ahead, prefill) * prefill.count,
        _of_one(behind, station) * station.count,
    )


def _of_one(load: Load, station: Station) -> float:
    """Requests a second of one engine that has them all at once."""
    asked = len(load.prompts)
    # Costs are known for batches of at most so many.
    batch = min(station.policy.max_batch, load.largest_batch)
    count = _FILLS * batch
    if load.blocks:
        # The more requests, the more of them find what others left: none is dropped.
        count = max(count, asked)
    at = np.arange(count) % asked
    many = replace(
        load,
        prompts=load.prompts[at],
        outputs=load.outputs[at],
        arrivals=np.zeros(count),
        concurrency=0,
        stands_for=0,
        hits=None if load.hits is None else load.hits[at],
        blocks=_repeated(load.blocks, count),
    )
    one = replace(station, count=1, policy=replace(station.policy, max_batch=batch))
    # While the last batch runs empty there is no other request waiting.
    full = max(1, count - batch)
    taken = float(np.sort(run_fleet(many, one).finished)[full - 1])
    # Behind workers of prompts, which give first tokens, outputs of one token take no time.
    return full / taken if taken else inf


def _repeated(blocks: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Blocks of a load that is repeated: those of each repetition have names of their own.

    Prompts share what they share in the load itself, and find nothing of the repetition before:
    that a request comes twice is no property of the load.
    """
    names = {block for own in blocks for block in own}
    step = max(names, default=0) - min(names, default=0) + 1
    return [
        tuple(block + step * (at // len(blocks)) for block in blocks[at % len(blocks)])
        for at in range(count if blocks else 0)
    ]
