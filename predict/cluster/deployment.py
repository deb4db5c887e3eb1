"""Deployment: a model, the engines that serve it, and their options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from ...common.errors import DeviceError, PlanError
from ...common.files import is_yaml
from ...features.devices.catalogue import in_catalogue, read_device
from ...features.devices.device import DeviceSpec
from ...simulate.clusters.catalogue import find_cluster, joined
from ...simulate.clusters.files import load_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.checkpoints import find_checkpoint, served_by_name
from ...simulate.serving.policies import (
    Framework,
    engine_era,
    framework_defaults,
    frameworks,
    known_framework,
    runs_ahead,
    runs_on,
)
from ...simulate.serving.served import NARROW, EnginePlan, Formats, ServedModel
from ...simulate.serving.token_exchange import EXPERT_SKEW
from ...simulate.step.settings import pairs_of
from ..locate import trained_devices
from .serving_case import EngineOptions, FleetCase, ModelCase, ServingCase


@dataclass(frozen=True)
class Workers:
    """Identical workers.

    Attributes:
        plan: Parallel plan of each worker.
        count: Number of workers: replicas of an engine, or prefill or decode workers.
        batch: Batch limit of each rank; 0 for the limit of the deployment.
    """

    plan: EnginePlan
    count: int = 1
    batch: int = 0

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return self.plan.devices * self.count


@dataclass(frozen=True)
class Deployment:
    """A model, the engines that serve it, and their options.

    Attributes:
        model: The served model.
        device: Name in the catalogue, or path of a device file.
        framework: Serving framework, such as ``vllm``.
        engine: Workers that decode, and also prefill unless there are prefill workers.
        prefill: Separate prefill workers, if any.
        options: Options of the engines.
        draft: Draft model of speculative decoding; ``None`` for drafts at no cost (n-grams).
        version: Version of the framework; empty for the newest.
        source: Owner of the machines, as named in serving tables. Empty for the user's own
            machines if runs of them were calibrated to, else for an average owner.
        cluster: Links between the devices; ``None`` for those of the device's usual machines.
        context: Context length that the checkpoint allows, in tokens; 0 if unknown.
    """

    model: ServedModel
    device: str
    framework: str = "vllm"
    engine: Workers = field(default_factory=lambda: Workers(EnginePlan()))
    prefill: Workers | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    draft: ServedModel | None = None
    version: str = ""
    source: str = ""
    cluster: Cluster | None = None
    context: int = 0

    def __post_init__(self) -> None:
        """Check that model, plan and options fit together.

        Raises:
            PlanError: The model does not generate, the framework does not run on the device, or an
                option is out of range.
        """
        spec = self.spec
        if not runs_on(self.framework, spec.platform, spec.vendor):
            raise PlanError(
                f"{self.framework} runs only on NVIDIA GPUs, not on {spec.name}",
                where="framework",
                hint=" or ".join(n for n in frameworks() if runs_on(n, spec.platform, spec.vendor)),
            )
        if not self.model.workload.causal:
            raise PlanError(
                "a model with bidirectional attention generates nothing",
                where="workload",
                hint="serve a causal model, for embeddings with an output of 1; for an encoder, "
                "use opcast predict with its program",
            )
        options = self.options
        hits, drafts = options.prefix_hits, options.drafts
        if not 0.0 <= hits < 1.0:
            raise PlanError(f"a hit rate of {hits:g}", hint="from 0 to below 1")
        if hits and not options.prefix_cache:
            raise PlanError(
                f"a hit rate of {hits:g} without a prefix cache",
                where="prefix_hits",
                hint="one of them",
            )
        if drafts < 0 or not 1.0 <= options.accepted <= (drafts + 1 if drafts else inf):
            raise PlanError(
                f"{options.accepted:g} tokens a step of {drafts} drafts",
                hint="from 1 to one more than the drafts",
            )
        self._check_waits()
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
    def rules(self) -> Framework:
        """Defaults and rules of the framework."""
        return framework_defaults(self.framework)

    @property
    def era(self) -> str:
        """``early`` for releases before the engine was rewritten, else ``now``."""
        return engine_era(self.framework, self.version)

    @property
    def runs_ahead(self) -> bool:
        """Whether the host prepares a pass while the previous one runs."""
        told = self.options.async_scheduling
        return runs_ahead(self.framework, self.version) if told is None else told

    def rank_batch(self, workers: Workers) -> int:
        """Return the maximum number of sequences in flight of an attention data-parallel rank.

        Args:
            workers: The prefill or decode workers.
        """
        known = self.rules
        limit = known.policy.max_batch
        if self.options.drafts and known.drafting and workers is not self.prefill:
            limit = max(1, known.drafting // workers.plan.dp)
        return workers.batch or self.options.max_batch or limit

    def _check_waits(self) -> None:
        """Check options by which prompts wait to be batched, against the framework and the plan."""
        options, known = self.options, frameworks()
        told = {
            "recv_interval": options.recv_interval > 1,
            "batch_wait_iters": options.batch_wait_iters > 0,
            "batch_wait_ratio": options.batch_wait_ratio > 0.0,
        }
        for name in filter(told.get, told):
            if self.framework in known and not known[self.framework].has(name):
                others = [other for other, rules in known.items() if rules.has(name)]
                raise PlanError(
                    f"{self.framework} has no such option",
                    where=name,
                    hint=f"only {' and '.join(others)} has it",
                )
        if told["batch_wait_iters"] != told["batch_wait_ratio"]:
            raise PlanError(
                "a maximum wait and the fraction of a pass that ends it only work together",
                where="batch_wait_iters",
                hint="give both batch_wait_iters and batch_wait_ratio",
            )
        if told["batch_wait_iters"] and self.engine.plan.dp > 1:
            raise PlanError(
                "with dp, prompts wait until every rank has one",
                where="batch_wait_iters",
                hint="leave it out, or a plan without dp",
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
        """Return text such as ``2 x (tp=4)``, or ``1 x (tp=4) prefill + 2 x (tp=4) decode``."""
        own = f"{self.engine.count} x ({self.engine.plan.text()})"
        if self.prefill is None:
            return own
        return f"{self.prefill.count} x ({self.prefill.plan.text()}) prefill + {own} decode"

    @property
    def links(self) -> Cluster:
        """Devices and links of the largest worker."""
        largest = max(w.plan.devices for w in (self.engine, self.prefill) if w)
        # Keep the name or path that the device was given by, so that its file can be read again.
        return self.cluster or replace(joined(self.spec, largest), device=self.device)


def on_cluster(
    cluster: str, plan: EnginePlan, replicas: int = 0, prefill: Workers | None = None
) -> tuple[str, Workers]:
    """Return the device of a cluster, and the engines that fill it.

    Args:
        cluster: Name or file.
        plan: Plan of each engine.
        replicas: Number of engines; 0 for as many as fit.
        prefill: Prefill workers on the same cluster.

    Raises:
        PlanError: The engines do not fit the cluster.
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


def device_of(given: str) -> str:
    """Return a device's canonical name, or the path of a valid device file unchanged.

    Raises:
        PlanError: The device is a CPU.
        DeviceError: The catalogue has no such device, or the file is missing or wrong.
    """
    try:
        spec = read_device(given)
    except DeviceError:
        # Devices of models that are not in the catalogue are CPUs.
        if given not in (trained := trained_devices()):
            raise
        spec = trained[given]
    if spec.platform == "cpu":
        raise PlanError(f"serving is simulated for GPUs and TPUs, not for {spec.name}")
    return spec.name if in_catalogue(given) else given


def parse_engine_plan(text: str, model: ServedModel, replicas: int) -> tuple[EnginePlan, int]:
    """Parse a plan such as ``tp=4,pp=2``; without experts, ``dp`` is the number of engines.

    Returns:
        The plan, and the number of engines (0 if not given).

    Raises:
        PlanError: A name is unknown, or the numbers do not agree.
    """
    known = ("tp", "pp", "dp", "ep", "moe_tp", "redundant")
    found: dict[str, int] = {}
    hint = "as in tp=4,pp=2; " + ", ".join(known)
    for name, value in pairs_of(text, "plan", hint).items():
        least = 0 if name == "redundant" else 1
        if name not in known or not value.isdigit() or int(value) < least:
            raise PlanError(f"'{name}={value}' is not an option of a serving plan", hint=hint)
        found[name] = int(value)
    tp, pp, dp = (found.get(name, 1) for name in ("tp", "pp", "dp"))
    if not model.workload.experts:
        if found.get("ep", 1) > 1 or found.get("moe_tp", tp) != tp or "redundant" in found:
            raise PlanError(f"{text} is for models with experts", hint="use tp, pp and dp")
        if dp > 1 and replicas:
            raise PlanError(f"{text} and replicas both set the number of engines", hint="give one")
        return EnginePlan(tp=tp, pp=pp, moe_tp=tp), replicas or (dp if dp > 1 else 0)
    ranks = tp * dp
    ep = found.get("ep", ranks // found["moe_tp"] if "moe_tp" in found else ranks if dp > 1 else 1)
    moe_tp = found.get("moe_tp", max(1, ranks // ep))
    plan = EnginePlan(tp, pp, dp, ep, moe_tp, found.get("redundant"))
    # Every rank holds as many experts, so that more copies than asked for may fill them.
    held = plan.copies(model.workload.experts) if plan.redundant else plan.redundant
    return replace(plan, redundant=held), replicas


def engines_of(model: ServedModel, fleet: FleetCase) -> tuple[str, Workers, Workers | None]:
    """Return the device, the engines that decode, and the prefill workers, if any.

    Without a plan, an engine on a cluster uses tensor parallelism over all devices.

    Raises:
        PlanError: A plan is malformed, or does not fit the cluster.
    """
    apart = None
    if fleet.prefill:
        first, times = parse_engine_plan(fleet.prefill, model, 0)
        count = max(1, times) * fleet.prefill_replicas
        apart = Workers(first, count, fleet.prefill_batch)
    plan = fleet.plan
    if not fleet.cluster:
        one, engines = parse_engine_plan(plan, model, fleet.replicas)
        return device_of(fleet.device), Workers(one, engines or 1), apart
    if not plan and not fleet.replicas:
        left = find_cluster(fleet.cluster).size - (apart.devices if apart else 0)
        plan = f"tp={max(1, left)}"
    one, engines = parse_engine_plan(plan, model, fleet.replicas)
    return (*on_cluster(fleet.cluster, one, engines, apart), apart)


def draft_model(name: str, model: ServedModel, files: bool) -> ServedModel | None:
    """Return the draft model; ``None`` for n-grams, one layer of the model itself for ``mtp``.

    Args:
        name: ``ngram``, ``mtp``, or the name of a model.
        model: The served model.
        files: Whether the name may be a file.

    Raises:
        PlanError: The model is known to have no module for multi-token prediction.
    """
    if name == "ngram":
        return None
    if name == "mtp":
        if model.mtp is False:
            raise PlanError(
                "the model has no module for multi-token prediction",
                where="draft",
                hint="use ngram, or the name of a draft model",
            )
        # The module is one layer with the model's output head (DeepSeek-V3, 2024, section 2.2).
        work = replace(model.workload, layers=1, dense_layers=0)
        return replace(model, workload=work, linear_layers=0, bare_layers=0)
    return replace(served_by_name(name, {}, Formats(), files=files), cache=model.cache)


def model_of(case: ModelCase, name: str, *, files: bool = False) -> ServedModel:
    """Return the model of a case in its number formats.

    Args:
        case: The model case.
        name: Name of the model, or with ``files`` its file.
        files: Whether the name may be a file.

    Raises:
        PlanError: The name, a size, a format or the framework is unknown.
    """
    engine, _ = known_framework(case.framework)
    formats = Formats(
        case.weights, case.kv_cache, case.experts, case.activations, case.linear_layers, engine
    )
    return served_by_name(name, case.settings, formats, files=files)


def deployment_of(case: ServingCase, *, files: bool = False) -> Deployment:
    """Return the deployment that a case describes.

    Args:
        case: The serving case.
        files: Whether models may be files.

    Raises:
        PlanError: A name is unknown, options do not agree, or a plan does not fit the cluster.
    """
    options, fleet = case.options, case.fleet
    if bool(fleet.cluster) == bool(fleet.device):
        raise PlanError("give either cluster or device", where="deployment")
    if options.preemption not in ("recompute", "swap"):
        raise PlanError(f"preemption {options.preemption!r}", hint="recompute or swap")
    if not options.drafts and (options.draft != "ngram" or options.accepted > 1.0):
        raise PlanError("draft and accepted need drafts", where="draft", hint="give drafts")
    if not fleet.prefill and (
        fleet.prefill_replicas > 1 or fleet.prefill_batch or options.transfer
    ):
        raise PlanError(
            "prefill_replicas, prefill_batch and transfer need prefill workers",
            hint="give prefill",
        )
    name = case.model.workload or str(case.model.hf)
    model = model_of(case.model, name, files=files)
    framework, version = known_framework(case.model.framework)
    device, engine, prefill = engines_of(model, fleet)
    told = options.overlap is not None or options.expert_skew != EXPERT_SKEW
    if told and not any(w.plan.wide for w in (engine, prefill) if w):
        raise PlanError(
            f"overlap and expert_skew apply only with dp and experts on more than {NARROW} ranks",
            where="overlap",
            hint="use a plan such as dp=16, or omit both",
        )
    by_file = is_yaml(fleet.cluster)
    found = Deployment(
        model=model,
        device=device,
        framework=framework,
        engine=engine,
        prefill=prefill,
        options=options,
        draft=draft_model(options.draft, model, files) if options.drafts else None,
        version=version,
        source=case.model.source,
        cluster=load_cluster(fleet.cluster) if by_file else None,
        context=find_checkpoint(name).context,
    )
    check_blocks(found)
    return found


def check_blocks(own: Deployment) -> None:
    """Refuse a plan whose ranks split weights within a quantization block.

    Raises:
        PlanError: The framework does not load such weights.
    """
    if not own.rules.whole_blocks:
        return
    for workers in filter(None, (own.engine, own.prefill)):
        if cut := own.model.cut_blocks(workers.plan):
            whole = ", or whole experts on a rank (ep)" if own.model.workload.experts else ""
            raise PlanError(
                f"{own.framework or 'the engine'} refuses {workers.plan.text()}: {cut}",
                hint=f"a smaller tp{whole}",
            )
