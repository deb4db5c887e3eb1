"""What a child of the fork server is asked about clusters and serving, and how it answers."""

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

#: A configuration that came with a request, in the folder of its child alone.
_CONFIG = Path("config.json")


def simulate(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """A step on a cluster, as ``opcast simulate --json`` prints it.

    Raises:
        OpcastError: The workload, plan, cluster or model does not fit.
    """
    from ..predict.cluster.step_case import StepCase

    given = SimulateQuery.model_validate_json(payload).model_dump()
    case = made(StepCase, given)
    case = replace(case, speed={int(rank): value for rank, value in case.speed.items()})
    return case.predict(_trained(given), _operators(predictors, task)).to_dict()


def sweep(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """The plans of a step that ``opcast sweep`` evaluates, and their Pareto front.

    Raises:
        OpcastError: The workload, grid, cluster or model does not fit.
    """
    from ..predict.sweep.job import SweepJob, front_notes, nearest_miss
    from ..predict.sweep.run import Sweep, grid, pareto
    from ..predict.sweep.space import parse_grid

    given = SweepQuery.model_validate_json(payload).model_dump()
    work = _trained(given)
    by = {name: given[name] for name in ("framework", "compiled")}
    # The default model's operators are those that commands take.
    by |= {} if task["model"] == "default" else {"model": task["model"]}
    job = SweepJob(work, given["power_cap_w"], **by)
    prices = {"": given["price"]} if given["price"] else {}
    with TemporaryDirectory() as folder:
        own = Sweep(job, Path(folder), prices=prices)
        axes = parse_grid(given["grid"]) if given["grid"] else {}
        rows = grid(own, [given["cluster"]], [work.batch], axes)
    # JSON has no NaN, which stands for what is not known.
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
    """A deployment under a load, as ``opcast simulate-serving --json`` prints it.

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
                f"a fleet says itself its {spare[0]}", where="fleet", hint="one of them"
            )
        return predict_fleet(predictor, parse_fleet(given["fleet"])).to_dict()
    case = made(ServingCase, given)
    load = case.load
    loads = [name for name in ("concurrency", "batch", "rate") if getattr(load, name)]
    if len(loads) > 1:
        raise PlanError(f"{' and '.join(loads)} exclude each other", hint="one of them")
    if not load.rate and load.burstiness != 1.0:
        raise PlanError("burstiness needs a rate", where="burstiness", hint="give rate")
    with _served(given, case.model) as model:
        deployment = deployment_of(replace(case, model=model), files=model.hf is not None)
    found = predictor.predict(deployment, load, slo=parse_slo(case.judged.slo))
    return found.to_dict(case.judged.price)


def plan_serving(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """The search of deployments, as ``opcast plan-serving --json`` prints it.

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
    """The workload of a step: by name, as no file of the server is read, or of a configuration.

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
    """The model that is served, by name or of a configuration."""
    with _configured(given) as path:
        yield replace(model, hf=path) if path is not None else model


@contextmanager
def _configured(given: JsonMapping) -> Iterator[Path | None]:
    """The file of the configuration of a request, if it has one.

    Raises:
        PlanError: There are both a workload and a configuration, or neither.
    """
    if bool(given["workload"]) == bool(given["config"]):
        raise PlanError("give either a workload or a config", where="workload")
    if not given["config"]:
        yield None
        return
    # This process answers one request, so that its folder is its own; messages name the file alone.
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _CONFIG.write_text(given["config"], encoding="utf-8", errors="replace")
            yield _CONFIG
        finally:
            os.chdir(before)


def _operators(predictors: Predictors, task: Task) -> OpModel | None:
    """The operators of a served model; ``None`` for rooflines."""
    return None if task["model"] == "roofline" else predictors[task["model"]].operators
