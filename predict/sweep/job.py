"""Evaluation of a sweep's candidates, in this process or in a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from math import ceil

import pandas as pd

from ...common.errors import OpcastError, PlanError, fault
from ...common.interval import LATENCY_KEYS, Interval
from ...models.steps.memory import law_of
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.step.memory import optimizer_bytes
from ...simulate.step.plan import Plan, parse_plan
from ...simulate.step.workload import Workload
from ..cluster.step import StepPrediction, StepPredictor
from ..cluster.step_case import StepsBy
from ..operator.step_operators import load_step_model
from .space import Candidate

logger = logging.getLogger(__name__)

#: Columns that a sweep writes, besides the plan's settings.
FIGURES = (
    "step_us",
    *LATENCY_KEYS,
    "compute_us",
    "exposed_communication_us",
    "bubble_us",
    "host_us",
    "memory_bytes_per_device",
    "host_memory_bytes_per_box",
    "fits",
    "tflops_per_device",
    "mfu",
    "tokens_per_s",
    "devices",
)
_ENERGY = ("energy_j", "energy_lo_j", "energy_hi_j", "energy_j_per_token")


@dataclass(frozen=True)
class SweepJob(StepsBy):
    """Settings that all candidates share; can be pickled to another process.

    Attributes:
        workload: The model; its ``batch`` is replaced by the candidate's.
        power_cap_w: Sustained power of a device in watts; ``None`` for its limit.
    """

    workload: Workload
    power_cap_w: float | None = None


def rests_on(job: SweepJob, clusters: Iterable[str]) -> dict[str, str]:
    """Return digests of what the results depend on besides their settings.

    Args:
        job: Settings of the sweep.
        clusters: Names or files.

    Returns:
        Digests of the models, and of each cluster with its device, by description.

    Raises:
        OpcastError: A cluster, device or model is not usable.
    """
    from ...models.steps.model import StepModel
    from ..devices import cluster_device
    from ..locate import is_untrained, model_hash

    found: dict[str, object] = {
        f"the model {job.model}": "" if is_untrained(job.model) else model_hash(job.model),
        f"the model of steps {job.steps}": StepModel.find(job.steps).to_dict(),
    }
    for name in sorted(clusters):
        cluster = find_cluster(name)
        found[f"the cluster {name}"] = (cluster, cluster_device(cluster))
    return {name: sha256(repr(own).encode()).hexdigest()[:16] for name, own in found.items()}


def judge(job: SweepJob, items: Sequence[Candidate]) -> list[dict[str, object]]:
    """Return one row per candidate: its settings and figures.

    A plan that cannot be evaluated gets a row without figures and the reason in ``error``, so that
    the others are still evaluated.

    Raises:
        OpcastError: A cluster, device or model does not exist.
    """
    rows = []
    for item in items:
        predictor = _predictor(item.cluster, job)
        try:
            rows.append(_row(job, item, predictor))
        except Exception as error:
            if isinstance(error, OpcastError) and not isinstance(error, PlanError):
                raise
            logger.debug("cannot evaluate %s", item, exc_info=True)
            empty = dict.fromkeys((*FIGURES, *_ENERGY), float("nan"))
            empty |= {"fits": False, "devices": item.plan.devices}
            said = str(error) if isinstance(error, PlanError) else str(fault(error))
            rows.append({**_subject(item, predictor), **empty, "error": said})
    return rows


def nearest_miss(job: SweepJob, rows: pd.DataFrame, named: Callable[[pd.Series], str]) -> str:
    """Describe the plan of a sweep that comes closest to fitting, and what would make it fit.

    Args:
        job: Settings of the sweep.
        rows: Results of the sweep.
        named: Returns how the user can select the plan of a row.

    Returns:
        A sentence; empty if a plan fits, or if none could be evaluated.
    """
    judged = rows[rows["error"] == ""]
    if judged.empty or judged["fits"].any():
        return ""
    near = judged.sort_values("memory_bytes_per_device").iloc[0]
    found = _again(job, near)
    said = f"nothing fits: the plan that needs least, {named(near)}, {found.fit.reason()}"
    # Bytes per parameter under any sharding: parameter, gradient and optimizer state.
    trained = 0.0 if job.workload.lora_rank else job.workload.width + optimizer_bytes(job.workload)
    kept = job.workload.width + trained
    memory = _predictor(str(near["cluster"]), job).learned.memory
    state = law_of(memory, job.framework).state * kept
    least = ceil(job.workload.parameters * state / found.fit.capacity)
    if job.workload.mode == "train" and least > found.plan.devices:
        said += f"; parameters, gradients and optimizer alone need at least {least} devices"
    return said


def front_notes(job: SweepJob, front: pd.DataFrame) -> list[str]:
    """Return the notes on the first plan of a front; none for an empty front."""
    return [] if front.empty else _again(job, front.iloc[0]).notes()


def _again(job: SweepJob, row: pd.Series) -> StepPrediction:
    """Predict a row's plan again, since rows hold only figures."""
    workload = replace(job.workload, batch=int(row["batch"]))
    return _predictor(str(row["cluster"]), job).predict(workload, parse_plan(str(row["plan"])))


def _subject(item: Candidate, predictor: StepPredictor) -> dict[str, object]:
    """Return the columns that identify a candidate."""
    return {
        "key": item.key,
        "cluster": item.cluster,
        "device": predictor.spec.name,
        "batch": item.batch,
        "plan": item.plan.text(),
        **_settings(item.plan),
    }


def _row(job: SweepJob, item: Candidate, predictor: StepPredictor) -> dict[str, object]:
    workload = replace(job.workload, batch=item.batch)
    # No search for a remedy: a plan that does not fit is a result, and the grid has its neighbours.
    prediction = predictor.predict(workload, item.plan, remedy=False)
    data = prediction.to_dict()
    # NaN, not 0: an unknown power must not win the Pareto front.
    joules = prediction.joules or Interval(*(float("nan"),) * 3)
    # Per token, since batches of a sweep differ.
    tokens = workload.batch * workload.seq
    return {
        **_subject(item, predictor),
        **{name: data[name] for name in FIGURES},
        **dict(zip(_ENERGY, (*joules, joules.value / tokens), strict=True)),
        "error": "",
    }


def _settings(plan: Plan) -> dict[str, object]:
    return {name: value for name, value in asdict(plan).items() if name != "overlap"}


# A predictor keeps the prices of all operators and collectives, so further candidates of a cluster
# are cheap; at most eight clusters at once limit the memory.
@lru_cache(maxsize=8)
def _predictor(cluster: str, job: SweepJob) -> StepPredictor:
    return job.predictor(cluster, load_step_model(job.model), power_cap_w=job.power_cap_w)
