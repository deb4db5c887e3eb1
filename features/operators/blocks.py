"""Physics of whole layers, mixed batches and recent kinds of attention, as sequences of stages.

These operators are several kernels, or one kernel over sequences of different lengths. Each becomes
a few stages with matrix work, bytes and a serial part; a stage takes the soft maximum of the three,
and the stages and a fixed cost add up. How libraries deviate from that is learned
(docs/operators.md). No feature names a vendor: work is expressed per core, per cache and per cycle,
so GPUs and TPUs share one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .attention import ROWS, visible_pairs
from .columns import OpTable
from .op import attention_flops
from .physics import (
    Physics,
    combine,
    fill,
    fitted,
    least_seconds,
    log2,
    logs,
    quantised,
    resident_share,
    stream_seconds,
)
from .schema import BLOCK_FLAGS, DTYPES
from .tiles import grouped_tiles

FIT = fitted("blocks")

#: Timing method that includes the host's launches.
HOST = "cuda_event"
#: Width of an indexer's key (DeepSeek-V3.2, 2025).
INDEX_WIDTH = 128.0
#: Kernels, and passes over the tensor, of PyTorch's RMS norm (in f32, operator by operator) and
#: rotary embedding. Each kernel costs twice ``FIT.kernel``. Medians of rows of split ``train``,
#: which agree on H100, RTX 3090 and RTX A6000: norms of Llama take 25 to 28 µs for few tokens and 8
#: to 12 passes for many, LayerNorm of Phi 8 µs and 1.2 passes.
RMS_NORM, ROPE = (6.0, 8.5), (8.0, 6.0)


class _Stage(NamedTuple):
    """One stage of ``n`` operators, shape ``(n,)`` each: FLOPs, bytes, and seconds of tiles.

    ``serial`` is time that nothing else can hide, such as the stream of a single block (seconds).
    """

    flops: np.ndarray
    moved: np.ndarray
    tiles: np.ndarray
    serial: np.ndarray


def _staged(
    table: OpTable,
    stages: list[_Stage],
    kernels: float | np.ndarray,
    waves: np.ndarray,
    sizes: dict[str, np.ndarray],
    keys: tuple[str, ...],
) -> Physics:
    """Add up stages; the logarithms of ``sizes`` become features."""
    mc, peak = table.machine(), table.matrix_peak()
    flops, moved, tiles, serial = (np.asarray(sum(parts)) for parts in zip(*stages, strict=True))
    resident = resident_share(moved, mc.cache, 1.1, 0.3)
    memory = stream_seconds(moved, resident, mc)
    floor = kernels * np.where(table.mentions("kernel", HOST), FIT.host_s, FIT.kernel / mc.clock)
    # Stages run one after the other, so the limits of different stages add up.
    busy = [combine(s.tiles, stream_seconds(s.moved, resident, mc), s.serial) for s in stages]
    base = floor + np.asarray(sum(busy))
    compute = flops / peak
    features = {
        f"{column}_{word}": table.mentions(column, word) * 1.0
        for column, words in BLOCK_FLAGS.items()
        for word in words
    }
    features |= {f"dtype_{name}": table.is_("dtype", name) * 1.0 for name in DTYPES["blocks"]}
    features |= {
        **logs(
            tiles_base=tiles / base,
            memory_base=memory / base,
            serial_base=serial / base,
            compute_base=compute / base,
        ),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock),
        "log_intensity": np.clip(log2(compute / memory), -20, 12),
        **logs(waves=waves / mc.cores),
        "wave_fill": fill(waves / mc.cores),
        "resident": resident,
        "log_footprint_cache": np.clip(log2(moved / mc.cache), -12, 12),
        # Balance of the chip: matrix work per byte, and bytes per cycle and core.
        **logs(
            ridge=peak / mc.bandwidth,
            core_bandwidth=mc.bandwidth / mc.cores / mc.clock,
            core_peak=peak / mc.cores / mc.clock,
        ),
    }
    features |= {f"log_{name}": log2(1 + value) for name, value in sizes.items()}
    features |= {
        f"share_{place}": busy[place] / base for place in range(len(stages) if stages[1:] else 0)
    }
    return Physics(
        base,
        np.minimum(compute, base),
        least_seconds(moved, resident, mc),
        floor,
        flops,
        moved,
        features,
        specific=("log_ridge", "log_core_bandwidth", "log_core_peak"),
        keys=("log_tiles_base", "log_memory_base", "floor_base", *(f"log_{k}" for k in keys)),
    )


def _product(table: OpTable) -> Physics:
    """Estimate ``m`` tokens through a layer of ``n × k`` weights."""
    m, n, k = table.numbers("m", "n", "k")
    mc, none = table.machine(), np.zeros(len(table))
    seconds, tiles, _ = grouped_tiles([(np.ones(len(m)), m, n, k)], table.matrix_peak(), mc)
    moved = n * k * table.weight_bytes + m * k * table.activation_bytes + m * n * 2
    stage = _Stage(2 * m * n * k, moved, seconds, none)
    return _staged(table, [stage], 1.0, tiles, {"m": m, "n": n, "k": k}, ("m", "n", "k"))


def _pass(table: OpTable) -> Physics:
    """Estimate a pass that reads and writes ``rows × cols`` 16-bit elements once."""
    rows, cols = table.numbers("rows", "cols")
    mc, none = table.machine(), np.zeros(len(table))
    torch = table.is_("backend", "torch")
    own_norm = table.mentions("op", "norm") & ~table.mentions("distribution", "phi")
    kinds = [own_norm, table.mentions("op", "rope"), table.mentions("op", "emb")]
    kernels = np.where(torch, 2 * np.select(kinds, [RMS_NORM[0], ROPE[0], 1.0], 1.0), 1.0)
    # Kernels of a TPU program follow each other without a launch.
    on_tpu = table.is_on(lambda device: device.platform == "tpu")
    kernels = np.where(on_tpu, FIT.tpu_kernel, kernels)
    passes = np.where(torch, np.select(kinds, [RMS_NORM[1], ROPE[1], FIT.embedding], 1.0), 1.0)
    passes = np.where(table.mentions("op", "act"), FIT.gated, passes)
    moved = rows * cols * 4 * passes
    stage = _Stage(none, moved, moved / mc.vector, none)
    return _staged(table, [stage], kernels, rows, {"rows": rows, "cols": cols}, ("rows", "cols"))


def _streams(table: OpTable) -> Physics:
    """Estimate hyper-connections: each row mixes ``copies`` residual streams of width ``cols``."""
    rows, cols, copies = table.numbers("rows", "cols", "copies")
    mc, none = table.machine(), np.zeros(len(table))
    # Read the copies, write their mix; a small product computes the weights of the mix.
    width = copies * (copies + 2)
    one = np.ones(len(rows))
    seconds, *_ = grouped_tiles([(one, rows, width, copies * cols)], table.matrix_peak(), mc)
    moved = rows * cols * (2 * copies + 2) * 2 + copies * cols * width * 4
    stage = _Stage(2 * rows * width * copies * cols, moved, seconds, none)
    return _staged(table, [stage], 2.0, rows, {"rows": rows, "cols": cols}, ("rows", "cols"))


def _experts(table: OpTable) -> Physics:
    """Estimate one rank's gated experts: ``routed`` rows over ``experts / ep`` experts."""
    tokens, hidden, inter, topk, experts, ep, rows = table.numbers(
        "tokens", "hidden", "inter", "topk", "experts", "ep", "routed"
    )
    mc, none = table.machine(), np.zeros(len(table))
    local = np.maximum(experts / ep, 1)
    # Expected number of experts that receive a row when rows are assigned at random.
    active = np.maximum(local * -np.expm1(-rows / local), np.minimum(rows, 1))
    depth = np.ceil(rows / active)
    peak = table.matrix_peak()
    up, tiles, _ = grouped_tiles([(active, depth, 2 * inter, hidden)], peak, mc)
    down, *_ = grouped_tiles([(active, depth, hidden, inter)], peak, mc)
    streams = rows * (hidden * 4 + inter * 6) + tokens * hidden * 4
    moved = active * 3 * hidden * inter * table.weight_bytes + streams
    stage = _Stage(6 * rows * hidden * inter, moved, up + down, none)
    sizes = {"tokens": tokens, "hidden": hidden, "inter": inter, "topk": topk, "local": local}
    sizes |= {"depth": depth, "active": active, "routed": rows}
    return _staged(
        table, [stage], FIT.expert_kernels, tiles, sizes, ("depth", "active", "hidden", "inter")
    )


def _batch(table: OpTable) -> Physics:
    """Estimate one call over prefill chunks and decodes of two lengths, with one rank's heads."""
    heads, groups, width, batch, q_len, older, n, kv, n_big, kv_big = table.numbers(
        *("q_heads", "kv_heads", "head_dim", "batch", "q_len", "kv_prefill"),
        *("n_decode", "kv_decode", "n_decode_big", "kv_decode_big"),
    )
    mc, peak = table.machine(), table.matrix_peak()
    prefill = batch * visible_pairs(q_len, q_len + older, np.zeros(len(q_len)))
    kv, kv_big = np.where(n > 0, kv + 1, 0), np.where(n_big > 0, kv_big + 1, 0)
    decoded = n * kv + n_big * kv_big
    one = 2 * width * table.weight_bytes
    flops = [attention_flops(1.0, heads, pairs, 2 * width) for pairs in (prefill, decoded)]
    bytes_ = [
        batch * ((older + q_len) * groups * one + 2 * q_len * heads * width * 2),
        decoded * groups * one + 2 * (n + n_big) * heads * width * 2,
    ]
    # Core seconds per (query row, key) pair: two products and an exponential.
    pair = (
        4 * width / (peak / mc.cores) / FIT.attention_share + FIT.exponential * mc.cores / mc.vector
    )
    seen = np.where(q_len > 0, prefill / np.maximum(batch * q_len, 1) + ROWS / 2, 0)
    blocks = batch * heads * np.ceil(q_len / ROWS)
    tiles = np.maximum(quantised(blocks / mc.cores, 0.5), 1.0) * ROWS * seen * pair
    longest = np.maximum(np.where(q_len > 0, older + q_len, 0), np.maximum(kv, kv_big))
    # The same bytes per cycle and core as in attention.py.
    rate = np.maximum(FIT.core_rate, 1.5 * mc.bandwidth / mc.cores / mc.clock)
    streamed = decoded * groups * one / rate / mc.clock / mc.cores
    parted = [
        _Stage(flops[0], bytes_[0], tiles, 0 * tiles),
        _Stage(flops[1], bytes_[1], flops[1] / peak / 0.2, streamed),
    ]
    # A kernel for sequences of any length assigns a block of rows to each head of each sequence,
    # even for a decode's single row, and does not split the keys: the longest sequence sets the
    # time of a core (Dao, FlashAttention-2, 2023, section 3.2).
    rows = batch * heads * np.ceil(q_len / FIT.unsplit_rows)
    count = rows + (n + n_big) * heads
    keys = rows * (older + q_len / 2) + heads * decoded
    step = FIT.unsplit_rows * pair
    waves = quantised(count / mc.cores, 0.5) * keys / np.maximum(count, 1) * step
    unsplit = table.is_("backend", "vllm") | table.is_("backend", "flash-attn2")
    whole = [
        _Stage(flops[0] + flops[1], bytes_[0] + bytes_[1], waves, longest * step),
        _Stage(*[0 * tiles] * 4),
    ]
    stages = [
        _Stage(*(np.where(unsplit, w, p) for w, p in zip(ours, theirs, strict=True)))
        for ours, theirs in zip(whole, parted, strict=True)
    ]
    sizes = {
        "heads": heads, "groups": groups, "repeat": heads / groups, "width": width,
        "q_len": q_len, "older": older, "prefill": prefill, "decodes": n, "kv": kv,
        "big": n_big, "kv_big": kv_big, "decoded": decoded, "streams": (n + n_big) * groups,
        "longest": longest, "chunks": batch, "own_blocks": count / mc.cores,
        "own_keys": keys / mc.cores,
    }  # fmt: skip
    return _staged(table, stages, 2.0, count, sizes, ("q_len", "kv", "decodes", "heads"))


def _sparse(table: OpTable) -> Physics:
    """Estimate projections, an indexer over compressed keys, and attention to the selected keys."""
    batch, heads, q_len, older, ratio, latent, groups, index, chosen, window, shared, each = (
        table.numbers(
            *("batch", "heads", "q_len", "kv_history", "ratio", "latent", "groups"),
            *("index_heads", "chosen", "window", "shared_weights", "head_weights"),
        )
    )
    mc, peak, none = table.machine(), table.matrix_peak(), np.zeros(len(table))
    tokens, ratio = batch * q_len, np.maximum(ratio, 1)
    weights = shared + heads * each
    narrow = table.mapped("distribution", {"fp8_block": 1.0, "nvfp4": 0.56}, 2.0)
    # All projections as one product with as many weights, 4096 deep.
    deep = np.full(len(tokens), 4096.0)
    products = [(np.ones(len(tokens)), tokens, weights / deep, deep)]
    seconds, tiles, _ = grouped_tiles(products, peak, mc)
    first = _Stage(
        2 * tokens * weights,
        np.where(weights > 0, weights * narrow + tokens * 4096 * 8, 0),
        np.where(weights > 0, seconds, 0),
        none,
    )
    pairs = batch * visible_pairs(q_len, q_len + older, none) / ratio
    logits = np.where(index > 0, pairs, 0)
    scored = 2 * logits * index * INDEX_WIDTH
    kv = (older + q_len) / ratio
    # Scores are written in f32 and read by the top-k selection.
    second = _Stage(
        scored,
        np.where(index > 0, batch * kv * INDEX_WIDTH + logits * 8, 0),
        scored / (2 * peak) / FIT.attention_share,
        none,
    )
    mean = pairs / np.maximum(tokens, 1)
    seen = np.where(chosen > 0, np.minimum(mean, chosen) + np.minimum(window, older + q_len), 0)
    third = _Stage(
        attention_flops(tokens, heads, seen, 2 * latent),
        np.where(chosen > 0, _read(table, batch, tokens, seen, kv + window, latent * groups), 0),
        attention_flops(tokens, np.maximum(heads, 16), seen, 2 * latent)
        / peak
        / FIT.attention_share,
        none,
    )
    sizes = {
        "batch": batch, "heads": heads, "q_len": q_len, "older": older, "ratio": ratio,
        "tokens": tokens, "weights": weights, "pairs": pairs, "seen": seen, "index": index,
        "kv": kv, "cached": batch * kv, "latent": latent, "chosen": chosen,
        "own_tokens": tokens / mc.cores, "past_choice": mean / np.maximum(chosen, 1),
    }  # fmt: skip
    kernels = np.where(weights > 0, FIT.block_kernels, 1.0)
    return _staged(
        table, [first, second, third], kernels, tiles, sizes, ("q_len", "older", "heads", "batch")
    )


def _read(
    table: OpTable,
    batch: np.ndarray,
    tokens: np.ndarray,
    seen: np.ndarray,
    kv: np.ndarray,
    width: np.ndarray,
) -> np.ndarray:
    """Return the bytes of keys that sparse attention reads, at most all keys a few times."""
    size = table.mapped("kv_dtype", {"fp8": 1.0}, 2.0)
    # Tokens of a sequence select similar keys, so the cache serves what several of them read.
    return np.asarray(np.minimum(tokens * seen, 8 * batch * np.maximum(kv, 1)) * width * size)


def _scan(table: OpTable) -> Physics:
    """Estimate linear attention: a causal convolution, or a scan with one state per head."""
    batch, length, key_heads, key, value_heads, value, chunk = table.numbers(
        "batch", "seq_len", "key_heads", "key_dim", "value_heads", "value_dim", "chunk"
    )
    mc = table.machine()
    peak, tokens = table.matrix_peak(), batch * length
    channels = 2 * key_heads * key + value_heads * value
    conv = table.mentions("kernel", "conv1d")
    chunk = np.where(chunk > 0, np.minimum(chunk, length), np.minimum(64, length))
    # Within a chunk: scores and their products; between chunks: states read and written (Yang et
    # al., Gated Delta Networks, 2024; Dao and Gu, Mamba-2, 2024).
    per_token = chunk * (2 * key + value) + 2 * key * value
    flops = np.where(conv, 8 * tokens * channels, 2 * tokens * value_heads * per_token)
    state = np.where(conv, batch * channels * 8, batch * value_heads * key * value * 8)
    inside = tokens * (channels + value_heads * value) * 2
    blocks = np.where(conv, tokens * channels / 4096, batch * value_heads)
    turns = np.ceil(length / chunk) * np.maximum(1, blocks / mc.cores)
    moved = state + np.where(conv, 2 * tokens * channels * 2, 2 * inside)
    # Chips with more bandwidth per core than a core can stream do not reach their full bandwidth.
    streamed = moved / np.where(conv, FIT.conv_rate, FIT.core_rate) / mc.cores / mc.clock
    steps = np.where(conv | (length == 1), 0, turns * FIT.chunk_step / mc.clock)
    tiles = np.where(conv, flops / mc.vector, flops / peak / FIT.scan_share)
    stage = _Stage(flops, moved, tiles, np.maximum(steps, streamed))
    sizes = {
        "batch": batch, "length": length, "tokens": tokens, "channels": channels,
        "key_heads": key_heads, "value_heads": value_heads, "value": value, "key": key,
        "chunk": chunk, "blocks": blocks, "own_blocks": blocks / mc.cores,
        "own_tokens": tokens / mc.cores,
    }  # fmt: skip
    return _staged(table, [stage], 1.0, blocks, sizes, ("batch", "length", "channels"))


#: Estimator by family.
PHYSICS: dict[str, Callable[[OpTable], Physics]] = {
    "layer/product": _product,
    "layer/pass": _pass,
    "layer/experts": _experts,
    "batch/attention": _batch,
    "graph/sparse": _sparse,
    "graph/scan": _scan,
    "graph/streams": _streams,
}
