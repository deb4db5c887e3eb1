"""ASTRA-sim's analytical, congestion-unaware simulation, for folders of traces.

Written after its published source, for machines that cannot build it: a rank runs one computation
and one collective or send at a time, of the nodes that are ready the one with the smallest id
first; receives wait aside (``Workload.cc``, ``HardwareResource.cc``). Some of the ranks are one
ring, whose neighbours send through the first dimension in which they differ; all ranks use one
dimension after the other (``CommunicatorGroup.cc``, ``Sys.cc``, ``Ring.cc``). A message takes
``latency · hops + size / bandwidth``. Endpoint delays of a few nanoseconds are left out.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from opcast.simulate.chakra.folder import read_folder
from opcast.simulate.chakra.messages import NodeType

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 6, 7


class Network:
    """``network.yml`` with rings only."""

    def __init__(self, folder: Path) -> None:
        data = yaml.safe_load((folder / "network.yml").read_text())
        assert set(data["topology"]) == {"Ring"}
        self.sizes = data["npus_count"]
        self.bytes_per_ns = [b * 2**30 / 1e9 for b in data["bandwidth"]]
        self.latency = data["latency"]

    def place(self, rank: int) -> list[int]:
        """Coordinates, innermost first."""
        out = []
        for n in self.sizes:
            out.append(rank % n)
            rank //= n
        return out

    def send(self, source: int, target: int, size: float) -> float:
        """Nanoseconds of a message."""
        a, b = self.place(source), self.place(target)
        dim = next(i for i in range(len(a)) if a[i] != b[i])
        around = abs(a[dim] - b[dim])
        hops = min(around, self.sizes[dim] - around)
        return hops * self.latency[dim] + size / self.bytes_per_ns[dim]


def messages(kind: int, ranks: int, size: float) -> tuple[int, float]:
    """Messages one after the other round a ring, and the bytes of each."""
    return {
        ALL_REDUCE: (2 * (ranks - 1), size / ranks),
        ALL_GATHER: (ranks - 1, size),
        REDUCE_SCATTER: (ranks - 1, size / ranks),
        ALL_TO_ALL: (ranks * (ranks - 1) // 2, size / ranks),
    }[kind]


def ring_ns(network: Network, ring: list[int], kind: int, size: float, splits: int) -> float:
    """A collective of some ranks: every part goes round once the one before has ended."""
    count, share = messages(kind, len(ring), size / splits)
    following = ring[1:] + ring[:1]
    delay = np.array([network.send(a, b, share) for a, b in zip(ring, following, strict=True)])
    now = np.zeros(len(ring))
    for _ in range(splits * count):
        now = np.roll(now + delay, 1)
    return float(now.max())


def all_ranks_ns(network: Network, kind: int, size: float, splits: int) -> float:
    """A collective of all ranks: a queue for each dimension, the parts one behind the other."""
    dims = [i for i, n in enumerate(network.sizes) if n > 1]
    if kind == ALL_REDUCE:
        inner = [(d, REDUCE_SCATTER) for d in dims[:-1]]
        back = [(d, ALL_GATHER) for d in reversed(dims[:-1])]
        phases = [*inner, (dims[-1], ALL_REDUCE), *back]
    else:
        phases = [(d, kind) for d in (reversed(dims) if kind == ALL_GATHER else dims)]
    free = dict.fromkeys(dims, 0.0)
    waiting = [(0.0, part, 0, size / splits) for part in range(splits)]
    end = 0.0
    while waiting:
        ready, part, at, left = heapq.heappop(waiting)
        dim, own = phases[at]
        n = network.sizes[dim]
        count, share = messages(own, n, left)
        time = count * (network.latency[dim] + share / network.bytes_per_ns[dim])
        free[dim] = max(free[dim], ready) + time
        left *= {REDUCE_SCATTER: 1 / n, ALL_GATHER: n}.get(own, 1)
        end = max(end, free[dim])
        if at + 1 < len(phases):
            heapq.heappush(waiting, (free[dim], part, at + 1, left))
    return end


def simulate(folder: Path) -> float:
    """Run a folder; returns the nanoseconds until the last rank has finished.

    Raises:
        RuntimeError: Ranks wait for each other for ever.
    """
    traces, groups = read_folder(folder)
    network = Network(folder)
    splits = json.loads((folder / "system.json").read_text())["preferred-dataset-splits"]
    index = [{n.id: n for n in t} for t in traces]
    missing = [{n.id: len(n.deps) for n in t} for t in traces]
    readers: list[dict[int, list[int]]] = [{n.id: [] for n in t} for t in traces]
    for rank, trace in enumerate(traces):
        for node in trace:
            for dep in node.deps:
                readers[rank][dep].append(node.id)
    ready = [sorted(i for i, n in m.items() if not n) for m in missing]
    busy = [{"compute": False, "talk": False} for _ in traces]
    met: dict[tuple[str, int], list[tuple[int, int]]] = {}
    seen: Counter[tuple[int, str]] = Counter()
    arrived: dict[tuple[object, ...], float] = {}
    received: dict[tuple[object, ...], tuple[int, int]] = {}
    known: dict[tuple[object, ...], float] = {}
    events: list[tuple[float, int, int]] = []
    now, done = 0.0, 0

    def collective(rank: int, node) -> None:
        name = str(node.attrs["pg_name"])
        turn = (name, seen[rank, name])
        seen[rank, name] += 1
        here = met.setdefault(turn, [])
        here.append((rank, node.id))
        ring = groups[name]
        if len(here) < len(ring):
            return
        kind, size = int(node.attrs["comm_type"]), node.bytes
        offsets = tuple(r - ring[0] for r in ring)
        key = (kind, size, offsets)
        if key not in known:
            known[key] = (
                all_ranks_ns(network, kind, size, splits)
                if len(ring) == len(traces)
                else ring_ns(network, ring, kind, size, splits)
            )
        for other, own in here:
            heapq.heappush(events, (now + known[key], other, own))

    def issue(rank: int) -> None:
        for place in list(ready[rank]):
            node = index[rank][place]
            what = "compute" if node.type == NodeType.COMP else "talk"
            ends = tuple(node.attrs.get(k) for k in ("comm_src", "comm_dst", "comm_tag"))
            if node.type == NodeType.COMM_RECV:
                ready[rank].remove(place)
                if ends in arrived:
                    heapq.heappush(events, (max(now, arrived[ends]), rank, place))
                else:
                    received[ends] = (rank, place)
                continue
            if busy[rank][what]:
                continue
            busy[rank][what] = True
            ready[rank].remove(place)
            if node.type == NodeType.COMP:
                heapq.heappush(events, (now + node.micros * 1e3, rank, place))
            elif node.type == NodeType.COMM_SEND:
                assert ends[0] == rank
                arrived[ends] = now + network.send(rank, int(ends[1]), node.bytes)
                heapq.heappush(events, (arrived[ends], rank, place))
                if ends in received:
                    heapq.heappush(events, (arrived[ends], *received.pop(ends)))
            else:
                collective(rank, node)

    for rank in range(len(traces)):
        issue(rank)
    while events:
        now, rank, place = heapq.heappop(events)
        node = index[rank][place]
        done += 1
        if node.type != NodeType.COMM_RECV:
            busy[rank]["compute" if node.type == NodeType.COMP else "talk"] = False
        for reader in readers[rank][place]:
            missing[rank][reader] -= 1
            if not missing[rank][reader]:
                ready[rank] = sorted([*ready[rank], reader])
        issue(rank)
    if done < sum(map(len, traces)):
        raise RuntimeError(f"{sum(map(len, traces)) - done} nodes wait for ever")
    return now
