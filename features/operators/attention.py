"""Physics of fused attention: prefill, decode, encoder and multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention_kernels import LatentBlocks, RowKernels
from .columns import Machine, OpTable
from .flops import attention_flops
from .physics import (
    Physics,
    combine,
    fill,
    flags,
    least_seconds,
    log2,
    non_nvidia,
    quantised,
    resident_share,
    stream_seconds,
)

# Constants are fits to the tensor-core pack's own rows (split `train`) of all its chips, as are
# those of kernels (attention_kernels.py), so their figures on left-out chips are not entirely
# blind (docs/operators.md).
#: Seconds and cycles of a prefill and of a decode without work. Kernels made for asynchronous
#: copies take longer to set up a prefill, and less for a decode; an fp8 cache costs a conversion.
PREFILL_S, PREFILL_FLOOR, DECODE_S, DECODE_FLOOR = 3.7e-6, 4600.0, 3.7e-6, 7700.0
PREFILL_MADE, DECODE_MADE, FP8_CACHE = 1.28, 0.85, 1.24
#: Query rows and keys of a tile: those of FlashAttention-2 (Dao, 2023, section 3.3), and the step
#: in which masked keys are skipped.
ROWS, KEYS = 128.0, 32.0
#: What 8-bit products reach of the share of others: values are transposed on the way (Shah et al.,
#: FlashAttention-3, 2024, section 3.3).
NARROW = 0.68
#: Exponentials of a core in a cycle, one for each (query, key) pair: special-function lanes (CUDA
#: C++ Programming Guide, throughput of native arithmetic instructions), of which Blackwell Ultra
#: has twice as many. They do not overlap with the products of their own tile (Shah et al., 2024).
EXPONENTIALS, EXPONENTIALS_ULTRA = 16.0, 32.0
#: How much the longest causal tiles delay the end: in units of what they take beyond the mean.
TAIL = 1.5
#: Traffic of writing the cache, over its bytes: paged rows are scattered.
SCATTERED = 1.4
#: Keys of the smallest split of a decode, and seconds to merge the partial results (splits over the
#: keys: Dao et al., Flash-Decoding, 2023).
SPLIT, MERGE_S = 128.0, 4.5e-6
#: Bytes per cycle that one core can stream, and that it can where every query head reads the keys;
#: how many times its even share of the memory's bandwidth a core can stream; and the power of the
#: width beyond 128 by which wider heads lower the rate, since fewer of their tiles are in flight.
CORE_RATE, LONE_RATE, UNEVEN, WIDE = 16.5, 26.0, 1.2, 0.3
#: Share of the matrix peak of a decode's padded products.
DECODE_PRODUCTS = 0.25
#: Times that partial results are moved, and cycles of a core for one sequence.
PARTIALS, SEQUENCE = 4.0, 4000.0
#: Query heads of a group beyond which TensorRT-LLM has no grouped decode kernel.
MOST_GROUPED = 32
#: Latent keys and values of an absorbed head, 512 and 64 rotary ones (DeepSeek-V2, 2024), of which
#: the values are the 512; the share of the matrix peak that a decode reaches with them; the floor
#: of TensorRT-LLM's kernels made for the chip over that of other decodes; and bytes that SGLang
#: moves to widen an element of an fp8 cache.
LATENT_WIDTH, LATENT_PRODUCTS, LATENT_FLOOR, WIDENED = 512 + 64 + 512, 0.6, 1.4, 9.0
#: The rate of a core over that with other keys, since latent values need no bytes of their own;
#: keys that a block reads at least; and the seconds of a merge over those of a kernel of its own.
#: Read off Hopper.
LATENT_RATE, LATENT_TILE, LATENT_MERGE = 1.6, 64.0, 0.2
#: Dtypes of queries and of the arithmetic, one flag each.
DTYPES = ("bf16", "fp8")


@dataclass(slots=True)
class _Work:
    """Attention of ``n`` rows as arrays of shape ``(n,)``; times in seconds."""

    table: OpTable
    mc: Machine
    peak: np.ndarray
    batch: np.ndarray
    heads: np.ndarray
    groups: np.ndarray
    d_key: np.ndarray
    d_value: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray
    window: np.ndarray
    keys: np.ndarray
    pairs: np.ndarray
    flops: np.ndarray
    kv_width: np.ndarray
    resident: np.ndarray
    t_memory: np.ndarray
    trt: np.ndarray
    kernel: RowKernels

    @property
    def repeat(self) -> np.ndarray:
        """Query heads that share keys."""
        return np.asarray(self.heads / self.groups)


class _Tiles(NamedTuple):
    """How the work is cut: blocks, their splits, and what all that costs in seconds.

    Tiles, blocks and memory overlap (``t_both``); what comes before or after is added.
    """

    blocks: np.ndarray
    split: np.ndarray
    t_tiles: np.ndarray
    t_blocks: np.ndarray
    t_both: np.ndarray
    t_extra: np.ndarray
    floor: np.ndarray


def visible_pairs(q_len: np.ndarray, kv_len: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Count the (query, key) pairs of causal attention over the last ``q_len`` positions.

    Query ``i`` of ``q_len`` sees ``min(kv_len - q_len + 1 + i, window)`` keys; a window of 0 means
    no window. The sum is an arithmetic series until the window is reached, and constant after.
    """
    first = kv_len - q_len + 1
    reach = np.where(window > 0, window, np.inf)
    growing = np.clip(reach - first + 1, 0, q_len)
    growing = np.minimum(growing, q_len)
    series = growing * (2 * first + growing - 1) / 2
    # Without a window `growing` is all of q_len: the inner `where` avoids 0 · inf, which is nan.
    return np.asarray(series + (q_len - growing) * np.where(np.isinf(reach), 0.0, reach))


def attention(table: OpTable) -> Physics:
    """Estimate attention over ``batch`` sequences with the heads of one rank."""
    batch, heads, groups, d_key, d_value, q_len, kv_len, window = table.numbers(
        "batch", "q_heads", "kv_heads", "head_dim", "v_head_dim", "q_len", "kv_len", "window"
    )
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    decode = table.family.startswith("graph/generation")
    latent = decode and table.family.endswith("mla")
    causal = table.columns["causal"] == 1
    keys = np.where(window > 0, np.minimum(kv_len, window), kv_len)
    pairs = keys if decode else np.where(causal, visible_pairs(q_len, kv_len, window), q_len * keys)
    flops = attention_flops(batch, heads, pairs, d_key + d_value)
    # The cache is bf16 unless the table says fp8. Queries and results are always 16 bits wide.
    kv_width = table.mapped("kv_dtype", {"fp8": 1.0}, 2.0)
    cached = batch * groups * (keys if decode else kv_len) * kv_width
    # In latent decode values are part of the latent keys, so they are read once.
    kv_bytes = cached * (d_key if latent else d_key + d_value)
    moved = batch * heads * q_len * (d_key + d_value) * 2 + kv_bytes
    # The benchmarks reuse the same buffers, so a small cache of keys stays in L2 from call to call.
    resident = resident_share(moved, mc.cache, 1.15, 0.15)
    t_memory = stream_seconds(moved, resident, mc)
    work = _Work(
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
        _decode(work, latent) if decode else _prefill(work, causal)
    )
    # Intel's Arc B60 is the only device of another vendor with such rows: one rough factor for it.
    floor = floor * np.where(non_nvidia(table) > 0, 3.0, 1.0)
    base = floor + t_extra + t_both
    repeat = work.repeat
    t_compute = flops / peak
    t_least = least_seconds(moved, resident, mc)
    waves = blocks * split / mc.cores
    features = {
        **flags(table, DTYPES),
        "kv_fp8": (kv_width == 1) * 1.0,
        # Shares of the parts in the estimate, as for products (gemm.py).
        "log_tiles_base": log2(t_tiles / base),
        "log_memory_base": log2(t_memory / base),
        "extra_base": t_extra / base,
        "log_compute_base": log2(t_compute / base),
        "log_blocks_base": log2(t_blocks / base),
        "floor_base": floor / base,
        "log_cycles": log2(base * mc.clock),
        "log_intensity": log2(t_compute / t_memory),
        # How blocks and splits occupy the device.
        "log_waves": log2(waves),
        "wave_fill": fill(waves),
        "log_split": log2(split),
        "resident": resident,
        "log_footprint_cache": np.clip(log2(moved / mc.cache), -8, 6),
        # Sizes, for the dispatch rules of libraries: many switch kernels at a number of heads or
        # keys.
        "log_batch": log2(batch),
        "log_heads": log2(heads),
        "log_groups": log2(groups),
        "log_q_len": log2(q_len),
        "log_kv_len": log2(kv_len),
        "log_keys": log2(keys),
        "log_repeat": log2(repeat),
        "repeat": repeat,
        "log_sequences": log2(batch * groups),
        "head_dim": d_key / 64,
        "v_head_dim": d_value / 64,
        "window": log2(1 + window),
        # Share of the keys that a window leaves, and of the pairs that the mask leaves.
        "seen_share": keys / kv_len,
        "pair_share": pairs / (q_len * kv_len),
        "q_fill": q_len / (np.ceil(q_len / ROWS) * ROWS),
        "log_tokens": log2(batch * q_len),
        "log_pairs": log2(batch * heads * pairs),
        "log_steps": log2(np.ceil(keys / KEYS)),
        **_waves(batch, heads, groups, q_len, mc.cores),
        "log_kv_cache": np.clip(log2(kv_bytes / mc.cache), -10, 8),
    }
    return Physics(
        base,
        np.maximum(t_compute, t_least),
        t_compute > t_least,
        floor,
        flops,
        moved,
        features,
        specific=("log_kv_cache",),
        keys=(
            "log_tiles_base",
            "log_memory_base",
            "floor_base",
            "log_keys",
            "log_q_len",
            "log_repeat",
            "log_sequences",
            "head_dim",
        ),
    )


def _waves(
    batch: np.ndarray, heads: np.ndarray, groups: np.ndarray, q_len: np.ndarray, cores: np.ndarray
) -> dict[str, np.ndarray]:
    """Return waves of query tiles, by head and with the heads of a group packed together.

    Both forms are features, since which of them a kernel uses is not always known.
    """
    columns = {}
    for rows in (64, 128):
        own = batch * heads * np.ceil(q_len / rows) / cores
        packed = batch * groups * np.ceil(q_len * heads / groups / rows) / cores
        columns[f"log_waves_{rows}"], columns[f"wave_fill_{rows}"] = log2(own), fill(own)
        columns[f"log_packed_{rows}"], columns[f"packed_fill_{rows}"] = log2(packed), fill(packed)
    return columns | {"sequence_fill": fill(batch * groups / cores)}


def _prefill(work: _Work, causal: np.ndarray) -> _Tiles:
    """Cut prefill into tiles of 128 query rows, in waves over the cores.

    Keys and values are written to the cache before.
    """
    w, mc, kernel = work, work.mc, work.kernel
    sharing = np.where(_packs_heads(w), w.repeat, 1.0)
    # Packing turns the heads of a group into rows of one tile, which fills tiles of short queries.
    blocks = w.batch * w.heads / sharing * np.ceil(w.q_len * sharing / ROWS)
    span = np.where(causal, np.minimum(ROWS, w.q_len), 0.0)
    seen = visited_keys(w.pairs / w.q_len, span, w.keys, w.window)
    narrow = np.where(w.table.is_("dtype", "fp8"), NARROW, 1.0)
    products = 2 * _width(work) / (w.peak / mc.cores) / kernel("products") / narrow
    # Products and exponentials add up: within a tile, softmax needs the first product and feeds the
    # second. Each (query, key) pair takes one exponential.
    pair = products + kernel("exponential") / (_lanes(w.table) * mc.clock)
    start = kernel("prefill_block") / mc.clock
    mean, most = start + ROWS * seen * pair, start + ROWS * _longest(work, causal, seen) * pair
    waves = blocks / mc.cores
    t_tiles = np.maximum(quantised(waves, 0.5), 1.0) * mean
    # The tiles at the end of a causal sequence see all keys: one of them is the least time, and
    # those that start late delay the end.
    t_tiles = np.maximum(t_tiles + TAIL * np.minimum(waves, 1.0) * (most - mean), most)
    t_blocks = waves * start
    floor = PREFILL_S * kernel("prefill_floor") + PREFILL_FLOOR / mc.clock
    floor = floor * np.where(kernel.made, PREFILL_MADE, 1.0)
    floor = floor * np.where(w.kv_width == 1, FP8_CACHE, 1.0)
    t_both = combine(t_tiles, w.t_memory)
    split = np.ones(len(blocks))
    return _Tiles(blocks, split, t_tiles, t_blocks, t_both, _cache_write(work), floor)


def _longest(work: _Work, causal: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the keys that the longest tile reads, shape ``(n,)``."""
    return np.where(causal, np.maximum(seen, work.keys + KEYS / 2), seen)


def _width(work: _Work) -> np.ndarray:
    """Return the multiply-adds of a (query, key) pair; SGLang prefills with latent keys, too."""
    latent = work.table.family.endswith("mla") & work.table.is_("backend", "sglang")
    padded = work.kernel.padded(work.d_key) + work.kernel.padded(work.d_value)
    return np.asarray(np.where(latent, LATENT_WIDTH, padded))


def _lanes(table: OpTable) -> np.ndarray:
    """Return the special-function lanes of a core, shape ``(n,)``."""
    ultra = [d.architecture == "blackwell-ultra" for d in table.devices]
    return table.of_device([EXPONENTIALS_ULTRA if u else EXPONENTIALS for u in ultra])


def _packs_heads(work: _Work) -> np.ndarray:
    """Return where query heads that share keys are rows of one tile, bool, shape ``(n,)``.

    FlashAttention 2 packs them only for a single query.
    """
    table = work.table
    always = table.says("kernel", "fa3", "fa4", "flashinfer", "fiprefill", "fidecode")
    always |= table.is_("backend", "sglang") & table.says("kernel", "flash_attention")
    never = work.trt | table.says("kernel", "triton")
    return np.asarray(always | (~never & (work.q_len == 1)))


def visited_keys(
    mean: np.ndarray, span: np.ndarray, keys: np.ndarray, window: np.ndarray
) -> np.ndarray:
    """Count the keys that a tile of queries reads, masked ones at its edges included, ``(n,)``.

    Args:
        mean: Keys visible to a query on average.
        span: Positions that the tile spans; 0 without a mask.
        keys: Keys visible to the last query.
        window: Of sliding attention; 0 is none.
    """
    # A causal tile computes the square on the diagonal but for steps that are masked altogether, of
    # which half is masked. Under a window the far edge is masked, too, and both ends fall within
    # tiles of keys.
    diagonal = np.maximum(span - KEYS, 0.0) / 2
    edge = np.where(window > 0, np.minimum(span, keys) + KEYS, diagonal)
    return np.asarray(np.maximum(mean + edge, KEYS))


def _cache_write(work: _Work) -> np.ndarray:
    """Return the seconds to write keys and values to the cache, shape ``(n,)``.

    TensorRT-LLM rewrites the queries, too.
    """
    w, width = work, work.d_key + work.d_value
    # The timed kernels of encoders and of latent attention do not include a cache write.
    if w.table.family != "graph/context_attention":
        return np.zeros(len(w.table))
    # Read in bf16, written in the cache's own type.
    rewritten = w.batch * w.groups * w.kv_len * width * (2 + w.kv_width)
    rewritten = rewritten + np.where(w.trt, 2.0, 0.0) * w.batch * w.heads * w.q_len * width
    return SCATTERED * stream_seconds(rewritten, w.resident, w.mc)


def _decode(work: _Work, latent: bool) -> _Tiles:
    """Cut decode into blocks of up to 64 query heads; split the keys for idle cores if it pays."""
    w, mc, kernel = work, work.mc, work.kernel
    sliding, many = _ungrouped(work, latent)
    blocks = w.batch * np.where(sliding | many, w.heads, w.groups * np.ceil(w.repeat / 64))
    cycles = kernel("decode_block")
    # One query for each head: the heads of a group are the rows of a product, padded to whole ones.
    least = kernel("rows")
    rows = np.ceil(w.repeat / least) * least
    padded = 2 * w.batch * w.groups * rows * w.keys * (w.d_key + w.d_value)
    # The faster of two ways counts: matrix units on padded rows, or the work without padding at 0.2
    # of the peak and a cost for each block. Read off the pack, as above.
    scalar = blocks / mc.cores * cycles / mc.clock + w.flops / w.peak / 0.2
    t_tiles = np.minimum(padded / w.peak / (LATENT_PRODUCTS if latent else DECODE_PRODUCTS), scalar)
    # On chips with more memory bandwidth for each core than that, a core streams more than its even
    # share.
    rate = CORE_RATE * kernel("rate")
    rate = np.maximum(rate, UNEVEN * mc.bandwidth / mc.cores / mc.clock)
    rate = np.where(many, LONE_RATE, rate)
    width = w.d_key if latent else w.d_key + w.d_value
    rate = rate * (LATENT_RATE if latent else np.minimum(1.0, 128 / w.d_key) ** WIDE)
    # An fp8 key is one byte in memory, but costs a core more, since it is widened there.
    tile = LATENT_TILE if latent else 1.0
    read = np.ceil(w.keys / tile) * tile
    streamed = read * np.maximum(w.kv_width, kernel("converted")) * width / rate
    memory = w.t_memory * kernel("stream")
    # Latent kernels of chips that none was made for have their own blocks, and a fixed split.
    own = LatentBlocks.of(w.table, kernel, w.batch, w.heads, w.keys, mc) if latent else None
    memory = memory * own.passes if own else memory

    def cut(split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        turns = np.maximum(quantised(blocks * split / mc.cores, 0.5), 1.0)
        serial = turns * (cycles + streamed / split) + w.batch / mc.cores * SEQUENCE
        serial = np.where(own.known, own.cycles, serial) if own else serial
        return serial / mc.clock, combine(t_tiles, memory, serial / mc.clock)

    whole_keys = own.known if own else np.zeros(len(w.table), bool)
    most = np.where(sliding | whole_keys, 1, np.maximum(1, w.keys / SPLIT))
    # As many splits as occupy the idle cores; more would only add partial results to merge.
    split = np.clip(mc.cores / blocks, 1, most)
    # Partial results are f32 (4 bytes); they stay in the cache between the two kernels.
    partial = w.batch * w.heads * split * w.d_value * 4 * PARTIALS / mc.cache_bandwidth
    # Kernels made for latent keys merge their parts in the same launch.
    merges = np.where(kernel.is_("trt-made") & latent, LATENT_MERGE, kernel("merge"))
    merge = MERGE_S * merges + partial
    (whole, t_whole), (parts, t_parts) = cut(np.ones(len(split))), cut(split)
    pays = (split > 1) & (t_parts + merge < t_whole)
    floor = DECODE_S * kernel("decode_floor") + DECODE_FLOOR / mc.clock
    floor = floor * np.where(kernel.made, DECODE_MADE, 1.0)
    floor = floor * np.where(w.kv_width == 1, kernel("fp8_cache"), 1.0)
    extra = np.where(pays, merge, 0.0)
    if own:
        floor = floor * np.where(w.trt, LATENT_FLOOR, 1.0)
        floor = np.where(own.known, own.floor_s, floor)
        # SGLang widens an fp8 cache of latent keys before FlashAttention-3 reads it.
        widened = w.batch * w.keys * w.d_key * np.where(w.kv_width == 1, WIDENED, 0.0)
        widened = np.where(kernel.is_("flash-3"), widened, 0.0)
        extra = extra + stream_seconds(widened, resident_share(widened, mc.cache), mc)
    return _Tiles(
        blocks,
        np.where(pays, split, 1.0),
        t_tiles,
        np.where(pays, parts, whole),
        np.where(pays, t_parts, t_whole),
        extra,
        floor,
    )


def _ungrouped(work: _Work, latent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return where each query head reads the keys for itself: in a window, and in large groups.

    FlashAttention 2 neither groups heads nor splits keys under a window. TensorRT-LLM's grouped
    kernel takes up to 32 heads.
    """
    table = work.table
    if latent:
        return np.zeros(len(table), bool), np.zeros(len(table), bool)
    second = table.says("kernel", "flash_attn", "fa2") & ~table.says("kernel", "fa3", "fa4")
    second &= table.is_("backend", "vllm") & (non_nvidia(table) == 0)
    return second & (work.window > 0), work.trt & (work.repeat > MOST_GROUPED)
