"""Operators of a forward pass of a served decoder on one device, and the collectives of its ranks.

Products run over all tokens of a pass, attention over each sequence, and the vocabulary projection
over the last token of each. When decoding, layers with latent attention absorb the up-projections
of keys and values into queries and results (DeepSeek-V2, 2024, section 2.1.2).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.operators.op import ABSORBED, DISPATCHED, EXPANDED, Op
from ...features.operators.routing import busy_rank
from ..step.workload import Workload
from .served import STATE_BYTES, EnginePlan, ServedModel, kinds_of
from .token_exchange import EXPERT_SKEW, Links, busiest, exchange_seconds, row_bytes

#: Exponent of the power law of expert loads: a batch of 16 to 64 tokens reaches half as many
#: experts as balanced routing would, as measured times per output token of gpt-oss under vLLM show.
ROUTING_SKEW = 1.2
#: Passes over the inputs of a recurrent layer for its convolution and gates; engineering estimate.
SCAN_PASSES = 6.0
#: Kernels of an operator: products, and others. Experts: two grouped products, plus routing,
#: sorting of tokens (two), activation and summation; attention includes the write to the cache.
_KERNELS = {"linear": (1, 0), "bmm": (1, 0), "moe": (2, 5), "attention": (0, 2)}
#: Operators with the number of times each runs.
Counted = list[tuple[Op, float]]


class Exchange(NamedTuple):
    """A collective of a forward pass.

    Attributes:
        kind: Collective, as in :class:`~opcast.simulate.step.costs.CommCall`.
        size: Bytes, as defined there.
        ranks: Number of participating devices, which are neighbours.
        times: Number of calls.
    """

    kind: str
    size: float
    ranks: int
    times: float


def token_ops(
    model: ServedModel, plan: EnginePlan, tokens: int, skew: float | None = None
) -> Counted:
    """Products, experts and memory-bound operators for ``tokens`` on each attention rank.

    All layers are listed, because the stages of a pipeline run one after another.

    Args:
        model: Served model.
        plan: Parallelism of the engine.
        tokens: Tokens on each attention rank.
        skew: Standard deviation of the logarithms of expert loads for a wide engine
            (:func:`~.token_exchange.busiest`); ``None`` for experts that see all ranks' tokens.
    """
    ops: Counted = []
    kinds = kinds_of(model.workload)
    layers = model.workload.layers
    for layer, count in kinds.items():
        recurrent = count * model.linear_layers / layers
        ops += [(op, count - recurrent) for op in _attention_products(model, layer, plan, tokens)]
        if recurrent:
            ops += [(op, recurrent) for op in _recurrent(model, layer, plan, tokens)]
        ops += [(op, count * model.fed) for op in _feed_forward(model, layer, plan, tokens, skew)]
    # Embedding: one row per token.
    ops.append((_pass(4.0 * tokens * model.workload.d_model), 1.0))
    return ops


def head_ops(model: ServedModel, plan: EnginePlan, sequences: int) -> Counted:
    """Vocabulary projection, and the passes of sampling over the logits of ``sequences``."""
    w = model.workload
    n = ceil(w.vocab / plan.tp)
    logits = Op("linear", (sequences, n, w.d_model), w.dtype)
    # Logits in f32: written, read by softmax or top-k, read again.
    return [(logits, 1.0), (_pass(12.0 * sequences * n), 1.0)]


def prefill_ops(
    model: ServedModel, plan: EnginePlan, sequences: int, tokens: int, past: int
) -> Counted:
    """Attention of ``sequences`` chunks of ``tokens``, each after ``past`` earlier tokens."""
    ops: Counted = []
    for layer, count in _attending(model):
        heads, groups = _heads(layer, plan)
        total = past + tokens
        if layer.kv_lora:
            op = _latent(layer, heads, sequences, tokens, total, model.cache)
        else:
            shape = (sequences, heads, groups, layer.head, layer.value, tokens, total, 1)
            window = layer.window if layer.window < total else 0
            op = Op("attention", shape, cache=model.cache, window=window)
        ops.append((op, count))
    return ops


def decode_ops(model: ServedModel, plan: EnginePlan, batch: int, length: int) -> Counted:
    """Attention of one new token for each of ``batch`` sequences of ``length`` tokens."""
    ops: Counted = []
    for layer, count in _attending(model):
        heads, groups = _heads(layer, plan)
        seen = min(length, layer.window) if layer.window else length
        if layer.kv_lora:
            op = _latent(layer, heads, batch, 1, seen, model.cache)
        else:
            shape = (batch, heads, groups, layer.head, layer.value, 1, seen, 1)
            op = Op("attention", shape, cache=model.cache)
        ops.append((op, count))
    if model.linear_layers:
        # The state is read and written (Yang et al., Gated Delta Networks, 2025).
        state = 2.0 * STATE_BYTES * batch * model.recurrent.state / plan.tp
        ops.append((_pass(state), float(model.linear_layers)))
    return ops


def exchanges(model: ServedModel, plan: EnginePlan, tokens: int) -> list[Exchange]:
    """Collectives of a pass over ``tokens`` on each attention rank.

    The token exchange of wide engines is not included; see :func:`dispatched`.
    """
    w = model.workload
    size = 2.0 * tokens * w.d_model
    moe = model.fed * sum(count for layer, count in kinds_of(w).items() if layer.experts)
    found = []
    if plan.tp > 1:
        # After attention, and after the feed-forward (Shoeybi et al., Megatron-LM, 2019, section
        # 3). The latter also combines experts, unless attention is data-parallel (all-to-all).
        reduces = (1.0 + model.fed) * w.layers - (moe if plan.dp > 1 else 0.0)
        found.append(Exchange("all_reduce", size, plan.tp, reduces))
    if plan.dp > 1 and moe and not plan.wide:
        # Tokens are sent to the ranks of their experts and back, at most once per rank.
        copies = min(w.top_k, plan.ranks)
        found.append(Exchange("alltoall", size * copies / plan.tp, plan.ranks, 2.0 * moe))
    if plan.pp > 1:
        found.append(Exchange("send_recv", size, 2, plan.pp - 1.0))
    return found


def launches(model: ServedModel, plan: EnginePlan) -> float:
    """Kernels that a prefill pass launches when no graph replays them."""
    counted = [*token_ops(model, plan, 1), *head_ops(model, plan, 1)]
    counted += prefill_ops(model, plan, 1, 2, 0)
    kernels = sum(times * _kernels(op) for op, times in counted)
    return kernels + sum(sent.times for sent in exchanges(model, plan, 1))


def _kernels(op: Op) -> int:
    """Kernels of an operator; narrow activations add a quantisation kernel to each product."""
    products, others = _KERNELS.get(op.family, (0, 1))
    narrow = products > 0 and FORMATS[op.dtype].activation_bits < 16
    return products * (1 + narrow) + others


def dispatched(
    model: ServedModel, plan: EnginePlan, tokens: int, skew: float, links: Links, *, direct: bool
) -> float:
    """Seconds per pass in which a wide engine dispatches tokens to experts and combines results.

    Args:
        model: Served model.
        plan: Parallelism of the engine; 0 seconds if it is not wide.
        tokens: Tokens on each attention rank.
        skew: Standard deviation of the logarithms of expert loads.
        links: Links between the ranks.
        direct: Whether low-latency kernels are used (:mod:`.token_exchange`).
    """
    w = model.workload
    layers = model.fed * sum(count for layer, count in kinds_of(w).items() if layer.experts)
    if not plan.wide or not layers:
        return 0.0
    mean = tokens * plan.dp * w.top_k / plan.ep
    # The busiest rank receives more than the others send.
    more = busiest(mean, w.experts, plan.ep, plan.redundant, skew) / plan.tp
    bits = FORMATS[model.expert_weights].activation_bits
    return layers * sum(
        exchange_seconds(
            links, plan.ranks, more * tokens * one, w.top_k, w.expert_boxes, direct=direct
        )
        for one in row_bytes(w.d_model, bits)
    )


def _attending(model: ServedModel) -> list[tuple[Workload, float]]:
    """Kinds of layers, each with the number of layers that attend over a KV cache."""
    share = 1.0 - model.linear_layers / model.workload.layers
    merged: dict[tuple[object, ...], tuple[Workload, float]] = {}
    for layer, count in kinds_of(model.workload).items():
        # Layers that differ only in their feed-forward have the same attention.
        key = (layer.window, layer.heads, layer.groups, layer.head)
        known = merged.get(key, (layer, 0.0))
        merged[key] = (known[0], known[1] + count * share)
    return list(merged.values())


def _heads(layer: Workload, plan: EnginePlan) -> tuple[int, int]:
    """Query heads, and key-value heads, on one device."""
    heads = ceil(layer.heads / plan.tp)
    # With more ranks than key-value heads, each rank holds a copy of one.
    return heads, min(heads, max(1, ceil(layer.groups / plan.tp)))


def _latent(layer: Workload, heads: int, batch: int, queries: int, keys: int, cache: str) -> Op:
    """Latent attention: absorbed for a single query, else expanded to the keys of each head."""
    latent, rotated = layer.kv_lora, layer.rope_dim
    if queries == 1:
        shape = (batch, heads, 1, latent + rotated, latent, 1, keys, 1)
        return Op("attention", shape, variant=ABSORBED, cache=cache)
    shape = (batch, heads, heads, layer.head + rotated, layer.value, queries, keys, 1)
    return Op("attention", shape, variant=EXPANDED, cache=cache)


def _pass(moved: float) -> Op:
    return Op("move", (max(1, round(moved)),))


def _attention_products(
    model: ServedModel, layer: Workload, plan: EnginePlan, tokens: int
) -> list[Op]:
    w, dtype = layer, model.attention_format
    heads, groups = _heads(w, plan)
    d = w.d_model
    # Two norms with fused residual additions: each reads and writes both tensors.
    ops = [_pass(8.0 * tokens * d)] * 2
    if w.kv_lora:
        query = heads * (w.head + w.rope_dim)
        narrow = w.kv_lora + w.rope_dim
        if w.q_lora:
            # Both down-projections run as one product.
            ops.append(Op("linear", (tokens, w.q_lora + narrow, d), dtype))
            ops.append(Op("linear", (tokens, query, w.q_lora), dtype))
        else:
            ops.append(Op("linear", (tokens, query + narrow, d), dtype))
        # Absorbed into queries and results; prefill expands keys and values from the latent at the
        # same cost.
        ops.append(Op("bmm", (heads, tokens, w.kv_lora, w.head), "bf16"))
        ops.append(Op("bmm", (heads, tokens, w.value, w.kv_lora), "bf16"))
    else:
        inner = w.head * (heads + 2 * groups)
        ops.append(Op("linear", (tokens, inner, d), dtype))
        # Rotary embedding, norms of queries and keys, and writing the cache.
        ops.append(_pass(4.0 * tokens * inner))
    ops.append(Op("linear", (tokens, d, heads * w.value), dtype))
    return ops


def _recurrent(model: ServedModel, layer: Workload, plan: EnginePlan, tokens: int) -> list[Op]:
    """Recurrent layer: projections of queries, keys, values and gates, scan, and output."""
    d, dtype, own = layer.d_model, model.attention_format, model.recurrent
    inner, outer = ceil(own.inner / plan.tp), ceil(own.outer / plan.tp)
    return [
        *([_pass(8.0 * tokens * d)] * 2),
        Op("linear", (tokens, inner, d), dtype),
        _pass(2.0 * SCAN_PASSES * tokens * inner),
        Op("linear", (tokens, d, outer), dtype),
    ]


def _feed_forward(
    model: ServedModel, layer: Workload, plan: EnginePlan, tokens: int, skew: float | None
) -> list[Op]:
    w = layer
    if not w.experts:
        return _dense(w, plan, tokens, w.d_ff, model.weights)
    # Experts see the tokens of all attention ranks.
    every = tokens * plan.dp
    # Kernel models of experts assume three matrices (gated); scale the width for two.
    width = w.d_ff * w.matrices // 3
    loading = _loading(every, w.top_k, w.experts, plan.ep)
    shape = (loading, w.d_model, width, w.top_k, w.experts, plan.moe_tp, plan.ep)
    experts = Op("moe", shape, model.expert_weights, skew=ROUTING_SKEW)
    if plan.wide and skew is not None:
        # Rows on the busiest rank are sorted by local expert; each row goes to one expert.
        mean = every * w.top_k / plan.ep
        rows = ceil(mean * busiest(mean, w.experts, plan.ep, plan.redundant, skew))
        held = round(plan.experts_held(w.experts))
        shape = (rows, w.d_model, width, 1, held, plan.moe_tp, 1)
        experts = Op("moe", shape, model.expert_weights, variant=DISPATCHED)
    ops = [Op("linear", (tokens, w.experts, w.d_model), "bf16"), experts]
    if w.shared_experts:
        ops += _dense(w, plan, tokens, w.shared_experts * w.d_ff, model.weights)
    return ops


@lru_cache(maxsize=4096)
def _loading(tokens: int, top_k: int, experts: int, ranks: int) -> int:
    """Tokens for which the power law of the kernel tables gives the busiest rank's measured load.

    The largest load of the power law grows with the tokens, that of measured expert loads does
    not: for 65,536 tokens of DeepSeek-R1 over eight ranks it is 1.8 and 1.4 times the mean.
    """
    if ranks == 1:
        return tokens
    draw = (np.array([float(n)]) for n in (tokens, top_k, experts, ranks, ROUTING_SKEW))
    mean = tokens * top_k / ranks
    power = float(busy_rank(*draw)[0][0]) / mean
    return max(1, round(tokens * min(1.0, busiest(mean, experts, ranks, 0, EXPERT_SKEW) / power)))


def _dense(w: Workload, plan: EnginePlan, tokens: int, width: int, dtype: str) -> list[Op]:
    inner = ceil(width / plan.tp)
    wide = inner * (w.matrices - 1)
    return [
        Op("linear", (tokens, wide, w.d_model), dtype),
        _pass(2.0 * tokens * (wide + inner)),
        Op("linear", (tokens, w.d_model, inner), dtype),
    ]
