"""Decode attention: how libraries split one query per head over the cores, and what that costs."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ..devices.device import DeviceSpec
from .attention_kernels import MADE, Attention, Tiles
from .physics import combine, fitted, quantised, resident_share, stream_seconds

FIT = fitted("decode")


class _Kinds(NamedTuple):
    """Which decode kernel runs each row, bool arrays of shape ``(n,)``; all false for latent keys.

    Attributes:
        grouped: TensorRT-LLM's kernels for heads that share keys.
        light: Variants of these made for the chip and an fp8 cache.
        single: TensorRT-LLM's kernels for heads that do not share keys.
        many: Rows of ``single`` whose groups are too large for grouped kernels.
        second: FlashAttention 2 in vLLM.
        swapped: Rows of ``second`` where the heads of a group become the rows of one tile, which
            requires that there is no window.
        latent: Whether keys are latent (bool for the whole table).
    """

    grouped: np.ndarray
    light: np.ndarray
    single: np.ndarray
    many: np.ndarray
    second: np.ndarray
    swapped: np.ndarray
    latent: bool

    @classmethod
    def of(cls, work: Attention, latent: bool) -> _Kinds:
        """Classify the rows of a table."""
        none = np.zeros(len(work.table), bool)
        if latent:
            return cls(none, none, none, none, none, none, latent)
        kernel, repeat = work.kernel, work.repeat
        trt = kernel.is_("trt", "trt-made")
        # Generated kernels take groups of any size.
        many = trt & (repeat > FIT.most_grouped)
        shared = trt & (repeat > 1) & ~many
        most = np.where(work.d_key > 128, FIT.light_heads, 2 * FIT.light_heads)
        light = shared & kernel.made & (work.kv_width == 1) & (repeat <= most)
        second = kernel.is_("flash-2") & work.table.is_("backend", "vllm") & ~kernel.foreign
        # Only then does flash_attn_varlen_func swap a group's heads and queries, and split keys.
        swapped = second & (repeat > 1) & (work.window == 0)
        return cls(shared & ~light, light, trt & ~shared, many, second, swapped, latent)

    @property
    def alone(self) -> np.ndarray:
        """Rows where each query head reads the keys separately, even if heads share keys."""
        return np.asarray(self.many | (self.second & ~self.swapped))


def decode(work: Attention, latent: bool) -> Tiles:
    """Split decode into blocks of up to 64 query heads; split the keys if idle cores make it pay.

    Args:
        work: The rows.
        latent: Whether all heads share latent keys.
    """
    w, mc, kernel = work, work.mc, work.kernel
    kinds = _Kinds.of(work, latent)
    blocks = w.batch * np.where(kinds.alone, w.heads, w.groups * np.ceil(w.repeat / 64))
    more = np.where(w.repeat > FIT.grouped_heads, FIT.grouped_more, 0.0)
    cycles = np.where(kinds.grouped, FIT.grouped_block + more, kernel("decode_block"))
    cycles = np.where(kinds.light, FIT.light_block, cycles)
    # With one query per head, the heads of a group are the rows of a product, padded to full tiles.
    least = kernel("rows")
    rows = np.ceil(w.repeat / least) * least
    padded = 2 * w.batch * w.groups * rows * w.keys * (w.d_key + w.d_value)
    # The faster of two variants counts: matrix units on padded rows, or unpadded work at 0.2 of the
    # peak plus a cost per block. Read off the tensor-core pack.
    scalar = blocks / mc.cores * cycles / mc.clock + w.flops / w.peak / 0.2
    t_tiles = np.minimum(
        padded / w.peak / (FIT.latent_products if latent else FIT.decode_products), scalar
    )
    streamed, unsplit = _streamed(work, kinds)
    memory = w.t_memory * kernel("stream")
    # Latent kernels on chips they were not made for have different blocks and a fixed split.
    own = LatentBlocks.of(work) if latent else None
    memory = memory * own.passes if own else memory
    sequence = np.where(kinds.light, 0.0, FIT.sequence) * w.batch / mc.cores
    together = _together(work)

    def cut(split: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        waves = blocks * split / mc.cores
        turns = np.maximum(quantised(waves, 0.5), 1.0)
        serial = turns * (cycles + streamed / split) + sequence
        # Blocks on the same core hide each other's latency but share its bandwidth.
        pairs = np.maximum(quantised(waves / together, 0.5), 1.0)
        serial = np.where(kinds.second, pairs * FIT.second_block + turns * streamed / split, serial)
        serial = np.where(own.known, own.cycles, serial) if own else serial
        return serial / mc.clock, combine(t_tiles, memory, serial / mc.clock)

    unsplit |= kinds.second & ~kinds.swapped
    unsplit |= own.known if own else False
    split, merge = _splits(work, kinds, blocks, unsplit)
    (whole, t_whole), (parts, t_parts) = cut(np.ones(len(split))), cut(split)
    pays = (split > 1) & (t_parts + merge < t_whole)
    planned = kinds.grouped & (w.kv_width == 2) & (w.kv_len > w.keys) & (w.kv_len >= FIT.planned)
    floor = _floor(work, kinds)
    extra = np.where(pays | planned, merge, 0.0) + _copies(work, kinds)
    if own:
        floor = np.where(own.known, own.floor_s, floor)
        # SGLang widens an fp8 cache of latent keys before FlashAttention-3 reads it.
        widened = w.batch * w.keys * w.d_key * np.where(w.kv_width == 1, FIT.widened, 0.0)
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


def _streamed(work: Attention, kinds: _Kinds) -> tuple[np.ndarray, np.ndarray]:
    """Return the cycles to stream all keys of a block, and where keys are not split, ``(n,)``."""
    w, mc, kernel = work, work.mc, work.kernel
    # Where memory bandwidth per core exceeds this rate, a core streams more than its even share.
    rate = FIT.core_rate * kernel("rate")
    rate = np.maximum(rate, FIT.uneven * mc.bandwidth / mc.cores / mc.clock)
    rate = np.where(kinds.many, FIT.lone_rate, rate)
    width = w.d_key if kinds.latent else w.d_key + w.d_value
    rate = rate * (FIT.latent_rate if kinds.latent else np.minimum(1.0, 128 / w.d_key) ** FIT.wide)
    tile = np.where(kinds.grouped, FIT.grouped_tile, FIT.latent_tile if kinds.latent else 1.0)
    tile = np.where(kinds.light, FIT.light_tile, np.where(kinds.second, _tile(w.d_key), tile))
    read = np.ceil(w.keys / tile) * tile
    # An fp8 key takes one byte in memory but costs a core more where it is widened there. Kernels
    # made for an fp8 cache multiply it without widening.
    converted = np.where(kinds.many, FIT.fp8_many, kernel("converted"))
    converted = np.where(kinds.light, 1.0, converted)
    streamed = read * np.maximum(w.kv_width, converted) * width / rate
    unsplit = kinds.grouped & kernel.whole_keys & (w.kv_width == 1)
    key = FIT.unsplit_key + np.exp2(np.ceil(np.log2(w.d_key))) / FIT.unsplit_rate
    return np.where(unsplit, read * key, streamed), unsplit


def _splits(
    work: Attention, kinds: _Kinds, blocks: np.ndarray, unsplit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of splits that idle cores allow, and the seconds of the merge, ``(n,)``."""
    w, mc, kernel = work, work.mc, work.kernel
    most = np.maximum(1, w.keys / FIT.split)
    most = np.where(kernel.is_("triton"), np.minimum(most, triton_splits(w.keys)), most)
    # As many splits as occupy the idle cores; more would only add partial results to merge.
    split = np.clip(mc.cores / blocks, 1, np.where(unsplit, 1, most))
    slots = 2 * mc.cores
    wanted = np.where(blocks < FIT.second_full * slots, FIT.second_fill * slots / blocks, 1)
    tiles = np.minimum(np.ceil(w.keys / _tile(w.d_key)), FIT.second_splits)
    split = np.where(kinds.swapped, np.clip(wanted, 1, tiles), split)
    # Partial results are f32 (4 bytes); they stay in the cache between the two kernels.
    partial = w.batch * w.heads * split * w.d_value * 4 * FIT.partials / mc.cache_bandwidth
    # Kernels made for latent keys merge the splits in the same launch.
    merges = np.where(kernel.is_(*MADE) & kinds.latent, FIT.latent_merge, kernel("merge"))
    # FlashAttention 2 adds up the splits one after the other.
    return split, FIT.merge_s * merges + partial + np.where(
        kinds.swapped, tiles * FIT.second_part_s, 0.0
    )


def _floor(work: Attention, kinds: _Kinds) -> np.ndarray:
    """Return the fixed cost of a decode kernel in seconds, shape ``(n,)``."""
    w, clock, kernel = work, work.mc.clock, work.kernel
    floor = FIT.decode_s * kernel("decode_floor") + FIT.decode_floor / clock
    floor = floor * np.where(kernel.made, FIT.decode_made, 1.0)
    later = np.where(kinds.single, FIT.single_floor, 0.0)
    grouped = FIT.grouped_s + (FIT.grouped_floor + later) / clock
    floor = np.where(kinds.grouped | kinds.single, grouped, floor)
    narrow = np.where(kinds.light & (w.d_key > 64), FIT.light_floor, kernel("fp8_cache"))
    narrow = np.where(kinds.light & (w.d_key <= 64), 1.0, narrow)
    narrow = np.where(kinds.grouped | (kinds.single & ~kinds.many), FIT.fp8_floor, narrow)
    floor = floor * np.where(w.kv_width == 1, narrow, 1.0)
    if kinds.latent:
        floor = floor * np.where(w.trt, FIT.latent_floor, 1.0)
    return np.where(kinds.second, FIT.second_s + FIT.second_floor / clock, floor)


def _copies(work: Attention, kinds: _Kinds) -> np.ndarray:
    """Return the seconds to transpose queries and results of FlashAttention 2, shape ``(n,)``.

    With one group or one sequence, a view suffices.
    """
    w, mc = work, work.mc
    moved = 4.0 * w.batch * w.heads * w.d_key * 2
    copied = 2 * FIT.copy_cycles / mc.clock + stream_seconds(
        moved, resident_share(moved, mc.cache), mc
    )
    return np.where(kinds.swapped & (w.batch > 1) & (w.groups > 1), copied, 0.0)


def _tile(width: np.ndarray) -> np.ndarray:
    """Return the keys per tile of FlashAttention 2's split kernels, shape ``(n,)``."""
    return np.where(width <= 64, 256.0, np.where(width <= 128, 128.0, 64.0))


def _together(work: Attention) -> np.ndarray:
    """Return how many FlashAttention 2 blocks fit into a core's shared memory, shape ``(n,)``.

    Each block keeps 64 queries and a tile of keys and values.
    """
    shared = work.table.of_device(lambda device: device.shared_bytes_per_core)
    taken = (64 + 2 * _tile(work.d_key)) * work.d_key * 2
    return np.asarray(np.maximum(np.floor(shared / taken), 1.0))


def triton_splits(keys: np.ndarray) -> np.ndarray:
    """Return the number of splits in SGLang's Triton decode kernels, shape ``(n,)``."""
    return np.asarray(
        FIT.triton_splits * np.maximum(keys / FIT.triton_keys, 1.0) ** FIT.triton_more
    )


class LatentBlocks(NamedTuple):
    """Latent decode with kernels that were not made for the chip, shape ``(n,)`` each.

    Attributes:
        known: Rows that run such a kernel.
        cycles: Cycles of the busiest core.
        passes: How often the keys are read.
        floor_s: Fixed cost in seconds.
    """

    known: np.ndarray
    cycles: np.ndarray
    passes: np.ndarray
    floor_s: np.ndarray

    @classmethod
    def of(cls, work: Attention) -> LatentBlocks:
        """Split latent decodes over the cores of their devices."""
        mc = work.mc
        whole, triton = work.kernel.is_("trt"), work.kernel.is_("triton")
        by_head = np.ceil(work.heads / FIT.triton_heads)
        serial = work.keys / triton_splits(work.keys) * FIT.triton_key
        parts = work.batch * by_head / mc.cores * FIT.triton_block + serial
        return cls(
            whole | triton,
            np.where(whole, _whole_keys(work), parts),
            np.where(triton, by_head, 1.0),
            np.where(whole, FIT.whole_s + FIT.whole_floor / mc.clock, FIT.triton_s),
        )


def _whole_keys(work: Attention) -> np.ndarray:
    """Return the cycles of blocks that each read all keys of a sequence, shape ``(n,)``."""
    table, machine = work.table, work.mc
    wide, narrow = (
        table.of_device(partial(DeviceSpec.matrix_peak, dtype=kind))
        for kind in ("bf16", "f8e4m3fn")
    )
    # An fp8 cache is multiplied without conversion where there are matrix units for it.
    as_fp8 = table.is_("kv_dtype", "fp8") & (narrow > wide)
    peak = np.where(as_fp8, narrow, wide) / machine.cores / machine.clock
    products = 2 * FIT.whole_heads * (FIT.latent_keys + FIT.latent_values / 2) / peak
    key = products + FIT.whole_key + FIT.latent_keys * np.where(as_fp8, 1.0, 2.0) / FIT.whole_rate
    block = FIT.whole_block + np.ceil(work.keys / FIT.whole_tile) * FIT.whole_tile * key
    waves = np.ceil(2 * work.batch * np.ceil(work.heads / FIT.whole_heads) / machine.cores)
    # Both blocks keep their 64 queries in shared memory.
    room = table.of_device(lambda device: device.shared_bytes_per_core)
    together = room >= 2 * FIT.whole_heads * FIT.latent_keys * 2
    return np.asarray(block * np.maximum(waves * np.where(together, FIT.paired, 1.0), 1.0))
