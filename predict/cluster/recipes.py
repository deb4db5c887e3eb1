"""Defaults for what a plan leaves open: recipes of frameworks, and interleaved pipelines.

``taken`` is the one place that decides, for every command that takes a plan, whether a pipeline
without a given schedule is interleaved.
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
    """A plan with its open choices made.

    Attributes:
        plan: The plan to predict.
        other: The alternative of a pipeline without a given schedule; ``None`` if nothing is open.
        why: Reason for the choice, up to the name of the alternative; empty without one.
    """

    plan: Plan
    other: Plan | None = None
    why: str = ""


def taken(predictor: StepPredictor, workload: Workload, plan: Plan) -> Taken:
    """Decide whether a pipeline without a given schedule is interleaved.

    It is, with as many chunks as in published runs, unless these do not fit even by the lower bound
    of their memory while 1F1B fits.

    Args:
        predictor: Predictor of the cluster, whose device memory decides.
        workload: The model.
        plan: A plan with neither schedule nor chunks.

    Raises:
        PlanError: The plan does not fit the model or the cluster.
    """
    framework = predictor.framework
    chunks = interleaved(plan, workload, predictor.cluster.size, framework)
    if chunks == plan:
        return Taken(plan)
    whose = f"recipes of {framework}" if framework else "published runs of large models"
    whole, cut = (predictor.fit(workload, own) for own in (plan, chunks))
    said = "the plan does not specify whether its pipeline is interleaved:"
    if whole.fits and not may_fit(predictor.learned, framework, cut):
        # A user without memory for the activations of several chunks would not interleave.
        why = (
            f"{said} schedule=1f1b is assumed, since it fits and the activations of more chunks do "
            f"not; with virtual={chunks.virtual}, as in {whose},"
        )
        return Taken(plan, chunks, why)
    why = f"{said} virtual={chunks.virtual} is assumed, as in {whose}; with schedule=1f1b"
    if whole.fits and not cut.fits:
        why = (
            f"{said} virtual={chunks.virtual} is assumed, as in {whose}; it fits within the error "
            "of the estimated memory; with schedule=1f1b, which fits,"
        )
    return Taken(chunks, plan, why)


def may_fit(learned: StepModel, framework: str, fit: Fit) -> bool:
    """Return whether a plan fits by the lower bound of its memory interval."""
    return fit.host_fits and (
        interval_of(learned.memory, framework, fit.worst.total).lo <= fit.capacity
    )


def interleaved(plan: Plan, workload: Workload, devices: int, framework: str) -> Plan:
    """Return a plan without given chunks with the chunks that a framework's recipes use.

    Args:
        plan: The plan.
        workload: The model.
        devices: Devices of the cluster.
        framework: Framework in lower case.

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
    """Return a plan with a framework's defaults for gradient and parameter formats.

    Args:
        workload: The model; recipe settings without effect on it are skipped.
        plan: The plan; settings that it gives are kept.
        framework: Framework in lower case.
    """
    recipe = FRAMEWORKS["recipes"].get(framework, {})
    for key in ("reduce", "quantized_weights"):
        own = getattr(plan, key) in ("", None) and key in recipe
        # A setting without effect is an error when given, so it is not set here either.
        if own and not idle_setting(workload, changed := plan.changed(**{key: recipe[key]})):
            plan = changed
    return plan
