"""Pipelines: a step in stages of layers, which micro-batches go through one after the other.

Each stage is a program of its own, for one micro-batch, over its own devices. What it takes is
composed as 1F1B orders micro-batches (``simulate/step/pipeline.py``), with the sends between
stages; the optimiser, and gradients that are all-reduced, come once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot
from typing import NamedTuple

from ...common.errors import PlanError
from ...common.interval import Interval
from ...simulate.clusters.topology import Cluster
from ...simulate.step.compose import StepTime
from ...simulate.step.compose import compose as compose_stages
from ...simulate.step.costs import Part
from ...simulate.step.plan import Plan as StepPlan
from ...simulate.step.stage_times import StageTimes
from ..cluster.network import xla_time
from ..cluster.spread import COMPOSITION_ERROR
from ..program.predictor import Predictor
from .case import PIPELINE
from .cost import Screened, Sheet
from .judge import CompiledPlan, PlanRow, StageFigures
from .program import PlannedProgram
from .space import UNCHANGED, Change, Plan
from .stages import SCHEDULE, StagedProgram, staged_program

#: Micro-batches for each stage. Engineering choice: with four the bubble is a fifth of the time at
#: most, and with more the kernels get small.
_MICRO_PER_STAGE = (1, 2, 4)
#: What stages are screened with, by stage and pass.
StageSheets = Mapping[tuple[int, str], Sheet]


class StageSeconds(NamedTuple):
    """What a stage takes.

    Attributes:
        forward: Seconds of a micro-batch.
        backward: Seconds of its backward pass.
        once: Seconds of a step behind the last micro-batch.
    """

    forward: float
    backward: float
    once: float

    @property
    def total(self) -> float:
        """Seconds of one micro-batch and what comes once: a run of the stage's program."""
        return sum(self)


class Sends(NamedTuple):
    """What a stage hands to others.

    Attributes:
        hop: Seconds of a micro-batch from one stage to the next.
        once: Seconds of a step for what is sent once, such as sums over all gradients.
    """

    hop: float
    once: float


def compose(stages: Sequence[StageSeconds], sends: Sends, micro: int) -> StepTime:
    """Time of a step whose micro-batches go through stages as 1F1B orders them.

    Args:
        stages: What each stage takes.
        sends: What transfers between stages take.
        micro: Number of micro-batches.
    """
    plan = StepPlan(pp=len(stages), microbatches=micro, schedule=SCHEDULE)
    times = [
        StageTimes(Part(own.forward), Part(own.backward), update=Part(own.once)) for own in stages
    ]
    made = compose_stages(times, plan, sends.hop)
    return replace(made, total=made.total + sends.once, sends=made.sends + sends.once)


def stage_sheets(staged: StagedProgram, sheet: Sheet) -> dict[tuple[int, str], Sheet]:
    """A sheet of the step by stage and pass: forward, backward, and what comes once."""
    count = len(staged.cut.stages)
    kinds = ("forward", "backward", "once")
    # Gathers of parameters and the state's memory are counted once.
    parts = {
        (n, kind): staged.held(n) if kind == "backward" else []
        for n in range(count)
        for kind in kinds
    }
    made = sheet.parts(staged.part, parts)
    saved = [staged.saved_bytes(n, Plan()) for n in range(count)]
    total = sum(saved) or 1.0
    for (stage, _), own in made.items():
        own.activations = sheet.activations * saved[stage] / total
    return made


def _stage_costs(
    staged: StagedProgram, sheets: StageSheets, plan: Plan
) -> list[tuple[StageSeconds, float]]:
    """What each stage takes and needs by our own reckoning; equal ones are reckoned once."""
    inside, last = plan.inside, plan.stages - 1
    known: dict[tuple[int, bool, bool], tuple[StageSeconds, float]] = {}
    found = []
    for stage in range(plan.stages):
        kind = staged.cut.layers.count(stage), stage == 0, stage == last
        if kind in known:
            found.append(known[kind])
            continue
        forward, backward, once = (
            sheets[stage, kind].cost(inside) for kind in ("forward", "backward", "once")
        )
        first = forward.compute + forward.waiting
        later = backward.compute + backward.waiting
        tail = once.compute + once.waiting
        # Collectives that could hide but have too little to hide behind.
        rest = sum(own.seconds - own.compute - own.waiting for own in (forward, backward, once))
        if "fsdp" in inside.sizes:
            later += rest  # gathers and scatters of each micro-batch
        else:
            tail += rest
        known[kind] = StageSeconds(first, later, tail), backward.memory
        found.append(known[kind])
    return found


def _sends(staged: StagedProgram, plan: Plan, cluster: Cluster, side: int = 0) -> Sends:
    """What transfers between stages take; at ``side`` 1 and 2 the ends of the interval."""

    def seconds(pair: tuple[int, int], sent: float) -> float:
        # All devices of a stage send at once, each to its own of the other stage.
        ranks = sorted(n * plan.inside.devices for n in pair)
        return xla_time("send_recv", float(round(sent)), ranks, cluster)[side]

    each, once = staged.sent_bytes(plan)
    hop = max((seconds(pair, sent) for pair, sent in each.items()), default=0.0)
    ways: dict[bool, float] = defaultdict(float)
    for pair, sent in once.items():
        # Sums go to one stage, and from there to the others.
        ways[pair[0] < pair[1]] = max(ways[pair[0] < pair[1]], seconds(pair, sent))
    return Sends(hop, sum(ways.values()))


def screen_pipeline(
    staged: StagedProgram, sheets: StageSheets, plan: Plan, cluster: Cluster
) -> Screened:
    """Reckon the time and memory of a plan."""
    costs = _stage_costs(staged, sheets, plan)
    seconds = [own for own, _ in costs]
    made = compose(seconds, _sends(staged, plan, cluster), plan.change.micro)
    memory = max(held + staged.more_memory(n, plan) for n, (_, held) in enumerate(costs))
    return Screened(plan, made.total, made.compute, made.total - made.compute, 0.0, memory)


class Pipelines:
    """A program in stages, in every way that was asked for.

    Args:
        program: The whole step.
        cluster: The cluster.
        predictor: Predicts the kernels of one device.
    """

    def __init__(self, program: PlannedProgram, cluster: Cluster, predictor: Predictor) -> None:
        self.program, self.cluster, self.predictor = program, cluster, predictor
        self._sheets: dict[Change, Sheet] = {}
        self._made: dict[tuple[int, Change], tuple[StagedProgram, StageSheets]] = {}

    def of(self, plan: Plan) -> tuple[StagedProgram, StageSheets]:
        """The stages of a plan, and what they are screened with.

        Raises:
            PlanError: The program cannot be cut so.
        """
        change = plan.change
        key = plan.stages, change
        if key not in self._made:
            made = staged_program(self.program, plan.stages, change)
            if change not in self._sheets:
                plain = self.program.micro_batch(change.micro) if change.remat else None
                self._sheets[change] = made.program.sheet(self.cluster, self.predictor, plain)
            self._made[key] = made, stage_sheets(made, self._sheets[change])
        return self._made[key]

    def screened(self, remat: int, micro: int | None, axes: Sequence[str]) -> list[Screened]:
        """Reckon the cost of all plans with stages over the whole cluster.

        Args:
            remat: Layers to compute again.
            micro: Number of micro-batches; ``None`` to search.
            axes: Axes to use inside of stages.

        Raises:
            PlanError: There is none.
        """
        total, rows = self.cluster.size, self.program.rows
        layers = self.program.layers.count if self.program.layers else 0
        if layers < 2:
            staged_program(self.program, 2, UNCHANGED)  # says why not
        found = []
        for stages in range(2, min(total, layers) + 1):
            if total % stages:
                continue
            each = total // stages
            for parts in [micro] if micro else [k * stages for k in _MICRO_PER_STAGE]:
                # Of a single row it cannot be told which dimensions are the batch.
                if parts < 2 or rows % parts or rows == parts:
                    continue
                change = Change(remat, parts)
                staged, sheets = self.of(Plan(((PIPELINE, stages),), (), change))
                inside = min(self.cluster.box or each, each)
                for own in staged.program.space.plans(each, axes, inside):
                    plan = Plan(((PIPELINE, stages), *own.mesh), own.tensor, change)
                    found.append(screen_pipeline(staged, sheets, plan, self.cluster))
        if not found:
            raise PlanError(
                f"no pipeline: a batch of {rows} rows cannot be cut into micro-batches of two rows "
                "and more, as many as stages, and what the other axes divide",
                where="--axes",
                hint="a larger batch, fewer devices or other --micro-batches may do",
            )
        return found


def pipeline_row(
    staged: StagedProgram,
    sheets: StageSheets,
    plan: Plan,
    cluster: Cluster,
    rows: Sequence[PlanRow],
    memory: float,
) -> PlanRow:
    """The row of a plan from those of its stages' programs.

    Args:
        staged: The step in stages.
        sheets: Parts of the sheet: which part of a stage's program is forward, and which comes
            once, is taken from our own reckoning.
        plan: The plan.
        cluster: The cluster.
        rows: The row of each stage's program.
        memory: Bytes that a device may use; 0 if not known.
    """
    for stage, row in enumerate(rows):
        if row.error:
            return PlanRow(error=f"stage {stage}: {row.error}")
    stages = [row for row in rows if isinstance(row, CompiledPlan)]
    known = [own for own, _ in _stage_costs(staged, sheets, plan)]
    micro = plan.change.micro

    def split(times: Sequence[float]) -> list[StageSeconds]:
        return [
            StageSeconds(*(us * 1e-6 * part / own.total for part in own))
            for own, us in zip(known, times, strict=True)
        ]

    sends, seconds = _sends(staged, plan, cluster), split([row.latency_us for row in stages])
    made = compose(seconds, sends, micro)
    widths = []
    ends = [row.lo_us for row in stages], [row.hi_us for row in stages]
    for side, times in enumerate(ends, 1):
        # All stages err alike, as their kernels do; transfers and composition for themselves.
        kernels = compose(split(times), sends, micro).total - made.total
        wire = compose(seconds, _sends(staged, plan, cluster, side), micro).total - made.total
        widths.append(hypot(kernels, wire, COMPOSITION_ERROR * made.total))
    interval = Interval.around(made.total, *widths)
    needs = [
        row.memory_bytes_per_device + staged.more_memory(n, plan) for n, row in enumerate(stages)
    ]
    # Runs of each stage's program to which its time in a step amounts.
    runs = [(micro * (own.forward + own.backward) + own.once) / own.total for own in seconds]
    worst, most = stages[made.worst], runs[made.worst]
    joules = [
        row.energy_j * n for row, n in zip(stages, runs, strict=True) if row.energy_j is not None
    ]
    exposed = worst.exposed_communication_us * most
    return CompiledPlan(
        latency_us=interval.value * 1e6,
        lo_us=interval.lo * 1e6,
        hi_us=interval.hi * 1e6,
        compute_us=made.compute * 1e6 - exposed,
        communication_us=worst.communication_us * most + made.sends * 1e6,
        exposed_communication_us=exposed + made.sends * 1e6,
        bubble_us=made.bubble * 1e6,
        sends_us=made.sends * 1e6,
        memory_bytes_per_device=max(needs),
        fits=not memory or max(needs) <= memory,
        lowering=worst.lowering,
        collectives=worst.collectives,
        moved_bytes=worst.moved_bytes * most,
        waits=[replace(own, us=own.us * most, bytes=own.bytes * most) for own in worst.waits],
        stages=[
            StageFigures(
                staged.cut.layers.count(n),
                own.forward * 1e6,
                own.backward * 1e6,
                own.once * 1e6,
                need,
            )
            for n, (own, need) in enumerate(zip(seconds, needs, strict=True))
        ],
        notes=[*dict.fromkeys(n for row in stages for n in row.notes), *staged.notes()],
        energy_j=sum(joules) if len(joules) == len(stages) else None,
    )
