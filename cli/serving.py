"""Commands that simulate and plan LLM serving, and that start the servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import (
    Json,
    NextOpt,
    OperatorModelOpt,
    Option,
    Timeline,
    page_file,
    yaml_file,
)
from ..common.progress import wrote
from ..models.core.registry import OPERATOR_MODEL
from ..predict.cluster.serving_case import SearchCase, ServingCase
from ..server.settings import ServerSettings
from ..simulate.serving.policies import ROUTERS
from .options import make_console, print_answer, print_json, refuse, refuse_unused, workload_of

if TYPE_CHECKING:
    from ..predict.cluster.deployment import Deployment
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_case import EngineOptions, LoadSpec

#: Default load: fraction of the offline throughput, and the number of requests that measure it. At
#: this utilization queues are short. Engineering estimates.
_MODERATE, _TRIED = 0.7, 256
#: Options of prefill workers.
PREFILLED = {"prefill_replicas", "prefill_batch", "transfer"}

ServingModelOpt = Annotated[
    str, Option("Serving model adapted by 'opcast calibrate --serving'.", ("--serving",))
]


def simulate_serving(
    context: typer.Context,
    case: ServingCase,
    fleet: Annotated[
        Path | None,
        Option(
            "Instead of a deployment and a load: YAML file with autoscaled pools and their traffic "
            "over a week.",
            check=yaml_file,
            section="Device and plan",
        ),
    ] = None,
    offline: Annotated[
        bool, Option("Send all requests at once.", ("--offline",), section="Load")
    ] = False,
    model: OperatorModelOpt = OPERATOR_MODEL,
    serving: ServingModelOpt = "default",
    next_count: NextOpt = 0,
    json_output: Json = False,
    timeline: Timeline = None,
    html: Annotated[Path | None, Option("Write an HTML page.", check=page_file)] = None,
) -> None:
    """Simulate LLM serving: latencies, throughput, memory, cache and queue.

    Each figure has a 90 % interval, learned from measured runs of vLLM, SGLang and TensorRT-LLM.
    """
    if fleet is not None:
        of_fleet = {"fleet", "model", "serving", "json_output"}
        refuse_unused(context, "a fleet (--fleet): set it in the fleet's file", of_fleet)
        _simulate_fleet(fleet, _predictor(model, serving), json_output)
        return
    load = case.load
    _refuse_loads(context, load, offline)
    if not case.fleet.prefill:
        refuse(context, "a deployment without prefill workers (--prefill)", PREFILLED)
    _refuse_drafts(context, case.options)
    if bool(case.fleet.cluster) == bool(case.fleet.device):
        raise typer.BadParameter("give either --cluster or --device")
    from ..common.chrome_trace import write_trace
    from ..common.errors import PlanError
    from ..common.files import write_text
    from ..predict.cluster.deployment import deployment_of
    from ..predict.cluster.serving_load import parse_lengths, parse_slo
    from ..predict.export.timeline import serving_trace

    for name, text in (("--prompt", load.prompt), ("--output", load.output)):
        try:
            parse_lengths(text)
        except PlanError as error:
            raise typer.BadParameter(f"{name}: {error}") from None
    named = workload_of(case.model.workload, case.model.hf, served=True)
    deployment = deployment_of(case, files=True)
    _refuse_unread(context, deployment, load, offline)
    predictor, kept = _predictor(model, serving), parse_slo(case.judged.slo)
    if not (load.rate or offline or load.concurrency or load.batch or load.requests):
        load = _moderate(predictor, deployment, load)
    if next_count:
        refuse(context, "--next", {"timeline", "html", "slo"})
        from ..predict.cluster.next_run import next_serving
        from ..predict.render.parts import print_next_runs
        from ..simulate.serving.checkpoints import find_checkpoint

        checkpoint = find_checkpoint(str(named))
        price = case.judged.price or None
        chosen = next_serving(predictor, deployment, load, checkpoint, next_count, price)
        print_answer(json_output, chosen, print_next_runs)
        return
    prediction = predictor.predict(deployment, load, slo=kept)
    if timeline is not None:
        write_trace(serving_trace(prediction), timeline)
        wrote(timeline, "Chrome trace")
    if html is not None:
        from ..predict.page.cluster import serving_page

        write_text(html, serving_page(prediction))
        wrote(html, "page; open it in a browser")
    if json_output:
        print_json(prediction.to_dict(case.judged.price))
    else:
        from ..predict.render.serving import print_serving

        print_serving(make_console(), prediction, case.judged.price)
    # As for plan-serving, so that scripts can test whether a deployment meets the SLO.
    if not prediction.good.value:
        typer.echo("no request meets the SLO", err=True)
        raise typer.Exit(1)


def _simulate_fleet(path: Path, predictor: ServingPredictor, json_output: bool) -> None:
    """Simulate the fleet of a file."""
    from ..predict.cluster.fleet_file import read_fleet
    from ..predict.cluster.serving_fleet import predict_fleet
    from ..predict.render.serving import print_fleet

    prediction = predict_fleet(predictor, read_fleet(path))
    print_answer(json_output, prediction, print_fleet)


def _moderate(predictor: ServingPredictor, deployment: Deployment, spec: LoadSpec) -> LoadSpec:
    """Make an open load below the engines' capacity, for a command line without a load."""
    most = min(spec.count or _TRIED, _TRIED)
    at_once = predictor.predict(deployment, replace(spec, count=most), record=False)
    capacity = at_once.requests_per_s.value
    rate = float(f"{_MODERATE * capacity:.2g}")
    typer.echo(
        f"note: no load given: assuming --rate {rate:g}, {_MODERATE:.0%} of the offline throughput "
        f"of {capacity:.3g} requests/s",
        err=True,
    )
    return replace(spec, rate=rate)


def _refuse_loads(context: typer.Context, load: LoadSpec, offline: bool) -> None:
    """Refuse options that do not apply to the chosen kind of load."""
    kinds = {
        "requests": ("a trace of requests (--requests)", load.requests is not None),
        "concurrency": ("a closed loop (--concurrency)", load.concurrency > 0),
        "batch": ("a static batch (--batch)", load.batch > 0),
        "offline": ("requests that are all sent at once (--offline)", offline),
    }
    drawn = {"requests": {"count", "prompt", "output", "seed"}, "batch": {"count"}}
    for name, (mode, wanted) in kinds.items():
        if wanted:
            others = kinds.keys() - {name}
            refuse(context, mode, {"rate", "burstiness", *others, *drawn.get(name, ())})


def _refuse_drafts(context: typer.Context, options: EngineOptions) -> None:
    """Refuse settings of speculative decoding without ``--drafts``."""
    if not options.drafts:
        refuse(context, "decoding without --drafts", {"accepted", "draft"})


def _refuse_unread(
    context: typer.Context, deployment: Deployment, load: LoadSpec, offline: bool
) -> None:
    """Refuse options without effect: a router for one engine, a seed if nothing is random."""
    alone = deployment.prefill is None and deployment.engine.count == 1
    # An unknown router gets an error message of its own.
    if alone and deployment.options.router in ROUTERS:
        refuse(context, "a single engine", {"router"})
    at_once = bool(load.concurrency or load.batch or offline)
    if at_once and load.prompt.isdigit() and load.output.isdigit():
        refuse(context, "requests of fixed lengths and arrival times", {"seed"})


def _predictor(model: str, serving: str) -> ServingPredictor:
    from ..models.serving.model import ServingModel
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.operator.serving_operators import load_serving_operators

    return ServingPredictor(load_serving_operators(model), ServingModel.find(serving))


def plan_serving(
    context: typer.Context,
    case: SearchCase,
    workload: Annotated[
        str, Option("Name of the model, as for simulate-serving.", ("--workload", "--model"))
    ] = "",
    all_gpus: Annotated[
        bool, Option("Try only deployments that use all of the devices.", ("--all-gpus",))
    ] = False,
    operators: OperatorModelOpt = OPERATOR_MODEL,
    serving: ServingModelOpt = "default",
    top: Annotated[int, Option("Number of deployments to print.", least=1)] = 10,
    json_output: Json = False,
) -> None:
    """Search for the cheapest serving deployment that meets an SLO.

    Tries engines, plans, batches and disaggregation. Prints the Pareto front of throughput per
    device against latency, and the launch commands of the best deployment.
    """
    if json_output:
        refuse(context, "--json, which has all deployments", {"top"})
    if case.gpus == 1:
        of_several = {"all_gpus", "transfer", "router"}
        refuse(context, "a single device (--gpus 1)", of_several)
    if case.together:
        refuse(context, "a search without prefill workers (--together)", {"transfer"})
    _refuse_drafts(context, case.options)
    from ..common.progress import counting
    from ..predict.plan.serving_search import search_case
    from ..predict.render.serving import print_plans
    from ..simulate.serving.checkpoints import find_checkpoint

    chosen = workload_of(workload, case.model.hf, served=True)
    predictor = _predictor(operators, serving)
    with counting("deployments") as tell:
        plans = search_case(
            predictor,
            case,
            files=True,
            fewer=not all_gpus,
            show=lambda done, of, what: tell(done, of),
        )
    checkpoint = find_checkpoint(chosen)
    if json_output:
        print_json(plans.to_dict(checkpoint, case.judged.price))
    else:
        print_plans(make_console(), plans, checkpoint, top, case.judged.price)
    if plans.stopped:
        typer.echo("stopped: only the deployments simulated so far are compared", err=True)
        raise typer.Exit(130)
    if plans.best is None:
        raise typer.Exit(1)


def serve(settings: ServerSettings) -> None:
    """Serve predictions over HTTP.

    The server runs until it is stopped; /docs describes its API.
    """
    from ..common.errors import OpcastError
    from ..common.plugins import extra_hint

    try:
        from ..server.app import serve as run
    except ImportError as error:
        raise OpcastError(
            f"the packages for the server are not installed: {error}", hint=extra_hint("serve")
        ) from None
    # Printed once connections are accepted; with --port 0 this is how a user learns the port.
    run(
        settings,
        lambda url: typer.echo(f"{url}/docs", err=True),
        lambda text: typer.echo(text, err=True),
    )


def mcp() -> None:
    """Serve tools for agents over standard input and output (MCP).

    The agent starts it, and it runs until its input ends (docs/agents.md).
    """
    from ..common.errors import OpcastError
    from ..common.plugins import extra_hint

    try:
        from ..server.agent import make_server

        server = make_server()
    except ImportError as error:
        raise OpcastError(
            f"the packages for the MCP server are not installed: {error}",
            hint=extra_hint("mcp"),
        ) from None
    server.run()
