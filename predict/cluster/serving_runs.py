"""Simulates rows of a table of serving; latencies come with their shares by class of cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np

from ...common.errors import OpcastError, PlanError
from ...features.devices.catalogue import read_device
from ...features.devices.device import NETWORK_BANDWIDTH
from ...models.operators import OpModel
from ...models.serving.model import APART, group_key
from ...simulate.serving.fleet import Station, run_fleet
from ...simulate.serving.floor import Floors, floors
from ...simulate.serving.load import Load, Run
from ...simulate.serving.memory import (
    CacheLayout,
    cache_layout,
    memory_parts,
    share_of_cache,
    what_is_too_large,
)
from ...simulate.serving.policies import Policy, engine_era, framework_defaults
from ...simulate.serving.served import EnginePlan, ServedModel
from ..operator.serving_operators import ServingLatency
from .serving_costs import Decoding, ServingCosts
from .serving_load import read_trace
from .serving_table import ServingRow, Workers
from .step_table import FAULTS, reason_of

#: Requests of a closed loop for each in flight, as benchmark scripts send (InferenceX: 10), and
#: most that are simulated: more waves than three change means by a few per cent.
WAVES, LEAST_WAVES, MOST_REQUESTS = 10, 3, 3000
#: Tables of costs that are kept where rows are simulated once: each takes a megabyte, and rows of a
#: configuration come together.
MOST_TABLES = 64
#: Loads of benchmarks without a server.
ENGINE_ALONE = ("static-batch", "offline")


@dataclass(frozen=True)
class Latency:
    """A latency with the shares of the classes in it.

    Attributes:
        seconds: Estimate.
        shares: Of :data:`CLASSES` and of the request itself, adding up to 1, shape
            ``(classes + 1,)``.
    """

    seconds: float
    shares: np.ndarray


@dataclass(frozen=True)
class RowRun:
    """A simulated row.

    Attributes:
        ttft: Mean time to the first token.
        tpot: Mean time of each further token.
        per_token: Time over the tokens that all engines generate in it.
        queued: Share of the time to the first token that was spent waiting for other requests.
        cache_tokens: Tokens that the cache of an engine holds.
        largest_batch: Most sequences of an engine at a time.
    """

    ttft: Latency
    tpot: Latency
    per_token: Latency
    queued: float
    cache_tokens: int
    largest_batch: int

    def latency(self, metric: str) -> Latency:
        """One of ``ttft``, ``tpot`` and ``per_token``."""
        return {"ttft": self.ttft, "tpot": self.tpot, "per_token": self.per_token}[metric]


class ServingRuns:
    """Simulates rows.

    Args:
        rows: The rows.
        model: Model of library operators; ``None`` for rooflines.
        show: Told of progress: rows done and rows in all.
        tables: Tables of costs that are kept; one for each row where rows are simulated again and
            again, since filling the tables takes twenty times as long as a simulation.
    """

    def __init__(
        self,
        rows: Sequence[ServingRow],
        model: OpModel | None,
        show: Callable[[int, int], None] = lambda done, of: None,
        tables: int = MOST_TABLES,
    ) -> None:
        self.rows, self.model, self.show, self.tables = list(rows), model, show, tables
        self._latency: dict[tuple[str, str], ServingLatency] = {}
        self._costs: OrderedDict[tuple[object, ...], ServingCosts] = OrderedDict()

    def run(self, weights: Sequence[np.ndarray]) -> list[RowRun | str]:
        """Simulate all rows.

        Args:
            weights: Of each row: seconds of a unit of each class and of a request, shape
                ``(classes + 1,)``.

        Returns:
            A run for each row, or the reason why there is none.
        """
        found: dict[int, RowRun | str] = {}
        # Rows of one configuration after each other, since only so many tables are kept.
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, row in enumerate(self.rows):
            key = (row.cluster.device, row.framework, row.model, row.engine, row.prefill)
            groups.setdefault(key, []).append(index)
        for index in (index for group in groups.values() for index in group):
            try:
                found[index] = self.simulate(self.rows[index], weights[index])
            except (OpcastError, *FAULTS) as error:
                found[index] = reason_of(error)
            self.show(len(found), len(self.rows))
        return [found[index] for index in range(len(self.rows))]

    def simulate(self, row: ServingRow, weights: np.ndarray) -> RowRun:
        """Simulate one row.

        Raises:
            PlanError: It does not fit into memory.
        """
        if row.prefill is not None:
            return self._disaggregated(row, row.prefill, weights)
        share = row.engine.count
        load = row_load(row, share)
        longest = int((load.prompts + load.outputs).max())
        most = load.concurrency or len(load.prompts)
        station = self.station(row, row.engine, weights, most, longest)
        delay = row_delay(row, weights)
        station = replace(station, count=1)
        if row.load.kind.startswith("open"):
            run = _keeping_up(row, load, station, delay)
        else:
            run = run_fleet(load, station, delay=delay)
        return _result(row, load, run, delay, station.cache.tokens)

    def station(
        self, row: ServingRow, workers: Workers, weights: np.ndarray, most: int, longest: int
    ) -> Station:
        """Engines as the simulator takes them.

        Args:
            row: The row.
            workers: Which of its workers.
            weights: Of the classes and of a request.
            most: Most requests of an engine at a time.
            longest: Most tokens of a request.

        Raises:
            PlanError: The weights, or a request, do not fit.
        """
        cache = engine_cache(row, workers)
        if cache.share_of(longest) > 1.0:
            raise PlanError(
                f"the cache of an engine holds {cache.tokens} tokens, a request needs {longest}",
                hint="more devices, or a narrower format",
            )
        policy = row_policy(row, workers)
        policy = replace(policy, block=max(policy.block, cache.block))
        own = row.options
        width = own.drafts + 1 if own.drafts else ceil(row.accepted)
        batch = min(policy.max_batch, most)
        costs = self.costs(row, workers, policy, batch * width, longest)
        draft = None
        if own.draft is not None:
            small = replace(row, model=own.draft)
            beside = replace(workers, plan=workers.plan.of(own.draft))
            draft = self.costs(small, beside, policy, batch, longest)
        how = Decoding(width, row.accepted, own.eager, draft, own.drafts)
        costs = costs.under(how)
        return Station(costs, weights[:-1], cache, policy, workers.count, row.accepted)

    def costs(
        self, row: ServingRow, workers: Workers, policy: Policy, batch: int, longest: int
    ) -> ServingCosts:
        """Costs of a row's passes; rows that differ in their load alone share them."""
        tokens = policy.token_budget if policy.chunked else max(policy.token_budget, longest)
        # Powers of two, so that loads of one configuration share tables.
        sizes = tuple(2 ** ceil(np.log2(max(n, 2))) for n in (tokens, batch, longest))
        early = row_era(row) == "early"
        key = (row.model, workers.plan, row.cluster, row.framework, early, *sizes)
        if key not in self._costs:
            device = row.cluster.device
            latency = self._latency.get((device, row.framework))
            if latency is None:
                latency = ServingLatency(read_device(device), self.model, row.framework)
                self._latency[device, row.framework] = latency
            self._costs[key] = ServingCosts(
                row.model, workers.plan, row.cluster, latency, *sizes, early=early
            )
            if len(self._costs) > self.tables:
                self._costs.popitem(last=False)
        self._costs.move_to_end(key)
        return self._costs[key]

    def _disaggregated(self, row: ServingRow, prefill: Workers, weights: np.ndarray) -> RowRun:
        """Prompts on workers of their own, whose caches move to those that decode."""
        load = row_load(row, 1)
        longest = int((load.prompts + load.outputs).max())
        most = load.concurrency or len(load.prompts)
        ahead = self.station(row, prefill, weights, most, longest)
        behind = self.station(row, row.engine, weights, most, longest)
        if not row.engine.counted:
            behind = replace(behind, count=_holding(load, behind))
        delay = row_delay(row, weights)
        run = run_fleet(load, behind, ahead, delay=delay, transfer=cache_transfer(row))
        whole = replace(row, engine=replace(row.engine, count=1))
        return _result(whole, load, run, delay, behind.cache.tokens)


#: Times of a request before the engine of which an answer by workers of two kinds takes so many: it
#: passes a router, both servers and the set-up of the transfer. Engineering estimate, which effects
#: of the cluster correct.
HANDOVER = 20.0
#: Share of the time of the arrivals that a run may last beyond them before its engines count as
#: overloaded, and times that they are sped up.
_BEHIND, _SPEED_UPS = 0.05, 6


def _keeping_up(row: ServingRow, load: Load, station: Station, delay: float) -> Run:
    """Serve requests at a rate by engines that keep up with it.

    Nobody reports latencies of a queue that grows without end. So where the engines are too slow
    for the rate, it is their estimated speed that is wrong, and they are as fast as need be. A
    burst is something else: all of its requests have arrived before the first is answered.
    """
    run = run_fleet(load, station, delay=delay)
    span = float(load.arrivals.max())
    own = row.load
    if 0 < own.count <= own.rate * float((run.finished - run.sent).min()):
        return run
    for _ in range(_SPEED_UPS):
        # The last requests take as long as any.
        alone = float((run.finished - run.sent).min())
        late = (run.makespan - alone) / (span * (1.0 + _BEHIND))
        if late <= 1.0:
            break
        station = replace(station, weights=station.weights / max(late, 1.0 + _BEHIND))
        run = run_fleet(load, station, delay=delay)
    return run


#: Fixed seconds of moving a cache between workers, and the share of the links that it gets;
#: engineering estimates.
_TRANSFER_S, _TRANSFER_SHARE = 1e-3, 0.8


def row_delay(row: ServingRow, weights: np.ndarray) -> float:
    """Seconds between sending a request and an engine's queue.

    Args:
        row: What is asked for.
        weights: Of the classes and of a request.
    """
    if row.load.kind in ENGINE_ALONE:
        # Benchmarks of an engine alone hand it their requests without a server between.
        return 0.0
    return float(weights[-1]) * (HANDOVER if row.prefill is not None else 1.0)


def row_floors(
    row: ServingRow, prompts: np.ndarray, outputs: np.ndarray, found: np.ndarray
) -> Floors:
    """Least times of requests on the devices of a row, at the rates of their data sheets.

    Args:
        row: What is asked for.
        prompts: Tokens of each prompt, shape ``(n,)``.
        outputs: Tokens that each request makes.
        found: Tokens of each prompt that a cache has already.
    """
    return floors(
        row.model,
        read_device(row.cluster.device),
        row.engine.plan,
        (row.prefill or row.engine).plan,
        prompts,
        outputs,
        found,
        row.accepted,
    )


def cache_transfer(row: ServingRow) -> Callable[[int], float]:
    """Seconds that the cache of a prompt takes from workers that run prompts to the others.

    Ranks send their shares at the same time, over the links of a box where all workers stand in
    one, else over its network (RDMA).
    """
    if row.prefill is None:
        return lambda tokens: 0.0
    spec = read_device(row.cluster.device)
    inside = 0 < row.devices <= spec.devices_per_node
    if inside:
        link = spec.link_bandwidth or spec.host_link
    else:
        link = spec.inter_node_bandwidth or NETWORK_BANDWIDTH
    ranks = min(row.prefill.plan.tp, row.engine.plan.tp)
    speed = row.options.transfer or link * ranks * _TRANSFER_SHARE
    one, state = row.model.token_bytes(EnginePlan()), row.model.state_bytes(EnginePlan())
    return lambda tokens: _TRANSFER_S + (state + tokens * one) / speed


def _holding(load: Load, station: Station) -> int:
    """Fewest workers whose caches hold the requests in flight at their full lengths."""
    each = station.cache.share_of(float((load.prompts + load.outputs).mean()))
    return ceil((load.concurrency or len(load.prompts)) * each)


def engine_memory(row: ServingRow, workers: Workers) -> dict[str, float]:
    """Bytes of one device of an engine by use; ``cache`` is what they leave, if anything.

    The order is that in which memory is taken; parts of the cache with rooms of their own are
    listed apart.
    """
    parts = _memory(row, workers)
    return parts | (_layout(row, workers, parts).parts if parts["cache"] > 0.0 else {})


def engine_cache(row: ServingRow, workers: Workers) -> CacheLayout:
    """What the cache of an engine holds.

    Raises:
        PlanError: The weights alone do not fit.
    """
    parts = _memory(row, workers)
    if parts["cache"] <= 0.0:
        capacity = read_device(row.cluster.device).memory_bytes
        raise PlanError(
            what_is_too_large(capacity, parts), hint="more devices, or a narrower format"
        )
    return _layout(row, workers, parts)


def memory_share(row: ServingRow, workers: Workers, tokens: float) -> float:
    """The framework's share of the memory that leaves a cache of so many tokens.

    Args:
        row: The row.
        workers: Which of its workers.
        tokens: That an engine logs when it starts.

    Raises:
        PlanError: The weights alone do not fit.
    """
    parts, known = _memory(row, workers), engine_cache(row, workers)
    cache = parts["cache"] * tokens / known.tokens
    capacity = read_device(row.cluster.device).memory_bytes
    rules = framework_defaults(row.framework)
    return share_of_cache(capacity, parts, cache, rules.memory_of)


def _layout(row: ServingRow, workers: Workers, parts: dict[str, float]) -> CacheLayout:
    rules = framework_defaults(row.framework)
    drafts = row.options.drafts or ceil(row.accepted) - 1
    reuse = row.options.prefix_cache
    return cache_layout(row.model, workers.plan, rules, parts["cache"], drafts=drafts, reuse=reuse)


def _memory(row: ServingRow, workers: Workers) -> dict[str, float]:
    capacity = read_device(row.cluster.device).memory_bytes
    if not capacity:
        raise PlanError(
            "the memory of the device is not known, so neither is its cache",
            where=row.cluster.device,
            hint="add memory_bytes to the device's file",
        )
    own, rules = row.options, framework_defaults(row.framework)
    share = own.memory or rules.memory
    return memory_parts(
        capacity,
        row.model,
        workers.plan,
        share,
        of=rules.memory_of,
        told=own.memory > 0.0,
        draft=own.draft,
    )


def row_policy(row: ServingRow, workers: Workers) -> Policy:
    """Rules by which some of a row's workers batch."""
    policy, own = framework_defaults(row.framework).policy, row.options
    budget = (row.token_budget or policy.token_budget) * workers.plan.dp
    chunked = policy.chunked if row.chunked is None else row.chunked
    return replace(
        policy,
        max_batch=workers.batch or (row.max_batch or policy.max_batch) * workers.plan.dp,
        token_budget=budget,
        chunked=chunked or row.load.prompt > budget,
        swap=own.swap,
        watermark=own.watermark,
        block=own.block or policy.block,
    )


def row_load(row: ServingRow, share: int) -> Load:
    """Requests that reach one of ``share`` engines."""
    own = row.load
    if own.trace:
        trace = read_trace(Path(own.trace))
        return Load(trace.prompts[::share], trace.outputs[::share], trace.arrivals[::share])
    concurrency = max(1, round(own.concurrency / share)) if own.concurrency else 0
    if own.kind == "static-batch":
        count = concurrency
    elif own.kind == "closed":
        waves = min(WAVES, max(LEAST_WAVES, MOST_REQUESTS // concurrency))
        count = concurrency * waves
        if own.count:
            count = min(count, max(concurrency, own.count // share))
    else:
        count = min(MOST_REQUESTS, max(1, (own.count or MOST_REQUESTS) // share))
    rng = np.random.default_rng(0)
    prompts, outputs = (_lengths(rng, mean, own.spread, count) for mean in (own.prompt, own.output))
    arrivals = np.zeros(count)
    if own.rate and own.kind.startswith("open"):
        arrivals = np.cumsum(rng.exponential(share / own.rate, count))
    limit = concurrency if own.kind == "closed" else 0
    return Load(prompts, outputs, arrivals, limit)


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    high = 2.0 * mean / (1.0 + spread)
    if spread >= 1.0:
        return np.full(count, max(1, round(mean)))
    return np.maximum(1, np.rint(rng.uniform(high * spread, high, count))).astype(int)


def _result(row: ServingRow, load: Load, run: Run, delay: float, room: int) -> RowRun:
    waited = run.first - run.sent
    ttft = float(waited.mean())
    long = load.outputs > 1
    between = (run.finished - run.first)[long] / (load.outputs[long] - 1)
    tpot = float(between.mean()) if long.any() else 0.0
    waits = np.append(run.waits, delay)
    tokens = np.append(run.tokens, 0.0)
    output = float(load.outputs.mean())
    engines = row.engine.count
    if load.concurrency:
        # As benchmarks without a throughput of their own are read: requests in flight over the
        # time of one.
        total = ttft + tpot * (output - 1.0)
        per_token = total / output / (load.concurrency * engines)
        parts = waits + tokens
    else:
        per_token = run.makespan / float(load.outputs.sum()) / engines
        parts = np.append(run.busy, 0.0)
    # The request that waited least was alone, or nearly so.
    alone = float(waited.min())
    return RowRun(
        Latency(ttft, _shares(waits)),
        Latency(tpot, _shares(tokens)),
        Latency(per_token, _shares(parts)),
        max(0.0, 1.0 - alone / ttft),
        room,
        run.largest_batch,
    )


def _shares(parts: np.ndarray) -> np.ndarray:
    total = parts.sum()
    return parts / total if total > 0.0 else np.full(len(parts), 1.0 / len(parts))


def row_context(row: ServingRow) -> dict[str, str]:
    """Levels of a row that effects are learned on."""
    levels = _levels(row)
    return {**levels, "known": group_key(levels)}


def row_era(row: ServingRow) -> str:
    """``early`` for an engine before it was rewritten, else ``now``."""
    return engine_era(row.framework, row.version, row.load.kind)


def _levels(row: ServingRow) -> dict[str, str]:
    spec = read_device(row.cluster.device)
    model = row.model
    era = row_era(row)
    engine = f"{row.framework} {era}"
    return {
        "any": "any",
        "all": spec.platform,
        "vendor": spec.vendor,
        "architecture": spec.architecture.removesuffix("-ultra"),
        "framework": row.framework,
        "engine": engine,
        "era": era,
        "format": model.weights,
        "expert_format": model.expert_weights if model.workload.experts else "",
        # Kernels of experts differ by engine and format.
        "engine_experts": f"{engine} {model.expert_weights}" if model.workload.experts else "",
        "latent": "latent" if model.workload.kv_lora else "",
        "shape": _shape(model),
        "spread": _spread(row),
        "handover": _handover(row),
        "speculative": row.speculative if row.speculative in ("ambiguous", "yes") else "",
        "source": row.source,
        "cluster": f"{row.source}|{spec.name}" if row.source else "",
        "group": row.group,
    }


def _shape(model: ServedModel) -> str:
    """Kind of model that decides how many kernels a layer has."""
    experts = "experts" if model.workload.experts else "dense"
    return f"{experts}, latent attention" if model.workload.kv_lora else experts


def _spread(row: ServingRow) -> str:
    """How sequences are spread over devices, where ranks hold some of their own."""
    if row.prefill is not None:
        return APART
    return "attention data parallel" if row.engine.plan.dp > 1 else ""


def _handover(row: ServingRow) -> str:
    """Whose servers hand requests over between workers of two kinds; empty where none do."""
    own = f"{row.framework}|{row.source}|{row.cluster.device}"
    return own if row.prefill is not None and row.source else ""
