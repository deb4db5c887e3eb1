"""Engines of a deployment as the simulator takes them: costs, memory, rules, learned levels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from ...common.errors import PlanError
from ...features.devices.catalogue import measured_as, read_device
from ...features.devices.device import NETWORK_BANDWIDTH
from ...models.operators import OpModel
from ...models.serving.effects import APART
from ...models.serving.model import ServingModel, group_key
from ...simulate.serving.floor import Floors, floors
from ...simulate.serving.load import Load, Station
from ...simulate.serving.memory import CacheLayout, MemoryParts, cache_layout, memory_parts
from ...simulate.serving.policies import (
    Policy,
    engine_era,
    framework_defaults,
    host_kind,
    runs_ahead,
)
from ...simulate.serving.served import EnginePlan, ServedModel
from ...simulate.serving.token_exchange import busiest
from ..operator.serving_operators import ServingLatency
from .deployment import Deployment, Workers
from .serving_case import EngineOptions
from .serving_costs import Decoding, ServingCosts

#: Tables of costs that are kept where each load is simulated once: one takes a megabyte.
MOST_TABLES = 64
#: Times of a request before the engine of which an answer by workers of two kinds takes so many: it
#: passes a router, both servers and the set-up of the transfer. Published runs of 3 to 16 requests
#: in flight on GB200 leave 90 (TensorRT-LLM) to 200 ms (vLLM, SGLang) beside the prompt's pass;
#: effects of the cluster correct it.
HANDOVER = 5.0
#: Fixed seconds of moving a cache between workers, and the share of the links that it gets;
#: engineering estimates.
_TRANSFER_S, _TRANSFER_SHARE = 1e-3, 0.8


class Engines:
    """Makes engines; those that differ in their load alone share tables of costs.

    Args:
        operators: Model of library operators; ``None`` for rooflines.
        tables: Tables of costs that are kept; filling one takes twenty times as long as simulating.
    """

    def __init__(self, operators: OpModel | None, tables: int = MOST_TABLES) -> None:
        self.operators, self.tables = operators, tables
        self._latency: dict[tuple[str, str], ServingLatency] = {}
        self._costs: OrderedDict[tuple[object, ...], ServingCosts] = OrderedDict()

    def stations(self, own: Deployment, load: Load, weights: np.ndarray) -> list[Station]:
        """Engines that decode and, where prompts have workers of their own, those.

        Args:
            own: What serves.
            load: The requests.
            weights: Seconds of a unit of each class and of a request, shape ``(classes + 1,)``.

        Raises:
            PlanError: The weights of the model, or a request, do not fit.
        """
        return [self._station(own, w, load, weights) for w in (own.engine, own.prefill) if w]

    def _station(
        self, own: Deployment, workers: Workers, load: Load, weights: np.ndarray
    ) -> Station:
        cache = engine_cache(own, workers)
        longest = int((load.prompts + load.outputs).max())
        if cache.share_of(longest) > 1.0:
            raise PlanError(
                f"the cache of an engine holds {cache.tokens} tokens, a request needs {longest}",
                hint="more devices, or a narrower format",
            )
        policy = engine_policy(own, workers, float(load.prompts.mean()))
        policy = replace(policy, block=max(policy.block, cache.block))
        width = own.options.drafts + 1
        batch = min(policy.max_batch, load.largest_batch)
        costs = self._table(own, own.model, workers.plan, policy, batch * width, longest)
        small, draft = own.draft, None
        if small is not None:
            draft = self._table(own, small, workers.plan.of(small), policy, batch, longest)
        how = Decoding(
            width,
            own.options.accepted,
            own.options.eager,
            draft,
            own.options.drafts,
            policy.ahead,
        )
        costs = costs.under(how, weights[:-1])
        return Station(costs, weights[:-1], cache, policy, workers.count, own.options.accepted)

    def _table(
        self,
        own: Deployment,
        model: ServedModel,
        plan: EnginePlan,
        policy: Policy,
        batch: int,
        longest: int,
    ) -> ServingCosts:
        tokens = policy.token_budget if policy.chunked else max(policy.token_budget, longest)
        # Powers of two, so that loads of one configuration share tables.
        sizes = tuple(2 ** ceil(np.log2(max(n, 2))) for n in (tokens, batch, longest))
        early = engine_era(own.framework, own.version) == "early"
        skew, overlap = own.options.expert_skew, own.options.overlap is not False
        key = (model, plan, own.links, own.framework, early, skew, overlap, *sizes)
        if key not in self._costs:
            at = (own.device, own.framework)
            if at not in self._latency:
                self._latency[at] = ServingLatency(own.spec, self.operators, own.framework)
            self._costs[key] = ServingCosts(
                model,
                plan,
                own.links,
                self._latency[at],
                *sizes,
                early=early,
                skew=skew,
                overlap=overlap,
            )
            if len(self._costs) > self.tables:
                self._costs.popitem(last=False)
        self._costs.move_to_end(key)
        return self._costs[key]


def request_delay(own: Deployment, *, served: bool, weights: np.ndarray) -> float:
    """Seconds between sending a request and an engine's queue.

    Args:
        own: What serves.
        served: Whether requests pass a server; benchmarks of an engine alone hand it its requests.
        weights: Of the classes and of a request.
    """
    return float(weights[-1]) * (HANDOVER if own.prefill is not None else 1.0) if served else 0.0


def request_floors(own: Deployment, load: Load, found: np.ndarray) -> Floors:
    """Least times of requests on the devices, at the rates of their data sheets.

    Args:
        own: What serves.
        load: The requests.
        found: Tokens of each prompt that a cache has already.
    """
    plan, first = own.engine.plan, (own.prefill or own.engine).plan
    spec = read_device(own.device)
    return floors(
        own.model, spec, plan, first, load.prompts, load.outputs, found, own.options.accepted
    )


def cache_transfer(own: Deployment) -> Callable[[int], float]:
    """Seconds that the cache of a prompt takes from workers that run prompts to the others.

    Ranks send their shares at the same time, over the links of a box where all workers stand in
    one, else over its network (RDMA).
    """
    if own.prefill is None:
        return lambda tokens: 0.0
    spec = own.spec
    if own.devices <= spec.devices_per_node:
        link = spec.link_bandwidth or spec.host_link
    else:
        link = spec.inter_node_bandwidth or NETWORK_BANDWIDTH
    ranks = min(own.prefill.plan.tp, own.engine.plan.tp)
    speed = own.options.transfer or link * ranks * _TRANSFER_SHARE
    one, state = own.model.token_bytes(EnginePlan()), own.model.state_bytes(EnginePlan())
    return lambda tokens: _TRANSFER_S + (state + tokens * one) / speed


def engine_memory(own: Deployment, workers: Workers) -> MemoryParts:
    """How the memory of one device of an engine is taken.

    Raises:
        PlanError: The memory of the device is not known.
    """
    capacity = own.spec.usable_bytes
    if not capacity:
        raise PlanError(
            "the memory of the device is not known, so neither is its cache",
            where=own.device,
            hint="add memory_bytes to the device's file",
        )
    told, rules = own.options.memory, framework_defaults(own.framework)
    return memory_parts(
        capacity,
        own.model,
        workers.plan,
        told or rules.memory,
        of=rules.memory_of,
        chosen=told > 0.0,
        draft=own.draft,
    )


def engine_cache(own: Deployment, workers: Workers) -> CacheLayout:
    """What the cache of an engine holds.

    Raises:
        PlanError: The weights alone do not fit.
    """
    memory = engine_memory(own, workers)
    if memory.cache <= 0.0:
        raise PlanError(memory.too_large(), hint="more devices, or a narrower format")
    return cache_layout(
        own.model,
        workers.plan,
        framework_defaults(own.framework),
        memory.cache,
        drafts=own.options.drafts,
        reuse=own.options.prefix_cache,
    )


def memory_share(own: Deployment, workers: Workers, tokens: float) -> float:
    """The framework's share of the memory that leaves a cache of so many tokens.

    Args:
        own: What serves.
        workers: Which of its workers.
        tokens: That an engine logs when it starts.

    Raises:
        PlanError: The weights alone do not fit.
    """
    memory, known = engine_memory(own, workers), engine_cache(own, workers)
    cache = memory.cache * tokens / known.tokens
    return memory.share_of(cache, framework_defaults(own.framework).memory_of)


def engine_policy(own: Deployment, workers: Workers, prompt: float) -> Policy:
    """Rules by which some of a deployment's workers batch.

    Args:
        own: What serves.
        workers: Which of its workers.
        prompt: Mean tokens of a prompt, which is cut where it is more than a pass takes.
    """
    policy, options = framework_defaults(own.framework).policy, own.options
    budget = (own.options.token_budget or policy.token_budget) * workers.plan.dp
    chunked = policy.chunked if own.options.chunked is None else own.options.chunked
    return replace(
        policy,
        max_batch=(workers.batch or own.options.max_batch or policy.max_batch) * workers.plan.dp,
        token_budget=budget,
        chunked=chunked or prompt > budget,
        swap=options.preemption == "swap",
        watermark=options.watermark,
        block=options.block or policy.block,
        ahead=runs_ahead(own.framework, own.version),
    )


def wide_notes(own: Deployment) -> tuple[str, ...]:
    """What is assumed of engines whose ranks send tokens to the ranks of their experts."""
    notes, experts = [], own.model.workload.experts
    for plan in dict.fromkeys(w.plan for w in (own.prefill, own.engine) if w):
        if not plan.wide:
            continue
        # Of so many rows that chance does not matter.
        busy, plain = (
            busiest(1e9, experts, plan.ep, redundant, own.options.expert_skew)
            for redundant in (plan.redundant, 0)
        )
        said = f"of {plan.ep} ranks of experts the busiest gets {busy:.3g} times the mean"
        if plan.redundant != 0 and own.options.expert_skew:
            said += (
                f", with {plan.copies(experts)} copies of experts that a balancer places; without "
                f"one (redundant=0 in the plan) {plain:.3g} times"
            )
        notes.append(said)
    if notes and own.options.overlap is not False:
        notes.append(
            "engines run a batch in two halves, exchanges of tokens beside the other's kernels, "
            "where that is faster (--no-overlap if they do not)"
        )
    return tuple(notes)


def engine_notes(options: EngineOptions, memory: MemoryParts) -> tuple[str, ...]:
    """What is assumed of drafts of which nobody says how many are accepted, and of the memory."""
    notes = []
    if options.drafts and options.accepted == 1.0:
        notes.append(
            f"of {options.drafts} drafts of a step none is accepted (accepted 1), so that they "
            "only cost: give the tokens that a step yields on average (accepted)"
        )
    if memory.fallback:
        notes.append(
            "the framework's own share of the memory leaves no cache: nearly all is taken, which "
            "its launch command has to say (memory)"
        )
    return tuple(notes)


def levels(own: Deployment, model: ServingModel) -> dict[str, str]:
    """Levels of a deployment that effects are learned on.

    Args:
        own: What serves.
        model: Tells model groups by their sizes.
    """
    spec, served = own.spec, own.model
    device = measured_as(spec)
    era = engine_era(own.framework, own.version)
    engine = f"{own.framework} {era}" if own.framework else ""
    experts = served.expert_weights if served.workload.experts else ""
    source = own.source
    stack = f"{source}|{engine}" if source and engine else ""
    found = {
        "any": "any",
        "all": spec.platform,
        "device": device,
        "vendor": spec.vendor,
        "architecture": spec.architecture.removesuffix("-ultra"),
        "framework": own.framework,
        "engine": engine,
        # Whose hosts prepare passes ahead of the device, and whose sequences it waits for.
        "era": "ahead" if runs_ahead(own.framework, own.version) else era,
        "host": host_kind(own.framework, era, spec.platform, eager=own.options.eager),
        "format": served.weights,
        "expert_format": experts,
        # Kernels of experts differ by engine and format.
        "engine_experts": f"{engine} {experts}" if experts else "",
        "latent": "latent" if served.workload.kv_lora else "",
        "shape": _shape(served),
        "spread": _spread(own),
        # Whose servers hand requests over between workers of two kinds.
        "handover": f"{own.framework}|{source}|{own.device}" if own.prefill and source else "",
        "speculative": "yes" if own.options.accepted > 1.0 else "",
        "source": source,
        # How a source starts an engine.
        "stack": stack,
        "stack_experts": f"{stack} {experts}" if stack and experts else "",
        "cluster": f"{source}|{device}" if source else "",
        "group": model.group_of(served.shape()),
    }
    return {**found, "known": group_key(found)}


def _shape(model: ServedModel) -> str:
    """Kind of model that decides how many kernels a layer has."""
    experts = "experts" if model.workload.experts else "dense"
    return f"{experts}, latent attention" if model.workload.kv_lora else experts


def _spread(own: Deployment) -> str:
    """How sequences are spread over devices, where ranks hold some of their own."""
    if own.prefill is not None:
        return APART
    return "attention data parallel" if own.engine.plan.dp > 1 else ""
