"""Decode attention: how libraries cut one query a head over the cores, and what that costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..columns import Machine, OpTable
from ..physics import combine, quantised, resident_share, stream_seconds
from .kernels import RowKernels, Tiles, Work

# Constants are fits to the tensor-core pack's own rows (split `train`) of all its chips
# (docs/operators.md), but where another source is given.
#: Seconds and cycles of a decode without work, over which kernels made for asynchronous copies are
#: shorter.
DECODE_S, DECODE_FLOOR, DECODE_MADE = 3.7e-6, 7700.0, 0.85
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
#: TensorRT-LLM has other kernels for heads that share keys ("XQA" in its guide to attention of
#: GPTs) than for others, up to 32 heads a group. Their seconds and cycles without work, and by how
#: many cycles the others start later, or earlier where a group has too many heads; cycles of a
#: block besides its keys, and with a second tile of heads; heads of a tile; and the keys that a
#: block reads at least. A100, H100 and RTX PRO 6000 agree within a tenth.
MOST_GROUPED, GROUPED_S, GROUPED_FLOOR, SINGLE_FLOOR = 32, 1e-6, 7000.0, 2500.0
GROUPED_BLOCK, GROUPED_MORE, GROUPED_HEADS, GROUPED_TILE = 5500.0, 4000.0, 16, 64.0
#: What an fp8 cache makes of the floor of both (Hopper and RTX PRO 6000 alike), and bytes that a
#: key costs a core where heads of large groups widen it for themselves.
FP8_FLOOR, FP8_MANY = 1.3, 2.0
#: On chips that grouped kernels for fp8 were made for: heads of a group, twice as many up to
#: widths of 128; the factor on the floor beyond widths of 64; cycles of a block, and keys of its
#: tile. Read off Hopper.
LIGHT_HEADS, LIGHT_FLOOR, LIGHT_BLOCK, LIGHT_TILE = 8, 0.72, 1300.0, 64.0
#: Cycles of a key where grouped kernels do not split those of an fp8 cache (kernels.WHOLE_KEYS),
#: and elements of a head's width in a cycle besides: 13, 23 and 42 cycles at widths of 64, 128 and
#: 256 on RTX PRO 6000.
UNSPLIT_KEY, UNSPLIT_RATE = 3.0, 6.5
#: Keys of a sequence from which on TensorRT-LLM splits 16-bit keys, even if a window leaves few:
#: the parts are planned for all keys, and merged.
PLANNED = 1024.0
#: FlashAttention 2 in vLLM: seconds and cycles without work, cycles of a block besides its keys
#: (A100 keeps two on a core, RTX PRO 6000 one), and seconds to merge another part.
SECOND_S, SECOND_FLOOR, SECOND_BLOCK, SECOND_PART_S = 3.5e-6, 3600.0, 3600.0, 0.15e-6
#: It splits keys where blocks fill less than 0.8 of two a core, into as many parts, of 128 at most,
#: as fill 0.85 of them (num_splits_heuristic in its source; 0.9 on average).
SECOND_FULL, SECOND_FILL, SECOND_SPLITS = 0.8, 0.9, 128.0
#: Cycles of a kernel that transposes queries or results: A100 3.0 µs, RTX PRO 6000 2.1.
COPY_CYCLES = 4500.0
#: Share of the matrix peak that a decode of latent keys reaches; the floor of kernels that
#: TensorRT-LLM made for the chip over that of other decodes; and bytes that SGLang moves to widen
#: an element of an fp8 cache.
LATENT_PRODUCTS, LATENT_FLOOR, WIDENED = 0.6, 1.4, 9.0
#: The rate of a core over that with other keys, since latent values need no bytes of their own;
#: keys that a block reads at least; and the seconds of a merge over those of a kernel of its own.
#: Read off Hopper.
LATENT_RATE, LATENT_TILE, LATENT_MERGE = 1.6, 64.0, 0.2
#: Latent keys of an absorbed head (512 and 64 rotary elements) and their values, the first 512
#: (DeepSeek-V2, 2024).
LATENT_KEYS, LATENT_VALUES = 576, 512
#: TensorRT-LLM where no latent kernel was made for the chip: two blocks for 64 heads of a sequence,
#: each with half of the values, walk all keys in tiles of 64. Cycles of a block besides them, those
#: of a key besides products and bytes, and bytes of keys in a cycle: read off A100 in bf16 (170
#: cycles a key) and RTX PRO 6000 in both formats (206 and 136).
WHOLE_HEADS, WHOLE_TILE, WHOLE_BLOCK, WHOLE_KEY, WHOLE_RATE = 64.0, 64.0, 2800.0, 60.0, 25.0
#: Its seconds and cycles without work; and the time of two blocks on a core, over that of one after
#: the other, where the queries of both fit into its memory (A100 0.69 at up to 19 blocks a core).
WHOLE_S, WHOLE_FLOOR, PAIRED = 2e-6, 5000.0, 0.69
#: Triton's latent decode in SGLang: a block for 16 heads of a sequence, each reading the keys for
#: itself; at least eight splits, the more the longer the keys beyond 8192; cycles of a core for all
#: splits of a block, whose partial results are written in float32, and of a lone split's key. Read
#: off RTX PRO 6000, the only chip with such rows.
TRITON_HEADS, TRITON_SPLITS, TRITON_KEYS, TRITON_MORE = 16.0, 8.0, 8192.0, 0.7
TRITON_BLOCK, TRITON_KEY, TRITON_S = 233_000.0, 128.0, 14e-6


class _Kinds(NamedTuple):
    """What kernels decode rows, bool arrays of shape ``(n,)``; all but ``latent`` false for latent.

    Attributes:
        grouped: TensorRT-LLM's kernels for heads that share keys.
        light: Those made for the chip and an fp8 cache.
        single: Its kernels for heads of their own.
        many: Among these, heads of groups that are too large for grouped kernels.
        second: FlashAttention 2 in vLLM.
        swapped: Where it makes the heads of a group the rows of one tile: not under a window.
        latent: Whether keys are latent.
    """

    grouped: np.ndarray
    light: np.ndarray
    single: np.ndarray
    many: np.ndarray
    second: np.ndarray
    swapped: np.ndarray
    latent: bool

    @classmethod
    def of(cls, work: Work, latent: bool) -> _Kinds:
        """Tell the kernels of rows."""
        none = np.zeros(len(work.table), bool)
        if latent:
            return cls(none, none, none, none, none, none, latent)
        kernel, repeat = work.kernel, work.repeat
        trt = kernel.is_("trt", "trt-made")
        many = trt & (repeat > MOST_GROUPED)
        shared = trt & (repeat > 1) & ~many
        most = np.where(work.d_key > 128, LIGHT_HEADS, 2 * LIGHT_HEADS)
        light = shared & kernel.made & (work.kv_width == 1) & (repeat <= most)
        second = kernel.is_("flash-2") & work.table.is_("backend", "vllm") & ~kernel.foreign
        # flash_attn_varlen_func swaps a group's heads and queries, and splits keys, only then.
        swapped = second & (repeat > 1) & (work.window == 0)
        return cls(shared & ~light, light, trt & ~shared, many, second, swapped, latent)

    @property
    def alone(self) -> np.ndarray:
        """Rows whose query heads each read the keys for themselves, groups or not."""
        return np.asarray(self.many | (self.second & ~self.swapped))


def decode(work: Work, latent: bool) -> Tiles:
    """Cut decode into blocks of up to 64 query heads; split the keys for idle cores if it pays.

    Args:
        work: The rows.
        latent: Whether keys are latent, of all heads.
    """
    w, mc, kernel = work, work.mc, work.kernel
    kinds = _Kinds.of(work, latent)
    blocks = w.batch * np.where(kinds.alone, w.heads, w.groups * np.ceil(w.repeat / 64))
    more = np.where(w.repeat > GROUPED_HEADS, GROUPED_MORE, 0.0)
    cycles = np.where(kinds.grouped, GROUPED_BLOCK + more, kernel("decode_block"))
    cycles = np.where(kinds.light, LIGHT_BLOCK, cycles)
    # One query for each head: the heads of a group are the rows of a product, padded to whole ones.
    least = kernel("rows")
    rows = np.ceil(w.repeat / least) * least
    padded = 2 * w.batch * w.groups * rows * w.keys * (w.d_key + w.d_value)
    # The faster of two ways counts: matrix units on padded rows, or the work without padding at 0.2
    # of the peak and a cost for each block. Read off the pack, as above.
    scalar = blocks / mc.cores * cycles / mc.clock + w.flops / w.peak / 0.2
    t_tiles = np.minimum(padded / w.peak / (LATENT_PRODUCTS if latent else DECODE_PRODUCTS), scalar)
    streamed, unsplit = _streamed(work, kinds)
    memory = w.t_memory * kernel("stream")
    # Latent kernels of chips that none was made for have their own blocks, and a fixed split.
    own = LatentBlocks.of(w.table, kernel, w.batch, w.heads, w.keys, mc) if latent else None
    memory = memory * own.passes if own else memory
    sequence = np.where(kinds.light, 0.0, SEQUENCE) * w.batch / mc.cores
    together = _together(work)

    def cut(split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        waves = blocks * split / mc.cores
        turns = np.maximum(quantised(waves, 0.5), 1.0)
        serial = turns * (cycles + streamed / split) + sequence
        # Blocks on one core hide each other's waits, but share its bandwidth.
        pairs = np.maximum(quantised(waves / together, 0.5), 1.0)
        serial = np.where(kinds.second, pairs * SECOND_BLOCK + turns * streamed / split, serial)
        serial = np.where(own.known, own.cycles, serial) if own else serial
        return serial / mc.clock, combine(t_tiles, memory, serial / mc.clock)

    unsplit |= kinds.second & ~kinds.swapped
    unsplit |= own.known if own else False
    split, merge = _splits(work, kinds, blocks, unsplit)
    (whole, t_whole), (parts, t_parts) = cut(np.ones(len(split))), cut(split)
    pays = (split > 1) & (t_parts + merge < t_whole)
    planned = kinds.grouped & (w.kv_width == 2) & (w.kv_len > w.keys) & (w.kv_len >= PLANNED)
    floor = _floor(work, kinds)
    extra = np.where(pays | planned, merge, 0.0) + _copies(work, kinds)
    if own:
        floor = np.where(own.known, own.floor_s, floor)
        # SGLang widens an fp8 cache of latent keys before FlashAttention-3 reads it.
        widened = w.batch * w.keys * w.d_key * np.where(w.kv_width == 1, WIDENED, 0.0)
        widened = np.where(kernel.is_("flash-3"), widened, 0.0)
        extra = extra + stream_seconds(widened, resident_share(widened, mc.cache), mc)
    return Tiles(
        blocks,
        np.where(pays, split, 1.0),
        t_tiles,
        np.where(pays, parts, whole),
        np.where(pays, t_parts, t_whole),
        extra,
        floor,
    )


def _streamed(work: Work, kinds: _Kinds) -> tuple[np.ndarray, np.ndarray]:
    """Return the cycles to stream all keys of a block, and where they are not split, ``(n,)``."""
    w, mc, kernel = work, work.mc, work.kernel
    # On chips with more memory bandwidth for each core than that, a core streams more than its even
    # share.
    rate = CORE_RATE * kernel("rate")
    rate = np.maximum(rate, UNEVEN * mc.bandwidth / mc.cores / mc.clock)
    rate = np.where(kinds.many, LONE_RATE, rate)
    width = w.d_key if kinds.latent else w.d_key + w.d_value
    rate = rate * (LATENT_RATE if kinds.latent else np.minimum(1.0, 128 / w.d_key) ** WIDE)
    tile = np.where(kinds.grouped, GROUPED_TILE, LATENT_TILE if kinds.latent else 1.0)
    tile = np.where(kinds.light, LIGHT_TILE, np.where(kinds.second, _tile(w.d_key), tile))
    read = np.ceil(w.keys / tile) * tile
    # An fp8 key is one byte in memory, but costs a core more where it is widened there. Kernels
    # made for an fp8 cache multiply it as it is.
    converted = np.where(kinds.many, FP8_MANY, kernel("converted"))
    converted = np.where(kinds.light, 1.0, converted)
    streamed = read * np.maximum(w.kv_width, converted) * width / rate
    unsplit = kinds.grouped & kernel.whole_keys & (w.kv_width == 1)
    key = UNSPLIT_KEY + np.exp2(np.ceil(np.log2(w.d_key))) / UNSPLIT_RATE
    return np.where(unsplit, read * key, streamed), unsplit


def _splits(
    work: Work, kinds: _Kinds, blocks: np.ndarray, unsplit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the splits that idle cores allow, and the seconds to merge their results, ``(n,)``."""
    w, mc, kernel = work, work.mc, work.kernel
    most = np.maximum(1, w.keys / SPLIT)
    most = np.where(kernel.is_("triton"), np.minimum(most, triton_splits(w.keys)), most)
    # As many splits as occupy the idle cores; more would only add partial results to merge.
    split = np.clip(mc.cores / blocks, 1, np.where(unsplit, 1, most))
    slots = 2 * mc.cores
    wanted = np.where(blocks < SECOND_FULL * slots, SECOND_FILL * slots / blocks, 1)
    tiles = np.minimum(np.ceil(w.keys / _tile(w.d_key)), SECOND_SPLITS)
    split = np.where(kinds.swapped, np.clip(wanted, 1, tiles), split)
    # Partial results are f32 (4 bytes); they stay in the cache between the two kernels.
    partial = w.batch * w.heads * split * w.d_value * 4 * PARTIALS / mc.cache_bandwidth
    # Kernels made for latent keys merge their parts in the same launch.
    merges = np.where(kernel.is_("trt-made") & kinds.latent, LATENT_MERGE, kernel("merge"))
    # FlashAttention 2 adds the parts up one after the other.
    return split, MERGE_S * merges + partial + np.where(kinds.swapped, tiles * SECOND_PART_S, 0.0)


def _floor(work: Work, kinds: _Kinds) -> np.ndarray:
    """Return the seconds of a decode without work, shape ``(n,)``."""
    w, clock, kernel = work, work.mc.clock, work.kernel
    floor = DECODE_S * kernel("decode_floor") + DECODE_FLOOR / clock
    floor = floor * np.where(kernel.made, DECODE_MADE, 1.0)
    later = np.where(kinds.single, SINGLE_FLOOR, 0.0)
    grouped = GROUPED_S + (GROUPED_FLOOR + later) / clock
    floor = np.where(kinds.grouped | kinds.single, grouped, floor)
    narrow = np.where(kinds.light & (w.d_key > 64), LIGHT_FLOOR, kernel("fp8_cache"))
    narrow = np.where(kinds.light & (w.d_key <= 64), 1.0, narrow)
    narrow = np.where(kinds.grouped | (kinds.single & ~kinds.many), FP8_FLOOR, narrow)
    floor = floor * np.where(w.kv_width == 1, narrow, 1.0)
    if kinds.latent:
        floor = floor * np.where(w.trt, LATENT_FLOOR, 1.0)
    return np.where(kinds.second, SECOND_S + SECOND_FLOOR / clock, floor)


def _copies(work: Work, kinds: _Kinds) -> np.ndarray:
    """Return the seconds to transpose queries and results of FlashAttention 2, shape ``(n,)``.

    With one group, or one sequence, a view of them is enough.
    """
    w, mc = work, work.mc
    moved = 4.0 * w.batch * w.heads * w.d_key * 2
    copied = 2 * COPY_CYCLES / mc.clock + stream_seconds(moved, resident_share(moved, mc.cache), mc)
    return np.where(kinds.swapped & (w.batch > 1) & (w.groups > 1), copied, 0.0)


def _tile(width: np.ndarray) -> np.ndarray:
    """Return the keys of a tile of FlashAttention 2's split kernels, shape ``(n,)``."""
    return np.where(width <= 64, 256.0, np.where(width <= 128, 128.0, 64.0))


def _together(work: Work) -> np.ndarray:
    """Return the blocks of FlashAttention 2 that a core has memory for, shape ``(n,)``.

    Each keeps 64 queries and a tile of keys and values.
    """
    shared = work.table.of_device([d.shared_bytes_per_core for d in work.table.devices])
    taken = (64 + 2 * _tile(work.d_key)) * work.d_key * 2
    return np.asarray(np.maximum(np.floor(shared / taken), 1.0))


def triton_splits(keys: np.ndarray) -> np.ndarray:
    """Return the splits of a decode by SGLang's Triton kernels, shape ``(n,)``."""
    return np.asarray(TRITON_SPLITS * np.maximum(keys / TRITON_KEYS, 1.0) ** TRITON_MORE)


class LatentBlocks(NamedTuple):
    """How libraries cut a latent decode on chips that they made no kernel for, ``(n,)`` each.

    Attributes:
        known: Rows of such a kernel.
        cycles: Cycles of the core that is busy longest.
        passes: Times that the keys are read.
        floor_s: Seconds without work.
    """

    known: np.ndarray
    cycles: np.ndarray
    passes: np.ndarray
    floor_s: np.ndarray

    @classmethod
    def of(
        cls,
        table: OpTable,
        kernel: RowKernels,
        batch: np.ndarray,
        heads: np.ndarray,
        keys: np.ndarray,
        machine: Machine,
    ) -> LatentBlocks:
        """Cut the latent decodes of a table's rows over their devices' cores."""
        whole, triton = kernel.is_("trt"), kernel.is_("triton")
        by_head = np.ceil(heads / TRITON_HEADS)
        splits = triton_splits(keys)
        parts = batch * by_head / machine.cores * TRITON_BLOCK + keys / splits * TRITON_KEY
        return cls(
            whole | triton,
            np.where(whole, _whole_keys(table, batch, heads, keys, machine), parts),
            np.where(triton, by_head, 1.0),
            np.where(whole, WHOLE_S + WHOLE_FLOOR / machine.clock, TRITON_S),
        )


def _whole_keys(
    table: OpTable, batch: np.ndarray, heads: np.ndarray, keys: np.ndarray, machine: Machine
) -> np.ndarray:
    """Return the cycles of blocks that walk all keys of their sequence, shape ``(n,)``."""
    wide, narrow = (
        table.of_device([d.matrix_peak(kind) for d in table.devices])
        for kind in ("bf16", "f8e4m3fn")
    )
    # An fp8 cache is computed with as it is, where there are units for it.
    as_fp8 = table.is_("kv_dtype", "fp8") & (narrow > wide)
    peak = np.where(as_fp8, narrow, wide) / machine.cores / machine.clock
    products = 2 * WHOLE_HEADS * (LATENT_KEYS + LATENT_VALUES / 2) / peak
    key = products + WHOLE_KEY + LATENT_KEYS * np.where(as_fp8, 1.0, 2.0) / WHOLE_RATE
    block = WHOLE_BLOCK + np.ceil(keys / WHOLE_TILE) * WHOLE_TILE * key
    waves = np.ceil(2 * batch * np.ceil(heads / WHOLE_HEADS) / machine.cores)
    # Both blocks keep their 64 queries in the memory of the core.
    room = table.of_device([d.shared_bytes_per_core for d in table.devices])
    together = room >= 2 * WHOLE_HEADS * LATENT_KEYS * 2
    return np.asarray(block * np.maximum(waves * np.where(together, PAIRED, 1.0), 1.0))
