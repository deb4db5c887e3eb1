"""One question about a training step: what is trained, where, and how it is looked at.

The fields are options of ``opcast simulate`` and ``opcast export chakra``, and what the server is
asked; ``StepCase.predict`` answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ...common.errors import PlanError
from ...common.options import (
    ClusterOpt,
    CompiledOpt,
    FrameworkOpt,
    OperatorModelOpt,
    Option,
    PowerCapOpt,
    PriceOpt,
    SourceOpt,
    StepModelOpt,
)
from ...common.units import duration
from ...models.core.registry import OPERATOR_MODEL
from ...simulate.step.settings import SizesOpt, sizes_of

if TYPE_CHECKING:
    from ...models.operators import OpModel
    from ...simulate.clusters.topology import Cluster
    from ...simulate.step.plan import Plan
    from ...simulate.step.workload import Workload
    from .recipes import Taken
    from .step import StepPrediction, StepPredictor


def _speeds(texts: Sequence[str]) -> dict[int, float]:
    """Speeds by rank, as plans number them: tp innermost, pp outermost (docs/simulate.md)."""
    try:
        return {int(rank): float(value) for rank, value in (t.split("=", 1) for t in texts)}
    except ValueError:
        raise ValueError("write --speed RANK=0.9") from None


@dataclass(frozen=True, kw_only=True)
class StepsBy:
    """By what steps are predicted."""

    model: OperatorModelOpt = OPERATOR_MODEL
    framework: FrameworkOpt = ""
    compiled: CompiledOpt = False
    steps: StepModelOpt = "default"

    def predictor(
        self,
        cluster: str | Cluster,
        operators: OpModel | None,
        source: str = "own",
        power_cap_w: float | None = None,
    ) -> StepPredictor:
        """What predicts steps on a cluster, with a loaded model of operators.

        Args:
            cluster: Name or file.
            operators: ``None`` for rooflines.
            source: Whose cluster it is.
            power_cap_w: Sustained power of a device in watts; ``None`` for its limit.

        Raises:
            OpcastError: The cluster or the model of steps is not usable, or the framework unknown.
        """
        from ...models.steps.model import StepModel
        from .step import StepPredictor

        learned = StepModel.find(self.steps)
        learned.check_framework(self.framework)
        return StepPredictor(
            cluster,
            operators,
            framework=self.framework,
            compiled=self.compiled,
            learned=learned,
            source=source,
            power_cap_w=power_cap_w,
        )


@dataclass(frozen=True)
class PlannedStep(StepsBy):
    """A step of a model under a plan.

    Attributes:
        workload: Name or file of the model.
    """

    cluster: ClusterOpt
    workload: str = ""
    plan: Annotated[str, Option("Parallel plan such as tp=8,pp=2,dp=8, or a YAML file.")] = ""
    settings: SizesOpt = field(default_factory=dict)

    def plan_on(self, cluster: Cluster, work: Workload) -> Plan:
        """The plan; without one data parallelism, which fits every model's sizes.

        Raises:
            PlanError: The plan is malformed, or one of its settings changes nothing.
        """
        from ...simulate.step.plan import Plan, idle_setting, parse_plan

        plan = parse_plan(self.plan) if self.plan else Plan(dp=cluster.size)
        if idle := idle_setting(work, plan):
            raise PlanError(idle, where="plan", hint="leave it out")
        return plan

    def taken(self, predictor: StepPredictor, work: Workload) -> Taken:
        """The plan as it is taken on a predictor's cluster, where it may be silent.

        Raises:
            PlanError: As of :meth:`plan_on`, or the plan does not fit the workload or the cluster.
        """
        from ...simulate.step.plan import says_schedule
        from .recipes import Taken, taken

        plan = self.plan_on(predictor.cluster, work)
        return Taken(plan) if says_schedule(self.plan) else taken(predictor, work, plan)


@dataclass(frozen=True)
class StepCase(PlannedStep):
    """A step, and what is asked about it."""

    source: SourceOpt = "own"
    explain: Annotated[bool, Option("Take the step apart into terms.", ("--explain",))] = False
    price: PriceOpt = None
    power_cap_w: PowerCapOpt = None
    jitter: Annotated[float, Option("Relative noise of a task's time on a device.", least=0.0)] = (
        0.0
    )
    speed: Annotated[
        Mapping[int, float],
        Option("Relative speed of a rank, RANK=0.9; may be given again.", collect=_speeds),
    ] = field(default_factory=dict)
    seed: Annotated[int, Option("With --jitter: random seed.", least=0)] = 0
    run: Annotated[
        Mapping[str, object],
        Option(
            "A run of such steps with failures, such as tokens=15e12,spares=4,repair_h=24.",
            collect=partial(sizes_of, option="--run"),
        ),
    ] = field(default_factory=dict)

    def predict(self, work: Workload, operators: OpModel | None) -> StepPrediction:
        """Answer for the workload as it was read.

        Raises:
            OpcastError: The plan, cluster or model does not fit.
        """
        predictor = self.predictor(self.cluster, operators, self.source, self.power_cap_w)
        return self.by(predictor, work)

    def by(self, predictor: StepPredictor, work: Workload) -> StepPrediction:
        """Answer by a predictor of the cluster, whose prices other cases share.

        Args:
            predictor: As :meth:`predictor` makes it.
            work: The workload as it was read.

        Raises:
            OpcastError: The plan does not fit the workload or the cluster.
        """
        own = self.taken(predictor, work)
        found = predictor.predict(
            work,
            own.plan,
            self.jitter,
            self.speed,
            seed=self.seed,
            explain=self.explain,
            price=self.price,
        )
        if own.other is not None:
            other = predictor.predict(work, own.other, speeds=self.speed, remedy=False)
            found = _either(found, other, own.why)
        if not self.run:
            return found
        from .training_run import training_run

        return replace(found, run=training_run(self.run, found, predictor.spec.host_link))


def _either(found: StepPrediction, other: StepPrediction, why: str) -> StepPrediction:
    """A step whose pipeline may be interleaved or not: one interval for both."""
    note = f"{why} it takes {duration(other.step.total * 1e6)}; the interval holds both"
    lo = min(found.interval.lo, other.interval.lo)
    hi = max(found.interval.hi, other.interval.hi)
    interval = found.interval._replace(lo=lo, hi=hi)
    return replace(found, interval=interval, described=(*found.described, note))
