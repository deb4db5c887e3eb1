"""What a plan is taken as where it is silent: recipes of frameworks, and chunks of a pipeline.

``taken`` is the one place that decides whether a pipeline of which no schedule is said is
interleaved, for every command that takes a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...models.steps.effects import FRAMEWORKS
from ...models.steps.memory import interval_of
from ...simulate.step.fitting import Fit
from ...simulate.step.plan import Plan, idle_setting, resolved
from ...simulate.step.workload import Workload

if TYPE_CHECKING:
    from ...models.steps.model import StepModel
    from .step import StepPredictor


class Taken(NamedTuple):
    """A plan as it is taken.

    Attributes:
        plan: What is answered for.
        other: What it may be as well, of a pipeline of which no schedule is said; ``None`` of a
            plan that leaves nothing open.
        why: Why it is taken, up to the name of the other; empty without one.
    """

    plan: Plan
    other: Plan | None = None
    why: str = ""


def taken(predictor: StepPredictor, workload: Workload, plan: Plan) -> Taken:
    """Decide whether a pipeline of which no schedule is said is interleaved.

    It is, in the chunks of published runs, unless the interval of their memory rules them out while
    1F1B fits.

    Args:
        predictor: Of the cluster; its device's memory decides.
        workload: The model.
        plan: A plan that says neither schedule nor chunks.

    Raises:
        PlanError: The plan does not fit the model or the cluster.
    """
    framework = predictor.framework
    chunks = interleaved(plan, workload, predictor.cluster.size, framework)
    if chunks == plan:
        return Taken(plan)
    whose = f"recipes of {framework}" if framework else "published runs of large models"
    whole, cut = (predictor.fit(workload, own) for own in (plan, chunks))
    said = "the plan does not say whether its pipeline is interleaved:"
    if whole.fits and not may_fit(predictor.learned, framework, cut):
        # Whoever lacks memory for the activations of chunks alone does not interleave.
        why = (
            f"{said} schedule=1f1b is taken, since it fits and the activations of more chunks do "
            f"not; with virtual={chunks.virtual}, as in {whose},"
        )
        return Taken(plan, chunks, why)
    why = f"{said} virtual={chunks.virtual} is taken, as in {whose}; with schedule=1f1b"
    if whole.fits and not cut.fits:
        why = (
            f"{said} virtual={chunks.virtual} is taken, as in {whose}, whose memory the error of "
            "the count allows; with schedule=1f1b, which fits,"
        )
    return Taken(chunks, plan, why)


def may_fit(learned: StepModel, framework: str, fit: Fit) -> bool:
    """Whether a plan fits by the lower end of the interval of its memory."""
    return fit.host_fits and (
        interval_of(learned.memory, framework, fit.worst.total).lo <= fit.capacity
    )


def interleaved(plan: Plan, workload: Workload, devices: int, framework: str) -> Plan:
    """The plan, which says nothing of chunks, with those that recipes of a framework would take.

    Args:
        plan: What is said.
        workload: The model.
        devices: Of the cluster.
        framework: Lower case.

    Raises:
        PlanError: The plan does not fit the model or the cluster.
    """
    if workload.mode != "train":
        return plan
    chunk = FRAMEWORKS["recipes"].get(framework, {}).get("chunk", 0)
    virtual = workload.layers // (plan.pp * chunk) if chunk else 1
    if plan.pp == 1 or virtual < 2 or resolved(workload, plan, devices).microbatches % plan.pp:
        return plan
    return plan.changed(schedule="interleaved", virtual=virtual)


def as_run(workload: Workload, plan: Plan, framework: str) -> Plan:
    """The plan with what recipes of a framework do of parameters and gradients, where it is silent.

    Args:
        workload: The model, of which some settings of recipes change nothing.
        plan: What is said.
        framework: Lower case.
    """
    recipe = FRAMEWORKS["recipes"].get(framework, {})
    for key in ("reduce", "quantized_weights"):
        own = getattr(plan, key) in ("", None) and key in recipe
        # What changes nothing is refused where it is said, so it is not said here either.
        if own and not idle_setting(workload, changed := plan.changed(**{key: recipe[key]})):
            plan = changed
    return plan
