"""From a simulated step to one execution trace per rank.

A rank computes the tasks of its stage in the schedule's order. Ranks of a stage do the same, so a
trace is built once per stage; ranks differ only in groups and partners.

:mod:`opcast.simulate.step.stage_times` adds up exposed times; here blocks contain each collective
with its dependencies. Both are folds over one :class:`~opcast.simulate.step.blocks.Stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..step.blocks import Stage
from ..step.costs import NOTHING, Costs, Message
from ..step.pipeline import BACKWARD, FORWARD, NAMES, Order, Task, producers
from ..step.plan import Group, Plan
from ..step.stage_times import StageTimes, UnitCost, unit_costs
from .messages import EtNode, NodeType, Value
from .ranks import FIRST_GROUP, Stream, comm_type, least_bytes
from .step_network import Axes, own_bytes

#: First tag of ring transfers, above those between stages.
RING_TAGS = 1 << 24


@dataclass(frozen=True)
class Block:
    """Computation of some units of a stage, and its collectives.

    Attributes:
        seconds: Computation, including stalls for the host.
        hiding: The part of it, at its end, that overlaps ``beside``.
        before: Parameter gathers.
        beside: Collectives that start with ``hiding``; the next block waits for them.
        after: Collectives that start at its end; the next block waits for them.
        reduce: Gradient reductions that start at its end; only the update waits for them.
        flops: Floating-point operations.
        bytes: Bytes read and written.
    """

    seconds: float
    hiding: float
    before: tuple[Message, ...]
    beside: tuple[Message, ...]
    after: tuple[Message, ...]
    reduce: tuple[Message, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class StageBlocks:
    """Work of a stage.

    Attributes:
        passes: Blocks of a task (one chunk of a micro-batch's pass), by kind (``F``, ``B``, ``W``).
        last: Blocks of the last backward tasks, which also start the reductions made once a step.
        tied: Collectives between the last reduction and the update.
        update: Seconds of the optimiser.
        gathers: Exposed gathers after the update.
    """

    passes: dict[str, tuple[Block, ...]]
    last: tuple[Block, ...] = ()
    tied: tuple[Message, ...] = ()
    update: float = 0.0
    gathers: tuple[Message, ...] = ()


def stage_blocks(stage: Stage, costs: Costs, times: StageTimes, units: int = 1) -> StageBlocks:
    """Blocks of a device of a stage.

    Args:
        stage: Work of the device.
        costs: Times of calls.
        times: The stage's times, from :func:`~opcast.simulate.step.compose.step_time`.
        units: Number of units per block.
    """
    priced = unit_costs(stage, costs)
    own = {FORWARD: (times.forward, times.slowing[0]), BACKWARD: (times.backward, times.slowing[1])}
    passes, last = dict[str, tuple[Block, ...]](), tuple[Block, ...]()
    for kind, parts in priced.items():
        # Known only for the pass as a whole: stalls for the host at the end of the stage, and the
        # slowing of kernels by hidden collectives.
        whole, slowing = own.get(kind, (NOTHING, 0.0))
        more = slowing + max(0.0, whole.host - sum(p.part.host for p in parts))
        passes[kind] = _blocks(parts, more, units, stage.plan.virtual)
        if kind == BACKWARD:
            both = [replace(p, reduce=(*p.reduce, *p.once)) for p in parts]
            last = _blocks(both, more, units, stage.plan.virtual)
    if not stage.train:
        return StageBlocks(passes)
    tied = costs.messages(stage.tied)
    left = times.update.exposed - sum(m.seconds for m in tied)
    gathers = [m for unit in stage.units for m in costs.messages(unit.renewed)]
    sent = sum(m.seconds for m in gathers)
    # Only what the next step's first pass does not hide counts towards this step.
    share = min(1.0, left / sent) if sent else 0.0
    update = times.update.compute + times.update.host + max(0.0, left - sent) + times.slowing[2]
    return StageBlocks(passes, last, tied, update, _merged(gathers, share))


def _blocks(units: Sequence[UnitCost], more: float, count: int, chunks: int) -> tuple[Block, ...]:
    """Join ``count`` units each to blocks of one of ``chunks`` equal parts of a pass.

    ``more``, the time of the pass beyond its units, is spread over them.
    """
    found = []
    for first in range(0, len(units), count):
        own = units[first : first + count]
        times = [_computing(unit) for unit in own]
        ops = [c for unit in own for c in unit.ops]
        found.append(
            Block(
                sum(seconds + more / len(units) for seconds, _ in times) / chunks,
                sum(hiding for _, hiding in times) / chunks,
                _merged((m for unit in own for m in unit.before), 1.0 / chunks),
                _merged((m for unit in own for m in unit.beside), 1.0 / chunks),
                _merged((m for unit in own for m in unit.after), 1.0 / chunks),
                _merged((m for unit in own for m in unit.reduce), 1.0 / chunks),
                flops=sum(c.flops() for c in ops) / chunks,
                bytes=sum(c.moved() for c in ops) / chunks,
            )
        )
    return tuple(found)


def _computing(unit: UnitCost) -> tuple[float, float]:
    """Seconds of a unit without its collectives, and the part that hides some of them."""
    left = max(0.0, sum(m.seconds for m in unit.beside) - unit.hiding)
    seconds = max(0.0, unit.part.total - sum(m.seconds for m in unit.after) - left)
    return seconds, min(unit.hiding, seconds)


def _merged(messages: Iterable[Message], factor: float = 1.0) -> tuple[Message, ...]:
    """Add up messages with the same purpose, kind and group, each times a factor."""
    sums: dict[tuple[str, str, Group], Message] = {}
    for own in messages:
        key = (own.name, own.kind, own.group)
        old = sums.get(key, replace(own, size=0.0, seconds=0.0))
        sums[key] = replace(
            own,
            size=old.size + own.size * factor,
            seconds=old.seconds + own.seconds * factor,
        )
    return tuple(sums.values())


@dataclass(frozen=True)
class _Talk:
    """A communicating node of a stage's trace: its purpose and its partner.

    ``ahead`` is the distance in ranks to the other end of a transfer; with ``ring`` the other end
    is the neighbour in the group instead.
    """

    message: Message
    ahead: int = 0
    ring: bool = False
    tag: int = 0


@dataclass
class StageTrace(Stream):
    """The trace of any rank of a stage; communicating nodes lack their attributes.

    Attributes:
        talks: Purpose and partner of communicating nodes, by position.
        owed: Microseconds not yet written, including the error of rounding.
        reductions: The last gradient reduction, for which the next one and the update wait.
    """

    talks: dict[int, _Talk] = field(default_factory=dict)
    owed: float = 0.0
    reductions: set[int] = field(default_factory=set)

    def compute(self, name: str, seconds: float, flops: float = 0.0, moved: float = 0.0) -> int:
        """Add computation after everything that the stage waits for."""
        self.owed += seconds * 1e6
        micros = max(1, round(self.owed))
        self.owed -= micros
        attrs: dict[str, Value] = {
            "is_cpu_op": False, "num_ops": round(flops), "tensor_size": round(moved), "kernels": 1
        }  # fmt: skip
        self.last = self.add(name, NodeType.COMP, self.ready(), micros, attrs)
        self.waits = set()
        return self.last

    def send(self, name: str, message: Message, deps: set[int]) -> int:
        """Add a collective."""
        return self.talk(name, NodeType.COMM_COLL, _Talk(message), deps)

    def talk(self, name: str, kind: NodeType, talk: _Talk, deps: set[int]) -> int:
        """Add a collective, a send or a receive."""
        micros = max(1, round(talk.message.seconds * 1e6))
        place = self.add(name, kind, deps, micros, {})
        self.talks[place] = talk
        return place


def stage_trace(
    plan: Plan, blocks: StageBlocks, orders: Sequence[Order], stage: int, hop: Message
) -> StageTrace:
    """Build the trace of any rank of a stage.

    Args:
        plan: Resolved plan.
        blocks: Work of the stage.
        orders: Tasks of each stage.
        stage: Stage, from 0.
        hop: Transfer of a micro-batch between stages.
    """
    trace = StageTrace()
    tags, takers = _tags(plan, orders), _takers(plan, orders, stage)
    # The backward tasks of the last micro-batch, one for each chunk.
    final = [task for task in orders[stage] if task.kind == BACKWARD][-plan.virtual :]
    for task in orders[stage]:
        for other, source in producers(stage, task, plan.pp, plan.virtual):
            if other != stage:
                far, tag = (other - stage) * hop.group.stride, tags[other, source, stage]
                talk = _Talk(hop, far, tag=tag)
                trace.waits.add(trace.talk(f"from stage {other}", NodeType.COMM_RECV, talk, set()))
        own = blocks.last if task in final else blocks.passes[task.kind]
        name = f"{NAMES[task.kind]} {task.micro}"
        _pass(trace, own, name, overlap=plan.overlap)
        for other in takers.get(task, ()):
            far, tag = (other - stage) * hop.group.stride, tags[stage, task, other]
            talk = _Talk(hop, far, tag=tag)
            trace.talk(f"to stage {other}", NodeType.COMM_SEND, talk, trace.ready())
    _end(trace, blocks)
    return trace


def _tags(plan: Plan, orders: Sequence[Order]) -> dict[tuple[int, Task, int], int]:
    """Number the transfers by source stage, task and target stage."""
    tags: dict[tuple[int, Task, int], int] = {}
    for stage, order in enumerate(orders):
        for task in order:
            for other, source in producers(stage, task, plan.pp, plan.virtual):
                if other != stage:
                    tags[other, source, stage] = 1 + len(tags)
    return tags


def _takers(plan: Plan, orders: Sequence[Order], stage: int) -> dict[Task, list[int]]:
    """Stages that wait for each task of a stage."""
    takers: dict[Task, list[int]] = {}
    for source, task, target in _tags(plan, orders):
        if source == stage:
            takers.setdefault(task, []).append(target)
    return takers


def _pass(trace: StageTrace, blocks: Sequence[Block], name: str, *, overlap: bool) -> None:
    """Add one task."""
    begin, ends = trace.ready(), list[int]()
    for place, block in enumerate(blocks):
        # A unit's parameters are gathered while the one before it runs (``run_passes``).
        free = {ends[place - 2]} if place > 1 else begin
        for message in block.before:
            deps = free if overlap else trace.ready()
            trace.waits.add(trace.send(message.name, message, deps))
        if not block.beside:
            trace.compute(name, block.seconds, block.flops, block.bytes)
        else:
            ahead = block.seconds - block.hiding
            share = ahead / block.seconds if block.seconds else 0.0
            trace.compute(name, ahead, block.flops * share, block.bytes * share)
            beside = {i for m in block.beside for i in _sent(trace, m)}
            rest = 1.0 - share
            trace.compute(name, block.hiding, block.flops * rest, block.bytes * rest)
            trace.waits |= beside
        ends.append(trace.last)
        for message in block.after:
            trace.waits = set(_sent(trace, message))
        for message in block.reduce:
            # One after the other, as in the step, whatever their groups.
            node = trace.send(message.name, message, trace.ready() | trace.reductions)
            trace.reductions = {node}
            if not overlap:
                trace.waits.add(node)


def _sent(trace: StageTrace, message: Message) -> list[int]:
    """Add a collective, or a transfer from each rank of the group to the next one."""
    if message.kind != "send_recv":
        return [trace.send(message.name, message, trace.ready())]
    deps, talk = trace.ready(), _Talk(message, ring=True, tag=RING_TAGS + len(trace.nodes))
    return [
        trace.talk(message.name, kind, talk, deps)
        for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV)
    ]


def _end(trace: StageTrace, blocks: StageBlocks) -> None:
    """Add everything after the last task."""
    trace.waits |= trace.reductions
    for message in blocks.tied:
        trace.waits.add(trace.send(message.name, message, trace.ready()))
    if blocks.update > 0:
        trace.compute("update", blocks.update)
    for message in blocks.gathers:
        trace.waits.add(trace.send(message.name, message, trace.ready()))


class Ranks:
    """Traces of all ranks, from those of their stages.

    Args:
        stages: Traces of the stages.
        axes: Dimensions of the ranks.

    Attributes:
        groups: Names of the process groups found so far, by their ranks.
    """

    def __init__(self, stages: Sequence[StageTrace], axes: Axes) -> None:
        self.stages, self.axes = stages, axes
        self.groups: dict[tuple[int, ...], str] = {}

    def __iter__(self) -> Iterator[list[EtNode]]:
        """Yield the trace of each rank, in order; stages are outermost in rank order."""
        each = self.axes.devices // len(self.stages)
        for rank in range(self.axes.devices):
            yield self._trace(rank, self.stages[rank // each])

    def _trace(self, rank: int, stage: StageTrace) -> list[EtNode]:
        nodes, known = list(stage.nodes), dict[Message, dict[str, Value]]()
        for place, talk in stage.talks.items():
            node = nodes[place]
            if node.type == NodeType.COMM_COLL:
                if talk.message not in known:
                    known[talk.message] = self._collective(talk.message, rank)
                attrs = known[talk.message]
            else:
                attrs = self._transfer(talk, rank, sends=node.type == NodeType.COMM_SEND)
            nodes[place] = replace(node, attrs=attrs)
        return nodes

    def _collective(self, message: Message, rank: int) -> dict[str, Value]:
        members = self.axes.members(message.group, rank)
        name = self.groups.setdefault(members, str(FIRST_GROUP + len(self.groups)))
        size = max(round(own_bytes(message, self.axes)), least_bytes(len(members)))
        kind = comm_type(message.kind)
        assert kind is not None
        return {
            "is_cpu_op": False, "comm_type": int(kind), "comm_size": size, "pg_name": name
        }  # fmt: skip

    def _transfer(self, talk: _Talk, rank: int, *, sends: bool) -> dict[str, Value]:
        other = rank + talk.ahead
        if talk.ring:
            members = self.axes.members(talk.message.group, rank)
            step = 1 if sends else -1
            other = members[(members.index(rank) + step) % len(members)]
        source, target = (rank, other) if sends else (other, rank)
        return {
            "is_cpu_op": False,
            "comm_size": max(1, round(talk.message.size)),
            "comm_src": source,
            "comm_dst": target,
            "comm_tag": talk.tag,
        }
