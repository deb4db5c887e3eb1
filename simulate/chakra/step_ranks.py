"""From a simulated step to one execution trace per rank.

A rank computes the tasks of its stage in the schedule's order. Ranks of a stage do the same, so a
trace is made once for each stage; ranks differ in groups and partners only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..step.costs import Message
from ..step.pipeline import BACKWARD, NAMES, Order, Task, producers
from ..step.plan import Plan
from .messages import EtNode, NodeType, Value
from .ranks import FIRST_GROUP, Stream, comm_type, least_bytes
from .step_blocks import Block, StageBlocks
from .step_network import Axes, own_bytes

#: First tag of transfers round a ring, above those between stages.
RING_TAGS = 1 << 24


@dataclass(frozen=True)
class _Talk:
    """A communicating node of a stage's trace: what it is for, and how far its partner is.

    ``ahead`` is the distance in ranks of the other end of a transfer, ``ring`` whether it is the
    neighbour in the group instead.
    """

    message: Message
    ahead: int = 0
    ring: bool = False
    tag: int = 0


@dataclass
class StageTrace(Stream):
    """The trace of any rank of a stage; nodes that communicate lack their attributes.

    Attributes:
        talks: What those are, by position.
        owed: Seconds not yet written, the error of rounding to microseconds included.
        reductions: The last reduction of gradients, for which the next one and the update wait.
    """

    talks: dict[int, _Talk] = field(default_factory=dict)
    owed: float = 0.0
    reductions: set[int] = field(default_factory=set)

    def compute(self, name: str, seconds: float, flops: float = 0.0, moved: float = 0.0) -> int:
        """Add computation behind everything that the stage waits for."""
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
        return self._talk(name, NodeType.COMM_COLL, deps, _Talk(message))

    def transfer(self, name: str, kind: NodeType, talk: _Talk, deps: set[int]) -> int:
        """Add a send or a receive."""
        return self._talk(name, kind, deps, talk)

    def _talk(self, name: str, kind: NodeType, deps: set[int], talk: _Talk) -> int:
        micros = max(1, round(talk.message.seconds * 1e6))
        place = self.add(name, kind, deps, micros, {})
        self.talks[place] = talk
        return place


def stage_trace(
    plan: Plan, blocks: StageBlocks, orders: Sequence[Order], stage: int, hop: Message
) -> StageTrace:
    """Build the trace of any rank of a stage.

    Args:
        plan: Resolved.
        blocks: What the stage does.
        orders: What each stage runs.
        stage: From 0.
        hop: Transfer of a micro-batch between stages.
    """
    trace = StageTrace()
    tags, takers = _tags(plan, orders), _takers(plan, orders, stage)
    final = _last_backward(orders[stage], plan)
    for task in orders[stage]:
        for other, source in producers(stage, task, plan.pp, plan.virtual):
            if other != stage:
                far, tag = (other - stage) * hop.group.stride, tags[other, source, stage]
                talk = _Talk(hop, far, tag=tag)
                trace.waits.add(
                    trace.transfer(f"from stage {other}", NodeType.COMM_RECV, talk, set())
                )
        own = blocks.last if task in final else blocks.passes[task.kind]
        name = f"{NAMES[task.kind]} {task.micro}"
        _pass(trace, own, name, overlap=plan.overlap)
        for other in takers.get(task, ()):
            far, tag = (other - stage) * hop.group.stride, tags[stage, task, other]
            talk = _Talk(hop, far, tag=tag)
            trace.transfer(f"to stage {other}", NodeType.COMM_SEND, talk, trace.ready())
    _end(trace, blocks)
    return trace


def _tags(plan: Plan, orders: Sequence[Order]) -> dict[tuple[int, Task, int], int]:
    """Number the transfers by their source and their target stage."""
    tags: dict[tuple[int, Task, int], int] = {}
    for stage, order in enumerate(orders):
        for task in order:
            for other, source in producers(stage, task, plan.pp, plan.virtual):
                if other != stage:
                    tags[other, source, stage] = 1 + len(tags)
    return tags


def _takers(plan: Plan, orders: Sequence[Order], stage: int) -> dict[Task, list[int]]:
    """Return the stages that wait for each task of a stage."""
    takers: dict[Task, list[int]] = {}
    for source, task, target in _tags(plan, orders):
        if source == stage:
            takers.setdefault(task, []).append(target)
    return takers


def _last_backward(order: Order, plan: Plan) -> set[Task]:
    """The backward tasks of the last micro-batch, one for each chunk."""
    return set([task for task in order if task.kind == BACKWARD][-plan.virtual :])


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
            # One after the other, as the step has them, whatever their groups.
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
        trace.transfer(message.name, kind, talk, deps)
        for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV)
    ]


def _end(trace: StageTrace, blocks: StageBlocks) -> None:
    """Add what follows the last task."""
    trace.waits |= trace.reductions
    for message in blocks.tied:
        trace.waits.add(trace.send(message.name, message, trace.ready()))
    if blocks.update > 0:
        trace.compute("update", blocks.update)
    for message in blocks.gathers:
        trace.waits.add(trace.send(message.name, message, trace.ready()))


class Ranks:
    """Traces of all ranks from those of their stages.

    Args:
        stages: Traces of the stages.
        axes: Dimensions of the ranks.

    Attributes:
        groups: Names of the process groups met so far, by their ranks.
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
