"""Pipelines: a step split into stages of layers, through which micro-batches pass.

Each stage is a separate program, for one micro-batch, on its own devices. Their times are composed
by the 1F1B schedule (``simulate/step/pipeline.py``), with transfers between stages; the optimizer,
and all-reduces of gradients, run once per step.
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

#: Micro-batches per stage to try. Engineering choice: with four, the bubble is at most a fifth of
#: the time, and with more the kernels get small.
_MICRO_PER_STAGE = (1, 2, 4)
#: Sheets for screening stages, by stage and phase.
StageSheets = Mapping[tuple[int, str], Sheet]


class StageSeconds(NamedTuple):
    """Times of a stage.

    Attributes:
        forward: Seconds of a micro-batch's forward pass.
        backward: Seconds of its backward pass.
        once: Seconds per step after the last micro-batch.
    """

    forward: float
    backward: float
    once: float

    @property
    def total(self) -> float:
        """Seconds of one micro-batch and the work per step: a run of the stage's program."""
        return sum(self)


class Sends(NamedTuple):
    """Times of transfers between stages.

    Attributes:
        hop: Seconds of a micro-batch from one stage to the next.
        once: Seconds of transfers once per step, such as sums over all gradients.
    """

    hop: float
    once: float


def compose(stages: Sequence[StageSeconds], sends: Sends, micro: int) -> StepTime:
    """Return the time of a step whose micro-batches pass through stages by 1F1B.

    Args:
        stages: Times of the stages.
        sends: Times of transfers between stages.
        micro: Number of micro-batches.
    """
    plan = StepPlan(pp=len(stages), microbatches=micro, schedule=SCHEDULE)
    times = [
        StageTimes(Part(own.forward), Part(own.backward), update=Part(own.once)) for own in stages
    ]
    made = compose_stages(times, plan, sends.hop)
    return replace(made, total=made.total + sends.once, sends=made.sends + sends.once)


def stage_sheets(staged: StagedProgram, sheet: Sheet) -> dict[tuple[int, str], Sheet]:
    """Split the sheet of a step by stage and phase: forward, backward, and once per step."""
    count = len(staged.cut.stages)
    kinds = ("forward", "backward", "once")
    # Gathers of parameters, and memory of the state, are attributed to one phase.
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
    """Return the screened times and memory of each stage; equal stages are computed once."""
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
        # Overlappable collectives beyond what the computation can hide.
        rest = sum(own.seconds - own.compute - own.waiting for own in (forward, backward, once))
        if "fsdp" in inside.sizes:
            later += rest  # gathers and scatters per micro-batch
        else:
            tail += rest
        known[kind] = StageSeconds(first, later, tail), backward.memory
        found.append(known[kind])
    return found


def _sends(staged: StagedProgram, plan: Plan, cluster: Cluster, side: int = 0) -> Sends:
    """Return the times of transfers between stages; ``side`` 1 and 2 select interval bounds."""

    def seconds(pair: tuple[int, int], sent: float) -> float:
        # All devices of a stage send at the same time, each to its peer.
        ranks = sorted(n * plan.inside.devices for n in pair)
        return xla_time("send_recv", float(round(sent)), ranks, cluster)[side]

    each, once = staged.sent_bytes(plan)
    hop = max((seconds(pair, sent) for pair, sent in each.items()), default=0.0)
    ways: dict[bool, float] = defaultdict(float)
    for pair, sent in once.items():
        # Sums go to one stage, and updated values back to the others.
        ways[pair[0] < pair[1]] = max(ways[pair[0] < pair[1]], seconds(pair, sent))
    return Sends(hop, sum(ways.values()))


def screen_pipeline(
    staged: StagedProgram, sheets: StageSheets, plan: Plan, cluster: Cluster
) -> Screened:
    """Estimate the time and memory of a plan."""
    costs = _stage_costs(staged, sheets, plan)
    seconds = [own for own, _ in costs]
    made = compose(seconds, _sends(staged, plan, cluster), plan.change.micro)
    memory = max(held + staged.more_memory(n, plan) for n, (_, held) in enumerate(costs))
    return Screened(plan, made.total, made.compute, made.total - made.compute, 0.0, memory)


class Pipelines:
    """A program split into stages, for all requested numbers of stages and changes.

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
        """Return the stages of a plan, and their sheets for screening.

        Raises:
            PlanError: The program cannot be split like this.
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
        """Screen all plans with stages over the whole cluster.

        Args:
            remat: Number of layers to recompute.
            micro: Number of micro-batches; ``None`` to search.
            axes: Axes to use inside stages.

        Raises:
            PlanError: There is no such plan.
        """
        total, rows = self.cluster.size, self.program.rows
        layers = self.program.layers.count if self.program.layers else 0
        if layers < 2:
            staged_program(self.program, 2, UNCHANGED)  # raises with the reason
        found = []
        for stages in range(2, min(total, layers) + 1):
            if total % stages:
                continue
            each = total // stages
            for parts in [micro] if micro else [k * stages for k in _MICRO_PER_STAGE]:
                # With a single row, the batch dimensions cannot be identified.
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
                f"no pipeline: a batch of {rows} rows cannot be split into micro-batches of at "
                "least two rows, as many as stages, and divisible by the other axes",
                where="--axes",
                hint="try a larger batch, fewer devices or other --micro-batches",
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
    """Combine the rows of a plan's stages into the row of the plan.

    Args:
        staged: The step split into stages.
        sheets: Sheets of the stages, which give the split of each stage's time into forward,
            backward and once.
        plan: The plan.
        cluster: The cluster.
        rows: The row of each stage's program.
        memory: Bytes that may be used per device; 0 if unknown.
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
        # Kernel errors are common to all stages; those of transfers and composition independent.
        kernels = compose(split(times), sends, micro).total - made.total
        wire = compose(seconds, _sends(staged, plan, cluster, side), micro).total - made.total
        widths.append(hypot(kernels, wire, COMPOSITION_ERROR * made.total))
    interval = Interval.around(made.total, *widths)
    needs = [
        row.memory_bytes_per_device + staged.more_memory(n, plan) for n, row in enumerate(stages)
    ]
    # Executions of each stage's program that its time in a step is equivalent to.
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
