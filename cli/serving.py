"""The commands that simulate LLM serving, and that plan it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import (
    HfOpt,
    Json,
    OperatorModelOpt,
    Option,
    Settings,
    Timeline,
    Workload,
    page_file,
)
from ..common.progress import wrote
from ..models.core.registry import OPERATOR_MODEL
from ..predict.cluster.step_case import sizes_of
from .options import make_console, print_json, refuse, workload_of

if TYPE_CHECKING:
    from ..predict.cluster.deployment import Deployment
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_load import LoadSpec

#: Load where none is given: a share of the throughput of so many requests sent at once, at which
#: queues are short. Engineering estimates.
_MODERATE, _TRIED = 0.7, 256
#: Requests, tokens and batches beyond any engine; as the largest batch of a step
#: (simulate/step/workload.py). Larger figures are slips of the hand.
_MOST = 10**7

#: Options of workers that run prompts alone.
PREFILLED = {"prefill_replicas", "prefill_batch", "transfer"}

ServingModelOpt = Annotated[
    str, Option("File of 'opcast calibrate --serving', for your own stack.", ("--serving",))
]
Weights = Annotated[
    str,
    Option("Format of the weights: bf16, fp8, int8, int4, mxfp4, nvfp4 (fp4 means nvfp4)."),
]
Experts = Annotated[str, Option("Format of the experts, where it differs.")]
Activations = Annotated[str, Option("bf16 for fp8 or int8 weights whose products run in 16 bits.")]
KvCache = Annotated[str, Option("Format of the cache: bf16, fp8, int8.")]
Framework = Annotated[
    str,
    Option(
        "Engine, whose rules and costs are taken: vllm, sglang, trtllm (tensorrt-llm), "
        "lmdeploy or deepspeed-mii, or a release of one, such as vllm@0.18.0; empty for another."
    ),
]
Source = Annotated[
    str,
    Option("Whose machines these are, as tables of serving name them."),
]
SloOpt = Annotated[str, Option("What requests have to keep, such as ttft=500ms,tpot=30ms,e2e=20s.")]
HitRate = Annotated[
    float, Option("Share of each prompt that the cache has already.", least=0.0, most=0.99)
]
Reuse = Annotated[
    bool,
    Option(
        "Whether what prompts begin with is kept for later ones.",
        ("--prefix-cache/--no-prefix-cache",),
    ),
]
Price = Annotated[float, Option("Dollars of a device and hour.", least=0.0)]
LinearLayers = Annotated[
    int,
    Option("Layers with a recurrent state instead of attention over a cache.", least=0),
]

Router = Annotated[str, Option("round-robin, least-loaded or prefix-aware.")]
Transfer = Annotated[
    float,
    Option("With --prefill: GB/s at which caches move; 0 for the links'.", least=0.0),
]
MaxBatch = Annotated[
    int,
    Option("Most sequences of an engine's rank; 0 for the framework's.", least=0, most=_MOST),
]
TokenBudget = Annotated[int, Option("Most tokens of a pass, likewise.", least=0, most=_MOST)]
Chunked = Annotated[
    bool | None,
    Option("Whether prompts may be cut.", ("--chunked/--whole-prompts",)),
]
Memory = Annotated[
    float,
    Option(
        "Share of the memory to use, as the framework's own option counts it; 0 for its default.",
        least=0.0,
        most=1.0,
    ),
]
Block = Annotated[
    int,
    Option("Tokens of a block of the cache; 0 for the framework's.", least=0, most=_MOST),
]
Watermark = Annotated[
    float, Option("Share of the cache kept free at admission.", least=0.0, most=0.9)
]
Preemption = Annotated[str, Option("What happens to evicted requests: recompute or swap.")]
Drafts = Annotated[
    int,
    Option("Speculative decoding: tokens that are drafted for a step.", least=0, most=_MOST),
]
Accepted = Annotated[
    float, Option("With --drafts: tokens that a step yields on average.", least=1.0)
]
Draft = Annotated[str, Option("With --drafts: mtp, ngram, or the name of a model that drafts.")]
Eager = Annotated[bool, Option("Launch kernel by kernel, without graphs.", ("--eager/--graphs",))]


def simulate_serving(
    context: typer.Context,
    workload: Workload = "",
    hf: HfOpt = None,
    settings: Settings = (),
    cluster: Annotated[
        str, Option("Name such as h100-sxm-x8, or a YAML file; engines fill it.")
    ] = "",
    device: Annotated[str, Option("Instead of --cluster: a device, or its file.")] = "",
    plan: Annotated[
        str,
        Option(
            "Plan of an engine, such as tp=4,pp=2 or tp=1,dp=8,ep=8; dp of a model without "
            "experts is engines."
        ),
    ] = "",
    replicas: Annotated[
        int, Option("Engines; 0 for as many as the cluster holds.", least=0, most=_MOST)
    ] = 0,
    prefill: Annotated[str, Option("Plan of workers that run prompts alone, such as tp=4.")] = "",
    prefill_replicas: Annotated[int, Option("How many of them.", least=1, most=_MOST)] = 1,
    prefill_batch: Annotated[
        int,
        Option("Most sequences of a rank of theirs; 0 for --max-batch.", least=0, most=_MOST),
    ] = 0,
    transfer: Transfer = 0.0,
    router: Router = "round-robin",
    framework: Framework = "vllm",
    source: Source = "",
    weights: Weights = "",
    experts: Experts = "",
    activations: Activations = "",
    kv_cache: KvCache = "",
    linear_layers: LinearLayers = 0,
    requests: Annotated[
        Path | None,
        Option(
            "Trace: CSV with arrival_s, prompt and output, or as of Azure, BurstGPT, Mooncake "
            "or vLLM's benchmark."
        ),
    ] = None,
    concurrency: Annotated[
        int, Option("Closed loop: requests in flight.", least=0, most=_MOST)
    ] = 0,
    batch: Annotated[int, Option("One static batch of so many.", least=0, most=_MOST)] = 0,
    rate: Annotated[
        float | None,
        Option(
            "Open load: requests per second; without any load 0.7 of what is served at once.",
            shows_default=False,
        ),
    ] = None,
    offline: Annotated[bool, Option("All requests at once.", ("--offline",))] = False,
    burstiness: Annotated[
        float, Option("With --rate: shape of the gamma distribution of the gaps.")
    ] = 1.0,
    count: Annotated[
        int,
        Option("Number of requests; 0 for 10 for each in flight, else 1000.", least=0, most=_MOST),
    ] = 0,
    prompt: Annotated[
        str,
        Option("Tokens of a prompt: 1024, uniform:512:1024, geometric:1024 or lognormal:1024:0.5."),
    ] = "1024",
    output: Annotated[str, Option("Tokens of an output, likewise.")] = "256",
    seed: Annotated[int, Option("Without a trace: random seed of the requests.")] = 0,
    max_batch: MaxBatch = 0,
    token_budget: TokenBudget = 0,
    chunked: Chunked = None,
    memory: Memory = 0.0,
    block: Block = 0,
    watermark: Watermark = 0.0,
    preemption: Preemption = "recompute",
    prefix_hits: HitRate = 0.0,
    prefix_cache: Reuse = True,
    drafts: Drafts = 0,
    accepted: Accepted = 1.0,
    draft: Draft = "ngram",
    eager: Eager = False,
    slo: SloOpt = "",
    price: Price = 0.0,
    model: OperatorModelOpt = OPERATOR_MODEL,
    serving: ServingModelOpt = "default",
    json_output: Json = False,
    timeline: Timeline = None,
    html: Annotated[Path | None, Option("Write an HTML page.", check=page_file)] = None,
) -> None:
    """Simulate LLM serving: latencies, throughput, memory, cache and queue.

    Each figure has a 90 % interval, learned from measured runs of vLLM, SGLang and TensorRT-LLM.
    """
    _refuse_loads(context, requests, concurrency, batch, offline)
    if not prefill:
        refuse(context, "engines that run prompts themselves", PREFILLED)
    if not drafts:
        refuse(context, "decoding without --drafts", {"accepted", "draft"})
    if bool(cluster) == bool(device):
        raise typer.BadParameter("give either --cluster or --device")
    from ..common.chrome_trace import write_trace
    from ..common.errors import PlanError
    from ..common.files import write_text
    from ..predict.cluster.deployment import ServingQuery
    from ..predict.cluster.served_row import known_framework, served_by_name
    from ..predict.cluster.serving_load import LoadSpec, parse_lengths, parse_slo
    from ..predict.export.timeline import serving_trace
    from ..simulate.serving.checkpoints import find_checkpoint
    from ..simulate.serving.formats import Formats

    for name, text in (("--prompt", prompt), ("--output", output)):
        try:
            parse_lengths(text)
        except PlanError as error:
            raise typer.BadParameter(f"{name}: {error}") from None
    engine, _ = known_framework(framework)
    formats = Formats(weights, kv_cache, experts, activations, linear_layers, engine)
    asked = ServingQuery(
        framework=framework,
        source=source,
        cluster=cluster,
        device=device,
        plan=plan,
        replicas=replicas,
        prefill=prefill,
        prefill_replicas=prefill_replicas,
        prefill_batch=prefill_batch,
        transfer=transfer,
        router=router,
        max_batch=max_batch,
        token_budget=token_budget,
        chunked=chunked,
        memory=memory,
        block=block,
        watermark=watermark,
        preemption=preemption,
        prefix_hits=prefix_hits,
        prefix_cache=prefix_cache,
        drafts=drafts,
        accepted=accepted,
        draft=draft,
        eager=eager,
    )
    chosen = workload_of(workload, hf, served=True)
    deployment = asked.deployment(
        served_by_name(chosen, sizes_of(settings), formats, files=True),
        lambda name: served_by_name(name, {}, Formats(), files=True),
    )
    deployment = replace(deployment, context=find_checkpoint(chosen).context)
    spec = LoadSpec(
        prompt=prompt,
        output=output,
        trace=requests,
        concurrency=concurrency,
        batch=batch,
        rate=rate or 0.0,
        burstiness=burstiness,
        count=count,
        seed=seed,
    )
    if rate is not None and rate <= 0.0:
        raise typer.BadParameter(f"rate={rate}: give a rate above 0, or --offline")
    predictor, kept = _predictor(model, serving), parse_slo(slo)
    if rate is None and not (offline or concurrency or batch or requests):
        spec = _moderate(predictor, deployment, spec)
    prediction = predictor.predict(deployment, spec, slo=kept)
    if timeline is not None:
        write_trace(serving_trace(prediction), timeline)
        wrote(timeline, "Chrome trace")
    if html is not None:
        from ..predict.page.cluster import serving_page

        write_text(html, serving_page(prediction))
        wrote(html, "page; open it in a browser")
    if json_output:
        print_json(prediction.to_dict(price))
    else:
        from ..predict.render.serving import print_serving

        print_serving(make_console(), prediction, price)
    # As plan-serving, so that a script can ask whether a deployment will do.
    if not prediction.good.value:
        typer.echo("no request keeps the SLO", err=True)
        raise typer.Exit(1)


def _moderate(predictor: ServingPredictor, deployment: Deployment, spec: LoadSpec) -> LoadSpec:
    """An open load that leaves the engines some room, where the user named none."""
    most = min(spec.count or _TRIED, _TRIED)
    at_once = predictor.predict(deployment, replace(spec, count=most), record=False)
    capacity = at_once.requests_per_s.value
    rate = float(f"{_MODERATE * capacity:.2g}")
    typer.echo(
        f"note: no load given: --rate {rate:g}, {_MODERATE:.0%} of the {capacity:.3g} requests/s "
        "that are served all at once",
        err=True,
    )
    return replace(spec, rate=rate)


def _refuse_loads(
    context: typer.Context, requests: Path | None, concurrency: int, batch: int, offline: bool
) -> None:
    """Refuse figures of a load that the chosen kind of load does not have."""
    kinds = {
        "requests": ("a trace of requests (--requests)", requests is not None),
        "concurrency": ("a closed loop (--concurrency)", concurrency > 0),
        "batch": ("a static batch (--batch)", batch > 0),
        "offline": ("requests that are all sent at once (--offline)", offline),
    }
    drawn = {"requests": {"count", "prompt", "output", "seed"}, "batch": {"count"}}
    for name, (mode, wanted) in kinds.items():
        if wanted:
            others = kinds.keys() - {name}
            refuse(context, mode, {"rate", "burstiness", *others, *drawn.get(name, ())})


def _predictor(model: str, serving: str) -> ServingPredictor:
    from ..models.serving.model import find_serving_model
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.operator.serving_operators import load_serving_operators

    return ServingPredictor(load_serving_operators(model), find_serving_model(serving))


def plan_serving(
    context: typer.Context,
    device: Annotated[str, Option("Device, such as h100-sxm, or its file.")],
    gpus: Annotated[
        int, Option("Number of devices at most; fewer are tried too.", least=1, most=4096)
    ],
    load: Annotated[
        str,
        Option(
            "concurrency=64 or rate=4 (burstiness=0.5), prompt=1024,output=256,count=500; "
            "or trace=FILE."
        ),
    ],
    workload: Annotated[
        str, Option("Model by name, as of simulate-serving.", ("--workload", "--model"))
    ] = "",
    hf: HfOpt = None,
    settings: Settings = (),
    slo: SloOpt = "",
    framework: Framework = "vllm",
    source: Source = "",
    weights: Weights = "",
    experts: Experts = "",
    activations: Activations = "",
    kv_cache: KvCache = "",
    linear_layers: LinearLayers = 0,
    transfer: Annotated[
        float,
        Option("GB/s at which caches move between workers; 0 for the links'.", least=0.0),
    ] = 0.0,
    router: Router = "round-robin",
    max_batch: MaxBatch = 0,
    token_budget: TokenBudget = 0,
    chunked: Chunked = None,
    memory: Memory = 0.0,
    block: Block = 0,
    watermark: Watermark = 0.0,
    preemption: Preemption = "recompute",
    prefix_hits: HitRate = 0.0,
    prefix_cache: Reuse = True,
    drafts: Drafts = 0,
    accepted: Accepted = 1.0,
    draft: Draft = "ngram",
    eager: Eager = False,
    together: Annotated[
        bool, Option("Try no workers that run prompts alone.", ("--together",))
    ] = False,
    all_gpus: Annotated[
        bool, Option("Compare deployments on all of the devices alone.", ("--all-gpus",))
    ] = False,
    operators: Annotated[
        str, Option("Operator model; 'roofline' for the plain roofline.")
    ] = OPERATOR_MODEL,
    serving: ServingModelOpt = "default",
    price: Price = 0.0,
    top: Annotated[int, Option("Number of deployments to print.", least=1)] = 10,
    json_output: Json = False,
) -> None:
    """Search engines, plans, batches and disaggregation for the cheapest under an SLO.

    Prints the Pareto front of throughput a device against latency, and the best with its launch
    commands.
    """
    if together:
        refuse(context, "engines that run prompts themselves (--together)", {"transfer"})
    if not drafts:
        refuse(context, "decoding without --drafts", {"accepted", "draft"})
    from ..common.progress import counting
    from ..predict.cluster.deployment import ServingQuery
    from ..predict.cluster.served_row import known_framework, served_by_name
    from ..predict.cluster.serving_load import parse_load, parse_slo
    from ..predict.plan.serving_search import search
    from ..predict.render.serving import print_plans
    from ..simulate.serving.checkpoints import find_checkpoint
    from ..simulate.serving.formats import Formats

    engine, _ = known_framework(framework)
    formats = Formats(weights, kv_cache, experts, activations, linear_layers, engine)
    chosen = workload_of(workload, hf, served=True)
    model = served_by_name(chosen, sizes_of(settings), formats, files=True)
    query = ServingQuery(
        framework=framework,
        source=source,
        device=device,
        router=router,
        max_batch=max_batch,
        token_budget=token_budget,
        chunked=chunked,
        memory=memory,
        block=block,
        watermark=watermark,
        preemption=preemption,
        prefix_hits=prefix_hits,
        prefix_cache=prefix_cache,
        drafts=drafts,
        accepted=accepted,
        draft=draft,
        eager=eager,
    )
    base = query.deployment(model, lambda name: served_by_name(name, {}, Formats(), files=True))
    base = replace(base, options=replace(base.options, transfer=transfer * 1e9))
    spec, asked = parse_load(load), parse_slo(slo)
    predictor = _predictor(operators, serving)
    # Progress goes to standard error, as that of sweeps.
    with counting("deployments") as tell:
        plans = search(
            predictor,
            base,
            gpus,
            spec,
            asked,
            apart=not together,
            fewer=not all_gpus,
            show=lambda done, of, what: tell(done, of),
        )
    checkpoint = find_checkpoint(workload or str(hf))
    if json_output:
        print_json(plans.to_dict(checkpoint, price))
    else:
        print_plans(make_console(), plans, checkpoint, top, price)
    if plans.best is None and not plans.stopped:
        raise typer.Exit(1)
    if plans.stopped:
        typer.echo("stopped: these are the deployments that were simulated until then", err=True)
        raise typer.Exit(130)
