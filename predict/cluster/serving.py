"""Serving a decoder on a cluster: iterations of prefill and decode from operators and collectives.

Iterations are estimated on a grid of sizes and interpolated between, so that a trace of thousands
of requests asks the model of operators once for each point of the grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, hypot, log2, prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, PlanError
from ...common.interval import Interval, latency_fields
from ...models.operators import OpModel
from ...simulate.clusters.topology import Cluster
from ...simulate.serving import Chunk, Request, ServingResult, check_requests, serve
from ...simulate.step.calls import CommCall, Estimate, OpCall
from ...simulate.step.layer_ops import layer_ops
from ...simulate.step.memory import RESERVED_BYTES
from ...simulate.step.plan import Plan
from ...simulate.step.workload import Workload, resolved
from ..devices import cluster_device
from ..operator.step_operators import OperatorLatency
from .network import ClusterNetwork
from .spread import COMPOSITION_ERROR, RHO, combined_spread

#: Columns of a trace.
COLUMNS = ("arrival_s", "prompt", "output")
#: Points of the grid for each doubling of a size.
POINTS = 2


@dataclass(frozen=True)
class ServingPrediction:
    """How a trace is served by one replica of a model.

    Attributes:
        result: Latencies of requests.
        interval: Mean seconds from arrival to last token, as estimated and with all iterations at
            the lower or the upper end of their 90 % interval.
        cache_tokens: Tokens that the key-value cache of a replica holds.
        replicas: Replicas that share the requests evenly.
        plan: Of one replica.
        cluster: Name of the cluster.
    """

    result: ServingResult
    interval: Interval
    cache_tokens: int
    replicas: int
    plan: Plan
    cluster: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data: mean latency of a request, percentiles, and throughput of all replicas."""
        figures: dict[str, Any] = dict(self.result.to_dict())
        for name in ("requests_per_s", "output_tokens_per_s"):
            figures[name] *= self.replicas
        return {
            **latency_fields(*self.interval),
            **figures,
            "cache_tokens": self.cache_tokens,
            "replicas": self.replicas,
            "plan": self.plan.text(),
            "cluster": self.cluster,
        }


class ServingPredictor:
    """Serves one model on one cluster.

    Args:
        workload: The model; ``batch``, ``seq`` and ``mode`` do not matter.
        plan: ``tp``, and ``dp`` replicas.
        cluster: Where it runs.
        model: Model of library operators; ``None`` for rooflines.

    Raises:
        PlanError: The plan has other parallelism or does not fit, or the model does not generate.
        DeviceError: The cluster names no device, or one that is not known.
    """

    def __init__(
        self, workload: Workload, plan: Plan, cluster: Cluster, model: OpModel | None
    ) -> None:
        if plan != Plan(tp=plan.tp, dp=plan.dp, sp=plan.sp):
            raise PlanError(
                f"serving knows tp and dp only, not {plan.text()}", hint="as in tp=4,dp=2"
            )
        if not workload.causal:
            raise PlanError(
                "a model whose tokens see later ones generates nothing",
                where="workload",
                hint="take a causal one, such as llama",
            )
        own = replace(workload, mode="forward", seq=1, batch=plan.dp)
        self.plan = resolved(own, plan.changed(sp=False), cluster.size)
        self.workload, self.cluster = own, cluster
        spec = cluster_device(cluster)
        self.memory = spec.memory_bytes
        self._latency, self._network = OperatorLatency(spec, model), ClusterNetwork(cluster)
        self._products, self._head = _Grid(self._products_at), _Grid(self._head_at)
        self._prefill, self._decode = _Grid(self._prefill_at), _Grid(self._decode_at)

    def cache_tokens(self) -> int:
        """Tokens that the cache of a replica holds: what weights and driver leave.

        Raises:
            PlanError: The weights alone do not fit, or the device's memory is not known.
        """
        w, tp = self.workload, self.plan.tp
        if not self.memory:
            raise PlanError(
                "the memory of the device is not known, so neither is its cache",
                where=self.cluster.device,
                hint="add memory_bytes to the device's file",
            )
        weights = w.parameters / tp * w.width
        token = 2.0 * w.layers * max(1.0, w.groups / tp) * w.head * w.width
        left = self.memory - RESERVED_BYTES - weights
        if left < token:
            raise PlanError(
                f"weights of {weights / 2**30:.1f} GiB leave no room for a cache in "
                f"{self.memory / 2**30:.1f} GiB",
                hint="raise tp",
            )
        return int(left / token)

    def predict(
        self, requests: Sequence[Request], max_batch: int = 256, token_budget: int = 2048
    ) -> ServingPrediction:
        """Serve a trace; each replica gets every ``dp``-th request, and the first is simulated.

        Raises:
            PlanError: A request does not fit, or a limit is below 1.
        """
        cache = self.cache_tokens()
        check_requests(requests, cache)
        own = requests[:: self.plan.dp]

        def served(side: int) -> ServingResult:
            return serve(
                own,
                lambda *of: self.estimate(*of)[side],
                cache,
                max_batch=max_batch,
                token_budget=token_budget,
            )

        runs = [served(side) for side in (0, 1, 2)]
        interval = Interval(*(float(run.latency.mean()) for run in runs))
        return ServingPrediction(
            runs[0], interval, cache, self.plan.dp, self.plan, self.cluster.name
        )

    def seconds(self, chunks: Sequence[Chunk], batch: int, length: float) -> float:
        """Seconds of an iteration, as :data:`~opcast.simulate.serving.IterationSeconds`."""
        return self.estimate(chunks, batch, length).seconds

    def estimate(self, chunks: Sequence[Chunk], batch: int, length: float) -> Estimate:
        """Seconds of an iteration with both ends of their 90 % interval.

        All tokens go through the same products; the vocabulary projection sees the last token of
        each sequence. Attention is one kernel for the parts of prompts, and one for decoding. A
        part attends to its own prompt alone: it takes its share of the time of a batch of as many
        parts that are all like it.

        Args:
            chunks: Parts of prompts.
            batch: Running requests.
            length: Mean length of their caches.
        """
        sequences = len(chunks) + batch
        times = self._products(batch + sum(c.tokens for c in chunks)) + self._head(sequences)
        for chunk, count in Counter(chunks).items():
            times = times + count / len(chunks) * self._prefill(len(chunks), *chunk)
        if batch:
            times = times + self._decode(batch, max(length, 1.0))
        middle = float(times[0])
        own = COMPOSITION_ERROR * middle
        down, up = hypot(middle - times[1], own), hypot(times[2] - middle, own)
        return Estimate(*Interval.around(middle, down, up))

    def _products_at(self, tokens: int) -> Estimate:
        w, p = replace(self.workload, batch=self.plan.dp, seq=tokens), self.plan
        ops = [c for c in layer_ops(w, p).forward if c.op != "attention"]
        size = float(tokens) * w.d_model * w.width
        sent = CommCall("tensor", "all_reduce", size, p.tensor_group, 2.0)
        return self._sum(ops, w.layers, sent)

    def _head_at(self, sequences: int) -> Estimate:
        w = self.workload
        shape = (sequences, ceil(w.vocab / self.plan.tp), w.d_model)
        return self._sum([OpCall("head", "linear", shape, w.dtype)])

    def _prefill_at(self, sequences: int, tokens: int, past: int) -> Estimate:
        """Attention of ``sequences`` parts of prompts, each of ``tokens`` after ``past`` others."""
        shape = (sequences, *self._heads(), tokens, past + tokens, 1)
        return self._attention(OpCall("attention", "attention", shape, self.workload.dtype))

    def _decode_at(self, batch: int, length: int) -> Estimate:
        shape = (batch, *self._heads(), length)
        return self._attention(OpCall("attention", "decode", shape, self.workload.dtype))

    def _heads(self) -> tuple[int, int, int]:
        """Query heads, key and value heads of a device, and their width."""
        w, tp = self.workload, self.plan.tp
        return w.heads // tp, max(1, w.groups // tp), w.head

    def _attention(self, call: OpCall) -> Estimate:
        return self._sum([call], self.workload.layers)

    def _sum(
        self, ops: Sequence[OpCall], layers: int = 1, sent: CommCall | None = None
    ) -> Estimate:
        """Operators and a collective one after the other in each layer; their errors correlate."""
        times = [Estimate(*row) for row in self._latency(ops)]
        if sent is not None and sent.needed:
            times.append(self._network(sent.kind, sent.size, sent.group).times(sent.times))
        rows = np.array(times) * layers
        total = float(rows[:, 0].sum())
        ends = np.stack([rows[:, 0] - rows[:, 1], rows[:, 2] - rows[:, 0]], axis=1)
        down, up = combined_spread(ends, RHO)
        return Estimate(*Interval.around(total, down, up))


class _Grid:
    """Estimates at points of a grid of sizes, each asked for once, and in between.

    Times are about powers of the sizes, so it is their logarithms that are linear between points.

    Args:
        at: Estimate at a point.
    """

    def __init__(self, at: Callable[..., Estimate]) -> None:
        self._at = at
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, *sizes: float) -> np.ndarray:
        """Seconds and both ends of the interval, shape ``(3,)``."""
        total = np.zeros(3)
        for corner in product(*map(_neighbours, sizes)):
            point = tuple(size for size, _ in corner)
            if point not in self._known:
                self._known[point] = np.log(self._at(*point))
            total += prod(weight for _, weight in corner) * self._known[point]
        return np.exp(total)


def _neighbours(size: float) -> list[tuple[int, float]]:
    """Points of the grid on both sides of a size, with their weights; 0 is a point of its own."""
    if size < 1:
        return [(0, 1.0)]
    place = log2(size) * POINTS
    low = int(place)
    points = sorted({round(2 ** (low / POINTS)), round(2 ** ((low + 1) / POINTS))})
    if len(points) == 1 or size <= points[0]:
        return [(points[0], 1.0)]
    share = min(1.0, log2(size / points[0]) / log2(points[1] / points[0]))
    if share == 1.0:
        return [(points[1], 1.0)]
    return [(points[0], 1.0 - share), (points[1], share)]


def poisson_requests(
    rate: float, count: int, prompt: int, output: int, seed: int = 0
) -> list[Request]:
    """Requests that come at random, with lengths that vary geometrically around their means.

    Args:
        rate: Requests a second on average.
        count: How many.
        prompt: Mean tokens of a prompt.
        output: Mean tokens of an output.
        seed: Of the draws.

    Raises:
        PlanError: A figure is not positive.
    """
    if not rate > 0 or min(count, prompt, output) < 1:
        raise PlanError(
            f"rate={rate}, count={count}, prompt={prompt}, output={output}",
            hint="all of them are above 0",
        )
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    lengths = [rng.geometric(1.0 / mean, count) for mean in (prompt, output)]
    rows = zip(arrivals.tolist(), lengths[0].tolist(), lengths[1].tolist(), strict=True)
    return [Request(a, p, o) for a, p, o in rows]


def read_requests(path: Path) -> list[Request]:
    """Requests of a CSV file with the columns ``arrival_s``, ``prompt`` and ``output``.

    Raises:
        DatasetError: The file cannot be read, or lacks a column.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the trace cannot be read: {error}", where=str(path)) from None
    missing = [c for c in COLUMNS if c not in frame]
    if missing:
        raise DatasetError(f"columns {missing} are missing", where=str(path), hint=str(COLUMNS))
    known = frame[list(COLUMNS)].apply(pd.to_numeric, errors="coerce")
    whole = (known[["prompt", "output"]] % 1 == 0).all(axis=1)
    good = np.isfinite(known).all(axis=1) & whole & (known["arrival_s"] >= 0)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise DatasetError(
            f"row {row + 1} is no request: {frame[list(COLUMNS)].iloc[row].to_dict()}",
            where=str(path),
            hint="arrival_s in seconds from 0, whole tokens of prompt and output",
        )
    rows = known.sort_values("arrival_s", kind="stable").itertuples(index=False)
    return [Request(float(a), int(p), int(o)) for a, p, o in rows]
