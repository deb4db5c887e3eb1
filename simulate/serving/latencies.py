"""User-visible latencies of a simulated run, their lower bounds, and queues of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from .forward import decode_ops, head_ops, prefill_ops, token_ops
from .load import History, Load, Run
from .served import EnginePlan, ServedModel, kinds_of

#: Percentiles that are reported in addition to the mean.
LEVELS = (50, 90, 99)
#: Latency metrics of a request.
METRICS = ("ttft", "tpot", "itl", "e2e")


class Floors(NamedTuple):
    """Lower bounds in seconds for each request, shape ``(n,)``.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time per output token after the first.
        e2e: Time to the last token.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


#: No bounds.
NO_FLOOR = Floors(np.zeros(1), np.zeros(1), np.zeros(1))


class EngineFloor:
    """Lower bounds for one model on one kind of engine: the roofline at the data sheet's rates.

    Only indispensable work counts, so that the bound holds whatever the kernels: the weights that
    one sequence activates and its KV cache are read once, and its prompt is multiplied at the dense
    peak of its operands (Williams et al., Roofline, 2009). Collectives, launches and passes over
    activations cost nothing. Caches of layers that see only part of the context (through a window,
    in chunks or by an indexer) are left out, and so are the weights that the device's last-level
    cache may hold.

    Args:
        model: Served model.
        plan: Parallelism of the engine.
        spec: Specification of its devices.
    """

    def __init__(self, model: ServedModel, plan: EnginePlan, spec: DeviceSpec) -> None:
        self.model, self.plan, self.spec = model, plan, spec
        self.partial = any(layer.window for layer in kinds_of(model.workload))
        ops = token_ops(model, plan, 1)
        # A token passes all pipeline stages, each of which may hold weights in its cache.
        weights = sum(self._weights(op) * count for op, count in [*ops, *head_ops(model, plan, 1)])
        kept = spec.cache_bytes * plan.pp
        #: Seconds to read the weights that one token activates.
        self.reading = max(0.0, weights - kept) / spec.bandwidth
        # Pipeline stages run chunks of one prompt concurrently.
        self._token = sum(self._multiplying(op) * count for op, count in ops) / plan.pp

    def first_token(self, prompts: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Least seconds to run prompts, shape ``(n,)``.

        Args:
            prompts: Prompt lengths in tokens.
            found: Prefix-cache hits in tokens.
        """
        new = prompts - found
        seconds = new * self._token
        if not self.partial:
            # Causal attention: each token attends to itself and all earlier ones.
            pairs = new * (found + (new + 1.0) / 2.0)
            # FLOPs of one query-key pair, from one token that attends to itself.
            one = sum(op.flops() * n for op, n in prefill_ops(self.model, self.plan, 1, 1, 0))
            peak = FORMATS[self.model.cache].peak_on(self.spec)
            seconds = seconds + pairs * one / peak / self.plan.pp
        return np.asarray(np.maximum(seconds, self.reading))

    def further_token(
        self, prompts: np.ndarray, outputs: np.ndarray, accepted: float
    ) -> np.ndarray:
        """Least seconds per output token after the first, shape ``(n,)``.

        Args:
            prompts: Prompt lengths in tokens.
            outputs: Output lengths in tokens.
            accepted: Tokens that a pass yields.
        """
        cached = 0.0
        if not self.partial:
            # Cost of one more token in the cache, which grows by one per pass.
            one, two = (
                sum(op.moved() * n for op, n in decode_ops(self.model, self.plan, 1, length))
                for length in (1, 2)
            )
            cached = (two - one) / self.spec.bandwidth
        return (self.reading + cached * (prompts + outputs / 2.0)) / accepted

    def _weights(self, op: Op) -> float:
        """Bytes of the weights that one token activates."""
        s, one = op.shape, FORMATS[op.dtype].weight_bytes
        if op.family == "linear":
            return one * s[1] * s[2]
        if op.family == "bmm":
            # Up-projections of latent attention: in 16 bits, or in the format of attention.
            own = min(one, FORMATS[self.model.attention_format].weight_bytes)
            return own * s[0] * s[2] * s[3]
        if op.family == "moe":
            _, hidden, inter, topk, _, tp, ep = s
            # Of all ranks, the one with most of the chosen experts holds at least one.
            return one * 3.0 * max(1.0, topk / ep) * hidden * inter / tp
        return 0.0

    def _multiplying(self, op: Op) -> float:
        """Seconds of the products of one token."""
        own = self.model.attention_format if op.family == "bmm" else op.dtype
        # The operator list holds one token of every rank for the experts.
        alone = self.plan.dp if op.family == "moe" else 1
        return op._replace(dtype=own).least_s(self.spec) / alone


def floors(
    model: ServedModel,
    spec: DeviceSpec,
    plan: EnginePlan,
    prefill: EnginePlan,
    prompts: np.ndarray,
    outputs: np.ndarray,
    found: np.ndarray,
    accepted: float = 1.0,
) -> Floors:
    """Lower bounds on the latencies of requests.

    Args:
        model: Served model.
        spec: Specification of the engines' devices.
        plan: Parallelism of the decoding engines.
        prefill: Parallelism of the prefill engines; equal to ``plan`` if there are none.
        prompts: Prompt lengths in tokens, shape ``(n,)``.
        outputs: Output lengths in tokens, shape ``(n,)``.
        found: Prefix-cache hits in tokens, shape ``(n,)``.
        accepted: Tokens that a decoding pass yields.
    """
    decoding = EngineFloor(model, plan, spec)
    ahead = decoding if prefill == plan else EngineFloor(model, prefill, spec)
    first = ahead.first_token(prompts, found)
    further = decoding.further_token(prompts, outputs, accepted)
    return Floors(first, further, first + further * np.maximum(outputs - 1.0, 0.0))


class Slo(NamedTuple):
    """Latency limits of a request in seconds; infinite for no limit.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time per output token after the first.
        e2e: Time to the last token.
    """

    ttft: float = inf
    tpot: float = inf
    e2e: float = inf


#: No limits.
FREE = Slo()


@dataclass(frozen=True)
class Served:
    """Latencies of the requests of one simulated run in seconds, arrays of shape ``(n,)``.

    Attributes:
        ttft: Time to the first token.
        tpot: Mean time per output token after the first; NaN for requests with one output token.
        e2e: Time to the last token.
        gaps: Inter-token times of all requests, sorted; shape ``(m,)``.
        weights: Number of tokens that came after each gap, shape ``(m,)``.
        counts: Number of requests that each simulated request represents.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    gaps: np.ndarray
    weights: np.ndarray
    counts: np.ndarray

    def figure(self, metric: str, level: int | str) -> float:
        """A percentile, the ``mean`` or the ``std`` of a metric; 0 if it has no values."""
        if metric == "itl":
            return _weighted(self.gaps, self.weights, level)
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}[metric]
        known = np.isfinite(values)
        values, counts = values[known], self.counts[known]
        if isinstance(level, int) and len(values) and (counts == 1.0).all():
            return float(np.percentile(values, level))
        order = np.argsort(values)
        return _weighted(values[order], counts[order], level)

    def good(self, slo: Slo) -> float:
        """Fraction of the requests that meet an SLO."""
        tpot = np.nan_to_num(self.tpot, nan=0.0)
        kept = (self.ttft <= slo.ttft) & (tpot <= slo.tpot) & (self.e2e <= slo.e2e)
        return float(np.average(kept, weights=self.counts))


def _weighted(values: np.ndarray, weights: np.ndarray, level: int | str) -> float:
    """A percentile, the ``mean`` or the ``std`` of sorted values; 0 if there are none."""
    if not len(values):
        return 0.0
    if isinstance(level, int):
        total = np.cumsum(weights)
        return float(values[np.searchsorted(total, level / 100.0 * total[-1])])
    mean = float(np.average(values, weights=weights))
    if level == "mean":
        return mean
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))


def served(
    load: Load, run: Run, first: float = 1.0, slower: float = 1.0, floor: Floors = NO_FLOOR
) -> Served:
    """Latencies of the requests of a run.

    Args:
        load: The requests.
        run: The simulated run.
        first: Factor on the time to the first token.
        slower: Factor on the time after the first token.
        floor: Lower bounds, which hold whatever the factors.
    """
    ttft = np.maximum((run.first - run.sent) * first, floor.ttft)
    after = np.maximum((run.finished - run.first) * slower, floor.e2e - floor.ttft)
    # A request with one output token has no time per output token.
    tpot = after / np.where(load.outputs > 1, load.outputs - 1.0, np.nan)
    gaps = [gap for history in run.histories for gap in history.gaps]
    if gaps:
        times, weights = (np.array(column, float) for column in zip(*gaps, strict=True))
    else:
        known = np.isfinite(tpot)
        times, weights = tpot[known] / slower, ((load.outputs - 1.0) * load.counts)[known]
    order = np.argsort(times)
    between = np.maximum(times[order] * slower, floor.tpot.min())
    return Served(ttft, tpot, ttft + after, between, weights[order], load.counts)


def tied(
    seen: Served, first: float, slower: float, whole: float, floor: Floors = NO_FLOOR
) -> Served:
    """Scale latencies with a separate factor for whole requests, none shorter than its parts.

    Args:
        seen: Latencies to scale.
        first: Factor on the time to the first token.
        slower: Factor on the time per output token.
        whole: Factor on the time to the last token.
        floor: Lower bounds, which hold whatever the factors.
    """
    e2e = np.maximum(seen.e2e * whole, floor.e2e)
    return replace(
        seen,
        ttft=np.maximum(np.minimum(seen.ttft * first, e2e), floor.ttft),
        tpot=np.maximum(seen.tpot * slower, floor.tpot),
        e2e=e2e,
        gaps=np.maximum(seen.gaps * slower, floor.tpot.min()),
    )


def wider(end: Served, other: Served, side: int) -> Served:
    """The outer of two bounds of an interval: the smaller for side 0, the larger for side 1."""
    outer = np.maximum if side else np.minimum
    found = replace(
        end,
        ttft=outer(end.ttft, other.ttft),
        tpot=outer(end.tpot, other.tpot),
        e2e=outer(end.e2e, other.e2e),
    )
    # Runs of bounds record no history: inter-token times widen as much as their mean does.
    before, after = (one.figure("tpot", "mean") for one in (end, found))
    return replace(found, gaps=end.gaps * (after / before)) if before > 0.0 else found


def states_of(run: Run, room: int, engines: int) -> dict[str, float]:
    """Time averages of cache occupancy, batch size and queue; empty for a run without histories.

    The queue counts all waiting requests. With separate prefill workers those are the requests that
    wait for a prefill worker, for its link, or for a decoding engine.
    """
    if not run.histories:
        return {}
    found: dict[str, list[float]] = {"kv": [], "batch": [], "peak": []}
    for history in run.histories[:engines]:
        if not history.time:
            continue
        for name, values in (("kv", history.held), ("batch", history.batch)):
            found[name].append(_over_time(history, values))
        found["peak"].append(max(history.held))
    if not found["kv"]:
        return {}
    ahead = run.histories[engines:]
    queues = [_queue(run.histories[:engines]), _queue(ahead), _links(run, len(ahead))]
    mean, longest = np.sum(queues, axis=0)
    return {
        "kv_occupancy_mean": float(np.mean(found["kv"])) / room,
        "kv_occupancy_max": max(found["peak"]) / room,
        "batch_mean": float(np.mean(found["batch"])),
        "queue_mean": float(mean),
        "queue_max": float(longest),
    }


def _over_time(history: History, values: Sequence[float]) -> float:
    """Time average of a quantity that a history recorded at its times."""
    spans = np.diff(history.time, prepend=0.0)
    return float(np.array(values) @ spans) / max(float(spans.sum()), 1e-12)


def _queue(histories: Sequence[History]) -> tuple[float, float]:
    """Requests that wait at one engine: mean over time and engines, and the maximum."""
    means, longest = [], 0
    for history in histories:
        if history.time:
            means.append(_over_time(history, history.waiting))
            longest = max(longest, max(history.waiting))
    return (float(np.mean(means)), float(longest)) if means else (0.0, 0.0)


def _links(run: Run, count: int) -> tuple[float, float]:
    """Caches that wait for one of ``count`` links: mean over the run, and the maximum."""
    waits = run.moves[run.moves[:, 1] > run.moves[:, 0]]
    if not len(waits):
        return 0.0, 0.0
    # +1 when a cache is ready, -1 when it moves; at equal times the moves come first.
    times = np.concatenate([waits[:, 1], waits[:, 0]])
    steps = np.repeat([-1, 1], len(waits))
    most = np.cumsum(steps[np.argsort(times, kind="stable")]).max()
    return float((waits[:, 1] - waits[:, 0]).sum()) / run.makespan / count, float(most) / count


def queued_share(load: Load, run: Run) -> float:
    """Fraction of the mean time to the first token that is spent waiting for other requests.

    Among prompts with about the same number of tokens to run (within half an octave; prefix-cache
    hits are not run), the fastest one ran alone or nearly so.
    """
    waits, alone = _waits(load, run)
    mean = partial(np.average, weights=load.counts)
    return max(0.0, 1.0 - float(mean(alone)) / float(mean(waits)))


def typical_wait(load: Load, run: Run) -> float:
    """Fraction of its time to the first token that the median request waits for other requests.

    In a closed loop the requests sent at the start are excluded: that burst ends, however long the
    loop lasts.
    """
    waits, alone = _waits(load, run)
    start = load.concurrency if load.concurrency < len(waits) else 0
    return float(np.median(1.0 - alone[start:] / waits[start:]))


def _waits(load: Load, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Times to the first token, and those of requests that run alone; seconds, shape ``(n,)``."""
    waits = run.first - run.sent
    bins = np.round(2.0 * np.log2(load.prompts - run.found)).astype(int)
    least = np.full(bins.max() + 1, inf)
    np.minimum.at(least, bins, waits)
    return waits, least[bins]
