"""What users ask of serving: a model, engines, how they are told to serve it, and a load.

The fields are the options of ``simulate-serving`` and ``plan-serving``, the schema of the server's
request and what readers of tables fill in; empty texts and 0 are defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from ...common.options import HfOpt, Option, Workload
from ...simulate.serving.policies import ROUTERS, frameworks
from ...simulate.serving.token_exchange import EXPERT_SKEW
from ...simulate.step.settings import SizesOpt

#: Requests, tokens and batches beyond any engine; as the largest batch of a step
#: (simulate/step/workload.py). Larger figures are slips of the hand.
MOST = 10**7
_ENGINES = "Device and plan"


def _above_zero(text: str) -> float:
    rate = float(text)
    if not rate > 0.0:
        raise ValueError(f"{text}: give a rate above 0, or --offline")
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
            f"Engine, whose rules and costs are taken: {', '.join(frameworks())}, or a release of "
            "one, such as vllm@0.18.0; empty for another.",
            section="Framework",
        ),
    ] = "vllm"
    source: Annotated[
        str,
        Option(
            "Owner of the machines, by the name that tables of serving use.", section="Framework"
        ),
    ] = ""
    weights: Annotated[
        str,
        Option("Format of the weights: bf16, fp8, int8, int4, mxfp4, nvfp4 (fp4 means nvfp4)."),
    ] = ""
    experts: Annotated[str, Option("Format of the experts, where it differs.")] = ""
    activations: Annotated[
        str, Option("bf16 for fp8 or int8 weights whose products run in 16 bits.")
    ] = ""
    kv_cache: Annotated[str, Option("Format of the cache: bf16, fp8, int8.")] = ""
    linear_layers: Annotated[
        int,
        Option("Layers with a recurrent state instead of attention over a cache.", least=0),
    ] = 0


@dataclass(frozen=True)
class FleetCase:
    """Devices, and the engines on them."""

    section: ClassVar[str] = _ENGINES

    cluster: Annotated[
        str,
        Option(
            "Name such as h100-sxm-x8, or a YAML file: one engine on all of it, or as many of "
            "--plan as fit."
        ),
    ] = ""
    device: Annotated[str, Option("Instead of --cluster: a device, or its file.")] = ""
    plan: Annotated[
        str,
        Option(
            "Plan of an engine, such as tp=4,pp=2 or tp=1,dp=8,ep=8; dp of a model without "
            "experts is engines; redundant= are copies of experts where ep is more than 8."
        ),
    ] = ""
    replicas: Annotated[
        int, Option("Engines; 0 for as many as the cluster holds.", least=0, most=MOST)
    ] = 0
    prefill: Annotated[str, Option("Plan of workers that run prompts alone, such as tp=4.")] = ""
    prefill_replicas: Annotated[int, Option("How many of them.", least=1, most=MOST)] = 1
    prefill_batch: Annotated[
        int, Option("Most sequences of a rank of theirs; 0 for --max-batch.", least=0, most=MOST)
    ] = 0


@dataclass(frozen=True)
class EngineOptions:
    """What may be told to an engine beside its plan; defaults are the framework's own."""

    section: ClassVar[str] = "Framework"

    #: Bytes a second.
    transfer: Annotated[
        float,
        Option(
            "Of workers that run prompts alone: GB/s at which each sends caches; 0 for the links'.",
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
        Option("Most sequences of an engine's rank; 0 for the framework's.", least=0, most=MOST),
    ] = 0
    token_budget: Annotated[int, Option("Most tokens of a pass, likewise.", least=0, most=MOST)] = 0
    chunked: Annotated[
        bool | None, Option("Whether prompts may be cut.", ("--chunked/--whole-prompts",))
    ] = None
    memory: Annotated[
        float,
        Option(
            "Share of the memory to use, as the framework's own option counts it; 0 for its "
            "default.",
            least=0.0,
            most=1.0,
        ),
    ] = 0.0
    block: Annotated[
        int, Option("Tokens of a block of the cache; 0 for the framework's.", least=0, most=MOST)
    ] = 0
    watermark: Annotated[
        float, Option("Share of the cache kept free at admission.", least=0.0, most=0.9)
    ] = 0.0
    preemption: Annotated[
        str,
        Option(
            "What happens to evicted requests: recompute or swap.", choices=("recompute", "swap")
        ),
    ] = "recompute"
    prefix_hits: Annotated[
        float, Option("Share of each prompt that the cache has already.", least=0.0, most=0.99)
    ] = 0.0
    prefix_cache: Annotated[
        bool,
        Option(
            "Whether what prompts begin with is kept for later ones.",
            ("--prefix-cache/--no-prefix-cache",),
        ),
    ] = True
    drafts: Annotated[
        int,
        Option("Speculative decoding: tokens that are drafted for a step.", least=0, most=MOST),
    ] = 0
    accepted: Annotated[
        float, Option("With --drafts: tokens that a step yields on average.", least=1.0)
    ] = 1.0
    draft: Annotated[
        str, Option("With --drafts: mtp, ngram, or the name of a model that drafts.")
    ] = "ngram"
    expert_skew: Annotated[
        float,
        Option(
            "Of experts on more than 8 ranks with dp: deviation of the logarithms of their loads; "
            "0 for even ones.",
            least=0.0,
        ),
    ] = EXPERT_SKEW
    overlap: Annotated[
        bool | None,
        Option(
            "Whether such engines hide exchanges of one half of a batch behind kernels of the "
            "other; by default they do.",
            ("--overlap/--no-overlap",),
        ),
    ] = None
    eager: Annotated[
        bool, Option("Launch kernel by kernel, without graphs.", ("--eager/--graphs",))
    ] = False


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Requests; of ``requests``, ``concurrency``, ``batch`` and ``rate`` the first counts.

    Without any of them all are sent at once.
    """

    section: ClassVar[str] = "Load"

    requests: Annotated[
        Path | None,
        Option(
            "Trace: CSV with arrival_s, prompt and output, or as of Azure, BurstGPT, Mooncake or "
            "vLLM's benchmark."
        ),
    ] = None
    concurrency: Annotated[int, Option("Closed loop: requests in flight.", least=0, most=MOST)] = 0
    batch: Annotated[int, Option("One static batch of so many.", least=0, most=MOST)] = 0
    rate: Annotated[
        float,
        Option(
            "Open load: requests per second; without any load 0.7 of what is served at once.",
            parse=_above_zero,
            metavar="<float>",
            shows_default=False,
        ),
    ] = 0.0
    #: 1 for a Poisson process, less for bursts (as ``vllm bench serve --burstiness``).
    burstiness: Annotated[
        float, Option("With --rate: shape of the gamma distribution of the gaps.")
    ] = 1.0
    count: Annotated[
        int,
        Option("Number of requests; 0 for 10 for each in flight, else 1000.", least=0, most=MOST),
    ] = 0
    prompt: Annotated[
        str,
        Option("Tokens of a prompt: 1024, uniform:512:1024, geometric:1024 or lognormal:1024:0.5."),
    ] = "1024"
    output: Annotated[str, Option("Tokens of an output, likewise.")] = "256"
    seed: Annotated[
        int, Option("Without a trace: random seed of the requests.", least=0, section="Run")
    ] = 0

    @property
    def kind(self) -> str:
        """``trace``, ``closed``, ``static-batch``, ``open-poisson`` or ``offline``."""
        if self.requests is not None:
            return "trace"
        if self.concurrency:
            return "closed"
        if self.batch:
            return "static-batch"
        return "open-poisson" if self.rate else "offline"


@dataclass(frozen=True)
class JudgedBy:
    """What makes a deployment good."""

    slo: Annotated[
        str,
        Option("What requests have to keep, such as ttft=500ms,tpot=30ms,e2e=20s.", section="Load"),
    ] = ""
    price: Annotated[
        float, Option("Dollars of a device and hour.", section="Output", least=0.0)
    ] = 0.0


@dataclass(frozen=True)
class ServingCase:
    """A deployment under a load."""

    model: ModelCase = field(default_factory=ModelCase)
    fleet: FleetCase = field(default_factory=FleetCase)
    options: EngineOptions = field(default_factory=EngineOptions)
    load: LoadSpec = field(default_factory=LoadSpec)
    judged: JudgedBy = field(default_factory=JudgedBy)
