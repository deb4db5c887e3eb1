"""Physics of fused attention: prefill, decode, encoder and multi-head latent attention."""

from __future__ import annotations

import numpy as np

from .attention_decode import decode
from .attention_kernels import TENSORRT, Attention, RowKernels, Tiles
from .columns import OpTable
from .op import attention_flops
from .physics import (
    Physics,
    combine,
    fill,
    fitted,
    flags,
    least_seconds,
    log2,
    logs,
    other_vendor,
    quantised,
    resident_share,
    stream_seconds,
)
from .schema import DTYPES

FIT = fitted("prefill")

#: Query rows of a tile (FlashAttention-2: Dao, 2023, section 3.3), and granularity in keys at which
#: masked keys are skipped.
ROWS, KEYS = 128.0, 32.0
#: Width of an absorbed head: latent keys (512 and 64 rotary elements) plus latent values (the 512)
#: (DeepSeek-V2, 2024).
LATENT_WIDTH = 512 + 64 + 512


def visible_pairs(q_len: np.ndarray, kv_len: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Count the (query, key) pairs of causal attention over the last ``q_len`` positions.

    Query ``i`` of ``q_len`` sees ``min(kv_len - q_len + 1 + i, window)`` keys; a window of 0 means
    no window. The sum grows arithmetically until the window is reached and is constant afterwards.
    """
    first = kv_len - q_len + 1
    reach = np.where(window > 0, window, np.inf)
    growing = np.clip(reach - first + 1, 0, q_len)
    series = growing * (2 * first + growing - 1) / 2
    # Without a window `growing` equals q_len: the inner `where` avoids 0 · inf, which is NaN.
    return np.asarray(series + (q_len - growing) * np.where(np.isinf(reach), 0.0, reach))


def attention(table: OpTable) -> Physics:
    """Estimate attention over ``batch`` sequences with the heads of one tensor-parallel rank."""
    batch, heads, groups, d_key, d_value, q_len, kv_len, window = table.numbers(
        "batch", "q_heads", "kv_heads", "head_dim", "v_head_dim", "q_len", "kv_len", "window"
    )
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    one = table.family.startswith("graph/generation")
    latent = one and table.family.endswith("mla")
    causal = table.columns["causal"] == 1
    keys = np.where(window > 0, np.minimum(kv_len, window), kv_len)
    pairs = keys if one else np.where(causal, visible_pairs(q_len, kv_len, window), q_len * keys)
    flops = attention_flops(batch, heads, pairs, d_key + d_value)
    # The KV cache is bf16 unless the table specifies fp8. Queries and results always have 16 bits.
    kv_width = table.mapped("kv_dtype", {"fp8": 1.0}, 2.0)
    cached = batch * groups * (keys if one else kv_len) * kv_width
    # In latent decode, values are part of the latent keys, so they are read once.
    kv_bytes = cached * (d_key if latent else d_key + d_value)
    moved = batch * heads * q_len * (d_key + d_value) * 2 + kv_bytes
    # Benchmarks reuse their buffers, so a small KV cache stays in L2 from call to call.
    resident = resident_share(moved, mc.cache, 1.15, 0.15)
    t_memory = stream_seconds(moved, resident, mc)
    work = Attention(
        table,
        mc,
        peak,
        batch,
        heads,
        groups,
        d_key,
        d_value,
        q_len,
        kv_len,
        window,
        keys,
        pairs,
        flops,
        kv_width,
        resident,
        t_memory,
        table.is_("backend", "trtllm"),
        RowKernels(table),
    )
    blocks, split, t_tiles, t_blocks, t_both, t_extra, floor = (
        decode(work, latent) if one else _prefill(work, causal)
    )
    # Intel's Arc B60 is the only non-NVIDIA device with such rows: one rough factor covers it.
    floor = floor * other_vendor(table, 3.0)
    base = floor + t_extra + t_both
    repeat = work.repeat
    t_compute = flops / peak
    waves = blocks * split / mc.cores
    features = {
        **flags(table, DTYPES["attention"]),
        "kv_fp8": (kv_width == 1) * 1.0,
        # Contribution of each part to the estimate, as for products (gemm.py).
        **logs(tiles_base=t_tiles / base, memory_base=t_memory / base),
        "extra_base": t_extra / base,
        **logs(compute_base=t_compute / base, blocks_base=t_blocks / base),
        "floor_base": floor / base,
        # How blocks and splits occupy the device.
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=waves),
        "wave_fill": fill(waves),
        "log_split": log2(split),
        "resident": resident,
        "log_footprint_cache": np.clip(log2(moved / mc.cache), -8, 6),
        # Sizes, for libraries' dispatch rules: many switch kernels at some number of heads or keys.
        **logs(batch=batch, heads=heads, groups=groups, q_len=q_len, kv_len=kv_len),
        **logs(keys=keys, repeat=repeat),
        "repeat": repeat,
        **logs(sequences=batch * groups),
        "head_dim": d_key / 64,
        "v_head_dim": d_value / 64,
        "window": log2(1 + window),
        # Fraction of keys inside the window, and of pairs that the mask leaves.
        "seen_share": keys / kv_len,
        "pair_share": pairs / (q_len * kv_len),
        "q_fill": q_len / (np.ceil(q_len / ROWS) * ROWS),
        **logs(tokens=batch * q_len, pairs=batch * heads * pairs, steps=np.ceil(keys / KEYS)),
        **_waves(batch, heads, groups, q_len, mc.cores),
        "log_kv_cache": np.clip(log2(kv_bytes / mc.cache), -10, 8),
    }
    return Physics(
        base,
        t_compute,
        least_seconds(moved, resident, mc),
        floor,
        flops,
        moved,
        features,
        specific=("log_kv_cache",),
        keys=(
            *("log_tiles_base", "log_memory_base", "floor_base", "log_keys", "log_q_len"),
            *("log_repeat", "log_sequences", "head_dim"),
        ),
    )


def _waves(
    batch: np.ndarray, heads: np.ndarray, groups: np.ndarray, q_len: np.ndarray, cores: np.ndarray
) -> dict[str, np.ndarray]:
    """Return wave counts of query tiles, per head and with the heads of a group packed together.

    Both are features because it is not always known which of the two a kernel uses.
    """
    columns = {}
    for rows in (64, 128):
        own = batch * heads * np.ceil(q_len / rows) / cores
        packed = batch * groups * np.ceil(q_len * heads / groups / rows) / cores
        columns[f"log_waves_{rows}"], columns[f"wave_fill_{rows}"] = log2(own), fill(own)
        columns[f"log_packed_{rows}"], columns[f"packed_fill_{rows}"] = log2(packed), fill(packed)
    return columns | {"sequence_fill": fill(batch * groups / cores)}


def _prefill(work: Attention, causal: np.ndarray) -> Tiles:
    """Split prefill into tiles of 128 query rows, in waves over the cores.

    Keys and values are written to the KV cache beforehand.
    """
    w, mc, kernel = work, work.mc, work.kernel
    sharing = np.where(_packs_heads(w), w.repeat, 1.0)
    # Packing makes the heads of a group rows of one tile, which fills the tiles of short queries.
    blocks = w.batch * w.heads / sharing * np.ceil(w.q_len * sharing / ROWS)
    span = np.where(causal, np.minimum(ROWS, w.q_len), 0.0)
    seen = visited_keys(w.pairs / w.q_len, span, w.keys, w.window)
    narrow = np.where(w.table.is_("dtype", "fp8"), FIT.narrow, 1.0)
    products = 2 * _width(work) / (w.peak / mc.cores) / kernel("products") / narrow
    # Products and exponentials add up: within a tile, softmax waits for the first product and the
    # second product waits for softmax. Each (query, key) pair takes one exponential.
    pair = products + kernel("exponential") / (_lanes(w.table) * mc.clock)
    start = kernel("prefill_block") / mc.clock
    mean, most = start + ROWS * seen * pair, start + ROWS * _longest(work, causal, seen) * pair
    waves = blocks / mc.cores
    t_tiles = np.maximum(quantised(waves, 0.5), 1.0) * mean
    # Tiles at the end of a causal sequence see all keys: one of them is a lower bound on the time,
    # and those that start late delay the end.
    t_tiles = np.maximum(t_tiles + FIT.tail * np.minimum(waves, 1.0) * (most - mean), most)
    t_blocks = waves * start
    floor = FIT.prefill_s * kernel("prefill_floor") + FIT.prefill_floor / mc.clock
    floor = floor * np.where(kernel.made, FIT.prefill_made, 1.0)
    floor = floor * np.where(w.kv_width == 1, FIT.fp8_cache, 1.0)
    t_both = combine(t_tiles, w.t_memory)
    split = np.ones(len(blocks))
    return Tiles(blocks, split, t_tiles, t_blocks, t_both, _cache_write(work), floor)


def _longest(work: Attention, causal: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the keys that the longest tile reads, shape ``(n,)``."""
    return np.where(causal, np.maximum(seen, work.keys + KEYS / 2), seen)


def _width(work: Attention) -> np.ndarray:
    """Return the multiply-adds per (query, key) pair, shape ``(n,)``.

    SGLang also prefills with latent keys, except with TensorRT-LLM's kernels on data-centre
    Blackwell (``trtllm_mla``), which receive the keys of each head.
    """
    latent = work.table.family.endswith("mla") & work.table.is_("backend", "sglang")
    latent &= ~work.kernel.is_(*TENSORRT)
    padded = work.kernel.padded(work.d_key) + work.kernel.padded(work.d_value)
    return np.asarray(np.where(latent, LATENT_WIDTH, padded))


def _lanes(table: OpTable) -> np.ndarray:
    """Return the special-function lanes per core, shape ``(n,)``."""
    ultra = table.is_on(lambda device: device.rules.fast_exponentials)
    return np.where(ultra, FIT.exponentials_ultra, FIT.exponentials)


def _packs_heads(work: Attention) -> np.ndarray:
    """Return where query heads that share keys are packed into one tile, bool, shape ``(n,)``.

    FlashAttention 2 packs them only for a single query.
    """
    table = work.table
    always = table.mentions("kernel", "fa3", "fa4", "flashinfer", "fiprefill", "fidecode")
    always |= table.is_("backend", "sglang") & table.mentions("kernel", "flash_attention")
    never = work.kernel.is_(*TENSORRT, "triton")
    return np.asarray(~never & (always | (work.q_len == 1)))


def visited_keys(
    mean: np.ndarray, span: np.ndarray, keys: np.ndarray, window: np.ndarray
) -> np.ndarray:
    """Count the keys that a tile of queries reads, including masked ones at its edges, ``(n,)``.

    Args:
        mean: Mean number of keys visible to a query.
        span: Positions that the tile spans; 0 without a mask.
        keys: Keys visible to the last query.
        window: Size of the sliding window; 0 for none.
    """
    # A causal tile computes the square on the diagonal, half of which is masked, except for the
    # steps that are masked entirely. Under a window the far edge is masked as well, and both ends
    # fall inside tiles of keys.
    diagonal = np.maximum(span - KEYS, 0.0) / 2
    edge = np.where(window > 0, np.minimum(span, keys) + KEYS, diagonal)
    return np.asarray(np.maximum(mean + edge, KEYS))


def _cache_write(work: Attention) -> np.ndarray:
    """Return the seconds to write keys and values to the KV cache, shape ``(n,)``.

    TensorRT-LLM also rewrites the queries.
    """
    w, width = work, work.d_key + work.d_value
    # The timed kernels of encoders and of latent attention do not include a cache write.
    if w.table.family != "graph/context_attention":
        return np.zeros(len(w.table))
    # Read in bf16, written in the format of the cache.
    rewritten = w.batch * w.groups * w.kv_len * width * (2 + w.kv_width)
    rewritten = rewritten + np.where(w.trt, 2.0, 0.0) * w.batch * w.heads * w.q_len * width
    return FIT.scattered * stream_seconds(rewritten, w.resident, w.mc)
