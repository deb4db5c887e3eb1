"""Times of one device of a pipeline stage: a micro-batch, gradient reduction, and the update.

Collectives of parameters overlap computation: two streams of one device, each in order. All times
are in seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...features.operators.op import Op
from .blocks import Beside, Block, Stage, Unit
from .costs import NOTHING, CommCall, Costs, Message, Part
from .pipeline import BACKWARD, FORWARD, WEIGHTS


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one device of a stage, all its chunks together.

    Attributes:
        forward: One micro-batch forward.
        backward: One micro-batch backward; without ``weights`` for zero-bubble schedules.
        weights: Weight gradients, if they are separate.
        reduction: Gradient reduction that the last backward pass does not hide.
        update: The optimiser, with the gathers of ZeRO after it and transfers of offloading.
        slowing: Part of the exposed seconds of ``forward``, ``backward`` and ``reduction`` by which
            hidden collectives slow concurrent kernels, as opposed to waiting.
    """

    forward: Part
    backward: Part = NOTHING
    weights: Part = NOTHING
    reduction: float = 0.0
    update: Part = NOTHING
    slowing: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def micro(self) -> Part:
        """All passes of one micro-batch."""
        return self.forward + self.backward + self.weights

    def slowed(self, factor: float) -> StageTimes:
        """The stage on a device that computes ``factor`` times as long, with the same links."""

        def slower(part: Part) -> Part:
            return replace(part, compute=part.compute * factor)

        return replace(
            self,
            forward=slower(self.forward),
            backward=slower(self.backward),
            weights=slower(self.weights),
            update=slower(self.update),
        )

    @property
    def tail(self) -> float:
        """Seconds after the pipeline's last task."""
        return self.reduction + self.update.total


@dataclass(frozen=True)
class UnitCost:
    """A unit in one pass with its times.

    Attributes:
        ops: Operators.
        part: Time of the unit.
        hiding: Seconds of its computation that overlap ``beside``.
        before: Gathers of its parameters.
        beside: Overlapped collectives of activations, exposed only as far as they take longer.
        after: Collectives whose results the next operator needs.
        reduce: Gradient reductions in every micro-batch.
        once: Gradient reductions after the last backward pass.
    """

    ops: tuple[Op, ...]
    part: Part
    hiding: float = 0.0
    before: tuple[Message, ...] = ()
    beside: tuple[Message, ...] = ()
    after: tuple[Message, ...] = ()
    reduce: tuple[Message, ...] = ()
    once: tuple[Message, ...] = ()


def unit_costs(stage: Stage, costs: Costs) -> dict[str, list[UnitCost]]:
    """Times of the units of a micro-batch in execution order, by kind of pass."""
    known = {unit: _unit_costs(stage, unit, costs) for unit in Counter(stage.units)}
    found = {FORWARD: [known[unit][FORWARD] for unit in stage.units]}
    if stage.train:
        found[BACKWARD] = [known[unit][BACKWARD] for unit in reversed(stage.units)]
    if stage.train and stage.split:
        found[WEIGHTS] = [known[unit][WEIGHTS] for unit in stage.units]
    return found


def _unit_costs(stage: Stage, unit: Unit, costs: Costs) -> dict[str, UnitCost]:
    before = costs.messages(unit.gathers)
    weights = UnitCost(unit.weights.ops, _part([unit.weights], costs))
    forward = _unit_cost(stage, [unit.forward], unit.moved, costs)
    back = _unit_cost(stage, unit.backward, unit.moved, costs)
    if not stage.split:
        back = replace(back, part=back.part + weights.part, ops=(*back.ops, *weights.ops))
    reduce, once = costs.messages(unit.scatters), costs.messages(unit.once)
    return {
        FORWARD: replace(forward, before=before),
        BACKWARD: replace(back, before=before, reduce=reduce, once=once),
        WEIGHTS: weights,
    }


def _unit_cost(stage: Stage, blocks: Sequence[Block], moved: float, costs: Costs) -> UnitCost:
    """Time of consecutive blocks, overlapping ``moved`` bytes to or from the host."""
    blocks = [_placed(block, costs) for block in blocks]
    part = _part(blocks, costs)
    hidden = part.total if stage.plan.overlap else 0.0
    beside = [own for block in blocks for own in block.beside if own.call.needed]
    return UnitCost(
        ops=tuple(c for block in blocks for c in block.ops),
        part=part + Part(exposed=exposed(moved / costs.host_bandwidth, hidden)),
        hiding=sum(costs.compute(own.ops) * own.share for own in beside),
        beside=costs.messages(own.call for own in beside),
        after=costs.messages(call for block in blocks for call in block.sent),
    )


def _placed(block: Block, costs: Costs) -> Block:
    """A block with tensor-parallel collectives overlapped with its products, if decomposed."""
    tensor = [call for call in block.sent if call.name == "tensor"]
    if not costs.effects.decomposed or not tensor:
        return block
    products = tuple(op for op in block.ops if op.kind == "product")
    # A gather feeds about half of the products, a scatter collects the results of the others.
    share = costs.effects.decomposed / len(tensor)
    pieces = (Beside(call, products, share) for call in tensor)
    others = tuple(call for call in block.sent if call.name != "tensor")
    return replace(block, sent=others, beside=(*block.beside, *pieces))


def _part(blocks: Sequence[Block], costs: Costs) -> Part:
    """Time of blocks, including the exposed part of their activations' collectives."""
    total = NOTHING
    for block in blocks:
        left = costs.comm(block.sent)
        for own in block.beside:
            left += exposed(costs.link(own.call), costs.compute(own.ops) * own.share)
        # Ring transfers are not prepared by the host one by one.
        count = sum(c.times for c in block.calls if c.needed and c.kind != "send_recv")
        total += costs.part(block.ops, left, round(count))
    return total


def stage_times(stage: Stage, costs: Costs) -> StageTimes:
    """Times of a micro-batch, the gradient reduction and the update.

    Args:
        stage: Work of the device.
        costs: Times of calls.
    """
    passes = unit_costs(stage, costs)
    # Handing a micro-batch to the next stage is work of the host.
    wait = Part(host=costs.effects.hop_s if stage.plan.pp > 1 else 0.0)
    found = _passes(stage, passes, costs.contention)
    found = replace(found, forward=found.forward + wait)
    if not stage.train:
        return found
    return replace(
        found,
        backward=found.backward + wait,
        weights=_sum(passes.get(WEIGHTS, ())),
        update=_update(stage, passes[FORWARD], costs),
    )


def _passes(stage: Stage, passes: dict[str, list[UnitCost]], contention: float) -> StageTimes:
    """Time a micro-batch in the steady state, and the exposed reduction of the last one.

    Reductions of one micro-batch (ZeRO 2 and 3) continue during the next one, so up to three
    micro-batches are simulated, and a backlog that still grows is extrapolated. The last backward
    pass also issues the reductions that are made once per step.
    """
    forward, backward = passes[FORWARD], passes.get(BACKWARD, [])
    ahead, back = _sum(forward), _sum(backward)
    gathers = [_seconds(u.before) for u in forward]
    scatters = [_seconds(u.reduce) for u in backward]
    once = [_seconds(u.once) for u in backward]
    if not stage.plan.overlap:
        sent = sum(gathers)
        more = Part(exposed=(sent + sum(scatters)) if stage.train else 0.0)
        return StageTimes(ahead + Part(exposed=sent), back + more, reduction=sum(once))
    up = Pass([u.part.total for u in forward], gathers)
    down = Pass([u.part.total for u in backward], gathers[::-1], scatters)
    # Three: the first has no backlog, the second meets it, the third shows whether it grows.
    count = min(stage.plan.microbatches, 3)
    steady = run_passes([up, down] * count)
    both = [a + b for a, b in zip(scatters, once, strict=True)]
    # With several chunks, all micro-batches of the last group pass through a chunk before the next
    # one: the reductions of earlier ones have that much longer.
    group = stage.plan.rounds_in_chunk
    end = Pass([group * own for own in down.compute], down.gather, both)
    last = run_passes([*[up, down] * (count - 1), up, end])
    # Ends of the previous backward, the last forward and the last backward pass: their
    # differences are the passes of the steady state.
    ends = (0.0, *steady.ends)[-3:]
    # Backlog of reductions after the last backward pass, and its growth since the previous one;
    # each micro-batch that was not simulated adds as much.
    left = steady.total - steady.ends[-1]
    fewer = run_passes([up, down] * max(1, count - 1))
    piled = max(0.0, left - (fewer.total - fewer.ends[-1])) * (stage.plan.microbatches - count)
    # Rounding may leave a wait just below zero.
    there = max(0.0, ends[1] - ends[0] - ahead.computing)
    again = max(0.0, ends[2] - ends[1] - back.computing)
    tail = max(0.0, last.total - ends[2] - (group - 1) * sum(down.compute)) + piled

    def slowing(wait: float, sent: float, own: float) -> float:
        # Part of the wait is the units' own exposed collectives, the rest is the exposed time of
        # ``sent``. Its hidden time occupies cores and slows concurrent kernels by the
        # fraction ``contention``.
        return contention * max(0.0, sent - max(0.0, wait - own))

    slow = (
        slowing(there, sum(gathers), ahead.exposed),
        slowing(again, sum(gathers) + sum(scatters), back.exposed) if stage.train else 0.0,
        slowing(tail, sum(once), 0.0),
    )
    return StageTimes(
        ahead.waiting(there + slow[0]),
        back.waiting(again + slow[1]),
        reduction=tail + slow[2],
        slowing=slow,
    )


def _update(stage: Stage, forward: Sequence[UnitCost], costs: Costs) -> Part:
    gathers = [costs.comm(unit.renewed) for unit in stage.units]
    # The next step's first forward pass may hide the gathers; with chunks of layers, the passes of
    # the first group of micro-batches. The exposed rest is booked here.
    own = [stage.plan.rounds_in_chunk * unit.part.total for unit in forward]
    hidden = run_passes([Pass(own, gathers)]).total - sum(own)
    waiting = hidden if stage.plan.overlap else sum(gathers)
    waiting += stage.moved / costs.host_bandwidth + costs.comm(stage.tied)
    return costs.part(stage.update, waiting)


def traffic(stage: Stage, costs: Costs) -> dict[str, float]:
    """Seconds of all communication of a step, hidden or not, by name."""
    seconds = dict[str, float]()

    def add(calls: Sequence[CommCall], times: float) -> None:
        for call in calls:
            seconds[call.name] = seconds.get(call.name, 0.0) + times * costs.link(call)

    micro = stage.plan.microbatches
    passes = micro * (2 if stage.train else 1)
    for unit, number in Counter(stage.units).items():
        for block in (unit.forward, *unit.backward):
            add(block.calls, number * micro)
        add(unit.gathers, number * passes)
        add(unit.scatters, number * micro)
        add((*unit.once, *unit.renewed), number)
    add(stage.tied, 1)
    add([stage.hop], passes)
    return {name: value for name, value in seconds.items() if value > 0}


def _sum(units: Sequence[UnitCost]) -> Part:
    return sum((unit.part for unit in units), NOTHING)


def _seconds(messages: Sequence[Message]) -> float:
    return sum(message.seconds for message in messages)


class Pass(NamedTuple):
    """A pass over layers in execution order.

    Attributes:
        compute: Seconds of each layer.
        gather: Seconds to gather each layer's parameters before it runs; empty for none.
        scatter: Seconds to reduce each layer's gradients after it has run; empty for none.
    """

    compute: Sequence[float]
    gather: Sequence[float] = ()
    scatter: Sequence[float] = ()


class PassRun(NamedTuple):
    """Result of :func:`run_passes`.

    Attributes:
        ends: End of each pass's computation, in seconds.
        links: End of the last collective, in seconds.
    """

    ends: tuple[float, ...]
    links: float

    @property
    def total(self) -> float:
        """End of everything."""
        return max(self.ends[-1], self.links)


def run_passes(passes: Sequence[Pass]) -> PassRun:
    """Run passes one after another, with their collectives in a second stream.

    The gather of layer ``i`` may start when layer ``i - 2`` has ended: at most two layers are
    gathered at a time by FSDP's default prefetch, which also bounds memory (Zhao et al., PyTorch
    FSDP, VLDB 2023). The first gathers of a pass wait for the previous pass. A layer's gather takes
    precedence over the reduction of the layer before it; reductions continue during later passes.

    Args:
        passes: Passes in order, at least one.
    """
    # ``device`` and ``links`` are the times at which the two streams become free.
    device = links = 0.0
    waiting: deque[tuple[float, float]] = deque()
    pass_ends = []
    for compute, gather, scatter in passes:
        begin, ends = device, list[float]()
        for layer, own in enumerate(compute):
            if gather and gather[layer] > 0.0:
                free = ends[layer - 2] if layer > 1 else begin
                # Reductions that were ready before this gather could start were issued before it,
                # and a communicator runs collectives in the order of issue.
                while waiting and waiting[0][0] <= free:
                    ready, seconds = waiting.popleft()
                    links = max(links, ready) + seconds
                links = max(links, free) + gather[layer]
                device = max(device, links)
            device += own
            ends.append(device)
            if scatter and scatter[layer] > 0.0:
                waiting.append((device, scatter[layer]))
        pass_ends.append(device)
    for ready, seconds in waiting:
        links = max(links, ready) + seconds
    return PassRun(tuple(pass_ends), links)


def exposed(total: float, compute: float) -> float:
    """The part of ``total`` that computation does not cover, never negative."""
    return max(0.0, total - compute)
