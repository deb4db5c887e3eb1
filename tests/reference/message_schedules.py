"""Messages of each algorithm, as lists for :mod:`.messages`, one phase after another.

A phase is one algorithm along one dimension, in all lines of devices at once. A device begins a
phase when everything that earlier phases send it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from opcast.simulate.collectives.trees import binary_tree, chunk_count

from .messages import DOWN, SHORTEST, UP, Links, Message, arrivals

#: Passes over the ranks: an all-reduce is a reduce-scatter and an all-gather.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass
class Schedule:
    """Messages under construction.

    Attributes:
        links: Links that they take.
        messages: Messages so far.
        ready: By device, the messages that its next phase waits for.
        holders: Devices that already have what is broadcast.
    """

    links: Links
    messages: list[Message] = field(default_factory=list)
    ready: dict[int, tuple[int, ...]] = field(default_factory=dict)
    holders: set[int] = field(default_factory=lambda: {0})

    def send(
        self, source: int, target: int, size: float, after: Iterable[int], way: int = SHORTEST
    ) -> int:
        """Send from device to device; return the number of the message."""
        return self.put(self.links.path(source, target, way), size, after)

    def put(self, path: tuple[int, ...], size: float, after: Iterable[int]) -> int:
        """Send along a path; return the number of the message."""
        self.messages.append(Message(path, size, tuple(after)))
        return len(self.messages) - 1

    def start(self, device: int) -> tuple[int, ...]:
        """Return the messages that a device waits for before it sends."""
        return self.ready.get(device, ())

    def seconds(self) -> float:
        """Run the messages; return the time at which the last one arrives."""
        return float(arrivals(self.links, self.messages).max()) if self.messages else 0.0


#: Devices along one dimension, in the order of their coordinates.
Line = Sequence[int]
#: By device, the numbers of the messages that it has to have before its next phase.
Received = dict[int, list[int]]
#: Adds the messages of one algorithm along a line: schedule, dimension, line, collective, bytes.
Phase = Callable[[Schedule, int, Line, str, float], Received]


def run_phase(schedule: Schedule, jobs: Sequence[tuple[Phase, int, str, float]]) -> None:
    """Add a phase: algorithms with dimension, collective and bytes, all at once in every line."""
    received: Received = {}
    for phase, dim, kind, size in jobs:
        for line in schedule.links.lines(dim):
            # A broadcast continues only in lines whose first device already has the data.
            if len(line) > 1 and (kind != "broadcast" or line[0] in schedule.holders):
                schedule.holders.update(line)
                for device, numbers in phase(schedule, dim, line, kind, size).items():
                    received.setdefault(device, []).extend(numbers)
    for device, numbers in received.items():
        schedule.ready[device] = tuple(numbers)


def _ways(schedule: Schedule, dim: int, line: Line) -> list[tuple[int, float]]:
    """Return the directions and the share of the bytes of each: both round a physical ring."""
    both = schedule.links.dims[dim].kind == "ring" and len(line) > 2
    return [(UP, 0.5), (DOWN, 0.5)] if both else [(UP, 1.0)]


def ring_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """Ring all-gather, reduce-scatter, all-reduce, broadcast, all-to-all."""
    if kind == "broadcast":
        return _chain(s, dim, line, size)
    if kind == "all_to_all":
        return _hand_on(s, dim, line, size)
    n, got = len(line), {device: list[int]() for device in line}
    shard = size if kind == "all_gather" else size / n
    for way, share in _ways(s, dim, line):
        last = {i: s.start(line[i]) for i in range(n)}
        for _ in range(_PASSES[kind] * (n - 1)):
            sent = {}
            for i in range(n):
                j = (i + way) % n
                sent[j] = s.send(line[i], line[j], shard * share, last[i], way)
                got[line[j]].append(sent[j])
            last = {j: (number,) for j, number in sent.items()}
    return got


def _chain(s: Schedule, dim: int, line: Line, size: float) -> Received:
    n, got = len(line), {device: list[int]() for device in line}
    chunks = chunk_count(size)
    for way, share in _ways(s, dim, line):
        for _ in range(chunks):
            after = s.start(line[0])
            for hop in range(n - 1):
                a, b = line[hop * way % n], line[(hop + 1) * way % n]
                after = (s.send(a, b, size * share / chunks, after, way),)
                # The sender is busy with it as well, so its next phase waits for both.
                got[b].append(after[0])
                got[a].append(after[0])
    return got


def _hand_on(s: Schedule, dim: int, line: Line, size: float) -> Received:
    n, got = len(line), {device: list[int]() for device in line}
    far, block = n // 2, size / n
    # With an even number of ranks the opposite one is equally far both ways: half a block each.
    half = 0.5 if n % 2 == 0 and n > 2 else 0.0
    for way, _ in _ways(s, dim, line):
        last = {i: s.start(line[i]) for i in range(n)}
        for step in range(1, far + 1):
            sent = {}
            for i in range(n):
                j = (i + way) % n
                bytes_on = (far - step + 1 - half) * block
                sent[j] = s.send(line[i], line[j], bytes_on, last[i], way)
                got[line[j]].append(sent[j])
            last = {j: (number,) for j, number in sent.items()}
    return got


def direct_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """Every rank to every other: the farthest first, so that a spine is busy from the beginning.

    Before the all-gather of an all-reduce the farthest come last, so that all begin it together.
    """
    n = len(line)
    if kind == "broadcast":
        return {d: [s.send(line[0], d, size, s.start(line[0]))] for d in line[1:]}
    shard = size if kind == "all_gather" else size / n
    got: Received = {}
    far_first = sorted(range(1, n), key=lambda k: -min(k, n - k))
    even = s.links.dims[dim].oversubscription == 1
    # ``more`` counts the passes that still follow: 1 in the reduce-scatter of an all-reduce.
    for more in reversed(range(_PASSES.get(kind, 1))):
        after = {d: tuple(got.get(d, s.start(d))) for d in line}
        got = {d: [] for d in line}
        for step in reversed(far_first) if more and even else far_first:
            for i in range(n):
                target = line[(i + step) % n]
                got[target].append(s.send(line[i], target, shard, after[line[i]]))
    return got


def one_shot_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """All-reduce by a direct all-gather of every buffer."""
    return direct_phase(s, dim, line, "all_gather", size)


def scatter_gather_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """Broadcast: the root scatters blocks, then every rank sends its block to all."""
    n, root = len(line), line[0]
    block = size / n
    first = {d: (s.send(root, d, block, s.start(root)),) for d in line[1:]}
    got: Received = {d: list(first.get(d, ())) for d in line}
    for step in range(1, n):
        for i in range(n):
            a, b = line[i], line[(i + step) % n]
            # Also to the root, although it has the data: the all-gather is a symmetric one.
            if a != root or b != root:
                got[b].append(s.send(a, b, block, first.get(a, s.start(root))))
    return got


def halving_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """Recursive halving with the nearest partner first, doubling with the farthest first."""
    n = len(line)
    whole = n * size if kind == "all_gather" else size
    near = [1 << k for k in range(n.bit_length() - 1)]
    steps = {"reduce_scatter": near, "all_gather": near[::-1]}.get(kind, near + near[::-1])
    last = {i: s.start(line[i]) for i in range(n)}
    got: Received = {d: [] for d in line}
    for distance in steps:
        sent = {}
        for i in range(n):
            # Partners differ in one bit of their number.
            j = i ^ distance
            sent[j] = s.send(line[i], line[j], whole / (2 * distance), last[i])
            got[line[j]].append(sent[j])
        last = {j: (*last[j], number) for j, number in sent.items()}
    return got


def tree_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """Binomial broadcast, or all-reduce along two binary trees."""
    if kind == "all_reduce":
        return _two_trees(s, line, size)
    n, has, got = len(line), {0: s.start(line[0])}, {d: list[int]() for d in line}
    reach = 1
    while reach < n:
        for i in range(min(reach, n - reach)):
            number = s.send(line[i], line[i + reach], size, has[i])
            has[i + reach] = (number,)
            got[line[i + reach]].append(number)
        reach *= 2
    return got


def _two_trees(s: Schedule, line: Line, size: float) -> Received:
    n, got = len(line), {d: list[int]() for d in line}
    parents, chunks = binary_tree(n), chunk_count(size)
    children: list[list[int]] = [[] for _ in range(n)]
    for place, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(place)
    # From the root down; each of both trees carries half of every chunk.
    order = sorted(range(n), key=lambda p: _depth(parents, p))
    part = size / 2 / chunks
    for _ in range(chunks):
        for shift in (0, 1):
            seat = [line[(place + shift) % n] for place in range(n)]
            risen: dict[int, list[int]] = {p: [] for p in range(n)}
            for place in reversed(order[1:]):
                after = (*s.start(seat[place]), *risen[place])
                parent = parents[place]
                risen[parent].append(s.send(seat[place], seat[parent], part, after))
                got[seat[parent]].append(risen[parent][-1])
            has = {order[0]: tuple(risen[order[0]])}
            for place in order:
                for child in children[place]:
                    number = s.send(seat[place], seat[child], part, has[place])
                    has[child] = (number,)
                    got[seat[child]].append(number)
    return got


def _depth(parents: list[int], place: int) -> int:
    return 0 if parents[place] < 0 else 1 + _depth(parents, parents[place])


def in_network_phase(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    """All-reduce and broadcast inside the switches, chunk by chunk."""
    if s.links.dims[dim].reduction == "multicast":
        return _multicast(s, dim, line, size)
    return _switch_tree(s, dim, line, kind, size)


def _switch_tree(s: Schedule, dim: int, line: Line, kind: str, size: float) -> Received:
    shape, got = s.links.dims[dim], {d: list[int]() for d in line}
    # A plain switch is a fat tree with a single leaf and no spine.
    radix = shape.radix if shape.kind == "fat_tree" else len(line)
    under = [line[i : i + radix] for i in range(0, len(line), radix)]
    chunks = chunk_count(size)
    senders = set(line if kind == "all_reduce" else line[:1])
    part = size / chunks
    for _ in range(chunks):
        risen = []
        for leaf in under:
            first = [
                s.put((s.links.to_switch(d, dim),), part, s.start(d)) for d in leaf if d in senders
            ]
            if len(under) > 1 and first:
                # The leaf switch sends one reduced message for all of its ranks.
                first = [s.put((s.links.spine(leaf[0], dim, "rise"),), part, first)]
            risen += first
        for leaf in under:
            ready = risen
            if len(under) > 1:
                ready = [s.put((s.links.spine(leaf[0], dim, "fall"),), part, risen)]
            for d in leaf:
                got[d].append(s.put((s.links.from_switch(d, dim),), part, ready))
    return got


def _multicast(s: Schedule, dim: int, line: Line, size: float) -> Received:
    """Each owner reads its share of a chunk from the switch, summed, and writes it to all."""
    n, chunks = len(line), chunk_count(size)
    got: Received = {d: [] for d in line}
    part = size / chunks / n
    for _ in range(chunks):
        summed = {}
        for owner in line:
            # The switch pulls the owner's share from every rank and adds it up on the way.
            up = [s.put((s.links.to_switch(d, dim),), part, s.start(d)) for d in line]
            summed[owner] = s.put((s.links.from_switch(owner, dim),), part, up)
        for owner in line:
            written = s.put((s.links.to_switch(owner, dim),), part, (summed[owner],))
            for d in line:
                got[d].append(s.put((s.links.from_switch(d, dim),), part, (written,)))
    return got


#: Phases by the name of the algorithm.
PHASES: dict[str, Phase] = {
    "ring": ring_phase,
    "direct": direct_phase,
    "one_shot": one_shot_phase,
    "tree": tree_phase,
    "halving_doubling": halving_phase,
    "scatter_gather": scatter_gather_phase,
    "in_network": in_network_phase,
}
