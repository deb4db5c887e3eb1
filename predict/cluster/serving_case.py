"""Description of a serving case: a model, its engines and their options, and a load.

The fields are the options of ``simulate-serving`` and ``plan-serving`` and the schema of the
server's requests; table readers fill them in, too. Empty strings and 0 mean defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar

from ...common.options import HfOpt, Option, Workload
from ...simulate.serving.policies import ROUTERS, frameworks
from ...simulate.serving.token_exchange import EXPERT_SKEW
from ...simulate.step.settings import SizesOpt

#: Largest number of requests, tokens or sequences that is accepted, as for the batch of a step
#: (simulate/step/workload.py). Larger numbers are typing errors.
MOST = 10**7
_ENGINES = "Device and plan"


def _above_zero(text: str) -> float:
    rate = float(text)
    if not 0.0 < rate < inf:
        raise ValueError(f"{text}: give a finite rate above 0, or --offline")
    return rate


@dataclass(frozen=True)
class ModelCase:
    """A model, its number formats, and the framework that serves it."""

    section: ClassVar[str] = "Model and data"

    workload: Workload = ""
    hf: HfOpt = None
    settings: SizesOpt = field(default_factory=dict)
    framework: Annotated[
        str,
        Option(
            f"Serving framework, which sets scheduling rules and costs: {', '.join(frameworks())}, "
            "or a release, such as vllm@0.18.0; empty for any other.",
            section="Framework",
        ),
    ] = "vllm"
    source: Annotated[
        str,
        Option("Owner of the machines, as named in serving tables.", section="Framework"),
    ] = ""
    weights: Annotated[
        str,
        Option("Format of the weights: bf16, fp8, int8, int4, mxfp4, nvfp4 (fp4 means nvfp4)."),
    ] = ""
    experts: Annotated[str, Option("Format of the experts, if different.")] = ""
    activations: Annotated[
        str, Option("bf16 if products of fp8 or int8 weights run in 16 bits.")
    ] = ""
    kv_cache: Annotated[str, Option("Format of the KV cache: bf16, fp8, int8.")] = ""
    linear_layers: Annotated[
        int,
        Option("Layers with a recurrent state instead of a KV cache.", least=0),
    ] = 0


@dataclass(frozen=True)
class FleetCase:
    """Devices and the engines that run on them."""

    section: ClassVar[str] = _ENGINES

    cluster: Annotated[
        str,
        Option(
            "Name such as h100-sxm-x8, or a YAML file: one engine on all devices, or as many "
            "engines of --plan as fit."
        ),
    ] = ""
    device: Annotated[str, Option("Instead of --cluster: a device, or its file.")] = ""
    plan: Annotated[
        str,
        Option(
            "Parallel plan of an engine, such as tp=4,pp=2 or tp=1,dp=8,ep=8. For a model without "
            "experts, dp is the number of engines. redundant= is the number of redundant experts "
            "where ep is above 8."
        ),
    ] = ""
    replicas: Annotated[
        int, Option("Number of engines; 0 for as many as fit.", least=0, most=MOST)
    ] = 0
    prefill: Annotated[str, Option("Parallel plan of prefill workers, such as tp=4.")] = ""
    prefill_replicas: Annotated[int, Option("Number of prefill workers.", least=1, most=MOST)] = 1
    prefill_batch: Annotated[
        int, Option("Batch limit of a prefill rank; 0 for --max-batch.", least=0, most=MOST)
    ] = 0


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine besides its plan; the defaults are the framework's."""

    section: ClassVar[str] = "Framework"

    #: Bytes per second.
    transfer: Annotated[
        float,
        Option(
            "KV cache transfer rate of each prefill worker, in GB/s; 0 for that of the links.",
            section=_ENGINES,
            unit=1e9,
            least=0.0,
        ),
    ] = 0.0
    router: Annotated[
        str,
        Option("round-robin, least-loaded or prefix-aware.", section=_ENGINES, choices=ROUTERS),
    ] = "round-robin"
    max_batch: Annotated[
        int,
        Option("Batch limit of a rank; 0 for the framework's default.", least=0, most=MOST),
    ] = 0
    token_budget: Annotated[
        int,
        Option("Token limit of a pass; 0 for the framework's default.", least=0, most=MOST),
    ] = 0
    chunked: Annotated[
        bool | None, Option("Whether prefill may be chunked.", ("--chunked/--whole-prompts",))
    ] = None
    async_scheduling: Annotated[
        bool | None,
        Option(
            "Whether the host prepares a pass while the previous one runs; by default as the "
            "release does.",
            ("--async-scheduling/--no-async-scheduling",),
        ),
    ] = None
    recv_interval: Annotated[
        int,
        Option(
            "Decoding passes between two checks for new requests (SGLang's "
            "--scheduler-recv-interval).",
            least=1,
            most=MOST,
        ),
    ] = 1
    batch_wait_iters: Annotated[
        int,
        Option(
            "Maximum decoding passes for which prompts wait to be batched (TensorRT-LLM's "
            "batch_wait_timeout_iters).",
            least=0,
            most=MOST,
        ),
    ] = 0
    batch_wait_ratio: Annotated[
        float,
        Option(
            "With --batch-wait-iters: fraction of the tokens of a pass from which prompts no "
            "longer wait.",
            least=0.0,
            most=1.0,
        ),
    ] = 0.0
    memory: Annotated[
        float,
        Option(
            "Fraction of device memory to use, as defined by the framework's option; 0 for its "
            "default.",
            least=0.0,
            most=1.0,
        ),
    ] = 0.0
    block: Annotated[
        int, Option("Tokens of a KV cache block; 0 for the framework's.", least=0, most=MOST)
    ] = 0
    watermark: Annotated[
        float, Option("Fraction of the KV cache kept free at admission.", least=0.0, most=0.9)
    ] = 0.0
    preemption: Annotated[
        str,
        Option(
            "What happens to preempted requests: recompute or swap.", choices=("recompute", "swap")
        ),
    ] = "recompute"
    prefix_hits: Annotated[
        float, Option("Fraction of each prompt found in the prefix cache.", least=0.0, most=0.99)
    ] = 0.0
    prefix_cache: Annotated[
        bool,
        Option(
            "Whether prompt prefixes are cached for later requests.",
            ("--prefix-cache/--no-prefix-cache",),
        ),
    ] = True
    drafts: Annotated[
        int,
        Option("Speculative decoding: draft tokens per step.", least=0, most=MOST),
    ] = 0
    accepted: Annotated[
        float, Option("With --drafts: mean tokens generated per step.", least=1.0)
    ] = 1.0
    draft: Annotated[str, Option("With --drafts: mtp, ngram, or the name of a draft model.")] = (
        "ngram"
    )
    expert_skew: Annotated[
        float,
        Option(
            "With dp and experts on more than 8 ranks: standard deviation of the logarithms of "
            "expert loads; 0 for equal loads.",
            least=0.0,
        ),
    ] = EXPERT_SKEW
    overlap: Annotated[
        bool | None,
        Option(
            "Whether such engines overlap the token exchange of one half of a batch with the "
            "kernels of the other half; by default they do.",
            ("--overlap/--no-overlap",),
        ),
    ] = None
    eager: Annotated[
        bool, Option("Launch kernels one by one, without CUDA graphs.", ("--eager/--graphs",))
    ] = False


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """A load: the first of ``requests``, ``concurrency``, ``batch`` and ``rate`` that is set.

    If none is set, all requests are sent at once.
    """

    section: ClassVar[str] = "Load"

    requests: Annotated[
        Path | None,
        Option(
            "Trace: CSV with arrival_s, prompt and output, or the format of Azure, BurstGPT, "
            "Mooncake or vLLM's benchmark."
        ),
    ] = None
    concurrency: Annotated[int, Option("Closed loop: requests in flight.", least=0, most=MOST)] = 0
    batch: Annotated[int, Option("Size of a single static batch.", least=0, most=MOST)] = 0
    rate: Annotated[
        float,
        Option(
            "Open load: requests per second; without any load, 0.7 of the offline throughput.",
            parse=_above_zero,
            metavar="<float>",
            shows_default=False,
        ),
    ] = 0.0
    #: 1 for a Poisson process, less for burstier arrivals (as ``vllm bench serve --burstiness``).
    burstiness: Annotated[
        float, Option("With --rate: shape of the gamma distribution of arrival gaps.")
    ] = 1.0
    count: Annotated[
        int,
        Option(
            "Number of requests; 0 for 10 per request in flight of a closed loop, else 1000.",
            least=0,
            most=MOST,
        ),
    ] = 0
    prompt: Annotated[
        str,
        Option("Tokens per prompt: 1024, uniform:512:1024, geometric:1024 or lognormal:1024:0.5."),
    ] = "1024"
    output: Annotated[str, Option("Tokens per output, in the same forms.")] = "256"
    seed: Annotated[
        int, Option("Random seed of the requests; unused with a trace.", least=0, section="Run")
    ] = 0

    @property
    def kind(self) -> str:
        """Kind: ``trace``, ``closed``, ``static-batch``, ``open-poisson`` or ``offline``."""
        if self.requests is not None:
            return "trace"
        if self.concurrency:
            return "closed"
        if self.batch:
            return "static-batch"
        return "open-poisson" if self.rate else "offline"


@dataclass(frozen=True)
class JudgedBy:
    """Criteria that a deployment is judged by."""

    slo: Annotated[
        str,
        Option("Latency limits of requests, such as ttft=500ms,tpot=30ms,e2e=20s.", section="Load"),
    ] = ""
    price: Annotated[
        float, Option("Price of a device in dollars per hour.", section="Output", least=0.0)
    ] = 0.0


@dataclass(frozen=True)
class ServingCase:
    """A deployment under a load."""

    model: ModelCase = field(default_factory=ModelCase)
    fleet: FleetCase = field(default_factory=FleetCase)
    options: EngineOptions = field(default_factory=EngineOptions)
    load: LoadSpec = field(default_factory=LoadSpec)
    judged: JudgedBy = field(default_factory=JudgedBy)


@dataclass(frozen=True)
class SearchCase:
    """A search for the best deployment of a model on devices under a load."""

    model: ModelCase
    options: EngineOptions
    judged: JudgedBy
    device: Annotated[str, Option("Device, such as h100-sxm, or its file.")]
    gpus: Annotated[
        int, Option("Maximum number of devices; fewer are tried too.", least=1, most=4096)
    ]
    load: Annotated[
        str,
        Option(
            "concurrency=64 or rate=4 (burstiness=0.5), prompt=1024,output=256,count=500; or "
            "trace=FILE."
        ),
    ]
    together: Annotated[bool, Option("Do not try separate prefill workers.", ("--together",))] = (
        False
    )
