"""Serve a decoder on a cluster: iteration times of prefill and decode for continuous batching.

Iteration times are estimated on a grid of sizes and interpolated, so that a trace of thousands of
requests queries the operator model once for each grid point.
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
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.loop import Chunk, Request, ServingResult, check_requests, serve
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
#: Grid points per octave of a size. Times follow powers of the sizes over so short a distance, and
#: interpolation is log-log, which is exact for powers; engineering estimate.
POINTS = 2


@dataclass(frozen=True)
class ServingPrediction:
    """Latencies and throughput of a trace of requests.

    Attributes:
        result: Latencies of requests.
        interval: Mean seconds from arrival to last token, as estimated and with all iterations at
            the lower or the upper end of their 90 % interval.
        cache_tokens: Tokens that the key-value cache of a replica holds.
        replicas: Replicas that share the requests evenly.
        plan: Parallel plan, replicas included.
        cluster: Name of the cluster.
    """

    result: ServingResult
    interval: Interval
    cache_tokens: int
    replicas: int
    plan: Plan
    cluster: str

    def to_dict(self) -> dict[str, object]:
        """Plain data: mean latency of a request, percentiles, and throughput of all replicas."""
        figures: dict[str, Any] = dict(self.result.to_dict())
        # One replica was simulated; the others serve as much each.
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
        cluster: Cluster that serves it, its name or file.
        model: Model of library operators; ``None`` for rooflines.

    Raises:
        PlanError: The plan has other parallelism or does not fit, or the model does not generate.
        DeviceError: The cluster names no device, or one that is not known.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        cluster: Cluster | str | Path,
        model: OpModel | None,
    ) -> None:
        cluster = find_cluster(cluster)
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
        # Plans count a batch over all replicas, so ``dp`` sequences are one per replica; the grid
        # sets the tokens.
        own = replace(workload, mode="forward", seq=1, batch=plan.dp)
        # Inference engines all-reduce the full activations: sequence parallelism would shard
        # tokens, of which a decode step has too few.
        self.plan = resolved(own, plan.changed(sp=False), cluster.size)
        self.workload, self.cluster = own, cluster
        spec = cluster_device(cluster)
        self.memory = spec.memory_bytes
        # No sustained-clock factor: serving is bursty, so the clock of short measurements applies
        # (docs/simulate.md).
        self._latency, self._network = OperatorLatency(spec, model), ClusterNetwork(cluster)
        self._products, self._head = _Grid(self._products_at), _Grid(self._head_at)
        self._prefill, self._decode = _Grid(self._prefill_at), _Grid(self._decode_at)

    def cache_tokens(self) -> int:
        """Return how many tokens a replica's key-value cache holds beside weights and driver.

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
        # Keys and values of all layers. With more devices than key-value heads, each head is
        # replicated, so a device never holds less than one.
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
        # Round-robin, as a load balancer deals out requests that it knows nothing about.
        own = requests[:: self.plan.dp]

        def served(side: int) -> ServingResult:
            return serve(
                own,
                lambda *of: self.estimate(*of)[side],
                cache,
                max_batch=max_batch,
                token_budget=token_budget,
            )

        # The whole trace is replayed at each end: slower iterations also lengthen the queues, which
        # scaling the latencies would miss.
        runs = [served(side) for side in (0, 1, 2)]
        interval = Interval(*(float(run.latency.mean()) for run in runs))
        return ServingPrediction(
            runs[0], interval, cache, self.plan.dp, self.plan, self.cluster.name
        )

    def seconds(self, chunks: Sequence[Chunk], batch: int, length: float) -> float:
        """Estimate an iteration; see :data:`~opcast.simulate.serving.loop.IterationSeconds`."""
        return self.estimate(chunks, batch, length).seconds

    def estimate(self, chunks: Sequence[Chunk], batch: int, length: float) -> Estimate:
        """Estimate the seconds of an iteration, with a 90 % interval.

        All tokens share the matrix products; the vocabulary projection sees only the last token
        of each sequence. Attention is one kernel for all chunks of prompts and one for decoding. A
        chunk attends to its own prompt alone and is priced as its share of a batch of equally
        many chunks of its size.

        Args:
            chunks: Chunks of prompts.
            batch: Running requests.
            length: Mean length of their caches.
        """
        sequences = len(chunks) + batch
        times = self._products(batch + sum(c.tokens for c in chunks)) + self._head(sequences)
        for chunk, count in Counter(chunks).items():
            times = times + count / len(chunks) * self._prefill(len(chunks), *chunk)
        if batch:
            # Decode attention streams keys and values, so its time is linear in the cache length
            # and the mean length stands for the batch.
            times = times + self._decode(batch, max(length, 1.0))
        middle = float(times[0])
        # The operators' interval and the composition's error are independent: they add in
        # quadrature.
        own = COMPOSITION_ERROR * middle
        down, up = hypot(middle - times[1], own), hypot(times[2] - middle, own)
        return Estimate(*Interval.around(middle, down, up))

    def _products_at(self, tokens: int) -> Estimate:
        w, p = replace(self.workload, batch=self.plan.dp, seq=tokens), self.plan
        # Attention depends on lengths, not only on the number of tokens, so it has grids of its
        # own.
        ops = [c for c in layer_ops(w, p).forward if c.op != "attention"]
        size = float(tokens) * w.d_model * w.width
        # Two all-reduces of the activations in each layer's forward pass, after attention and after
        # the feed-forward block (Shoeybi et al., Megatron-LM, 2019, section 3).
        sent = CommCall("tensor", "all_reduce", size, p.tensor_group, 2.0)
        return self._sum(ops, w.layers, sent)

    def _head_at(self, sequences: int) -> Estimate:
        w = self.workload
        # The vocabulary is padded to a multiple of the tensor-parallel ranks, as in Megatron-LM.
        shape = (sequences, ceil(w.vocab / self.plan.tp), w.d_model)
        return self._sum([OpCall("head", "linear", shape, w.dtype)])

    def _prefill_at(self, sequences: int, tokens: int, past: int) -> Estimate:
        """Attention of ``sequences`` prompt chunks, each of ``tokens`` after ``past`` others."""
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
        """Add up operators and a collective over all layers; their errors correlate."""
        times = [Estimate(*row) for row in self._latency(ops)]
        if sent is not None and sent.needed:
            times.append(self._network(sent.kind, sent.size, sent.group).times(sent.times))
        rows = np.array(times) * layers
        total = float(rows[:, 0].sum())
        ends = np.stack([rows[:, 0] - rows[:, 1], rows[:, 2] - rows[:, 0]], axis=1)
        down, up = combined_spread(ends, RHO)
        return Estimate(*Interval.around(total, down, up))


class _Grid:
    """Memoised estimates on a grid of sizes, interpolated in between.

    Times behave like powers of the sizes, so the interpolation is linear in logarithms.

    Args:
        at: Estimate at a point.
    """

    def __init__(self, at: Callable[..., Estimate]) -> None:
        self._at = at
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, *sizes: float) -> np.ndarray:
        """Seconds and both ends of the interval, shape ``(3,)``."""
        total = np.zeros(3)
        # Multilinear: a weighted sum over the corners of the grid cell.
        for corner in product(*map(_neighbours, sizes)):
            point = tuple(size for size, _ in corner)
            if point not in self._known:
                self._known[point] = np.log(self._at(*point))
            total += prod(weight for _, weight in corner) * self._known[point]
        return np.exp(total)


def _neighbours(size: float) -> list[tuple[int, float]]:
    """Grid points on both sides of a size with their weights; 0 is a point by itself."""
    if size < 1:
        return [(0, 1.0)]
    place = log2(size) * POINTS
    low = int(place)
    # Sizes are whole tokens and sequences; the first two points both round to 1.
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
    """Draw random requests: Poisson arrivals, geometrically distributed lengths.

    Args:
        rate: Requests a second on average.
        count: Number of requests.
        prompt: Mean tokens of a prompt.
        output: Mean tokens of an output.
        seed: Random seed.

    Raises:
        PlanError: An argument is not positive.
    """
    if not rate > 0 or min(count, prompt, output) < 1:
        raise PlanError(
            f"rate={rate}, count={count}, prompt={prompt}, output={output}",
            hint="all of them are above 0",
        )
    rng = np.random.default_rng(seed)
    # A Poisson process has exponential gaps, as the Server scenario of MLPerf's LoadGen.
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    lengths = [rng.geometric(1.0 / mean, count) for mean in (prompt, output)]
    rows = zip(arrivals.tolist(), lengths[0].tolist(), lengths[1].tolist(), strict=True)
    return [Request(a, p, o) for a, p, o in rows]


def read_requests(path: Path) -> list[Request]:
    """Read requests from a CSV file with the columns ``arrival_s``, ``prompt`` and ``output``.

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
    # Stable, so that requests with equal arrival times keep the order of the file.
    rows = known.sort_values("arrival_s", kind="stable").itertuples(index=False)
    return [Request(float(a), int(p), int(o)) for a, p, o in rows]
