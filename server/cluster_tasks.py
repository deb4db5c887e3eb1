"""Tasks on clusters and serving that children of the fork server execute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..common.errors import PlanError
from ..common.options import made
from ..common.types import JsonMapping
from .cluster_schemas import PlanServingQuery, SimulateQuery, SimulateServingQuery, SweepQuery
from .tasks import Predictors, Task

if TYPE_CHECKING:
    from ..models.operators import OpModel
    from ..predict.cluster.serving_case import ModelCase
    from ..simulate.step.workload import Workload

#: File of a request's model configuration, in a temporary folder of the child process.
_CONFIG = Path("config.json")


def simulate(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Predict a step on a cluster, as for ``opcast simulate --json``.

    Raises:
        OpcastError: The workload, plan, cluster or model does not fit.
    """
    from ..predict.cluster.step_case import StepCase

    given = SimulateQuery.model_validate_json(payload).model_dump()
    case = made(StepCase, given)
    case = replace(case, speed={int(rank): value for rank, value in case.speed.items()})
    return case.predict(_trained(given), _operators(predictors, task)).to_dict()


def sweep(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Evaluate plans of a step, as for ``opcast sweep``, and return their Pareto front.

    Raises:
        OpcastError: The workload, grid, cluster or model does not fit.
    """
    from ..predict.sweep.job import SweepJob, front_notes, nearest_miss
    from ..predict.sweep.run import Sweep, grid, pareto
    from ..predict.sweep.space import parse_grid

    given = SweepQuery.model_validate_json(payload).model_dump()
    work = _trained(given)
    by = {name: given[name] for name in ("framework", "compiled")}
    # The default model has the operators that the commands use by default.
    by |= {} if task["model"] == "default" else {"model": task["model"]}
    job = SweepJob(work, given["power_cap_w"], **by)
    prices = {"": given["price"]} if given["price"] else {}
    with TemporaryDirectory() as folder:
        own = Sweep(job, Path(folder), prices=prices)
        axes = parse_grid(given["grid"]) if given["grid"] else {}
        rows = grid(own, [given["cluster"]], [work.batch], axes)
    # JSON has no NaN, so unknown figures become null.
    best = pareto(rows)
    front = best.astype(object)
    plans = front.where(front.notna(), None).drop(columns=["key", "error"]).to_dict("records")
    return {
        "judged": int((rows["plan"] != "").sum()),
        "fits": int(rows["fits"].sum()),
        "tokens": work.batch * work.seq,
        "front": [{str(name): value for name, value in plan.items()} for plan in plans],
        "nearest_miss": nearest_miss(job, rows, lambda row: str(row["plan"])),
        "notes": front_notes(job, best),
    }


def simulate_serving(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Simulate a deployment under a load, as for ``opcast simulate-serving --json``.

    Raises:
        OpcastError: The model, plan, load or device does not fit.
    """
    from ..predict.cluster.deployment import deployment_of
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_case import ServingCase
    from ..predict.cluster.serving_load import parse_slo

    given = SimulateServingQuery.model_validate_json(payload).model_dump()
    predictor = ServingPredictor(_operators(predictors, task))
    if given["fleet"]:
        from ..predict.cluster.fleet_file import parse_fleet
        from ..predict.cluster.serving_fleet import predict_fleet

        spare = [name for name in ("workload", "config", "device", "cluster") if given[name]]
        if spare:
            raise PlanError(
                f"{spare[0]} does not apply to a fleet", where="fleet", hint="set it in the fleet"
            )
        return predict_fleet(predictor, parse_fleet(given["fleet"])).to_dict()
    case = made(ServingCase, given)
    load = case.load
    loads = [name for name in ("concurrency", "batch", "rate") if getattr(load, name)]
    if len(loads) > 1:
        raise PlanError(f"{' and '.join(loads)} exclude each other", hint="give one of them")
    if not load.rate and load.burstiness != 1.0:
        raise PlanError("burstiness needs a rate", where="burstiness", hint="give rate")
    with _served(given, case.model) as model:
        deployment = deployment_of(replace(case, model=model), files=model.hf is not None)
    found = predictor.predict(deployment, load, slo=parse_slo(case.judged.slo))
    return found.to_dict(case.judged.price)


def plan_serving(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Search for deployments, as for ``opcast plan-serving --json``.

    Raises:
        OpcastError: The model, load or device does not fit.
    """
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_case import SearchCase
    from ..predict.cluster.serving_load import parse_load
    from ..predict.plan.serving_search import search_case
    from ..simulate.serving.checkpoints import find_checkpoint

    given = PlanServingQuery.model_validate_json(payload).model_dump()
    case = made(SearchCase, given)
    if parse_load(case.load).requests is not None:
        raise PlanError("the server does not read files", where="load")
    predictor = ServingPredictor(_operators(predictors, task))
    with _served(given, case.model) as model:
        found = search_case(predictor, replace(case, model=model), files=model.hf is not None)
        checkpoint = find_checkpoint(model.workload or str(model.hf))
    return found.to_dict(checkpoint, case.judged.price)


def _trained(given: JsonMapping) -> Workload:
    """Read the workload of a training step by name or from the request's configuration.

    Raises:
        PlanError: There is no such workload, or its sizes do not fit.
    """
    from ..simulate.step.named_workloads import make_workload, read_by_model, read_workload

    with _configured(given) as path:
        if path is not None:
            return read_workload(str(path), given["settings"])
        return read_by_model(make_workload(given["workload"], given["settings"]), given["settings"])


@contextmanager
def _served(given: JsonMapping, model: ModelCase) -> Iterator[ModelCase]:
    """The model to serve, by name or from the request's configuration."""
    with _configured(given) as path:
        yield replace(model, hf=path) if path is not None else model


@contextmanager
def _configured(given: JsonMapping) -> Iterator[Path | None]:
    """Write the configuration of a request, if it has one, to a temporary file.

    Raises:
        PlanError: Both or neither of a workload and a configuration are given.
    """
    if bool(given["workload"]) == bool(given["config"]):
        raise PlanError("give either a workload or a config", where="workload")
    if not given["config"]:
        yield None
        return
    # The process answers a single request, so it may change its working folder; messages then
    # contain only the name of the file.
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _CONFIG.write_text(given["config"], encoding="utf-8", errors="replace")
            yield _CONFIG
        finally:
            os.chdir(before)


def _operators(predictors: Predictors, task: Task) -> OpModel | None:
    """Operator model of a served model; ``None`` for the roofline."""
    return None if task["model"] == "roofline" else predictors[task["model"]].operators
