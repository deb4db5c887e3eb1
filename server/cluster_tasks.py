"""What a child of the fork server is asked about clusters and serving, and how it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..common.errors import PlanError
from .schemas import SimulateQuery, SimulateServingQuery, build
from .tasks import Predictors, Task

if TYPE_CHECKING:
    from ..models.operators import OpModel


def simulate(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """A step on a cluster, as ``opcast simulate --json`` prints it.

    Raises:
        OpcastError: The workload, plan, cluster or model does not fit.
    """
    from ..predict.cluster.step_case import StepCase
    from ..simulate.step.workload import make_workload, read_by_model

    given = SimulateQuery.model_validate_json(payload).model_dump()
    case = build(StepCase, given)
    # Names of workloads alone: no file of the server is read.
    work = read_by_model(make_workload(given["workload"], case.settings), case.settings)
    case = replace(case, speed={int(rank): value for rank, value in case.speed.items()})
    return case.predict(work, _operators(predictors, task)).to_dict()


def simulate_serving(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """A deployment under a load, as ``opcast simulate-serving --json`` prints it.

    Raises:
        OpcastError: The model, plan, load or device does not fit.
    """
    from ..predict.cluster.deployment import deployment_of
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_case import ServingCase
    from ..predict.cluster.serving_load import parse_slo

    case = build(ServingCase, SimulateServingQuery.model_validate_json(payload).model_dump())
    load = case.load
    loads = [name for name in ("concurrency", "batch", "rate") if getattr(load, name)]
    if len(loads) > 1:
        raise PlanError(f"{' and '.join(loads)} exclude each other", hint="one of them")
    if not load.rate and load.burstiness != 1.0:
        raise PlanError("burstiness needs a rate", where="burstiness", hint="give rate")
    deployment = deployment_of(case)
    predictor = ServingPredictor(_operators(predictors, task))
    found = predictor.predict(deployment, load, slo=parse_slo(case.judged.slo))
    return found.to_dict(case.judged.price)


def _operators(predictors: Predictors, task: Task) -> OpModel | None:
    """The operators of a served model; ``None`` for rooflines."""
    return None if task["model"] == "roofline" else predictors[task["model"]].operators
