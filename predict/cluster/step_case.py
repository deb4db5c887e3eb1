"""A training step to predict, and the options of the prediction.

The fields are options of ``opcast simulate`` and ``opcast export chakra`` and the schema of the
server's requests; ``StepCase.predict`` answers.
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

#: Ratio of step times from which another number of micro-batches is named, above their usual
#: effect on products (engineering choice).
_MUCH_FASTER = 1.15


def _speeds(texts: Sequence[str]) -> dict[int, float]:
    """Parse relative speeds by rank, with tp innermost and pp outermost (docs/simulate.md)."""
    try:
        return {int(rank): float(value) for rank, value in (t.split("=", 1) for t in texts)}
    except ValueError:
        raise ValueError("write --speed RANK=0.9") from None


@dataclass(frozen=True, kw_only=True)
class StepsBy:
    """Models and framework that steps are predicted with."""

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
        """Return a predictor of steps on a cluster.

        Args:
            cluster: Name or file.
            operators: Latency model of library operators; ``None`` for rooflines.
            source: Owner of the cluster.
            power_cap_w: Sustained power of a device in watts; ``None`` for its limit.

        Raises:
            OpcastError: The cluster or the step model is not usable, or the framework unknown.
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
        """Return the plan; without one, data parallelism over the cluster.

        Raises:
            PlanError: The plan is malformed, or one of its settings changes nothing.
        """
        from ...simulate.step.plan import Plan, idle_setting, parse_plan

        plan = parse_plan(self.plan) if self.plan else Plan(dp=cluster.size)
        if idle := idle_setting(work, plan):
            raise PlanError(idle, where="plan", hint="omit it")
        return plan

    def taken(self, predictor: StepPredictor, work: Workload) -> Taken:
        """Return the plan with its open choices made for a predictor's cluster.

        Raises:
            PlanError: See :meth:`plan_on`; or the plan does not fit the workload or the cluster.
        """
        from ...simulate.step.plan import says_schedule
        from .recipes import Taken, taken

        plan = self.plan_on(predictor.cluster, work)
        return Taken(plan) if says_schedule(self.plan) else taken(predictor, work, plan)


@dataclass(frozen=True)
class StepCase(PlannedStep):
    """A training step to predict, with options of the output."""

    source: SourceOpt = "own"
    explain: Annotated[bool, Option("Break the step down into terms.", ("--explain",))] = False
    price: PriceOpt = None
    power_cap_w: PowerCapOpt = None
    jitter: Annotated[float, Option("Relative noise of a task's time on a device.", least=0.0)] = (
        0.0
    )
    speed: Annotated[
        Mapping[int, float],
        Option("Relative speed of a rank, RANK=0.9; may be repeated.", collect=_speeds),
    ] = field(default_factory=dict)
    seed: Annotated[int, Option("With --jitter: random seed.", least=0)] = 0
    run: Annotated[
        Mapping[str, object],
        Option(
            "A whole training run with failures, such as tokens=15e12,spares=4,repair_h=24.",
            collect=partial(sizes_of, option="--run"),
        ),
    ] = field(default_factory=dict)

    def predict(self, work: Workload, operators: OpModel | None) -> StepPrediction:
        """Predict the step.

        Raises:
            OpcastError: The plan, cluster or model does not fit.
        """
        predictor = self.predictor(self.cluster, operators, self.source, self.power_cap_w)
        return self.by(predictor, work, advise=True)

    def by(
        self, predictor: StepPredictor, work: Workload, *, advise: bool = False
    ) -> StepPrediction:
        """Predict the step by a predictor of the cluster, which other cases may share.

        Args:
            predictor: Result of :meth:`predictor`.
            work: The workload.
            advise: Whether to try fewer micro-batches than were chosen, for a note.

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
        if advise and not own.plan.microbatches and (told := self._fewer(predictor, work, found)):
            found = replace(found, described=(*found.described, told))
        if not self.run:
            return found
        from .training_run import training_run

        return replace(found, run=training_run(self.run, found, predictor.spec.host_link))

    def _fewer(self, predictor: StepPredictor, work: Workload, found: StepPrediction) -> str:
        """Return a note if fewer micro-batches than were chosen are much faster and fit."""
        from ...simulate.step.plan import TOKENS

        chosen = found.plan.microbatches
        others = [
            found.plan.changed(microbatches=count)
            for count in range(1, chosen)
            if chosen % count == 0 and count % found.plan.rounds_in_chunk == 0
        ]
        steps = {
            other.microbatches: predictor.predict(
                work, other, speeds=self.speed, remedy=False
            ).step.total
            for other in others
            if predictor.fit(work, other).fits
        }
        fastest = min(steps, key=lambda count: steps[count], default=chosen)
        if steps.get(fastest, found.step.total) > found.step.total / _MUCH_FASTER:
            return ""
        return (
            f"microbatches={chosen} was chosen, since each then has about {TOKENS} tokens; with "
            f"microbatches={fastest}, which fits, the step takes {duration(steps[fastest] * 1e6)}"
        )


def _either(found: StepPrediction, other: StepPrediction, why: str) -> StepPrediction:
    """Return a prediction whose interval covers both an interleaved and a 1F1B pipeline."""
    note = f"{why} it takes {duration(other.step.total * 1e6)}; the interval covers both"
    lo = min(found.interval.lo, other.interval.lo)
    hi = max(found.interval.hi, other.interval.hi)
    interval = found.interval._replace(lo=lo, hi=hi)
    return replace(found, interval=interval, described=(*found.described, note))
