"""Serving a decoder on a cluster: iterations of prefill and decode from operators and collectives.

Iterations are estimated on a grid of sizes and interpolated between, so that a trace of thousands
of requests asks the model of operators once for each point of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..features.errors import DatasetError, PlanError
from ..models.ops import OpModel
from ..simulate.serving import Request, ServingResult, serve
from ..simulate.step.calls import CommCall, OpCall
from ..simulate.step.costs import Costs
from ..simulate.step.layer_ops import layer_ops
from ..simulate.step.memory import RESERVED_BYTES
from ..simulate.step.plan import Plan
from ..simulate.step.workload import Workload, resolved
from ..simulate.topology import Cluster
from .cluster_network import ClusterNetwork
from .devices import resolve_device
from .op_calls import OperatorLatency

#: Columns of a trace.
COLUMNS = ("arrival_s", "prompt", "output")
#: Points of the grid for each doubling of a size.
POINTS = 2


@dataclass(frozen=True)
class ServingPrediction:
    """How a trace is served by one replica of a model.

    Attributes:
        result: Latencies of requests.
        cache_tokens: Tokens that the key-value cache of a replica holds.
        replicas: Replicas that share the requests evenly.
        plan: Of one replica.
        cluster: Name of the cluster.
    """

    result: ServingResult
    cache_tokens: int
    replicas: int
    plan: Plan
    cluster: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data; throughput is that of all replicas."""
        found: dict[str, Any] = dict(self.result.to_dict())
        for name in ("requests_per_s", "output_tokens_per_s"):
            found[name] *= self.replicas
        return {
            **found,
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
        PlanError: The plan has other parallelism, does not fit, or leaves no room for a cache.
    """

    def __init__(
        self, workload: Workload, plan: Plan, cluster: Cluster, model: OpModel | None
    ) -> None:
        if plan.changed(tp=1, dp=1, sp=True) != Plan():
            raise PlanError(
                f"serving knows tp and dp only, not {plan.text()}", hint="as in tp=4,dp=2"
            )
        own = replace(workload, mode="forward", seq=1, batch=plan.dp)
        self.plan = resolved(own, plan.changed(sp=False), cluster.size)
        self.workload, self.cluster = own, cluster
        spec = resolve_device(cluster.device, {})
        self.memory = spec.memory_bytes
        network = ClusterNetwork(cluster)
        self._costs = Costs(OperatorLatency(spec, model), network)
        self._prefill: dict[tuple[int, int], float] = {}
        self._decode: dict[tuple[int, int], float] = {}

    def cache_tokens(self) -> int:
        """Tokens that the cache of a replica holds: what weights and driver leave.

        Raises:
            PlanError: The weights alone do not fit.
        """
        w, tp = self.workload, self.plan.tp
        weights = w.parameters / tp * w.width
        token = 2.0 * w.layers * max(1.0, w.groups / tp) * w.head * w.width
        left = self.memory - RESERVED_BYTES - weights
        if left < token:
            raise PlanError(
                f"weights of {weights / 2**30:.1f} GiB leave no room for a cache in "
                f"{self.memory / 2**30:.1f} GiB", hint="raise tp",
            )  # fmt: skip
        return int(left / token)

    def predict(
        self, requests: Sequence[Request], max_batch: int = 256, token_budget: int = 2048
    ) -> ServingPrediction:
        """Serve a trace; each replica gets every ``dp``-th request, and the first is simulated.

        Raises:
            PlanError: A request does not fit.
        """
        cache = self.cache_tokens()
        own = requests[:: self.plan.dp]
        found = serve(own, self.seconds, cache, max_batch=max_batch, token_budget=token_budget)
        return ServingPrediction(found, cache, self.plan.dp, self.plan, self.cluster.name)

    def seconds(self, tokens: int, reach: float, batch: int, length: float) -> float:
        """Seconds of an iteration, as :data:`~opcast.simulate.serving.IterationSeconds`.

        Both kinds of tokens go through the same products; each has its own attention.
        """
        products = _between(tokens + batch, 1.0, lambda m, _: self._products(m))
        attention = 0.0
        if tokens:
            attention += _between(tokens, max(reach, 1.0), self._prefill_attention)
        if batch:
            attention += _between(batch, max(length, 1.0), self._decode_attention)
        return products + attention

    def _products(self, tokens: int) -> float:
        key = (tokens, 0)
        if key not in self._prefill:
            w, p = replace(self.workload, batch=self.plan.dp, seq=tokens), self.plan
            ops = [c for c in layer_ops(w, p).forward if c.op != "attention"]
            size = float(tokens) * w.d_model * w.width
            sent = self._costs.link(CommCall("tensor", "all_reduce", size, p.tensor_group, 2.0))
            vocab = ceil(w.vocab / p.tp)
            head = OpCall("head", "linear", (min(tokens, 256), vocab, w.d_model), w.dtype)
            layer = self._costs.compute(ops) + sent
            self._prefill[key] = w.layers * layer + self._costs.compute([head])
        return self._prefill[key]

    def _prefill_attention(self, tokens: int, reach: int) -> float:
        """Attention of prompts: ``tokens`` queries, which see ``reach`` keys on average."""
        key = (tokens, reach)
        if key not in self._prefill:
            w, tp = self.workload, self.plan.tp
            length = max(tokens, round(reach + tokens / 2))
            groups = max(1, w.groups // tp)
            shape = (1, w.heads // tp, groups, w.head, tokens, length, 1)
            self._prefill[key] = w.layers * self._costs.compute(
                [OpCall("attention", "attention", shape, w.dtype)]
            )
        return self._prefill[key]

    def _decode_attention(self, batch: int, length: int) -> float:
        key = (batch, length)
        if key not in self._decode:
            w, tp = self.workload, self.plan.tp
            shape = (batch, w.heads // tp, max(1, w.groups // tp), w.head, length)
            call = OpCall("attention", "decode", shape, w.dtype)
            self._decode[key] = w.layers * self._costs.compute([call])
        return self._decode[key]


def _between(first: float, second: float, at: Any) -> float:
    """Interpolate bilinearly in the logarithms of both sizes, between points of the grid."""
    total = 0.0
    for a, weight_a in _neighbours(first):
        for b, weight_b in _neighbours(second):
            total += weight_a * weight_b * at(a, b)
    return total


def _neighbours(size: float) -> list[tuple[int, float]]:
    """Points of the grid on both sides of a size, with their weights."""
    place = log2(max(size, 1.0)) * POINTS
    low = int(place)
    points = sorted({round(2 ** (low / POINTS)), round(2 ** ((low + 1) / POINTS))})
    if len(points) == 1 or size <= points[0]:
        return [(points[0], 1.0)]
    share = min(1.0, log2(size / points[0]) / log2(points[1] / points[0]))
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
    frame = frame.sort_values("arrival_s", kind="stable")
    rows = frame[list(COLUMNS)].itertuples(index=False)
    return [Request(float(a), int(p), int(o)) for a, p, o in rows]
