"""Costs of a served decoder's forward passes by cost class, from precomputed tables.

Operators are priced on a grid of sizes and interpolated in log-log space, which is exact for power
laws; simulations of any number of requests then look up dense tables.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, floor, log2

import numpy as np

from ...features.devices.catalogue import read_device
from ...simulate.clusters.topology import Cluster
from ...simulate.serving.forward import (
    Counted,
    decode_ops,
    dispatched,
    exchanges,
    head_ops,
    launches,
    prefill_ops,
    token_ops,
)
from ...simulate.serving.load import CLASSES, Chunk
from ...simulate.serving.served import EnginePlan, ServedModel
from ...simulate.serving.token_exchange import (
    EXCHANGE_CORES,
    EXPERT_SKEW,
    HIDDEN,
    HIDDEN_DIRECT,
    Links,
)
from ...simulate.step.plan import Group
from ..operator.serving_operators import ServingLatency
from .network import ClusterNetwork

#: Cost classes of matrix products by bottleneck: weight traffic, arithmetic.
_SPLIT = {
    "linear": ("stream", "product"),
    "bmm": ("stream", "product"),
    "moe": ("experts", "grouped"),
}
_AT = {name: place for place, name in enumerate(CLASSES)}
_EXPERTS = [_AT[name] for name in _SPLIT["moe"]]
#: Classes of host work for a pass.
_HOST = [_AT[name] for name in ("host", "sequence")]
#: Classes of kernels that keep the device's cores busy.
_KERNELS = [_AT[n] for n in (*_SPLIT["linear"], *_SPLIT["moe"], "prefill", "decode", "memory")]
#: Classes of everything that the host launches.
_LAUNCHED = [*_KERNELS, _AT["network"]]
#: 0/1 masks of these classes: a dot product with a mask is the sum over them.
_OF_HOST, _OF_DEVICE = (np.isin(np.arange(len(CLASSES)), own) * 1.0 for own in (_HOST, _LAUNCHED))
#: Grid points per octave of tokens and sequences, and of lengths.
_POINTS, _LENGTH_POINTS = 2, 1
#: Exponent of prefill attention time in the number of query-key pairs, used within a quarter of an
#: octave; between launch-bound (0) and compute-bound (1). Engineering estimate.
ATTENTION_GROWTH = 0.75
#: Numbers of chunks in a pass for which prefill attention is priced.
_CHUNKS = (1, 4, 16, 64)
#: Custom all-reduce inside a node: base latency (s), latency per rank (s), and the fraction of the
#: link bandwidth that its two passes reach. Fitted to the graph-captured kernels of TensorRT-LLM,
#: SGLang and vLLM on H100 and H200 (published-tensor-core pack, collectives_tc: 8 KiB to 32 MiB, 2
#: to 8 ranks). From 64 MiB on these take as long as NCCL: with 8 ranks 0.6 times two passes.
_REDUCE_S, _REDUCE_RANK_S, _REDUCE_SHARE = 4e-6, 0.2e-6, 0.6


#: Prompt chunks of a pass: number of chunks, tokens per chunk, tokens of the prompt before it.
_Chunks = tuple[int, int, int]


@dataclass(frozen=True)
class Decoding:
    """How an engine decodes.

    Attributes:
        width: Tokens per sequence in a pass: more than 1 where draft tokens are verified.
        accepted: Mean tokens generated per sequence and pass.
        eager: Whether the host launches kernels one by one instead of replaying CUDA graphs.
        draft: Costs of the draft model; ``None`` for drafts at no cost.
        drafts: Passes of the draft model per step.
        ahead: Whether the host prepares a pass while the device runs the previous one.
    """

    width: int = 1
    accepted: float = 1.0
    eager: bool = False
    draft: ServingCosts | None = None
    drafts: int = 0
    ahead: bool = False


class ServingCosts:
    """Costs of the passes of one model on one engine.

    Args:
        model: The served model.
        plan: Parallel plan of the engine.
        cluster: Devices and links; at least as many as the engine needs.
        latency: Latency of operators of the engine's framework on the device.
        most_tokens: Maximum tokens of a pass, over all ranks.
        most_batch: Maximum sequences of a pass, over all ranks.
        longest: Maximum tokens of a sequence.
        early: Whether the engine predates its framework's rewrite and calls the library's
            all-reduce (NCCL, RCCL) instead of a custom kernel captured in graphs.
        skew: With wide expert parallelism: standard deviation of the logarithms of expert loads.
        overlap: With wide expert parallelism: whether a batch may be split in two halves, with the
            exchange of one overlapping the kernels of the other, where that is faster.
    """

    def __init__(
        self,
        model: ServedModel,
        plan: EnginePlan,
        cluster: Cluster,
        latency: ServingLatency,
        most_tokens: int,
        most_batch: int,
        longest: int,
        *,
        early: bool = False,
        skew: float = EXPERT_SKEW,
        overlap: bool = False,
    ) -> None:
        self.model, self.plan, self.latency, self.early = model, plan, latency, early
        self.skew, self.overlap = skew, overlap and plan.wide
        self.cluster, self.network = cluster, ClusterNetwork(cluster)
        self._spec = read_device(cluster.device)
        # Each pipeline stage works on its share of the batch, so a pass costs all layers at that
        # share; data-parallel ranks hold their own sequences. A single prompt is not split.
        self.parts = plan.dp * plan.pp
        self.decoding = Decoding()
        self._weights = np.ones(len(CLASSES))
        self._of_host, self._of_device = _OF_HOST, _OF_DEVICE
        share = ceil((most_tokens + most_batch) / self.parts)
        tokens = _grid(1, max(2, share, min(most_tokens, longest)), _POINTS)
        batches = _grid(1, max(2, ceil(most_batch / self.parts)), _POINTS)
        lengths = _grid(16, max(32, longest), _LENGTH_POINTS)
        wanted = [op for n in tokens for op, _ in token_ops(model, plan, n, skew)]
        wanted += [op for n in batches for op, _ in head_ops(model, plan, n)]
        wanted += [op for b in batches for n in lengths for op, _ in decode_ops(model, plan, b, n)]
        latency.prepare(wanted)
        self._tokens = _dense(tokens, self._tokens_at)
        self._dispatched = {
            direct: _dense(tokens, self._dispatched_at(direct)) for direct in (True, False)
        }
        self._heads = _dense(batches, self._heads_at)
        self._lengths = lengths
        self._decode = np.stack([_dense(batches, self._decode_at(n)) for n in lengths], axis=1)
        self._prefills: dict[_Chunks, float] = {}
        self._decodings: dict[int, np.ndarray] = {}
        sizes = {_rounded(n) for n in _grid(16, max(32, min(tokens[-1], longest)), 4)}
        self._price([(n, size, 0) for n in _CHUNKS for size in sizes if n * size <= 2 * tokens[-1]])
        self._launches = launches(model, plan)
        self._zero = np.zeros(len(CLASSES))
        self._base = self._zero.copy()
        self._base[_AT["host"]] = 1.0

    def under(self, decoding: Decoding, weights: np.ndarray) -> ServingCosts:
        """Return a copy with another decoding method and weights of the cost classes."""
        other = copy(self)
        other.decoding, other._weights = decoding, weights
        other._of_host, other._of_device = _OF_HOST * weights, _OF_DEVICE * weights
        return other

    def decode(self, batch: int, cached: float, steps: int) -> np.ndarray:
        """Return the sum over ``steps`` passes; see ``PassCosts`` of ``simulate.serving``."""
        how = self.decoding
        # Attention is linear in the cached tokens, so the middle pass is the mean of all.
        length = cached / batch + how.accepted * (steps - 1) / 2.0 + 1.0
        attention = self._attend(batch, length)
        one = steps * self._decoding(batch * how.width, attention)
        if how.draft is not None:
            drafts = how.drafts * how.draft.decode(batch, cached, steps)
            # The host schedules a step once; its drafts replay captured graphs in a loop.
            drafts[_HOST] = 0.0
            one += drafts
        return self._paced(one, steps * how.eager, ahead=how.ahead)

    def swap(self, tokens: float) -> np.ndarray:
        """Return the cost of moving a KV cache to the host; see ``PassCosts``."""
        cost = self._zero.copy()
        cost[_AT["memory"]] = tokens * self.model.token_bytes(self.plan) / self._spec.host_link
        return cost

    def mixed(self, chunks: Sequence[Chunk], batch: int, cached: float) -> np.ndarray:
        """Return the costs of a pass with prompt chunks; see ``PassCosts``."""
        decoding = batch * self.decoding.width
        total = decoding + sum(chunk.tokens for chunk in chunks)
        largest = max(chunk.tokens for chunk in chunks)
        decode = self._attend(batch, cached / batch + 1.0) if batch else 0.0
        count = -(-len(chunks) // self.parts)
        share = count / len(chunks)
        prefill = share * sum(self._prompt(count, chunk) for chunk in chunks)
        costs = self._pass(total, decoding + len(chunks), largest, prefill, decode)
        return self._paced(costs, 1)

    def _paced(self, costs: np.ndarray, launched: int, *, ahead: bool = False) -> np.ndarray:
        """Return the costs of passes in which host and device work at the same time.

        A pass takes as long as the slower of the two, to which the whole time is attributed.

        Args:
            costs: Costs of the passes; modified in place.
            launched: Passes whose kernels the host launches one by one; 0 if it replays graphs.
            ahead: Whether the host prepares a pass while the device runs the previous one, in the
                thread that launches.
        """
        if not (launched or ahead):
            return costs
        launching = launched * self._launches
        hosts = launching * self._weights[_AT["launch"]] + ahead * (costs @ self._of_host)
        if hosts > costs @ self._of_device:
            costs[_LAUNCHED] = 0.0
            costs[_AT["launch"]] = launching
        elif ahead:
            costs[_HOST] = 0.0
        return costs

    def _decoding(self, tokens: int, attention: float) -> np.ndarray:
        """Return the costs of a decode-only pass, cached by the number of tokens."""
        if self.overlap:
            # Whether two halves are faster depends on the attention, so the result is not cached.
            return self._pass(tokens, tokens, decode=attention)
        if tokens not in self._decodings:
            self._decodings[tokens] = self._pass(tokens, tokens)
        costs = self._decodings[tokens].copy()
        costs[_AT["decode"]] += attention
        return costs

    def _pass(
        self,
        tokens: int,
        sequences: int,
        largest: int = 0,
        prefill: float = 0.0,
        decode: float = 0.0,
    ) -> np.ndarray:
        """Return the costs of a pass on the slowest stage and rank, which has the largest chunk.

        Args:
            tokens: Tokens of all ranks.
            sequences: Sequences whose next token is sampled.
            largest: Tokens of the largest prompt chunk; 0 without prompts.
            prefill: Seconds of prefill attention.
            decode: Seconds of decode attention.
        """
        share = -(-tokens // self.parts)
        heads = min(-(-sequences // self.parts), len(self._heads)) - 1
        rest = np.array(self._heads[heads])
        rest[_AT["prefill"]] += prefill
        rest[_AT["decode"]] += decode
        costs = self._layers_of(share, largest) + rest
        if self.overlap and share > 1:
            costs = self._overlapped(costs, rest, share, largest)
        costs[_AT["host"]] = 1.0
        # Each data-parallel rank has its own host process, which handles all its stages.
        costs[_AT["sequence"]] = float(-(-sequences // self.plan.dp))
        return np.asarray(costs)

    def _layers_of(self, share: int, largest: int) -> np.ndarray:
        """Return the costs of all layers without attention, at ``share`` tokens per rank."""
        most = max(share, largest)
        costs = self._row(most)
        costs[_AT["network"]] += self._dispatched[largest == 0][min(most, len(self._tokens)) - 1]
        if self.plan.dp > 1 and largest > share:
            # The experts' work is spread over all ranks, whichever rank holds the chunk.
            spread = self._row(max(share, -(-largest // self.plan.dp)))
            costs[_EXPERTS] = spread[_EXPERTS]
        return costs

    def _overlapped(
        self, whole: np.ndarray, rest: np.ndarray, share: int, largest: int
    ) -> np.ndarray:
        """Return the costs of a pass as one batch or as two halves, whichever is faster.

        The exchange of each half overlaps with the kernels of the other (DeepSeek-V3, 2024, section
        3.4.1). High-throughput exchange kernels occupy some of the cores; the network cost is the
        exposed part of the exchange.

        Args:
            whole: Costs as one batch.
            rest: The part of ``whole`` that does not depend on the split.
            share: Tokens of a rank.
            largest: Tokens of the largest prompt chunk; 0 without prompts.
        """
        halves = rest + 2.0 * self._layers_of(-(-share // 2), -(-largest // 2))
        cores = self._spec.core_count or 0
        if largest and cores > EXCHANGE_CORES:
            halves[_KERNELS] *= cores / (cores - EXCHANGE_CORES)
        most = min(float(halves[_KERNELS].sum()), float(halves[_AT["network"]]))
        halves[_AT["network"]] -= most * (HIDDEN if largest else HIDDEN_DIRECT)
        return halves if halves.sum() < whole.sum() else whole

    def _row(self, tokens: int) -> np.ndarray:
        return np.array(self._tokens[min(tokens, len(self._tokens)) - 1])

    def _attend(self, batch: int, length: float) -> float:
        """Return seconds of decode attention, interpolated linearly between grid lengths."""
        row = self._decode[min(-(-batch // self.parts), len(self._decode)) - 1]
        grid = self._lengths
        at = min(max(bisect_right(grid, length), 1), len(grid) - 1)
        low, high = grid[at - 1], grid[at]
        share = (length - low) / (high - low)
        return float(row[at - 1] + share * (row[at] - row[at - 1]))

    def _prompt(self, count: int, chunk: Chunk) -> float:
        """Return seconds of prefill attention of one of ``count`` chunks of equal size."""
        near = min(_CHUNKS, key=lambda n: max(n / count, count / n))
        # Priced at sizes rounded to a quarter octave, then scaled by the number of pairs.
        tokens, past = _rounded(chunk.tokens), _rounded(chunk.past)
        key = (near, tokens, past)
        if key not in self._prefills:
            self._price(self._like(key))
        seen = chunk.tokens * (chunk.past + chunk.tokens / 2.0)
        scale = (seen / (tokens * (past + tokens / 2.0))) ** ATTENTION_GROWTH
        return float(self._prefills[key] * scale)

    def _like(self, key: _Chunks) -> list[_Chunks]:
        """Return chunks likely to occur in the same load: pricing 100 takes no longer than 4."""
        count, tokens, _ = key
        longest = self._lengths[-1]
        octave = floor(log2(tokens))
        sizes = [round(2 ** (octave + i / 4)) for i in range(4)]
        before = {_rounded(n) for n in _grid(16, longest, 4)}
        near = {(count, n, past) for n in sizes for past in before if n + past <= longest}
        return sorted({key, *near} - self._prefills.keys())

    def _price(self, keys: Sequence[_Chunks]) -> None:
        """Price the prefill attention of chunks and cache it."""
        ops = [prefill_ops(self.model, self.plan, *key) for key in keys]
        self.latency.prepare([op for own in ops for op, _ in own])
        for key, own in zip(keys, ops, strict=True):
            self._prefills[key] = sum(self.latency(op) * n for op, n in own) / key[0]

    def _tokens_at(self, tokens: int) -> np.ndarray:
        costs = self._classed(token_ops(self.model, self.plan, tokens, self.skew))
        for sent in exchanges(self.model, self.plan, tokens):
            costs[_AT["network"]] += sent.times * self._exchange(sent.kind, sent.size, sent.ranks)
        return costs

    def _dispatched_at(self, direct: bool) -> Callable[[int], np.ndarray]:
        dims = self.cluster.topology.dims
        box = self.cluster.box or self.cluster.size
        links = Links(box, dims[0].bandwidth, dims[-1].bandwidth)

        def at(tokens: int) -> np.ndarray:
            own = self.model, self.plan, tokens, self.skew, links
            return np.array(dispatched(*own, direct=direct))

        return at

    def _exchange(self, kind: str, size: float, ranks: int) -> float:
        """Return seconds of a collective by the library or, for an all-reduce, a custom kernel.

        Engines use the library for large messages (in-switch reduction on Hopper and later) and for
        more than two ranks connected only by PCIe.
        """
        seconds = self.network(kind, size, Group(ranks, 1)).value
        link = self._spec.link_bandwidth
        inside = 1 < ranks <= self.cluster.devices_per_node and not self.early
        if kind != "all_reduce" or not inside or not link:
            return seconds
        if self._spec.platform == "gpu":
            # A cluster file may override the device's link bandwidth.
            link = self.cluster.topology.group_dims(ranks)[0].bandwidth
        if ranks > 2 and link <= self._spec.host_link:
            return seconds
        moved = 2.0 * size * (ranks - 1) / ranks
        own = _REDUCE_S + _REDUCE_RANK_S * ranks + moved / (_REDUCE_SHARE * link)
        return min(own, seconds)

    def _heads_at(self, sequences: int) -> np.ndarray:
        return self._classed(head_ops(self.model, self.plan, sequences))

    def _decode_at(self, length: int) -> Callable[[int], np.ndarray]:
        def at(batch: int) -> np.ndarray:
            ops = decode_ops(self.model, self.plan, batch, length)
            return np.array(sum(self.latency(op) * count for op, count in ops))

        return at

    def _classed(self, ops: Counted) -> np.ndarray:
        costs = np.zeros(len(CLASSES))
        for op, count in ops:
            seconds = self.latency(op) * count
            if op.family in _SPLIT:
                moving, arithmetic = _SPLIT[op.family]
                share = self.latency.arithmetic(op)
                costs[_AT[arithmetic]] += seconds * share
                costs[_AT[moving]] += seconds * (1.0 - share)
            else:
                costs[_AT["memory"]] += seconds
        return costs


def _grid(least: int, most: int, points: int) -> list[int]:
    """Return integers that grow by the ``points``-th root of two, including ``most``."""
    count = ceil(np.log2(most / least) * points)
    return sorted({round(least * 2 ** (i / points)) for i in range(count + 1)} | {most})


def _rounded(size: int) -> int:
    return round(2 ** (round(log2(size) * 4) / 4)) if size > 1 else size


def _dense(grid: Sequence[int], at: Callable[[int], np.ndarray]) -> np.ndarray:
    """Interpolate values at every integer up to the last grid point, in log-log space.

    Returns:
        Shape ``(last, …)``; row ``i`` holds the values at ``i + 1``.
    """
    known = np.stack([np.asarray(at(n), float) for n in grid])
    where = np.arange(1, grid[-1] + 1)
    flat = known.reshape(len(grid), -1)
    logs = np.log(np.maximum(flat, 1e-12))
    columns = [np.interp(np.log(where), np.log(grid), column) for column in logs.T]
    dense = np.exp(np.stack(columns, axis=1))
    dense[:, (flat == 0.0).all(axis=0)] = 0.0
    return np.asarray(dense.reshape(len(where), *known.shape[1:]))
