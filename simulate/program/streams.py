"""Two streams of one device: computation in order, and concurrent collectives that share links.

Collectives that overlap in time and share links each progress at a fraction of their rate (a fluid
model with fair shares: Bertsekas and Gallager, Data Networks, 1992, on max-min fairness);
collectives over the same devices run one after another, as in one communicator.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .list_schedule import Dependencies
from .nodes import Node

#: Times closer than this fraction of the total count as equal on the critical path: start and end
#: of adjacent nodes differ by rounding.
_SAME = 1e-9


@dataclass(frozen=True)
class StreamRun:
    """When each node runs; arrays have shape ``(n_nodes,)``, times in seconds.

    Attributes:
        start: Start; for a collective, when its communicator is free.
        end: End.
        compute: Sum of computation.
        communication: Time during which any collective is in progress.
        makespan: Last end.
        critical: Positions of a chain of nodes that explains the makespan, in order.
    """

    start: np.ndarray
    end: np.ndarray
    compute: float
    communication: float
    makespan: float
    critical: tuple[int, ...]

    @property
    def exposed(self) -> float:
        """Time lost to collectives, because the device waits or computes on fewer cores."""
        return max(0.0, self.makespan - self.compute)


def run_streams(
    nodes: Sequence[Node],
    transfer: Sequence[float] | np.ndarray,
    links: Sequence[frozenset[Hashable]],
    *,
    scheduled: bool,
    contention: float = 0.0,
) -> StreamRun:
    """Simulate a program.

    Args:
        nodes: Nodes in the order in which the device runs or issues them.
        transfer: Seconds of each node's collective when it runs alone; 0 for others.
        links: Links that each node's collective uses.
        scheduled: Whether everything runs at its place in the order. Otherwise collectives are
            issued as soon as their operands are ready, and of the ready kernels the earliest runs
            first, which XLA's LatencyHidingScheduler aims for.
        contention: Fraction of a device that a collective takes from concurrent kernels, 0 to 1,
            as in :class:`~opcast.simulate.step.costs.Costs`.

    Raises:
        ValueError: Nodes wait for one another.
    """
    return _Run(nodes, transfer, links, scheduled=scheduled, contention=contention).run()


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        nodes: Sequence[Node],
        transfer: Sequence[float] | np.ndarray,
        links: Sequence[frozenset[Hashable]],
        *,
        scheduled: bool,
        contention: float = 0.0,
    ) -> None:
        self.nodes, self.transfer, self.links, self.scheduled = nodes, transfer, links, scheduled
        self.contention = contention
        count = len(nodes)
        self.start, self.end = np.full(count, np.nan), np.full(count, np.nan)
        self.left: dict[int, float] = {}
        self.queues: dict[tuple[int, ...], deque[int]] = {}
        self.now = self.communication = 0.0
        self.waits = Dependencies([node.operands for node in nodes])
        self.ready: list[int] = []

    def run(self) -> StreamRun:
        """Run all nodes."""
        self._in_order() if self.scheduled else self._as_ready()
        # Collectives that nothing reads are still part of the program's time.
        while self.left:
            self._advance(np.inf)
        return self._result()

    def _as_ready(self) -> None:
        """Run the earliest node whose operands are ready, else wait for the next collective."""
        for place in self.waits.ready():
            self._becomes_ready(place)
        done = 0
        total = sum(1 for node in self.nodes if not node.collective)
        while done < total:
            if not self.ready:
                if not self.left:
                    raise ValueError("nodes wait for one another")
                self._advance(np.inf)
                continue
            place = heapq.heappop(self.ready)
            self.start[place] = self.now
            self._compute(self.nodes[place].seconds)
            self._finish(place)
            done += 1

    def _becomes_ready(self, place: int) -> None:
        if self.nodes[place].collective:
            self._issue(place)
        else:
            heapq.heappush(self.ready, place)

    def _in_order(self) -> None:
        """Issue nodes in order; between two, let collectives progress."""
        for place, node in enumerate(self.nodes):
            for operand in node.operands:
                # Blocks only when a result is read: issuing a collective does not wait for its end.
                self._wait_for(operand)
            if node.collective:
                self._issue(place)
                if node.collective.waits:
                    self._wait_for(place)
                continue
            self.start[place] = self.now
            self._compute(node.seconds)
            self._finish(place)

    def _issue(self, place: int) -> None:
        collective = self.nodes[place].collective
        assert collective is not None
        # One queue per communicator: NCCL serialises the collectives of a communicator's stream.
        queue = self.queues.setdefault(collective.group, deque())
        queue.append(place)
        if len(queue) == 1:
            self._begin(place)

    def _begin(self, place: int) -> None:
        self.start[place] = self.now
        self.left[place] = self.transfer[place]

    def _wait_for(self, place: int) -> None:
        while np.isnan(self.end[place]):
            if not self.left:
                raise ValueError(f"{self.nodes[place].name} is never issued")
            self._advance(np.inf)

    def _compute(self, seconds: float) -> None:
        """Run a kernel, which has fewer cores while a collective is in progress."""
        rate = 1.0 - self.contention
        while self.left and seconds > 0.0 and rate < 1.0:
            slow = self._slowness()
            ends = min(left * slow[p] for p, left in self.left.items())
            if ends * rate >= seconds:
                seconds /= rate
                break
            self._advance(self.now + ends)
            seconds -= ends * rate
        self._advance(self.now + seconds)

    def _advance(self, until: float) -> None:
        """Advance time to ``until``, or, if that is infinite, to the end of a collective."""
        while self.left:
            # Shares change only when a collective ends, so time moves from end to end.
            slow = self._slowness()
            ends = {p: self.now + left * slow[p] for p, left in self.left.items()}
            first = min(ends, key=ends.__getitem__)
            to = min(until, ends[first])
            for p in self.left:
                self.left[p] -= (to - self.now) / slow[p]
            # At least one collective is in progress during the whole interval.
            self.communication += to - self.now
            self.now = to
            # One that ends exactly at ``until`` is finished first: its reader may start then.
            if ends[first] > until:
                return
            del self.left[first]
            self._finish(first)
            if until == np.inf:
                return
        if until < np.inf:
            self.now = max(self.now, until)

    def _slowness(self) -> dict[int, int]:
        """Factor by which each collective is slowed: the number of users of its busiest link."""
        # An equal share of the busiest link. Unlike true max-min fairness it does not redistribute
        # what another collective, limited elsewhere, leaves unused, so it errs on the slow side.
        users: dict[Hashable, int] = {}
        for place in self.left:
            for link in self.links[place]:
                users[link] = users.get(link, 0) + 1
        return {p: max((users[k] for k in self.links[p]), default=1) for p in self.left}

    def _finish(self, place: int) -> None:
        self.end[place] = self.now
        collective = self.nodes[place].collective
        if collective:
            queue = self.queues[collective.group]
            queue.popleft()
            if queue:
                self._begin(queue[0])
        if not self.scheduled:
            for reader in self.waits.finish(place):
                self._becomes_ready(reader)

    def _result(self) -> StreamRun:
        makespan = float(self.end.max(initial=0.0))
        compute = float(sum(node.seconds for node in self.nodes))
        critical = self._critical(makespan)
        return StreamRun(
            self.start, self.end, compute, self.communication, makespan, tuple(critical)
        )

    def _critical(self, makespan: float) -> list[int]:
        """Walk back from the last end: the predecessor of a node ended when it began."""
        if not len(self.nodes):
            return []
        slack = _SAME * makespan
        # Sorted ends allow a binary search for predecessors: O(n log n) for the whole chain.
        by_end = np.argsort(self.end, kind="stable")
        sorted_ends = self.end[by_end]
        at, chain = int(by_end[-1]), list[int]()
        seen: set[int] = set()
        while at not in seen:
            seen.add(at)
            if self.end[at] > self.start[at]:
                chain.append(at)
            begin = self.start[at]
            if begin <= slack:
                break
            low = int(np.searchsorted(sorted_ends, begin - slack))
            high = int(np.searchsorted(sorted_ends, begin + slack, side="right"))
            before = [int(p) for p in by_end[low:high] if int(p) not in seen]
            if not before:
                break
            # Prefer a true dependency, then a node that occupied the stream, then anything.
            reads = [p for p in before if p in self.nodes[at].operands]
            busy = [p for p in before if self.end[p] > self.start[p]]
            at = (reads or busy or before)[-1]
        return chain[::-1]
