"""One question about a training step: what is trained, where, and how it is looked at.

The fields are options of ``opcast simulate`` and ``opcast export chakra``, and what the server is
asked; ``StepCase.predict`` answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ...simulate.step.settings import SizesOpt

if TYPE_CHECKING:
    from ...models.operators import OpModel
    from ...models.steps.model import StepModel
    from ...simulate.clusters.topology import Cluster
    from ...simulate.step.fitting import Fit
    from ...simulate.step.plan import Plan
    from ...simulate.step.workload import Workload
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
        cluster: str,
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
        from .step import interleaved

        said = self.plan_on(predictor.cluster, work)
        plan, other = said, None
        if not any(word in self.plan for word in ("schedule", "virtual", "chunks", ".y")):
            plan = interleaved(said, work, predictor.cluster.size, predictor.framework)
        if plan != said:
            other = predictor.predict(work, said, speeds=self.speed, remedy=False)
            chunks = predictor.predict(work, plan, speeds=self.speed, remedy=False)
            if other.fit.fits and not may_fit(predictor.learned, predictor.framework, chunks.fit):
                # Whoever lacks memory for the activations of chunks alone does not interleave.
                plan, other = said, chunks
        found = predictor.predict(
            work,
            plan,
            self.jitter,
            self.speed,
            seed=self.seed,
            explain=self.explain,
            price=self.price,
        )
        return found if other is None else _either(found, other, predictor.framework)


def may_fit(learned: StepModel, framework: str, fit: Fit) -> bool:
    """Whether a plan fits by the lower end of the interval of its memory."""
    from ...models.steps.memory import interval_of

    return fit.host_fits and (
        interval_of(learned.memory, framework, fit.worst.total).lo <= fit.capacity
    )


def _either(found: StepPrediction, other: StepPrediction, framework: str) -> StepPrediction:
    """A step whose pipeline may be interleaved or not: one interval for both."""
    whose = f"recipes of {framework}" if framework else "published runs of large models"
    taken = f"virtual={found.plan.virtual} is taken, as in {whose}; with schedule=1f1b"
    if not found.fit.fits and other.fit.fits:
        taken = (
            f"virtual={found.plan.virtual} is taken, as in {whose}, whose memory the error of the "
            "count allows; with schedule=1f1b, which fits,"
        )
    if found.plan.virtual == 1:
        taken = "schedule=1f1b is taken, since it fits and the activations of more chunks do not; "
        taken += f"with virtual={other.plan.virtual}, as in {whose},"
    note = (
        f"the plan does not say whether its pipeline is interleaved: {taken} it takes "
        f"{duration(other.step.total * 1e6)}; the interval holds both"
    )
    lo = min(found.interval.lo, other.interval.lo)
    hi = max(found.interval.hi, other.interval.hi)
    interval = found.interval._replace(lo=lo, hi=hi)
    return replace(found, interval=interval, described=(*found.described, note))
