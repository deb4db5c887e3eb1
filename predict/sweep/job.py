"""Evaluate candidates of a sweep: the work of one worker, in this process or elsewhere."""

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
from ...simulate.step.memory import OPTIMIZER_BYTES
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
    """Settings that all candidates share; can be sent to another process.

    Attributes:
        workload: The model; ``batch`` is the candidate's.
        power_cap_w: Sustained power of a device in watts; ``None`` for its limit.
    """

    workload: Workload
    power_cap_w: float | None = None


def rests_on(job: SweepJob, clusters: Iterable[str]) -> dict[str, str]:
    """Digests of what results follow from beyond their settings: files may be written anew.

    Args:
        job: Settings of the sweep.
        clusters: Names or files.

    Returns:
        By what it is: the models, and each cluster with its device.

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
    """One row for each candidate: its settings and figures.

    A plan that cannot be evaluated gets a row without
    figures and the reason in ``error``: it must not cost the others.

    Raises:
        OpcastError: Not of a plan but of all: no such cluster, device or model.
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
    """Report which plan of a sweep misses least, by how much, and what would make it fit.

    Args:
        job: Settings of the sweep.
        rows: Its results.
        named: Names a plan, by its row, as whoever asked can ask for it again.

    Returns:
        Empty if a plan fits, or if none could be evaluated.
    """
    judged = rows[rows["error"] == ""]
    if judged.empty or judged["fits"].any():
        return ""
    near = judged.sort_values("memory_bytes_per_device").iloc[0]
    found = _again(job, near)
    said = f"nothing fits: the plan that needs least, {named(near)}, {found.fit.reason()}"
    # However it is sharded: a parameter and its gradient, and what the optimiser keeps of it.
    kept = 2.0 * job.workload.width + OPTIMIZER_BYTES
    memory = _predictor(str(near["cluster"]), job).learned.memory
    state = law_of(memory, job.framework).state * kept
    least = ceil(job.workload.parameters * state / found.fit.capacity)
    if job.workload.mode == "train" and least > found.plan.devices:
        said += f"; parameters, gradients and optimizer alone take {least} devices at least"
    return said


def front_notes(job: SweepJob, front: pd.DataFrame) -> list[str]:
    """What ``opcast simulate`` notes on the first plan of a front; none of an empty one."""
    return [] if front.empty else _again(job, front.iloc[0]).notes()


def _again(job: SweepJob, row: pd.Series) -> StepPrediction:
    """The prediction of a row, of which rows keep the figures alone."""
    workload = replace(job.workload, batch=int(row["batch"]))
    return _predictor(str(row["cluster"]), job).predict(workload, parse_plan(str(row["plan"])))


def _subject(item: Candidate, predictor: StepPredictor) -> dict[str, object]:
    """What a row is about."""
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
    # No remedy: a plan that does not fit is a result, and the grid holds its neighbours anyway.
    prediction = predictor.predict(workload, item.plan, remedy=False)
    data = prediction.to_dict()
    # NaN, not 0: an unknown power must not win the Pareto front.
    joules = prediction.joules or Interval(*(float("nan"),) * 3)
    # For each token, since batches of a sweep differ.
    tokens = workload.batch * workload.seq
    return {
        **_subject(item, predictor),
        **{name: data[name] for name in FIGURES},
        **dict(zip(_ENERGY, (*joules, joules.value / tokens), strict=True)),
        "error": "",
    }


def _settings(plan: Plan) -> dict[str, object]:
    return {name: value for name, value in asdict(plan).items() if name != "overlap"}


# A predictor keeps the prices of all operators and collectives that it has seen, so consecutive
# candidates of a cluster cost little; eight clusters at once bound the memory.
@lru_cache(maxsize=8)
def _predictor(cluster: str, job: SweepJob) -> StepPredictor:
    return job.predictor(cluster, load_step_model(job.model), power_cap_w=job.power_cap_w)
