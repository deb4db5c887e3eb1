"""Simulates rows of a table of serving; latencies come with their shares by class of cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np

from ...common.errors import OpcastError, PlanError
from ...features.devices.catalogue import find_device
from ...models.operators import OpModel
from ...models.serving.model import group_key
from ...simulate.serving.classes import CLASSES
from ...simulate.serving.engine import Load, Policy, Run, run_engine
from ...simulate.serving.loop import Chunk
from ...simulate.serving.policies import framework_defaults
from ...simulate.serving.pools import Pool, two_pools
from ...simulate.serving.served import ServedModel
from ...simulate.step.memory import RESERVED_BYTES
from ..operator.serving_operators import ServingLatency
from .serving import read_requests
from .serving_costs import ServingCosts
from .serving_table import ServingRow, Workers
from .step_table import FAULTS, reason_of

#: Requests of a closed loop for each in flight, as benchmark scripts send (InferenceX: 10), and
#: most that are simulated: more waves than three change means by a few per cent.
WAVES, LEAST_WAVES, MOST_REQUESTS = 10, 3, 3000
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
    """

    def __init__(
        self,
        rows: Sequence[ServingRow],
        model: OpModel | None,
        show: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.rows, self.model, self.show = list(rows), model, show
        self._latency: dict[tuple[str, str], ServingLatency] = {}
        self._costs: dict[tuple[object, ...], ServingCosts] = {}

    def run(self, weights: Sequence[np.ndarray]) -> list[RowRun | str]:
        """Simulate all rows.

        Args:
            weights: Of each row: seconds of a unit of each class and of a request, shape
                ``(classes + 1,)``.

        Returns:
            A run for each row, or the reason why there is none.
        """
        found: list[RowRun | str] = []
        for row, own in zip(self.rows, weights, strict=True):
            try:
                found.append(self.simulate(row, own))
            except (OpcastError, *FAULTS) as error:
                found.append(reason_of(error))
            self.show(len(found), len(self.rows))
        return found

    def simulate(self, row: ServingRow, weights: np.ndarray) -> RowRun:
        """Simulate one row.

        Raises:
            PlanError: It does not fit into memory.
        """
        if row.prefill is not None:
            return self._disaggregated(row, row.prefill, weights)
        share = row.engine.count
        load = row_load(row, share)
        policy = row_policy(row)
        room = self.cache_tokens(row, row.engine)
        longest = int((load.prompts + load.outputs).max())
        if room < longest:
            raise PlanError(
                f"the cache of an engine holds {room} tokens, a request needs {longest}",
                hint="more devices, or a narrower format",
            )
        most = min(policy.max_batch, load.concurrency or len(load.prompts))
        width = ceil(row.accepted)
        costs = self.costs(row, row.engine, policy, most * width, longest).verifying(width)
        # A pass yields as many tokens as are accepted, so that there are so many fewer.
        passes = replace(load, outputs=np.ceil(load.outputs / row.accepted).astype(int))
        # Benchmarks of an engine alone hand it their requests without a server between.
        delay = 0.0 if row.load.kind in ENGINE_ALONE else float(weights[-1])
        run = run_engine(passes, costs, weights[:-1], room, policy, delay)
        return _result(row, load, run, delay, room)

    def cache_tokens(self, row: ServingRow, workers: Workers) -> int:
        """Tokens that the cache of an engine holds.

        Raises:
            PlanError: The weights alone do not fit.
        """
        spec = find_device(row.cluster.device)
        plan = workers.plan
        held = row.model.weight_bytes(plan)
        share = framework_defaults(row.framework).memory
        left = spec.memory_bytes * share - RESERVED_BYTES - held
        if left <= 0.0:
            # Engines that are told to may use all of the memory.
            left = spec.memory_bytes * 0.98 - held - RESERVED_BYTES / 2
        if left <= 0.0:
            raise PlanError(
                f"weights of {held / 2**30:.1f} GiB on a device do not fit into "
                f"{spec.memory_bytes / 2**30:.1f} GiB",
                hint="more devices, or a narrower format",
            )
        return int(left / row.model.token_bytes(plan)) * plan.dp

    def costs(
        self, row: ServingRow, workers: Workers, policy: Policy, batch: int, longest: int
    ) -> ServingCosts:
        """Costs of a row's passes; rows that differ in their load alone share them."""
        tokens = policy.token_budget if policy.chunked else max(policy.token_budget, longest)
        # Powers of two, so that loads of one configuration share tables.
        sizes = tuple(2 ** ceil(np.log2(max(n, 2))) for n in (tokens, batch, longest))
        key = (row.model, workers.plan, row.cluster, row.framework, *sizes)
        if key not in self._costs:
            device = row.cluster.device
            latency = self._latency.get((device, row.framework))
            if latency is None:
                latency = ServingLatency(find_device(device), self.model, row.framework)
                self._latency[device, row.framework] = latency
            self._costs[key] = ServingCosts(row.model, workers.plan, row.cluster, latency, *sizes)
        return self._costs[key]

    def _disaggregated(self, row: ServingRow, prefill: Workers, weights: np.ndarray) -> RowRun:
        """Prompts on workers of their own: two stations of a closed network."""
        load, policy = row.load, row_policy(row)
        prompt, output = round(load.prompt), max(2, round(load.output))
        longest = prompt + output
        room = self.cache_tokens(row, row.engine)
        batch = min(row.engine.batch or policy.max_batch, max(1, room // longest))
        concurrency = load.concurrency or load.count or WAVES
        most = max(1, min(batch, ceil(concurrency / row.engine.count)))
        ahead = self.costs(row, prefill, policy, 1, longest)
        width = ceil(row.accepted)
        behind = self.costs(row, row.engine, policy, most * width, longest).verifying(width)
        whole = np.zeros(len(CLASSES))
        for start in range(0, prompt, policy.token_budget):
            tokens = min(policy.token_budget, prompt - start)
            # Ranks with sequences of their own take a prompt each at the same time.
            whole += ahead.mixed([Chunk(tokens, start)] * prefill.plan.dp, 0, 0.0)
        whole /= prefill.plan.dp
        mean = prompt + output / 2.0

        def decode(sequences: float) -> np.ndarray:
            n = max(1, round(sequences))
            return behind.decode(n, n * mean, 1) / row.accepted

        found = two_pools(
            Pool(whole, prefill.count * prefill.plan.dp, prefill.plan.dp),
            decode,
            weights[:-1],
            row.engine.count,
            batch,
            output,
            concurrency,
            WAVES,
            float(weights[-1]),
        )
        extra = float(weights[-1]) / found.ttft
        shares = np.append(found.ttft_shares * (1.0 - extra), extra)
        tpot = np.append(found.tpot_shares, 0.0)
        total = found.ttft + found.tpot * (output - 1)
        part = found.ttft / total
        return RowRun(
            Latency(found.ttft, shares),
            Latency(found.tpot, tpot),
            Latency(total / output / concurrency, part * shares + (1.0 - part) * tpot),
            found.queued,
            room,
            most,
        )


def row_policy(row: ServingRow) -> Policy:
    """Rules by which the engine of a row batches."""
    policy = framework_defaults(row.framework).policy
    budget = (row.token_budget or policy.token_budget) * row.engine.plan.dp
    chunked = policy.chunked if row.chunked is None else row.chunked
    return replace(
        policy,
        max_batch=(row.max_batch or policy.max_batch) * row.engine.plan.dp,
        token_budget=budget,
        chunked=chunked or row.load.prompt > budget,
    )


def row_load(row: ServingRow, share: int) -> Load:
    """Requests that reach one of ``share`` engines."""
    own = row.load
    if own.trace:
        requests = read_requests(Path(own.trace))[::share]
        return Load(
            np.array([r.prompt for r in requests]),
            np.array([r.output for r in requests]),
            np.array([r.arrival for r in requests]),
        )
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
    ttft = float((run.first - run.sent).mean())
    more = np.maximum(load.outputs - 1, 1)
    long = load.outputs > 1
    between = (run.finished - run.first)[long] / more[long]
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
    alone = float((run.first - run.sent).min())
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


def _levels(row: ServingRow) -> dict[str, str]:
    spec = find_device(row.cluster.device)
    model = row.model
    return {
        "all": spec.platform,
        "architecture": spec.architecture.removesuffix("-ultra"),
        "framework": row.framework,
        "engine": f"{row.framework} {_era(row)}",
        "format": model.weights,
        "expert_format": model.expert_weights if model.workload.experts else "",
        "engine_format": f"{row.framework} {_era(row)} {model.weights}",
        "engine_experts": _experts(row),
        "latent": "latent" if model.workload.kv_lora else "",
        "shape": _shape(model),
        "spread": _spread(row),
        "speculative": row.speculative if row.speculative in ("ambiguous", "yes") else "",
        "source": row.source,
        "cluster": f"{row.source}|{spec.name}" if row.source else "",
        "group": row.group,
    }


def _shape(model: ServedModel) -> str:
    """Kind of model that decides how many kernels a layer has."""
    experts = "experts" if model.workload.experts else "dense"
    return f"{experts}, latent attention" if model.workload.kv_lora else experts


def _experts(row: ServingRow) -> str:
    """Engine and format of experts, whose kernels differ by both; empty without experts."""
    engine = f"{row.framework} {_era(row)} {row.model.expert_weights}"
    return engine if row.model.workload.experts else ""


def _spread(row: ServingRow) -> str:
    """How sequences are spread over devices, where ranks hold some of their own."""
    if row.prefill is not None:
        return "disaggregated"
    return "attention data parallel" if row.engine.plan.dp > 1 else ""


#: First versions whose engines were rewritten: vLLM's V1, TensorRT-LLM's PyTorch backend.
_REWRITTEN = {"vllm": (0, 8), "tensorrt-llm": (0, 17)}


def _era(row: ServingRow) -> str:
    """``early`` for engines before they were rewritten; whole batches without a version are."""
    if row.load.kind not in ("static-batch", "offline"):
        return "now"
    numbers = re.findall(r"\d+", row.version)[:2]
    if len(numbers) < 2:
        return "early" if row.load.kind == "static-batch" else "now"
    return "early" if tuple(map(int, numbers)) < _REWRITTEN.get(row.framework, (0, 0)) else "now"
