"""A model, the engines that serve it and how they are told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from ...common.errors import PlanError
from ...features.devices.catalogue import in_catalogue, read_device
from ...features.devices.device import DeviceSpec
from ...simulate.clusters.catalogue import find_cluster, joined
from ...simulate.clusters.files import load_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.policies import runs_on
from ...simulate.serving.served import EnginePlan, ServedModel
from .served_row import known_framework


@dataclass(frozen=True)
class Workers:
    """Workers of one kind.

    Attributes:
        plan: Of each.
        count: How many; replicas of an engine that prefills and decodes.
        batch: Most sequences of each of its ranks; 0 for the limit of the deployment.
    """

    plan: EnginePlan
    count: int = 1
    batch: int = 0

    @property
    def devices(self) -> int:
        """Devices of all of them."""
        return self.plan.devices * self.count


@dataclass(frozen=True)
class EngineOptions:
    """What may be told to an engine beside its plan; defaults are the framework's own.

    Attributes:
        memory: Share of the memory for weights, activations and cache; 0 for the framework's.
        block: Tokens of a block of the cache; 0 for the framework's.
        swap: Whether the cache of an evicted request moves to the host.
        watermark: Share of the cache that stays free when a request is admitted.
        eager: Whether passes are launched kernel by kernel, not replayed from captured graphs.
        prefix_cache: Whether what prompts begin with is kept for later ones.
        drafts: Tokens that are drafted for a step of speculative decoding; 0 without.
        draft: Model that drafts them; ``None`` for drafts at no cost, as of n-grams.
        draft_name: What drafts: ``ngram``, ``mtp``, or the name of a model.
        transfer: Bytes a second at which caches move between workers; 0 for the links' own.
        router: One of :data:`~opcast.simulate.serving.fleet.ROUTERS`.
    """

    memory: float = 0.0
    block: int = 0
    swap: bool = False
    watermark: float = 0.0
    eager: bool = False
    prefix_cache: bool = True
    drafts: int = 0
    draft: ServedModel | None = None
    draft_name: str = "ngram"
    transfer: float = 0.0
    router: str = "round-robin"


@dataclass(frozen=True)
class Deployment:
    """A model, engines that serve it, and how they are told to.

    Attributes:
        model: What is served.
        device: Name in the catalogue, or path of a device file.
        framework: Such as ``vllm``.
        engine: Workers that decode, and run prompts as well unless ``prefill`` does.
        prefill: Workers that run prompts alone.
        max_batch: Most sequences of an engine, of each of its ranks with sequences of their own;
            0 for the framework's limit.
        token_budget: Most tokens of a pass, likewise.
        chunked: Whether prompts may be cut; ``None`` for what the framework does.
        accepted: Tokens that a step of decoding yields; 1 without speculation.
        hit_rate: Share of each prompt that the cache has already.
        options: What else the engines are told.
        version: Of the framework; empty for its newest.
        source: Whose machines these are, as tables of measured serving name them; empty for one's
            own, if there are runs of it, else an average.
        cluster: Links of the engines; ``None`` for those of the device's usual machines.
        context: Tokens of a sequence that the checkpoint allows; 0 if unknown.
    """

    model: ServedModel
    device: str
    framework: str = "vllm"
    engine: Workers = field(default_factory=lambda: Workers(EnginePlan()))
    prefill: Workers | None = None
    max_batch: int = 0
    token_budget: int = 0
    chunked: bool | None = None
    accepted: float = 1.0
    hit_rate: float = 0.0
    options: EngineOptions = field(default_factory=EngineOptions)
    version: str = ""
    source: str = ""
    cluster: Cluster | None = None
    context: int = 0

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            PlanError: The model does not generate, the framework does not run on the device, or a
                figure is out of its range.
        """
        spec = self.spec
        if not runs_on(self.framework, spec.platform, spec.vendor):
            raise PlanError(
                f"{self.framework} runs on NVIDIA's GPUs alone, not on {spec.name}",
                where="framework",
                hint="vllm or sglang",
            )
        if not self.model.workload.causal:
            raise PlanError(
                "a model whose tokens see later ones generates nothing",
                where="workload",
                hint="take a causal one, such as llama",
            )
        if not 0.0 <= self.hit_rate < 1.0:
            raise PlanError(f"a hit rate of {self.hit_rate:g}", hint="from 0 to below 1")
        if self.hit_rate and not self.options.prefix_cache:
            raise PlanError(
                f"a hit rate of {self.hit_rate:g} without a prefix cache",
                where="hit_rate",
                hint="one of them",
            )
        drafts = self.options.drafts
        if drafts < 0 or not 1.0 <= self.accepted <= (drafts + 1 if drafts else inf):
            raise PlanError(
                f"{self.accepted:g} tokens a step of {drafts} drafts",
                hint="from 1 to one more than the drafts",
            )
        heads, layers = self.model.workload.heads, self.model.workload.layers
        for workers in filter(None, (self.engine, self.prefill)):
            plan = workers.plan
            if heads % plan.tp:
                fit = [str(n) for n in range(1, heads + 1) if heads % n == 0]
                raise PlanError(
                    f"tp={plan.tp} does not divide {heads} heads", hint="tp is " + ", ".join(fit)
                )
            if plan.pp > layers:
                raise PlanError(
                    f"pp={plan.pp} stages for {layers} layers", hint="pp is at most the layers"
                )

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return self.engine.devices + (self.prefill.devices if self.prefill else 0)

    @property
    def spec(self) -> DeviceSpec:
        """The description of the device."""
        return read_device(self.device)

    def text(self) -> str:
        """Such as ``2 x (tp=4)``, or ``1 x (tp=4) prefill + 2 x (tp=4) decode``."""
        own = f"{self.engine.count} x ({self.engine.plan.text()})"
        if self.prefill is None:
            return own
        return f"{self.prefill.count} x ({self.prefill.plan.text()}) prefill + {own} decode"

    @property
    def links(self) -> Cluster:
        """Devices and links of the largest worker."""
        largest = max(w.plan.devices for w in (self.engine, self.prefill) if w)
        # The device keeps the name that it was given: that of a file is read again from there.
        return self.cluster or replace(joined(self.spec, largest), device=self.device)


def on_cluster(
    cluster: str, plan: EnginePlan, replicas: int = 0, prefill: Workers | None = None
) -> tuple[str, Workers]:
    """The device of a cluster, and engines that fill it.

    Args:
        cluster: Name or file.
        plan: Of each engine.
        replicas: Engines; 0 for as many as fit.
        prefill: Workers of the cluster that run prompts alone.

    Raises:
        PlanError: They do not fit the cluster.
    """
    found = find_cluster(cluster)
    taken = prefill.devices if prefill else 0
    count = max(1, replicas or (found.size - taken) // plan.devices)
    needed = taken + count * plan.devices
    if needed > found.size:
        first = f" ({taken} of them run prompts)" if taken else ""
        raise PlanError(
            f"{count} x ({plan.text()}) need {needed} devices{first}, "
            f"{found.name} has {found.size}",
            hint="a smaller plan, or fewer replicas",
        )
    return device_of(found.device), Workers(plan, count)


def links_of(cluster: str) -> Cluster | None:
    """The links of a cluster's file; ``None`` for a cluster of the catalogue.

    Args:
        cluster: Name or file; empty for none.
    """
    return load_cluster(cluster) if cluster.lower().endswith((".yaml", ".yml")) else None


def device_of(given: str) -> str:
    """A device's canonical name; the path of a file stays, once the file was read.

    Raises:
        DeviceError: The catalogue has no such device, or the file is missing or wrong.
    """
    spec = read_device(given)
    return spec.name if in_catalogue(given) else given


def parse_engine_plan(text: str, model: ServedModel, replicas: int) -> tuple[EnginePlan, int]:
    """A plan from text such as ``tp=4,pp=2``, and engines; ``dp`` without experts is engines.

    Raises:
        PlanError: A name is unknown, or the numbers do not agree.
    """
    known = ("tp", "pp", "dp", "ep", "moe_tp")
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in known or not value.isdigit() or int(value) < 1:
            raise PlanError(
                f"{part!r} is no part of a serving plan",
                hint="as in tp=4,pp=2; " + ", ".join(known),
            )
        found[name] = int(value)
    tp, pp, dp = (found.get(name, 1) for name in ("tp", "pp", "dp"))
    if not model.workload.experts:
        if found.get("ep", 1) > 1 or found.get("moe_tp", tp) != tp:
            raise PlanError(f"{text} spreads experts, the model has none", hint="tp, pp and dp")
        if dp > 1 and replicas:
            raise PlanError(f"{text} and replicas both give engines", hint="one of them")
        return EnginePlan(tp=tp, pp=pp, moe_tp=tp), replicas or (dp if dp > 1 else 0)
    ranks = tp * dp
    ep = found.get("ep", ranks // found["moe_tp"] if "moe_tp" in found else ranks if dp > 1 else 1)
    return EnginePlan(tp, pp, dp, ep, found.get("moe_tp", max(1, ranks // ep))), replicas


def engines_of(
    model: ServedModel,
    *,
    cluster: str = "",
    device: str = "",
    plan: str = "",
    replicas: int = 0,
    prefill: str = "",
    prefill_replicas: int = 1,
) -> tuple[str, Workers, Workers | None]:
    """The device, engines that decode, and workers that run prompts alone, from texts.

    Args:
        model: What is served.
        cluster: Name or file, which engines fill; else ``device``.
        device: Name in the catalogue, or path of a device file.
        plan: Of an engine; on a cluster by default all devices by tensor parallelism.
        replicas: Engines; 0 for as many as the cluster holds.
        prefill: Plan of a worker that runs prompts alone; empty for none.
        prefill_replicas: How many of them.

    Raises:
        PlanError: A plan is none, or does not fit the cluster.
    """
    apart = None
    if prefill:
        first, times = parse_engine_plan(prefill, model, 0)
        apart = Workers(first, max(1, times) * prefill_replicas)
    if not cluster:
        one, engines = parse_engine_plan(plan, model, replicas)
        return device_of(device), Workers(one, engines or 1), apart
    if not plan and not replicas:
        left = find_cluster(cluster).size - (apart.devices if apart else 0)
        plan = f"tp={max(1, left)}"
    one, engines = parse_engine_plan(plan, model, replicas)
    return (*on_cluster(cluster, one, engines, apart), apart)


#: Looks a model up by its name.
Lookup = Callable[[str], ServedModel]


def draft_model(name: str, model: ServedModel, models: Lookup) -> ServedModel | None:
    """The model that drafts: none for n-grams, a layer of the model for its own predictions.

    Args:
        name: ``ngram``, ``mtp``, or a model's.
        model: What is served.
        models: Looks a model up by its name.

    Raises:
        PlanError: The model is known to have no module that drafts.
    """
    if name == "ngram":
        return None
    if name == "mtp":
        if model.mtp is False:
            raise PlanError(
                "the model has no module of multi-token prediction",
                where="draft",
                hint="ngram, or the name of a model that drafts",
            )
        # A module of multi-token prediction is one layer with the model's own head (DeepSeek-V3,
        # 2024, section 2.2).
        work = replace(model.workload, layers=1, dense_layers=0)
        return replace(model, workload=work, linear_layers=0, bare_layers=0)
    return replace(models(name), cache=model.cache)


@dataclass(frozen=True)
class ServingQuery:
    """A deployment as a command line or a request says it; empty texts and 0 are defaults.

    Attributes:
        framework: Engine, and after ``@`` its version; empty for one that is not listed.
        source: As of :class:`Deployment`.
        cluster: Name or file, which engines fill; else ``device``.
        device: Name in the catalogue, or path of a device file.
        plan: Of an engine, such as ``tp=4``.
        replicas: Engines.
        prefill: Plan of workers that run prompts alone.
        prefill_replicas: How many of them.
        prefill_batch: Most sequences of a rank of theirs; 0 for ``max_batch``.
        transfer: GB/s at which caches move between workers.
        router: One of :data:`~opcast.simulate.serving.fleet.ROUTERS`.
        max_batch: As of :class:`Deployment`, like the next two.
        token_budget: Most tokens of a pass.
        chunked: Whether prompts may be cut.
        memory: As of :class:`EngineOptions`, like the next two.
        block: Tokens of a block of the cache.
        watermark: Share of the cache that stays free at admission.
        preemption: ``recompute`` or ``swap``.
        prefix_hits: Share of each prompt that the cache has already.
        prefix_cache: Whether what prompts begin with is kept for later ones.
        drafts: Tokens that are drafted for a step.
        accepted: Tokens that a step yields.
        draft: What drafts, as of :func:`draft_model`.
        eager: Whether kernels are launched one by one.
    """

    framework: str = "vllm"
    source: str = ""
    cluster: str = ""
    device: str = ""
    plan: str = ""
    replicas: int = 0
    prefill: str = ""
    prefill_replicas: int = 1
    prefill_batch: int = 0
    transfer: float = 0.0
    router: str = "round-robin"
    max_batch: int = 0
    token_budget: int = 0
    chunked: bool | None = None
    memory: float = 0.0
    block: int = 0
    watermark: float = 0.0
    preemption: str = "recompute"
    prefix_hits: float = 0.0
    prefix_cache: bool = True
    drafts: int = 0
    accepted: float = 1.0
    draft: str = "ngram"
    eager: bool = False

    def deployment(self, model: ServedModel, models: Lookup) -> Deployment:
        """What it says.

        Args:
            model: What is served.
            models: Looks a model that drafts up by its name.

        Raises:
            PlanError: Figures do not agree, or a plan does not fit the cluster.
        """
        if bool(self.cluster) == bool(self.device):
            raise PlanError("give either cluster or device", where="deployment")
        if self.preemption not in ("recompute", "swap"):
            raise PlanError(f"preemption {self.preemption!r}", hint="recompute or swap")
        if not self.drafts and (self.draft != "ngram" or self.accepted > 1.0):
            raise PlanError("draft and accepted are of drafts", where="draft", hint="give drafts")
        if not self.prefill and (self.prefill_replicas > 1 or self.prefill_batch or self.transfer):
            raise PlanError(
                "prefill_replicas, prefill_batch and transfer are of workers that run prompts "
                "alone",
                hint="give prefill",
            )
        framework, version = known_framework(self.framework)
        device, engine, prefill = engines_of(
            model,
            cluster=self.cluster,
            device=self.device,
            plan=self.plan,
            replicas=self.replicas,
            prefill=self.prefill,
            prefill_replicas=self.prefill_replicas,
        )
        if prefill is not None:
            prefill = replace(prefill, batch=self.prefill_batch)
        return Deployment(
            model=model,
            device=device,
            framework=framework,
            version=version,
            source=self.source,
            engine=engine,
            prefill=prefill,
            max_batch=self.max_batch,
            token_budget=self.token_budget,
            chunked=self.chunked,
            accepted=self.accepted,
            hit_rate=self.prefix_hits,
            options=EngineOptions(
                memory=self.memory,
                block=self.block,
                swap=self.preemption == "swap",
                watermark=self.watermark,
                eager=self.eager,
                prefix_cache=self.prefix_cache,
                drafts=self.drafts,
                draft=draft_model(self.draft, model, models) if self.drafts else None,
                draft_name=self.draft,
                transfer=self.transfer * 1e9,
                router=self.router,
            ),
            cluster=links_of(self.cluster),
        )
