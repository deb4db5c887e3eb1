"""A simulated stage as blocks of computation that a trace writes, with collectives around them.

Where :mod:`opcast.simulate.step.stage_times` adds up what nothing hides, this names each
collective, what it waits for and what waits for it; both are folds over one
:class:`~opcast.simulate.step.blocks.Stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..step.blocks import Stage
from ..step.costs import NOTHING, Costs, Message
from ..step.pipeline import BACKWARD, FORWARD
from ..step.plan import Group
from ..step.stage_times import StageTimes, UnitCost, unit_costs


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
    hiding: float
    before: tuple[Message, ...]
    beside: tuple[Message, ...]
    after: tuple[Message, ...]
    reduce: tuple[Message, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class StageBlocks:
    """What a stage does.

    Attributes:
        passes: Blocks of a task: of one chunk of a micro-batch's pass, by kind (``F``, ``B``,
            ``W``).
        last: Blocks of the last backward tasks, which also start what is reduced once a step.
        tied: Collectives between the last reduction and the update.
        update: Seconds of the optimiser.
        gathers: What is gathered after it and nothing hides.
    """

    passes: dict[str, tuple[Block, ...]]
    last: tuple[Block, ...] = ()
    tied: tuple[Message, ...] = ()
    update: float = 0.0
    gathers: tuple[Message, ...] = ()


def stage_blocks(stage: Stage, costs: Costs, times: StageTimes, units: int = 1) -> StageBlocks:
    """Write out what a device of a stage does.

    Args:
        stage: What it does.
        costs: Times of calls.
        times: The stage's times, from :func:`~opcast.simulate.step.compose.step_time`.
        units: Units that become one block.
    """
    priced = unit_costs(stage, costs)
    own = {FORWARD: (times.forward, times.slowing[0]), BACKWARD: (times.backward, times.slowing[1])}
    passes, last = dict[str, tuple[Block, ...]](), tuple[Block, ...]()
    for kind, parts in priced.items():
        # Known of the pass as a whole only: waiting for the host at the end of the stage, and what
        # hidden collectives take from the kernels beside them.
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

    What the pass takes beyond its units, ``more``, is spread over them.
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
    """Seconds of a unit without its collectives, and those of them that hide some."""
    left = max(0.0, sum(m.seconds for m in unit.beside) - unit.hiding)
    seconds = max(0.0, unit.part.total - sum(m.seconds for m in unit.after) - left)
    return seconds, min(unit.hiding, seconds)


def _merged(messages: Iterable[Message], factor: float = 1.0) -> tuple[Message, ...]:
    """Add up messages of one purpose, kind and group, each times a factor."""
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
