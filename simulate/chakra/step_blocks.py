"""What a device of a stage does in a step: blocks of computation with the collectives around them.

The same composition as :mod:`opcast.simulate.step.stage_times`, written out: where that adds up
what nothing hides, this names each collective, what it waits for and what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...features.operators.op import Op
from ..step.calls import CommCall
from ..step.costs import Costs, Part
from ..step.layer_ops import PassOps, embedding_ops, head_ops, layer_ops
from ..step.plan import Group, Plan
from ..step.schedules import BACKWARD, FORWARD, WEIGHTS
from ..step.stage_times import StageCost, StageTimes
from ..step.traffic import (
    expert_calls,
    gather_calls,
    replica_calls,
    ring_call,
    scatter_calls,
    tensor_calls,
    tied_calls,
)
from ..step.workload import Workload


@dataclass(frozen=True)
class Message:
    """Collectives of one kind that a trace writes as one.

    Attributes:
        name: Purpose, such as ``tensor``.
        kind: As of a :class:`~opcast.simulate.step.calls.CommCall`.
        group: Devices that take part.
        size: Bytes of all of them, counted as there.
        seconds: Predicted time of all of them.
    """

    name: str
    kind: str
    group: Group
    size: float
    seconds: float

    def scaled(self, factor: float) -> Message:
        """A part of it, or several."""
        return replace(self, size=self.size * factor, seconds=self.seconds * factor)


@dataclass(frozen=True)
class Block:
    """Computation of some units of a stage, and its collectives.

    Attributes:
        seconds: Computation, with waiting for the host.
        hiding: The part of it, at its end, beside which ``beside`` runs.
        before: Gathers of its parameters.
        beside: Collectives that start with ``hiding``; the next block waits for them.
        after: Collectives that start at its end; the next block waits for them.
        reduce: Reductions of gradients that start at its end; only the update waits for them.
        flops: Floating-point operations.
        bytes: Bytes read and written.
    """

    seconds: float
    hiding: float = 0.0
    before: tuple[Message, ...] = ()
    beside: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()
    reduce: tuple[Message, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0

    def messages(self) -> tuple[Message, ...]:
        """All its collectives."""
        return (*self.before, *self.beside, *self.after, *self.reduce)

    def scaled(self, factor: float) -> Block:
        """A part of it."""

        def part(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(m.scaled(factor) for m in messages)

        return Block(
            self.seconds * factor,
            self.hiding * factor,
            part(self.before),
            part(self.beside),
            part(self.after),
            part(self.reduce),
            self.flops * factor,
            self.bytes * factor,
        )


@dataclass(frozen=True)
class StageBlocks:
    """What a stage does.

    Attributes:
        passes: Blocks of a micro-batch's pass, by its kind (``F``, ``B``, ``W``).
        last: Blocks of the last backward pass, which also starts what is reduced once a step.
        tied: Collectives between the last reduction and the update.
        update: The optimiser.
        gathers: What is gathered after it and nothing hides.
    """

    passes: dict[str, tuple[Block, ...]]
    last: tuple[Block, ...]
    tied: tuple[Message, ...]
    update: Block
    gathers: tuple[Message, ...]

    def messages(self) -> tuple[Message, ...]:
        """All collectives of one micro-batch and of the end of the step."""
        blocks = [b for part in (*self.passes.values(), self.last) for b in part]
        return (*(m for b in blocks for m in b.messages()), *self.tied, *self.gathers)


def stage_blocks(
    workload: Workload, plan: Plan, costs: Costs, stage: int, times: StageTimes, units: int = 1
) -> StageBlocks:
    """Write out what a device of a stage does.

    Args:
        workload: The model.
        plan: Resolved.
        costs: Times of calls.
        stage: From 0.
        times: The stage's times, from :func:`~opcast.simulate.step.compose.step_time`.
        units: Layers that become one block.
    """
    return _Stage(StageCost(workload, plan, costs, stage), times).blocks(units)


def merged(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Add up messages of one purpose, kind and group."""
    sums: dict[tuple[str, str, Group], Message] = {}
    for own in messages:
        key = (own.name, own.kind, own.group)
        old = sums.get(key, replace(own, size=0.0, seconds=0.0))
        sums[key] = replace(own, size=old.size + own.size, seconds=old.seconds + own.seconds)
    return tuple(sums.values())


class _Stage:
    """The blocks of a stage in the making."""

    def __init__(self, cost: StageCost, times: StageTimes) -> None:
        self.cost, self.times = cost, times
        self.workload, self.plan, self.costs = cost.workload, cost.plan, cost.costs
        self.known: dict[tuple[int, str], Block] = {}

    def blocks(self, units: int) -> StageBlocks:
        """Make them."""
        times, split = self.times, self.plan.schedule == "zero-bubble"
        own = self.cost.units
        count = range(len(own))
        forward = [self._unit(i, FORWARD) for i in count]
        slow = self._slowed(forward, times.forward, [u.forward for u in own])
        passes = {FORWARD: _pass(forward, slow, units)}
        last: tuple[Block, ...] = ()
        if self.cost.train:
            back = [self._unit(i, BACKWARD) for i in reversed(count)]
            inside = [u.backward if split else u.backward + u.weights for u in own]
            slow = self._slowed(back, times.backward, inside)
            passes[BACKWARD] = _pass(back, slow, units)
            once = [self._once(i) for i in reversed(count)]
            both = [
                replace(b, reduce=merged([*b.reduce, *more]))
                for b, more in zip(back, once, strict=True)
            ]
            last = _pass(both, slow, units)
            if split:
                passes[WEIGHTS] = _pass([self._unit(i, WEIGHTS) for i in count], 0.0, units)
        return StageBlocks(passes, last, *self._end())

    def _slowed(self, blocks: Sequence[Block], part: Part, inside: Sequence[Part]) -> float:
        """Seconds of a pass that are known of it as a whole only.

        Waiting for the host at the end of the stage, and what hidden collectives take from the
        kernels beside them (:class:`~opcast.simulate.step.stage_times.StageCost`).
        """
        waiting = part.host - sum(p.host for p in inside)
        sent = sum(m.seconds for b in blocks for m in (*b.before, *b.reduce))
        if not self.plan.overlap or not sent:
            return waiting
        return waiting + self._taken(sent, part.exposed - sum(p.exposed for p in inside))

    def _taken(self, sent: float, exposed: float) -> float:
        """What collectives beside kernels take from them, by how much of both is exposed."""
        share = self.costs.contention
        # exposed = left + share · (sent − left), solved for what nothing hides of ``sent``.
        left = max(0.0, (exposed - share * sent) / (1.0 - share))
        return share * max(0.0, sent - left)

    def _unit(self, place: int, kind: str) -> Block:
        """One layer, the embedding or the head in one pass; equal ones are made once."""
        key = (id(self.cost.units[place]), kind)
        if key not in self.known:
            self.known[key] = self._new_unit(place, kind)
        return self.known[key]

    def _new_unit(self, place: int, kind: str) -> Block:
        unit, (ops, layer) = self.cost.units[place], self._ops(place)
        split = self.plan.schedule == "zero-bubble"
        part, calls = {
            FORWARD: (unit.forward, ops.forward),
            BACKWARD: (unit.backward, ops.backward),
            WEIGHTS: (unit.weights, ops.weights),
        }[kind]
        if kind == BACKWARD and not split:
            part, calls = part + unit.weights, (*calls, *ops.weights)
        work = Block(
            part.total,
            flops=sum(c.flops() for c in calls),
            bytes=sum(c.moved() for c in calls),
        )
        if kind == WEIGHTS:
            return work
        if layer is not None:
            work = self._communicating(work, layer, ops, backward=kind == BACKWARD)
        before, reduce = list[CommCall](), list[CommCall]()
        if self.plan.stage >= 3:
            before = gather_calls(unit.held, self.workload, self.plan)
        if self.plan.stage >= 2 and kind == BACKWARD:
            reduce = scatter_calls(unit.held, self.workload, self.plan)
        return replace(work, before=self._messages(before), reduce=self._messages(reduce))

    def _ops(self, place: int) -> tuple[PassOps, Workload | None]:
        """The operators of a unit, and the layer's workload; ``None`` for embedding and head."""
        layer = place - (self.cost.stage == 0)
        if layer < 0:
            return embedding_ops(self.workload, self.plan), None
        if layer >= len(self.cost.kinds):
            return head_ops(self.workload, self.plan), None
        return layer_ops(self.cost.kinds[layer], self.plan), self.cost.kinds[layer]

    def _communicating(
        self, work: Block, layer: Workload, ops: PassOps, *, backward: bool
    ) -> Block:
        """A layer's block with its collectives taken out of its time."""
        plan = self.plan
        calls = [(ops.backward, True)] if backward else [(ops.forward, False)]
        if backward and plan.recompute == "full":
            calls.append((ops.forward, False))
        sent = list(self._messages(tensor_calls(layer, plan))) * len(calls)
        swapped = list(self._messages(expert_calls(layer, plan))) * len(calls)
        rings = [self._ring(part, backward=way) for part, way in calls if plan.cp > 1]
        after, beside, hiding = [*sent], [m for m, _ in rings], sum(s for _, s in rings)
        if plan.hide_experts:
            beside += swapped
            hiding += sum(self.costs.compute(part) for part, _ in calls) if swapped else 0.0
        else:
            after += swapped
        if not plan.overlap:
            # Keys and values then travel between blocks of attention.
            after, beside, hiding = [*after, *beside], [], 0.0
        open_ = max(0.0, sum(m.seconds for m in beside) - hiding)
        seconds = work.seconds - sum(m.seconds for m in after) - open_
        return replace(
            work,
            seconds=max(0.0, seconds),
            hiding=min(hiding, max(0.0, seconds)),
            beside=merged(beside),
            after=merged(after),
        )

    def _ring(self, calls: Sequence[Op], *, backward: bool) -> tuple[Message, float]:
        """Keys and values round the ring, and the attention beside which they travel."""
        steps = self.plan.cp
        (pair,) = self._messages([ring_call(self.workload, self.plan, backward=backward)])
        own = replace(pair, group=self.plan.context_group)
        core = self.costs.compute([c for c in calls if c.family == "attention"])
        return own.scaled(steps - 1), core * (steps - 1) / steps

    def _once(self, place: int) -> tuple[Message, ...]:
        """Reductions of a unit's gradients that are made once a step."""
        held = self.cost.units[place].held
        calls = replica_calls(held, self.workload, self.plan)
        if self.plan.stage == 1:
            calls += scatter_calls(held, self.workload, self.plan)
        return self._messages(calls)

    def _end(self) -> tuple[tuple[Message, ...], Block, tuple[Message, ...]]:
        """What follows the last pass: tied weights, the update, gathers."""
        if not self.cost.train:
            return (), Block(0.0), ()
        plan, update = self.plan, self.times.update
        tied = self._messages(tied_calls(self.workload, plan, self.cost.stage))
        left = update.exposed - sum(m.seconds for m in tied)
        gathers = list[Message]()
        if plan.stage in (1, 2):
            for unit in self.cost.units:
                gathers += self._messages(gather_calls(unit.held, self.workload, plan))
        whole = sum(m.seconds for m in gathers)
        # Only what the next step's first pass does not hide counts towards this step.
        share = min(1.0, left / whole) if whole else 0.0
        waiting = update.host + max(0.0, left - whole)
        once = [m for i in range(len(self.cost.units)) for m in self._once(i)]
        sent = sum(m.seconds for m in once)
        if plan.overlap and sent:
            waiting += self._taken(sent, self.times.reduction)
        return tied, Block(update.compute + waiting), merged(m.scaled(share) for m in gathers)

    def _messages(self, calls: Iterable[CommCall]) -> tuple[Message, ...]:
        """Price calls."""
        return tuple(
            Message(c.name, c.kind, c.group, c.size * c.times, self.costs.link(c))
            for c in calls
            if c.needed
        )


def _pass(blocks: Sequence[Block], more: float, units: int) -> tuple[Block, ...]:
    """Join units to blocks, and spread over them what the pass takes beyond them."""
    own = [replace(b, seconds=b.seconds + more / len(blocks)) for b in blocks]
    return tuple(_joined(own[i : i + units]) for i in range(0, len(own), units))


def _joined(blocks: Sequence[Block]) -> Block:
    """Some units one after the other as one block."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        seconds=sum(b.seconds for b in blocks),
        hiding=sum(b.hiding for b in blocks),
        before=merged(m for b in blocks for m in b.before),
        beside=merged(m for b in blocks for m in b.beside),
        after=merged(m for b in blocks for m in b.after),
        reduce=merged(m for b in blocks for m in b.reduce),
        flops=sum(b.flops for b in blocks),
        bytes=sum(b.bytes for b in blocks),
    )
