"""Collectives message by message: every message on every link, queued where they meet.

This is what the formulas of ``collectives`` are checked against. It needs time in proportion to the
number of messages, so it is for tens of devices. A message is cut through: its head goes on to the
next link after the latency of the one before, its tail follows as fast as the slowest link lets it.
A link is busy for bytes over bandwidth with each, takes the one that comes first in the schedule of
those that wait, and lets queues grow as long as needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from opcast.simulate.clusters.topology import Dimension, Topology

#: Direction round a ring: upwards, downwards, or whichever is shorter.
UP, DOWN, SHORTEST = 1, -1, 0


@dataclass(frozen=True)
class Message:
    """Bytes from one place to another.

    Attributes:
        path: Numbers of the links that it takes.
        size: Bytes.
        after: Numbers of the messages that must have arrived before it leaves.
    """

    path: tuple[int, ...]
    size: float
    after: tuple[int, ...] = ()


@dataclass
class Links:
    """Links of a topology, numbered as they are first asked for.

    Attributes:
        topology: Topology to build; a torus counts as one ring per axis.
        rates: Bytes/s of each link in one direction, all lanes together.
        latencies: Seconds of each link.
        lanes: Equal lanes of each link; a message takes one. The links between a leaf and the spine
            have as many as devices of the leaf can use at once.
    """

    topology: Topology
    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    _numbers: dict[tuple[int | str, ...], int] = field(default_factory=dict)

    @cached_property
    def dims(self) -> tuple[Dimension, ...]:
        """Dimensions, with every axis of a torus as a separate ring."""
        return tuple(ring for d in self.topology.dims for ring in d.rings())

    def lines(self, dim: int) -> list[list[int]]:
        """Return the devices that differ only in dimension ``dim``, ordered by coordinate."""
        sizes = [d.size for d in self.dims]
        # NumPy's last axis varies fastest, a topology's first dimension: hence the reversal.
        grid = np.arange(prod(sizes)).reshape(sizes[::-1])
        axis = len(sizes) - 1 - dim
        lines = np.moveaxis(grid, axis, -1).reshape(-1, sizes[dim])
        return [[int(r) for r in line] for line in lines]

    def coordinates(self, device: int) -> list[int]:
        """Return the coordinates of a device, innermost first."""
        result = []
        for dim in self.dims:
            result.append(device % dim.size)
            device //= dim.size
        return result

    def path(self, source: int, target: int, way: int = SHORTEST) -> tuple[int, ...]:
        """Return the links from one device to another, dimension by dimension, innermost first."""
        here, there = self.coordinates(source), self.coordinates(target)
        links: list[int] = []
        # Dimension-order routing (Dally and Seitz, IEEE Trans. Computers 36, 1987).
        for d, (a, b) in enumerate(zip(here, there, strict=True)):
            if a != b:
                # A line is named by its dimension and the coordinates that its devices share.
                line = (d, *here[:d], -1, *here[d + 1 :])
                links += self._along(d, line, a, b, way)
                here[d] = b
        return tuple(links)

    def to_switch(self, device: int, dim: int) -> int:
        """Return the link from a device to the switch of its line."""
        here = self.coordinates(device)
        line = (dim, *here[:dim], -1, *here[dim + 1 :])
        # A dimension's latency goes from device to device: half before, half after the switch.
        return self._link(self.dims[dim], (*line, "up", here[dim]), 2)

    def from_switch(self, device: int, dim: int) -> int:
        """Return the link from the switch of its line to a device."""
        here = self.coordinates(device)
        line = (dim, *here[:dim], -1, *here[dim + 1 :])
        return self._link(self.dims[dim], (*line, "down", here[dim]), 2)

    def spine(self, device: int, dim: int, direction: str) -> int:
        """Return the link of a device's leaf to the spine (``rise``) or back (``fall``)."""
        here, shape = self.coordinates(device), self.dims[dim]
        line = (dim, *here[:dim], -1, *here[dim + 1 :])
        share = shape.radix / shape.oversubscription
        key: tuple[int | str, ...] = (*line, direction, here[dim] // shape.radix)
        return self._link(shape, key, 2, share, max(int(share), 1))

    def _along(self, d: int, line: tuple[int, ...], a: int, b: int, way: int) -> list[int]:
        dim = self.dims[d]
        if dim.kind == "fully_connected":
            return [self._link(dim, (*line, a, b), 1, 1 / (dim.size - 1))]
        if dim.kind == "ring":
            return self._around(dim, line, a, b, way)
        first = self._link(dim, (*line, "up", a), 2)
        last = self._link(dim, (*line, "down", b), 2)
        if dim.kind == "switch" or a // dim.radix == b // dim.radix:
            return [first, last]
        share = dim.radix / dim.oversubscription
        lanes = max(int(share), 1)
        rise = self._link(dim, (*line, "rise", a // dim.radix), 2, share, lanes)
        fall = self._link(dim, (*line, "fall", b // dim.radix), 2, share, lanes)
        return [first, rise, fall, last]

    def _around(self, dim: Dimension, line: tuple[int, ...], a: int, b: int, way: int) -> list[int]:
        n = dim.size
        # Both links of a ring of two go to the same neighbour and count as one of full bandwidth.
        if n == 2:
            return [self._link(dim, (*line, a, b), 1)]
        up = (b - a) % n
        step = way or (UP if up <= n - up else DOWN)
        hops = up if step == UP else n - up
        stops = [(a + step * k) % n for k in range(hops + 1)]
        return [self._link(dim, (*line, x, y), 1, 0.5) for x, y in pairwise(stops)]

    def _link(
        self,
        dim: Dimension,
        key: tuple[int | str, ...],
        halves: int,
        share: float = 1.0,
        lanes: int = 1,
    ) -> int:
        """Return a link with ``share`` of a device's bandwidth and its latency over ``halves``."""
        if key not in self._numbers:
            self._numbers[key] = len(self.rates)
            self.rates.append(dim.rate * share)
            self.latencies.append(dim.latency / halves)
            self.lanes.append(lanes)
        return self._numbers[key]


def arrivals(links: Links, messages: Sequence[Message]) -> np.ndarray:
    """Return when the last byte of each message arrives, in seconds, shape ``(n_messages,)``.

    Args:
        links: The links that the paths name.
        messages: Each may depend on any earlier one.
    """
    return _Run(links, messages).finish()


#: Kinds of events, in the order of equal times: heads join a queue before a lane is given away.
_HEAD, _FREE = 0, 1


class _Run:
    """One simulation: events are heads that reach a link, and lanes that become free."""

    def __init__(self, links: Links, messages: Sequence[Message]) -> None:
        self.links, self.messages = links, messages
        self.missing = [len(m.after) for m in messages]
        self.next_ones: list[list[int]] = [[] for _ in messages]
        for i, message in enumerate(messages):
            for j in message.after:
                self.next_ones[j].append(i)
        self.lanes = list(links.lanes)
        self.waiting: list[list[int]] = [[] for _ in links.rates]
        self.hops = [0] * len(messages)
        self.tails = [0.0] * len(messages)
        self.events = [(0.0, _HEAD, i) for i, count in enumerate(self.missing) if not count]

    def finish(self) -> np.ndarray:
        """Run all events; return the arrivals."""
        heapq.heapify(self.events)
        while self.events:
            time, what, number = heapq.heappop(self.events)
            if what == _FREE:
                self.lanes[number] += 1
                self._serve(number, time)
            elif self.hops[number] == len(self.messages[number].path):
                self._arrive(number, time)
            else:
                link = self.messages[number].path[self.hops[number]]
                heapq.heappush(self.waiting[link], number)
                self._serve(link, time)
        return np.array(self.tails)

    def _serve(self, link: int, time: float) -> None:
        """Start the waiting message with the lowest number if a lane is free."""
        if not self.lanes[link] or not self.waiting[link]:
            return
        number = heapq.heappop(self.waiting[link])
        message, latency = self.messages[number], self.links.latencies[link]
        # A lane has an equal share of the link's rate.
        end = time + message.size * self.links.lanes[link] / self.links.rates[link]
        self.lanes[link] -= 1
        heapq.heappush(self.events, (end, _FREE, link))
        # The tail leaves when this link has sent it, but never before it came from the last one.
        self.tails[number] = max(end, self.tails[number]) + latency
        self.hops[number] += 1
        # On the last link the tail's arrival counts, before it the head's.
        last = self.hops[number] == len(message.path)
        heapq.heappush(self.events, (self.tails[number] if last else time + latency, _HEAD, number))

    def _arrive(self, number: int, time: float) -> None:
        for j in self.next_ones[number]:
            self.missing[j] -= 1
            if not self.missing[j]:
                self.tails[j] = time
                heapq.heappush(self.events, (time, _HEAD, j))
