"""Selection of what to measure next: steps on a cluster, or loads on the user's engines.

The steps reduce uncertainty most; the loads narrow the interval of TPOT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...common.errors import OpcastError
from ...features.devices.catalogue import find_device
from ...models.adapt.active import in_order
from ...models.operators import OpModel
from ...models.serving.effects import Observed, linear_serving
from ...models.steps.effects import OWN, is_compiled, slopes_at
from ...models.steps.memory import law_of, weight_copies
from ...models.steps.model import StepModel
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.serving.checkpoints import Checkpoint
from ...simulate.step.fitting import memory_of
from ...simulate.step.plan import Plan, resolved
from ...simulate.step.workload import Workload
from ..next_runs import NextRuns, Run, next_runs, variance_of
from ..sweep.space import candidates
from .case_table import FAULTS
from .deployment import Deployment
from .serving import ServingPredictor
from .serving_case import LoadSpec
from .serving_launch import launches
from .step_case import StepCase
from .step_table import StepRow, StepRuns

#: Maximum number of models and of clusters among the measured steps for which plans are tried, and
#: of plans per pair of them. Engineering choice, for a run time of seconds.
_MODELS, _PLANS = 4, 12
#: Cost classes with random effects of the cluster, in words.
_TELLS = {
    "between": "the scale-out network",
    "launch": "launches from the host",
    "whole": "the cluster as a whole",
}
#: Concurrencies of candidate loads, and requests per request in flight of a run. Engineering
#: choice: the host dominates at the lowest, matrix products and the KV cache at the highest.
_IN_FLIGHT, _ROUNDS = (1, 4, 16, 64, 256), 4
#: The metric to predict and to measure: mean time per output token.
_METRIC = "tpot"


@dataclass(frozen=True)
class NextRun:
    """A step worth measuring.

    Attributes:
        row: The step.
        fall: Expected decrease of the mean error variance over all candidate plans.
        tells: The cost class that the step would reveal most about, in words.
    """

    row: StepRow
    fall: float
    tells: str

    def text(self) -> str:
        """Return one line for people."""
        work, plan = self.row.workload, self.row.plan
        return (
            f"measure next: {work.layers} layers of {work.d_model} on {self.row.cluster.size} × "
            f"{self.row.cluster.device} with {plan.text()}, batch {work.batch}: tells most about "
            f"{self.tells}"
        )


def next_run(model: StepModel, runs: StepRuns, measured: np.ndarray) -> NextRun | None:
    """Find the step whose measurement would reduce the uncertainty of the clusters most.

    Args:
        model: Step model before its adaptation to the measured steps.
        runs: The measured steps.
        measured: Logarithms of their seconds.

    Returns:
        The step; ``None`` if no other plan of the measured models fits into memory.
    """
    done = {(row.workload, row.cluster, row.plan) for row in runs.rows}
    rows = [r for r in _others(model, runs) if (r.workload, r.cluster, r.plan) not in done]
    if not rows:
        return None
    every = StepRuns([*runs.rows, *rows], runs.operators)
    slopes, count = slopes_at(every.simulate, model.table, len(every.rows)), len(runs.rows)
    # Times of unmeasured steps are placeholders, which are not learned from.
    times = np.concatenate([measured, slopes.level[count:]])
    errors = slopes.linear(every.contexts, times).unsure(np.arange(len(times)) < count)
    (best,), (fall,) = in_order([errors], np.full(len(rows), 1 / len(rows)), 1, np.ones(len(rows)))
    return NextRun(rows[best], float(fall), _tells(slopes.slope, count, int(best)))


def next_steps(case: StepCase, work: Workload, operators: OpModel | None, count: int) -> NextRuns:
    """Choose steps to measure for a given step: the same with other plans or on smaller clusters.

    Args:
        case: The step.
        work: Its workload.
        operators: Latency model of library operators; ``None`` for rooflines.
        count: Number of steps to choose; with a price, by the narrowing per cost.

    Raises:
        OpcastError: The plan, cluster or model does not fit.
    """
    asked = case.predict(work, operators)
    cluster = find_cluster(case.cluster)
    row = StepRow(
        id="asked",
        source=case.source,
        framework=case.framework.lower(),
        workload=asked.workload,
        plan=asked.plan,
        cluster=cluster,
        share=1.0,
        launched=not (case.compiled or is_compiled(case.framework)),
        measured_s=float("nan"),
        memory_bytes=float("nan"),
        split="",
    )
    own = [row, *_smaller(row)]
    model = StepModel.find(case.steps)
    known = {
        (r.workload, r.cluster, r.plan): r for r in [row, *_others(model, StepRuns(own, None))]
    }
    rows = [*known.values(), row]
    runs = StepRuns(rows, operators)
    slopes = slopes_at(runs.simulate, model.table, len(rows))
    errors = slopes.linear(runs.contexts, slopes.level).unsure(np.zeros(len(rows), bool))
    one = {cost: float(values[-1]) for cost, values in slopes.slope.items()}
    # The rest of the variance is due to framework, chip and composition; runs do not reduce it.
    told = float(errors.covariance[-1, -1]) / model.table.spread(runs.contexts[-1], one) ** 2
    before = variance_of(asked.interval)
    candidates = [
        Run(_words(own), _command(case, own, row), float(np.exp(level)), own.cluster.size)
        for own, level in zip(rows[:-1], slopes.level[:-1].tolist(), strict=True)
    ]
    return next_runs(
        asked.interval,
        candidates,
        [errors.given(before * min(told, 1.0))],
        count,
        kind="step",
        price=case.price,
        stays=before * max(1.0 - told, 0.0),
        then=(
            "opcast calibrate --steps STEPS.csv --out own.json   # a row for each, with step_s "
            "(docs/steps.md)",
            "opcast simulate … --steps own.json",
        ),
    )


def _smaller(row: StepRow) -> Iterator[StepRow]:
    """Yield the same work per device on halves of the cluster, down to one node."""
    size, work = row.cluster.size, row.workload
    least = max(row.cluster.devices_per_node or 1, 1)
    part = 2
    while size // part >= least and size % part == 0 and work.batch % part == 0:
        name = row.cluster.name.removesuffix(str(size)) + str(size // part)
        part *= 2
        try:
            cluster = find_cluster(name)
            smaller = replace(work, batch=work.batch * cluster.size // size)
            plan = resolved(smaller, Plan(dp=cluster.size), cluster.size)
        except (OpcastError, *FAULTS):
            continue
        yield replace(row, cluster=cluster, workload=smaller, plan=plan)


def _words(row: StepRow) -> str:
    return f"{row.plan.text()} on {row.cluster.name}, batch {row.workload.batch}"


def _command(case: StepCase, row: StepRow, asked: StepRow) -> str:
    """Return the command that predicts a step."""
    sizes = {**case.settings}
    if row.workload.batch != asked.workload.batch:
        sizes["batch"] = row.workload.batch
    words = ["opcast simulate --workload", case.workload or "MODEL"]
    if sizes:
        words += ["--set", ",".join(f"{k}={v}" for k, v in sizes.items())]
    words += ["--cluster", row.cluster.name, "--plan", row.plan.text().replace(" ", ",")]
    return " ".join(words)


def _tells(slope: Mapping[str, np.ndarray], count: int, best: int) -> str:
    """Return the cost class whose slope differs most from those of the measured steps, in words."""
    more = {
        cost: float(slope[cost][count + best] - slope[cost][:count].mean())
        for cost in _TELLS
        if cost != "whole"
    }
    cost = max(more, key=lambda name: more[name])
    return _TELLS[cost if more[cost] > 0.0 else "whole"]


def _others(model: StepModel, runs: StepRuns) -> Iterator[StepRow]:
    """Yield other plans of the measured models on the measured clusters that fit into memory."""
    works = {row.workload: row for row in runs.rows}
    clusters = {row.cluster: None for row in runs.rows}
    grid = _used(runs.rows)
    for row in list(works.values())[:_MODELS]:
        law = law_of(model.memory, row.framework)
        own = grid | {"recompute": [row.plan.recompute], "offload": [row.plan.offload]}
        for cluster in list(clusters)[:_MODELS]:
            spec = find_device(cluster.device)
            capacity = spec.usable_bytes or np.inf
            copies = weight_copies(row.workload, spec)
            try:
                plans = candidates(row.workload, {"": cluster}, [row.workload.batch], own)
            except (OpcastError, *FAULTS):
                continue
            fitting = [
                c.plan
                for c in plans
                if max(law.total(m) for m in memory_of(row.workload, c.plan, copies)) <= capacity
            ]
            for plan in fitting[:: max(1, len(fitting) // _PLANS)]:
                yield replace(row, cluster=cluster, plan=plan, measured_s=float("nan"))


def _used(rows: Sequence[StepRow]) -> dict[str, list[str]]:
    """Return the plan axes that the measured steps use; a framework may not support others."""
    plans = [row.plan for row in rows]
    grid = {"schedule": ["1f1b"], "data": ["fsdp"] if any(p.fsdp > 1 for p in plans) else ["dp"]}
    if any(p.zero for p in plans):
        grid["data"].append("zero1")
    for axis in ("tp", "pp", "cp", "ep"):
        if all(getattr(plan, axis) == 1 for plan in plans):
            grid[axis] = ["1"]
    return grid


def next_serving(
    predictor: ServingPredictor,
    deployment: Deployment,
    spec: LoadSpec,
    checkpoint: Checkpoint,
    count: int,
    price: float | None = None,
) -> NextRuns:
    """Choose closed loops to measure on a deployment, for the TPOT of a load on it.

    Args:
        predictor: Predictor of the deployment.
        deployment: Engines that serve the load.
        spec: The load to predict.
        checkpoint: Checkpoint of the model, for the commands.
        count: Number of runs to choose; with a price, by the narrowing per cost.
        price: Dollars per device hour.

    Raises:
        PlanError: The deployment does not fit into memory, or a request into the KV cache.
    """
    deployment = replace(deployment, source=deployment.source or OWN)
    prediction = predictor.predict(deployment, spec, record=False)
    asked = predictor.simulate(deployment, spec)
    loads = [
        replace(
            spec, requests=None, concurrency=own, batch=0, rate=0.0, count=_ROUNDS * own,
            prompt=_mean(asked.load.prompts), output=_mean(asked.load.outputs),
        )
        for own in _IN_FLIGHT
    ]  # fmt: skip
    tried = [predictor.simulate(deployment, load) for load in loads]
    effects, every = predictor.model.effects, [*tried, asked]
    logs = np.log([own.seconds(_METRIC) for own in every])
    shares = np.array([own.shares(_METRIC) for own in every])
    rows = np.arange(len(every))
    seen = Observed(rows, np.full(len(every), _METRIC), logs, logs, shares, np.zeros(len(every)))
    linear = linear_serving(seen, [own.context for own in every], effects)
    errors = linear.unsure(np.zeros(len(every), bool))
    spread = effects.spread(asked.context, _METRIC, shares[-1])
    # The rest of the variance is due to engines, formats and models: runs here do not reduce it.
    told = min(float(errors.covariance[-1, -1]) / spread**2, 1.0)
    found = prediction.figures[f"{_METRIC}/mean"]
    before = variance_of(found)
    runs = [
        Run(
            f"{own.concurrency} requests in flight",
            _engine_command(own, checkpoint),
            one.span,
            deployment.devices,
        )
        for own, one in zip(loads, tried, strict=True)
    ]
    started = [
        f"the engines are started by {one.command}"
        for name, one in launches(deployment, checkpoint).items()
        if name.lower().startswith(deployment.framework)
    ]
    return next_runs(
        found,
        runs,
        [errors.given(before * told)],
        count,
        kind="serving",
        price=price,
        stays=before * (1.0 - told),
        then=(
            "opcast calibrate --serving RUNS.csv --out own.json   # a row for each, with ttft_ms, "
            "tpot_ms and out_tok_s (docs/serving.md)",
            "opcast simulate-serving … --serving own.json",
        ),
        notes=started,
    )


def _mean(lengths: np.ndarray) -> str:
    return str(max(1, round(float(lengths.mean()))))


def _engine_command(load: LoadSpec, checkpoint: Checkpoint) -> str:
    """Return the command of vLLM's client, which can measure any OpenAI-compatible server."""
    return (
        f"vllm bench serve --backend openai --model {checkpoint.name} --dataset-name random "
        f"--random-input-len {load.prompt} --random-output-len {load.output} "
        f"--max-concurrency {load.concurrency} --num-prompts {load.count}"
    )
