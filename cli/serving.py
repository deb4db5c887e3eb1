"""The command that simulates LLM serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..models.core.registry import OPERATOR_MODEL
from .options import (
    ClusterOpt,
    HfOpt,
    Json,
    OperatorModelOpt,
    Settings,
    Workload,
    print_json,
    refuse,
    workload_of,
)

#: Requests, tokens and batches beyond any engine; as the largest batch of a step
#: (simulate/step/workload.py). Larger figures are slips of the hand.
_MOST = 10**7


def simulate_serving(
    context: typer.Context,
    cluster: ClusterOpt,
    workload: Workload = "",
    hf: HfOpt = None,
    plan: Annotated[str, typer.Option(help="Plan with tp and dp only, such as tp=4,dp=2.")] = "",
    settings: Settings = None,
    requests: Annotated[
        Path | None, typer.Option(help="Trace: CSV with columns arrival_s, prompt and output.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Without a trace: requests per second.")] = 1.0,
    count: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Without a trace: number of requests.")
    ] = 200,
    prompt: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Without a trace: mean prompt length in tokens.")
    ] = 1024,
    output: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Without a trace: mean output length in tokens.")
    ] = 256,
    # Engineering estimates, of the order of serving engines' defaults.
    max_batch: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Maximum requests in a batch.")
    ] = 256,
    token_budget: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Maximum tokens in an iteration.")
    ] = 2048,
    model: OperatorModelOpt = OPERATOR_MODEL,
    seed: Annotated[int, typer.Option(help="Without a trace: random seed of the requests.")] = 0,
    json_output: Json = False,
) -> None:
    """Simulate LLM serving with continuous batching.

    Prints TTFT, TPOT, throughput and the size of the KV cache.
    """
    if requests is not None:
        drawn = {"rate", "count", "prompt", "output", "seed"}
        refuse(context, "a trace of requests (--requests)", drawn)
    from ..predict.cluster.serving import ServingPredictor, poisson_requests, read_requests
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.plan import Plan, parse_plan
    from ..simulate.step.workload import read_workload

    work, where = read_workload(workload_of(workload, hf), settings or []), find_cluster(cluster)
    # Tensor parallelism over all devices usually has the lowest latency for a single request.
    chosen = parse_plan(plan) if plan else Plan(tp=where.size)
    predictor = ServingPredictor(work, chosen, where, load_step_model(model))
    if requests is not None:
        trace = read_requests(requests)
    else:
        trace = poisson_requests(rate, count, prompt, output, seed)
    data = predictor.predict(trace, max_batch, token_budget).to_dict()
    if json_output:
        print_json(data)
        return
    for name, value in data.items():
        typer.echo(f"{name:<22} {value:.5g}" if isinstance(value, float) else f"{name:<22} {value}")
