"""Selection of loads to measure on the user's engines, to narrow the interval of TPOT."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...models.serving.effects import Observed, linear_serving
from ...models.steps.effects import OWN
from ...simulate.serving.checkpoints import Checkpoint
from ..next_runs import NextRuns, Run, next_runs, variance_of
from .deployment import Deployment
from .serving import ServingPredictor
from .serving_case import LoadSpec
from .serving_launch import launches

#: Concurrencies of candidate loads, and requests per request in flight of a run. Engineering
#: choice: the host dominates at the lowest, matrix products and the KV cache at the highest.
_IN_FLIGHT, _ROUNDS = (1, 4, 16, 64, 256), 4
#: The metric to predict and to measure: mean time per output token.
_METRIC = "tpot"


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
            _command(own, checkpoint),
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


def _command(load: LoadSpec, checkpoint: Checkpoint) -> str:
    """Return the command of vLLM's client, which can measure any OpenAI-compatible server."""
    return (
        f"vllm bench serve --backend openai --model {checkpoint.name} --dataset-name random "
        f"--random-input-len {load.prompt} --random-output-len {load.output} "
        f"--max-concurrency {load.concurrency} --num-prompts {load.count}"
    )
