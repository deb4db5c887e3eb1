"""The step simulated in full: every rank, every layer and every message of every ring.

Slow, and only for checking ``step.compose``, which takes one rank of each stage for all. Ranks have
a stream of computation and one for parameters and gradients; collectives are rings of messages, in
which a rank sends its next message when it has sent the last one and received what it passes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from opcast.simulate.step.pipeline import BACKWARD, FORWARD, Task, orders
from opcast.simulate.step.plan import Group, Plan

#: Direction, micro-batch, stage and layer of an event.
Name = tuple[str, int, int, int]

#: Steps of a ring over ``n`` ranks, as a multiple of ``n - 1``; an all-reduce is a reduce-scatter
#: and an all-gather (Patarasuk and Yuan, JPDC 69, 2009).
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Wire:
    """Links between any two ranks: latency in seconds, bandwidth in bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, kind: str, size: float, group: Group) -> float:
        """Return the closed form of a collective over these links; ``size`` as in ``CommCall``."""
        if kind == "send_recv":
            return self.latency + size / self.bandwidth
        steps = _ROUNDS[kind] * (group.size - 1)
        return steps * (self.latency + size / group.size / self.bandwidth)


@dataclass(frozen=True)
class LayerSeconds:
    """A layer of one micro-batch: computation in seconds, communication in bytes.

    Attributes:
        forward: Computation.
        backward: Computation, gradients of weights included.
        tensor: Bytes of each of its collectives among tensor-parallel ranks.
        tensor_kinds: Those collectives, in either pass.
        gather: Bytes of its parameters in full, gathered before each pass (ZeRO 3); 0 for none.
        scatter: Bytes of its gradients in full, scattered after each backward pass; 0 for none.
        reduce: Bytes of its gradients, all-reduced after the last backward pass; 0 for none.
    """

    forward: float
    backward: float
    tensor: float = 0.0
    tensor_kinds: tuple[str, ...] = ()
    gather: float = 0.0
    scatter: float = 0.0
    reduce: float = 0.0


@dataclass
class _Item:
    """One item of a rank's stream: a computation, or participation in a ring.

    Attributes:
        seconds: Seconds of computation.
        ring: Name of the ring, the same at all of its ranks; ``None`` for computation.
        kind: Kind of the ring's collective.
        size: Its bytes.
        members: Its ranks.
        needs: Tokens that must have been given before it starts.
        gives: Token that others may need.
        after: Seconds from the end until the token is given.
    """

    seconds: float = 0.0
    ring: Hashable = None
    kind: str = ""
    size: float = 0.0
    members: tuple[int, ...] = ()
    needs: list[Hashable] = field(default_factory=list)
    gives: Hashable = None
    after: float = 0.0


def step_by_rank(
    plan: Plan,
    stages: Sequence[Sequence[LayerSeconds]],
    wire: Wire,
    hop_bytes: float,
    update: float,
) -> float:
    """Simulate a training step; return its seconds.

    Args:
        plan: Resolved; ``1f1b`` or ``gpipe``.
        stages: Layers of each stage, embedding and head among them.
        wire: All links.
        hop_bytes: Bytes of a micro-batch between stages.
        update: Seconds of the optimiser.
    """
    streams: dict[tuple[int, str], list[_Item]] = {}
    for rank in range(plan.devices):
        made = _Rank(plan, rank, stages, wire, hop_bytes)
        streams[rank, "compute"], streams[rank, "links"] = made.compute, made.links
    return max(_execute(streams, wire).values()) + update


class _Rank:
    """Builds the streams of a rank, in order."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Sequence[Sequence[LayerSeconds]],
        wire: Wire,
        hop_bytes: float,
    ) -> None:
        self.plan, self.rank = plan, rank
        self.per_stage = plan.devices // plan.pp
        self.stage = rank // self.per_stage
        self.layers = stages[self.stage]
        pair = plan.pipeline_group._replace(size=2)
        self.hop = wire.seconds("send_recv", hop_bytes, pair) if plan.pp > 1 else 0.0
        self.compute: list[_Item] = []
        self.links: list[_Item] = []
        order = orders(plan.schedule, plan.pp, plan.microbatches)[self.stage]
        # Gradients are all-reduced after the last backward task, which depends on the schedule
        # (gpipe goes backwards).
        self.last = next(t.micro for t in reversed(order) if t.kind == BACKWARD)
        for task in order:
            self._pass(task)

    def _pass(self, task: Task) -> None:
        """Append one micro-batch through all layers, in either direction."""
        ahead = task.kind == FORWARD
        source = self.rank + (-self.per_stage if ahead else self.per_stage)
        before = self.compute[-1].gives if self.compute else None
        names = [(task.kind, task.micro, self.stage, i) for i in range(len(self.layers))]
        names = names if ahead else names[::-1]
        gathers, sums = [], []
        for place, name in enumerate(names):
            layer, needs = self.layers[name[3]], list[Hashable]()
            if place == 0 and 0 <= source < self.plan.devices:
                needs.append(("hop", source, task.kind, task.micro))
            if layer.gather:
                gather = self._ring(self.plan.shard_group, "all_gather", layer.gather, "g", name)
                gather.gives = ("gathered", self.rank, *name)
                # One layer ahead: a gather waits until the layer before the last has run.
                free = ("ran", self.rank, *names[place - 2]) if place > 1 else before
                gather.needs += [free] if free else []
                gathers.append(gather)
                needs.append(gather.gives)
            self._compute(layer, layer.forward if ahead else layer.backward, name, needs)
            sums.append([] if ahead else self._reductions(layer, name, task.micro))
        # Gathers precede the reductions of the layer before: two are issued before the first sum.
        self.links += gathers[:2]
        for place, reduced in enumerate(sums):
            self.links += [*reduced, *gathers[place + 2 : place + 3]]
        end: Hashable = ("hop", self.rank, task.kind, task.micro)
        self.compute.append(_Item(gives=end, after=self.hop))

    def _compute(
        self, layer: LayerSeconds, seconds: float, name: Name, needs: list[Hashable]
    ) -> None:
        self.compute.append(_Item(seconds, needs=needs))
        for i, kind in enumerate(layer.tensor_kinds):
            ring = self._ring(self.plan.tensor_group, kind, layer.tensor, f"t{i}", name)
            self.compute.append(ring)
        self.compute[-1].gives = ("ran", self.rank, *name)

    def _reductions(self, layer: LayerSeconds, name: Name, micro: int) -> list[_Item]:
        plan, items = self.plan, []
        if layer.scatter:
            items.append(self._ring(plan.shard_group, "reduce_scatter", layer.scatter, "s", name))
        if layer.reduce and micro == self.last:
            items.append(self._ring(plan.replica_group, "all_reduce", layer.reduce, "r", name))
        for item in items:
            item.needs.append(("ran", self.rank, *name))
        return items

    def _ring(self, group: Group, kind: str, size: float, what: str, name: Name) -> _Item:
        # The lowest rank of the group names the ring at all of its members.
        first = self.rank - self.rank // group.stride % group.size * group.stride
        members = tuple(range(first, first + group.size * group.stride, group.stride))
        return _Item(ring=(first, what, *name), kind=kind, size=size, members=members)


def _execute(
    streams: dict[tuple[int, str], list[_Item]], wire: Wire
) -> dict[tuple[int, str], float]:
    """Run all streams; return the time at which each has ended."""
    given: dict[Hashable, float] = {}
    arrived: dict[Hashable, dict[int, float]] = {}
    ended: dict[Hashable, dict[int, float]] = {}
    place, free = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0)
    left = sum(len(items) for items in streams.values())
    while left:
        before = left
        for key, items in streams.items():
            while place[key] < len(items):
                item = items[place[key]]
                if any(need not in given for need in item.needs):
                    break
                start = max([free[key], *(given[need] for need in item.needs)])
                if item.ring is None:
                    end = start + item.seconds
                else:
                    # A rank registers once and blocks its stream until the last member arrives.
                    there = arrived.setdefault(item.ring, {})
                    there.setdefault(key[0], start)
                    if len(there) < len(item.members):
                        break
                    if item.ring not in ended:
                        starts = tuple(there[m] for m in item.members)
                        ended[item.ring] = _ring_ends(item, starts, wire)
                    end = ended[item.ring][key[0]]
                free[key] = end
                if item.gives is not None:
                    given[item.gives] = end + item.after
                place[key] += 1
                left -= 1
        if left == before:
            raise ValueError("the ranks wait for one another")
    return free


def _ring_ends(item: _Item, starts: tuple[float, ...], wire: Wire) -> dict[int, float]:
    """Return when each rank has sent and received its last message."""
    count = len(starts)
    now = list(starts)
    message = wire.latency + item.size / count / wire.bandwidth
    for _ in range(_ROUNDS[item.kind] * (count - 1)):
        # Own previous message sent, and the message to forward received from the left neighbour.
        now = [max(pair) + message for pair in zip(now, now[-1:] + now[:-1], strict=True)]
    return dict(zip(item.members, now, strict=True))
