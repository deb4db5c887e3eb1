"""Engines behind a router in one event order: closed loops, open loads, disaggregated prefill.

The engine whose clock is furthest behind runs next, up to the earliest time at which a request may
reach it, so that interactions happen in the right order although an engine runs many passes at
once.
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

#: Seconds to transfer the cache of a prompt of the given number of tokens to another worker.
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
    """Simulate the serving of a load.

    Args:
        load: Requests.
        station: Engines that decode, and also run prompts unless ``prefill`` is given.
        prefill: Engines that only run prompts and transfer the caches to ``station``.
        router: One of :data:`ROUTERS`; after ``prefill``, the decoding engine with the fewest
            requests is always chosen.
        delay: Seconds between sending a request and its arrival in an engine's queue.
        transfer: Transfer time of a prompt's cache.
        record: Whether to record the engines' histories.

    Raises:
        PlanError: A request does not fit the cache, or the router is unknown.
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
        #: Time, tie-breaking order, request, and whether its prompt has been run.
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
        #: Times at which the links of the prefill workers become free, a heap.
        self.links = [0.0] * len(self.fronts)
        self.moves: list[tuple[float, float]] = []
        closed = load.concurrency > 0
        times = [0.0] * min(load.concurrency, n) if closed else load.arrivals.tolist()
        self.next = len(times) if closed else n
        # Whether the end of a request in one engine can cause an event in another.
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
        # Engines with requests by their clocks, which only their own steps advance.
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
            # NVIDIA Dynamo's KV router (https://docs.nvidia.com/dynamo, routing concepts) with unit
            # weights: uncached prompt tokens of the request and of those waiting, plus the tokens
            # that the engine's requests keep in the cache.
            place = min(places, key=lambda at: engines[at].load(time) + engines[at].uncached(index))
        else:
            place = min(places, key=lambda at: engines[at].holds(time))
        if engines is self.decoders:
            self.requests.engine[index] = place
        return engines[place]

    def _prompt_done(self, index: int, time: float) -> None:
        """Transfer the cache of a prompt from its prefill worker to a decoding engine."""
        assert self.prefiller is not None
        # A link transfers caches in turn, at the same mean rate as all of them at once.
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
    """The requests from the view of prefill workers: one output token each."""

    def __init__(self, load: Load, classes: int) -> None:
        super().__init__(load, classes)
        self.outputs = [1] * len(self.outputs)


#: How often the capacity run fills an engine's largest batch; engineering choice.
_FILLS = 4


def capacity(load: Load, station: Station, prefill: Station | None = None) -> float:
    """Maximum throughput of engines in requests per second, for requests like those of a load.

    Identical engines behind a router add up; of prefill and decoding engines the slower limits.

    Args:
        load: Requests.
        station: Engines that decode, and also run prompts unless ``prefill`` is given.
        prefill: Engines that only run prompts.
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
    """Requests per second of one engine that gets all of them at once."""
    asked = len(load.prompts)
    # Costs are known up to this batch size.
    batch = min(station.policy.max_batch, load.largest_batch)
    count = _FILLS * batch
    if load.blocks:
        # Keep all requests: the more there are, the more prefixes they share.
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
    # Until the last batch starts to drain, requests are always waiting.
    full = max(1, count - batch)
    taken = float(np.sort(run_fleet(many, one).finished)[full - 1])
    # After prefill workers, which yield first tokens, outputs of one token take no time.
    return full / taken if taken else inf


def _repeated(blocks: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Blocks of a repeated load, with new identifiers in each repetition.

    Prompts share prefixes as within the load itself but not across repetitions, which are an
    artefact of the simulation.
    """
    names = {block for own in blocks for block in own}
    step = max(names, default=0) - min(names, default=0) + 1
    return [
        tuple(block + step * (at // len(blocks)) for block in blocks[at % len(blocks)])
        for at in range(count if blocks else 0)
    ]
