"""Simulator inputs for the engines of a deployment: costs, memory, policies and effect levels."""

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
from ...simulate.serving.latencies import Floors, floors
from ...simulate.serving.load import Load, Station
from ...simulate.serving.memory import CacheLayout, MemoryParts, cache_layout, memory_parts
from ...simulate.serving.policies import (
    Policy,
    host_kind,
)
from ...simulate.serving.served import EnginePlan, ServedModel
from ...simulate.serving.token_exchange import busiest
from ..operator.serving_operators import ServingLatency
from .deployment import Deployment, Workers
from .serving_case import EngineOptions
from .serving_costs import Decoding, ServingCosts

#: Cost tables kept by default; a table takes about 1 MB.
MOST_TABLES = 64
#: Factor on the request overhead with separate prefill workers, where a request passes a router,
#: both servers and the transfer set-up. Published runs of 3 to 16 requests in flight on GB200 leave
#: 90 ms (TensorRT-LLM) to 200 ms (vLLM, SGLang) besides the prefill pass; the random effect of the
#: cluster corrects it.
HANDOVER = 5.0
#: Latency (s) of a KV cache transfer between workers, and the fraction of the link bandwidth that
#: it reaches; engineering estimates.
_TRANSFER_S, _TRANSFER_SHARE = 1e-3, 0.8


class Engines:
    """Builds engines; engines that differ only in their load share cost tables.

    Args:
        operators: Latency model of library operators; ``None`` for rooflines.
        tables: Number of cost tables to keep; filling one takes 20 times as long as a simulation.
    """

    def __init__(self, operators: OpModel | None, tables: int = MOST_TABLES) -> None:
        self.operators, self.tables = operators, tables
        self._latency: dict[tuple[str, str], ServingLatency] = {}
        self._costs: OrderedDict[tuple[object, ...], ServingCosts] = OrderedDict()

    def stations(self, deployment: Deployment, load: Load, weights: np.ndarray) -> list[Station]:
        """Return the engines that decode, followed by the prefill workers, if any.

        Args:
            deployment: The deployment.
            load: The requests.
            weights: Seconds per unit of each cost class and per request, shape ``(classes + 1,)``.

        Raises:
            PlanError: The weights of the model, or a request, do not fit.
        """
        return [
            self._station(deployment, w, load, weights)
            for w in (deployment.engine, deployment.prefill)
            if w
        ]

    def _station(
        self, deployment: Deployment, workers: Workers, load: Load, weights: np.ndarray
    ) -> Station:
        cache = engine_cache(deployment, workers)
        longest = int((load.prompts + load.outputs).max())
        if cache.share_of(longest) > 1.0:
            raise PlanError(
                f"the KV cache of an engine holds {cache.tokens} tokens, a request needs {longest}",
                hint="more devices, or a narrower format",
            )
        policy = engine_policy(deployment, workers, float(load.prompts.mean()))
        policy = replace(policy, block=max(policy.block, cache.block))
        width = deployment.options.drafts + 1
        batch = min(policy.max_batch, load.largest_batch)
        costs = self._table(
            deployment, deployment.model, workers.plan, policy, batch * width, longest
        )
        small, draft = deployment.draft, None
        if small is not None:
            draft = self._table(deployment, small, workers.plan.of(small), policy, batch, longest)
        how = Decoding(
            width,
            deployment.options.accepted,
            deployment.options.eager,
            draft,
            deployment.options.drafts,
            policy.ahead,
        )
        costs = costs.under(how, weights[:-1])
        return Station(
            costs, weights[:-1], cache, policy, workers.count, deployment.options.accepted
        )

    def _table(
        self,
        deployment: Deployment,
        model: ServedModel,
        plan: EnginePlan,
        policy: Policy,
        batch: int,
        longest: int,
    ) -> ServingCosts:
        tokens = policy.token_budget if policy.chunked else max(policy.token_budget, longest)
        # Powers of two, so that similar loads of a deployment share tables.
        sizes = tuple(2 ** ceil(np.log2(max(n, 2))) for n in (tokens, batch, longest))
        early = deployment.era == "early"
        skew, overlap = deployment.options.expert_skew, deployment.options.overlap is not False
        key = (model, plan, deployment.links, deployment.framework, early, skew, overlap, *sizes)
        if key not in self._costs:
            at = (deployment.device, deployment.framework)
            if at not in self._latency:
                self._latency[at] = ServingLatency(
                    deployment.spec, self.operators, deployment.framework
                )
            self._costs[key] = ServingCosts(
                model,
                plan,
                deployment.links,
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


def request_delay(deployment: Deployment, *, served: bool, weights: np.ndarray) -> float:
    """Return the seconds from sending a request until it enters an engine's queue.

    Args:
        deployment: The deployment.
        served: Whether requests pass an HTTP server; offline benchmarks call the engine directly.
        weights: Seconds per unit of each cost class and per request.
    """
    return (
        float(weights[-1]) * (HANDOVER if deployment.prefill is not None else 1.0)
        if served
        else 0.0
    )


def request_floors(deployment: Deployment, load: Load, found: np.ndarray) -> Floors:
    """Return lower limits of request times, at the peak rates of the devices' data sheets.

    Args:
        deployment: The deployment.
        load: The requests.
        found: Tokens of each prompt that are in a prefix cache already.
    """
    plan, first = deployment.engine.plan, (deployment.prefill or deployment.engine).plan
    spec = read_device(deployment.device)
    return floors(
        deployment.model,
        spec,
        plan,
        first,
        load.prompts,
        load.outputs,
        found,
        deployment.options.accepted,
    )


def cache_transfer(deployment: Deployment) -> Callable[[int], float]:
    """Return a function from prompt tokens to seconds of moving their KV cache to a decode engine.

    Ranks send their shares at the same time: over the links inside a node if all workers fit into
    one node, else over the network (RDMA).
    """
    if deployment.prefill is None:
        return lambda tokens: 0.0
    spec = deployment.spec
    if deployment.devices <= spec.devices_per_node:
        link = spec.link_bandwidth or spec.host_link
    else:
        link = spec.inter_node_bandwidth or NETWORK_BANDWIDTH
    ranks = min(deployment.prefill.plan.tp, deployment.engine.plan.tp)
    speed = deployment.options.transfer or link * ranks * _TRANSFER_SHARE
    one, state = (
        deployment.model.token_bytes(EnginePlan()),
        deployment.model.state_bytes(EnginePlan()),
    )
    return lambda tokens: _TRANSFER_S + (state + tokens * one) / speed


def engine_memory(deployment: Deployment, workers: Workers) -> MemoryParts:
    """Return how the memory of one device of an engine is used.

    Raises:
        PlanError: The memory size of the device is unknown.
    """
    capacity = deployment.spec.usable_bytes
    if not capacity:
        raise PlanError(
            "the memory size of the device is unknown, and so is the size of its KV cache",
            where=deployment.device,
            hint="add memory_bytes to the device's file",
        )
    told, rules = deployment.options.memory, deployment.rules
    return memory_parts(
        capacity,
        deployment.model,
        workers.plan,
        told or rules.memory,
        of=rules.memory_of,
        chosen=told > 0.0,
        draft=deployment.draft,
    )


def engine_cache(deployment: Deployment, workers: Workers) -> CacheLayout:
    """Return the layout and capacity of an engine's KV cache.

    Raises:
        PlanError: The weights alone do not fit.
    """
    memory = engine_memory(deployment, workers)
    if memory.cache <= 0.0:
        raise PlanError(memory.too_large(), hint="more devices, or a narrower format")
    return cache_layout(
        deployment.model,
        workers.plan,
        deployment.rules,
        memory.cache,
        drafts=deployment.options.drafts,
        reuse=deployment.options.prefix_cache,
    )


def memory_share(deployment: Deployment, workers: Workers, tokens: float) -> float:
    """Return the framework's memory fraction that results in a KV cache of a given size.

    Args:
        deployment: The deployment.
        workers: The prefill or decode workers of the deployment.
        tokens: Capacity of the KV cache in tokens, as an engine logs it when it starts.

    Raises:
        PlanError: The weights alone do not fit.
    """
    memory, known = engine_memory(deployment, workers), engine_cache(deployment, workers)
    cache = memory.cache * tokens / known.tokens
    return memory.share_of(cache, deployment.rules.memory_of)


def engine_policy(deployment: Deployment, workers: Workers, prompt: float) -> Policy:
    """Return the batching policy of the prefill or decode workers of a deployment.

    Args:
        deployment: The deployment.
        workers: The prefill or decode workers.
        prompt: Mean tokens of a prompt; prompts above the token budget of a pass are chunked.
    """
    policy, options = deployment.rules.policy, deployment.options
    budget = (options.token_budget or policy.token_budget) * workers.plan.dp
    chunked = policy.chunked if options.chunked is None else options.chunked
    return replace(
        policy,
        max_batch=deployment.rank_batch(workers) * workers.plan.dp,
        token_budget=budget,
        chunked=chunked or prompt > budget // workers.plan.dp,
        swap=options.preemption == "swap",
        watermark=options.watermark,
        block=options.block or policy.block,
        ahead=deployment.runs_ahead,
        ranks=workers.plan.dp,
        gather=policy.gather if workers.plan.dp > 1 else options.batch_wait_iters,
        fill=options.batch_wait_ratio,
        poll=options.recv_interval,
    )


def wide_notes(deployment: Deployment) -> tuple[str, ...]:
    """Return notes on the assumptions for engines with wide expert parallelism."""
    notes, experts = [], deployment.model.workload.experts
    for plan in dict.fromkeys(w.plan for w in (deployment.prefill, deployment.engine) if w):
        if not plan.wide:
            continue
        # So many tokens that sampling noise does not matter.
        busy, plain = (
            busiest(1e9, experts, plan.ep, redundant, deployment.options.expert_skew)
            for redundant in (plan.redundant, 0)
        )
        said = f"the busiest of {plan.ep} expert ranks gets {busy:.3g} times the mean load"
        if plan.redundant != 0 and deployment.options.expert_skew:
            said += (
                f", with {plan.copies(experts)} redundant experts placed by a load balancer; "
                f"without one (redundant=0 in the plan) {plain:.3g} times"
            )
        notes.append(said)
    if notes and deployment.options.overlap is not False:
        notes.append(
            "engines split a batch in two and overlap the token exchange of one half with the "
            "kernels of the other where that is faster (--no-overlap if they do not)"
        )
    return tuple(notes)


def engine_notes(options: EngineOptions, memory: MemoryParts) -> tuple[str, ...]:
    """Return notes on drafts without a given acceptance, and on the memory fraction."""
    notes = []
    if options.drafts and options.accepted == 1.0:
        notes.append(
            f"none of the {options.drafts} draft tokens per step is accepted (accepted 1), so they "
            "only add cost: give the mean number of tokens generated per step (accepted)"
        )
    if memory.fallback:
        notes.append(
            "the framework's default memory fraction leaves no KV cache, so nearly all memory is "
            "used; set it in the launch command (memory)"
        )
    return tuple(notes)


def levels(deployment: Deployment, model: ServingModel) -> dict[str, str]:
    """Return the levels of a deployment in the random effects of the serving model.

    Args:
        deployment: The deployment.
        model: Serving model, which assigns served models to groups by their sizes.
    """
    spec, served = deployment.spec, deployment.model
    device = measured_as(spec)
    era = deployment.era
    engine = f"{deployment.framework} {era}" if deployment.framework else ""
    experts = served.expert_weights if served.workload.experts else ""
    source = deployment.source
    stack = f"{source}|{engine}" if source and engine else ""
    found = {
        "any": "any",
        "all": spec.platform,
        "device": device,
        "vendor": spec.vendor,
        "architecture": spec.line,
        "framework": deployment.framework,
        "engine": engine,
        # Whether the host prepares passes ahead of the device.
        "era": "ahead" if deployment.runs_ahead else era,
        "host": host_kind(deployment.framework, era, spec.platform, eager=deployment.options.eager),
        "format": served.weights,
        "expert_format": experts,
        # Expert kernels differ by engine and format.
        "engine_experts": f"{engine} {experts}" if experts else "",
        "latent": "latent" if served.workload.kv_lora else "",
        "shape": _shape(served),
        "spread": _spread(deployment),
        # Set for deployments that hand requests over from prefill to decode workers.
        "handover": f"{deployment.framework}|{source}|{deployment.device}"
        if deployment.prefill and source
        else "",
        "speculative": "yes" if deployment.options.accepted > 1.0 else "",
        "source": source,
        # Launch options that the source uses for an engine.
        "stack": stack,
        "stack_experts": f"{stack} {experts}" if stack and experts else "",
        "cluster": f"{source}|{device}" if source else "",
        "group": model.group_of(served.shape()),
    }
    return {**found, "known": group_key(found)}


def _shape(model: ServedModel) -> str:
    """Return the kind of model, which determines the number of kernels of a layer."""
    experts = "experts" if model.workload.experts else "dense"
    return f"{experts}, latent attention" if model.workload.kv_lora else experts


def _spread(deployment: Deployment) -> str:
    """Return how sequences are spread over devices; empty if all ranks share them."""
    if deployment.prefill is not None:
        return APART
    return "attention data parallel" if deployment.engine.plan.dp > 1 else ""
