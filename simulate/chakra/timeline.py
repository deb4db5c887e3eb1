"""Runs traces with the durations they contain: start and end of each node of each rank.

A rank computes one node at a time, as they become ready. A collective starts when all ranks of its
group have reached it and the group's previous one has ended, a transfer when both sides have; the
longest of the ranks' durations counts. Contention for links is ignored: ASTRA-sim models it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...common.chrome_trace import ChromeTrace, free_tracks
from ...common.errors import DatasetError
from ..program.list_schedule import Dependencies
from .messages import EtNode, NodeType

#: A joint operation of several ranks: kind, group or pair, and its index among those of the kind.
Meeting = tuple[object, ...]


@dataclass(frozen=True)
class TraceRun:
    """Traces with their times.

    Attributes:
        traces: Nodes of each rank.
        start: Starts on each rank, in microseconds, shape ``(n_nodes,)``.
        end: Ends, likewise.
    """

    traces: Sequence[Sequence[EtNode]]
    start: list[np.ndarray]
    end: list[np.ndarray]

    @property
    def makespan_us(self) -> float:
        """Last end, in microseconds."""
        return float(max((e.max(initial=0.0) for e in self.end), default=0.0))

    def summary(self) -> dict[str, object]:
        """Number of ranks and time; for rank 0 computation, and count and bytes by collective."""
        first = self.traces[0]
        count: Counter[str] = Counter(n.collective for n in first if n.collective)
        size: Counter[str] = Counter()
        for node in first:
            size[node.collective] += node.bytes
        return {
            "ranks": len(self.traces),
            "step_us": self.makespan_us,
            "latency_us": self.makespan_us,
            "nodes": sum(map(len, self.traces)),
            "compute_us": float(sum(n.micros for n in first if n.type == NodeType.COMP)),
            "kernels": sum(n.kernels for n in first),
            "collectives": {k: {"count": count[k], "bytes": size[k]} for k in sorted(count)},
        }

    def chrome_trace(self) -> dict[str, object]:
        """Trace events for Perfetto and chrome://tracing, one process per rank."""
        trace = ChromeTrace()
        for rank, nodes in enumerate(self.traces):
            trace.process(f"rank {rank}", rank)
            tracks = self._tracks(trace, rank)
            spans = zip(nodes, tracks, self.start[rank], self.end[rank], strict=True)
            for node, track, start, end in spans:
                trace.span(
                    node.name,
                    node.collective or "compute",
                    start,
                    end - start,
                    track=track,
                    process=rank,
                    details=node.attrs,
                )
        return trace.to_dict()

    def _tracks(self, trace: ChromeTrace, rank: int) -> list[int]:
        """Name the tracks, and return that of each node; concurrent nodes get separate tracks."""
        found, taken = [0] * len(self.traces[rank]), 0
        kinds = {NodeType.COMM_COLL: "collectives", NodeType.COMM_SEND: "sends and receives"}
        kinds[NodeType.COMM_RECV] = kinds[NodeType.COMM_SEND]
        named = [kinds.get(NodeType(node.type), "compute") for node in self.traces[rank]]
        for name in dict.fromkeys(("compute", *kinds.values())):
            own = [at for at, kind in enumerate(named) if kind == name]
            times = self.start[rank][own].tolist(), self.end[rank][own].tolist()
            tracks = free_tracks(*times)
            for at, track in zip(own, tracks, strict=True):
                found[at] = taken + track
            for track in range(max(tracks, default=-1) + 1):
                trace.track(f"{name} {track + 1}" if track else name, taken + track, rank)
            taken += max(tracks, default=0) + 1
        return found


def run_traces(traces: Sequence[Sequence[EtNode]], groups: Mapping[str, Sequence[int]]) -> TraceRun:
    """Run the traces of all ranks.

    Args:
        traces: Traces by rank.
        groups: Ranks by name of a process group; an unknown name means all ranks.

    Raises:
        DatasetError: A node needs a missing one, or ranks deadlock.
    """
    run = _Run(traces, groups)
    run.go()
    return TraceRun(traces, run.start, run.end)


class _Run:
    """State of one run: events in the order of their times."""

    def __init__(
        self, traces: Sequence[Sequence[EtNode]], groups: Mapping[str, Sequence[int]]
    ) -> None:
        self.traces, self.groups = traces, groups
        self.place = [{n.id: i for i, n in enumerate(nodes)} for nodes in traces]
        self.start = [np.full(len(nodes), np.nan) for nodes in traces]
        self.end = [np.full(len(nodes), np.nan) for nodes in traces]
        self.free = [0.0] * len(traces)
        self.over: dict[Meeting, float] = {}
        self.seen: Counter[Meeting] = Counter()
        self.here: dict[Meeting, list[tuple[float, int, int]]] = {}
        self.events: list[tuple[float, int, int]] = []
        self.waits = [Dependencies(self._operands(rank)) for rank in range(len(traces))]
        for rank, waits in enumerate(self.waits):
            for at in waits.ready():
                heapq.heappush(self.events, (0.0, rank, at))

    def _operands(self, rank: int) -> list[list[int]]:
        """Positions of the nodes that each node of a rank needs."""
        place = self.place[rank]
        for at, node in enumerate(self.traces[rank]):
            for dep in node.deps:
                if dep not in place:
                    raise DatasetError(
                        f"node {at} needs node {dep}, which the trace lacks", where=_of(rank)
                    )
        return [[place[dep] for dep in node.deps] for node in self.traces[rank]]

    def go(self) -> None:
        """Process all events."""
        while self.events:
            ready, rank, at = heapq.heappop(self.events)
            node = self.traces[rank][at]
            if node.collective:
                self._meet(ready, rank, at, node)
                continue
            # Events come in the order of readiness, which is the order of service.
            start = max(ready, self.free[rank])
            self.free[rank] = start + node.micros
            self._done(rank, at, start, start + node.micros)
        # Nodes that never ran: a cycle, or a collective that not all ranks reach.
        for rank, ends in enumerate(self.end):
            if np.isnan(ends).any():
                name = self.traces[rank][int(np.isnan(ends).argmax())].name
                raise DatasetError(f"{name} waits for ever", where=_of(rank))

    def _meet(self, ready: float, rank: int, at: int, node: EtNode) -> None:
        channel, many = self._channel(node)
        # The n-th collective of a group on one rank meets the n-th on the others.
        order = self.seen[(rank, node.type, *channel)]
        self.seen[(rank, node.type, *channel)] += 1
        here = self.here.setdefault((*channel, order), [])
        here.append((ready, rank, at))
        if len(here) < many:
            return
        start = max(self.over.get(channel, 0.0), *(r for r, _, _ in here))
        end = start + max(self.traces[r][i].micros for _, r, i in here)
        self.over[channel] = end
        for _, r, i in here:
            self._done(r, i, start, end)

    def _channel(self, node: EtNode) -> tuple[Meeting, int]:
        """Participants, and the number of nodes that have to arrive."""
        if node.type == NodeType.COMM_COLL:
            name = str(node.attrs.get("pg_name", ""))
            return (name,), len(self.groups.get(name, range(len(self.traces))))
        # A transfer is a send and a receive with the same ends and tag.
        return tuple(node.attrs.get(k, 0) for k in ("comm_src", "comm_dst", "comm_tag")), 2

    def _done(self, rank: int, at: int, start: float, end: float) -> None:
        self.start[rank][at], self.end[rank][at] = start, end
        for reader in self.waits[rank].finish(at):
            deps = (self.place[rank][d] for d in self.traces[rank][reader].deps)
            ready = max(float(self.end[rank][d]) for d in deps)
            heapq.heappush(self.events, (ready, rank, reader))


def _of(rank: int) -> str:
    return f"trace of rank {rank}"
