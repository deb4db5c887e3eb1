"""Physics of fused attention: prefill, decode, encoder and multi-head latent attention."""

from __future__ import annotations

import numpy as np

from .physics import (
    Physics,
    combine,
    fill,
    flags,
    log2,
    non_nvidia,
    quantised,
    resident_share,
    stream_seconds,
)
from .table import OpTable

#: Cycles of a kernel without work: prefill, and decode with its reduction over splits.
PREFILL_FLOOR, DECODE_FLOOR = 18_000.0, 15_000.0
#: Cycles that a thread block costs besides its arithmetic.
PREFILL_BLOCK, DECODE_BLOCK, DECODE_BLOCK_TRT = 800.0, 5500.0, 8500.0
#: Query rows and keys of a tile.
ROWS, KEYS = 128.0, 64.0
DTYPES = ("bf16", "fp8")


def visible_pairs(q_len: np.ndarray, kv_len: np.ndarray, window: np.ndarray) -> np.ndarray:
    """(query, key) pairs of causal attention whose queries are the last ``q_len`` positions.

    Query ``i`` of ``q_len`` sees ``min(kv_len - q_len + 1 + i, window)`` keys; a window of 0 is
    none. The sum is an arithmetic series until the window is reached, and constant after.
    """
    first = kv_len - q_len + 1
    reach = np.where(window > 0, window, np.inf)
    growing = np.clip(reach - first + 1, 0, q_len)
    growing = np.minimum(growing, q_len)
    series = growing * (2 * first + growing - 1) / 2
    return np.asarray(series + (q_len - growing) * np.where(np.isinf(reach), 0.0, reach))


def attention(table: OpTable) -> Physics:
    """Physics of attention over ``batch`` sequences with the heads of one rank."""
    batch, heads, groups, d_key, d_value, q_len, kv_len, window = table.numbers(
        "batch", "q_heads", "kv_heads", "head_dim", "v_head_dim", "q_len", "kv_len", "window"
    )
    mc, peak = table.machine(), table.matrix_peak()
    decode = table.family.startswith("graph/generation")
    latent = decode and table.family.endswith("mla")
    causal = table.columns["causal"] == 1
    keys = np.where(window > 0, np.minimum(kv_len, window), kv_len)
    pairs = keys if decode else np.where(causal, visible_pairs(q_len, kv_len, window), q_len * keys)
    flops = 2 * batch * heads * pairs * (d_key + d_value)
    kv_width = table.mapped("kv_dtype", {"fp8": 1.0}, 2.0)
    cached = batch * groups * (keys if decode else kv_len) * kv_width
    kv_bytes = cached * (d_key if latent else d_key + d_value)
    moved = batch * heads * q_len * (d_key + d_value) * 2 + kv_bytes
    resident = resident_share(moved, mc.cache, 1.15, 0.15)
    t_memory = stream_seconds(moved, resident, mc)
    repeat = heads / groups
    trt = table.is_("backend", "trtllm")
    if decode:
        blocks = batch * groups * np.ceil(repeat / 64)
        split = np.clip(np.floor(mc.cores * 2 / blocks), 1, np.maximum(1, np.ceil(keys / 128)))
        cycles = np.where(trt, DECODE_BLOCK_TRT, DECODE_BLOCK)
        t_blocks = blocks / mc.cores * cycles / mc.clock
        rows = np.maximum(16, np.ceil(repeat / 16) * 16)
        padded = 2 * batch * groups * rows * keys * (d_key + d_value)
        t_tiles = np.minimum(padded / peak / 0.35, t_blocks + flops / peak / 0.2)
        floor = DECODE_FLOOR / mc.clock
    else:
        tile = np.where(q_len < 64, 64.0, ROWS)
        blocks = batch * heads * np.ceil(q_len / tile)
        split = np.ones(len(table))
        t_blocks = blocks / mc.cores * PREFILL_BLOCK / mc.clock
        seen = np.maximum(pairs / q_len + 32, KEYS)
        one = 2 * tile * seen * (d_key + d_value) / (peak / mc.cores) / 0.6
        t_tiles = np.maximum(quantised(blocks / mc.cores, 0.5), 1.0) * one
        floor = PREFILL_FLOOR / mc.clock
    floor = floor * np.where(non_nvidia(table) > 0, 3.0, 1.0)
    base = floor + combine(t_tiles, t_memory, t_blocks)
    t_compute = flops / peak
    t_least = moved / np.maximum(mc.bandwidth, mc.cache_bandwidth * resident)
    waves = blocks * split / mc.cores
    features = {
        **flags(table, DTYPES),
        "kv_fp8": (kv_width == 1) * 1.0,
        "log_tiles_base": log2(t_tiles / base), "log_memory_base": log2(t_memory / base),
        "log_compute_base": log2(t_compute / base), "log_blocks_base": log2(t_blocks / base),
        "floor_base": floor / base, "log_cycles": log2(base * mc.clock),
        "log_intensity": log2(t_compute / t_memory), "log_waves": log2(waves),
        "wave_fill": fill(waves), "log_split": log2(split), "resident": resident,
        "log_footprint_cache": np.clip(log2(moved / mc.cache), -8, 6),
        "log_batch": log2(batch), "log_heads": log2(heads), "log_groups": log2(groups),
        "log_q_len": log2(q_len), "log_kv_len": log2(kv_len), "log_keys": log2(keys),
        "log_repeat": log2(repeat), "repeat": repeat, "log_sequences": log2(batch * groups),
        "head_dim": d_key / 64, "v_head_dim": d_value / 64, "window": log2(1 + window),
        "seen_share": keys / kv_len, "pair_share": pairs / (q_len * kv_len),
        "q_fill": q_len / (np.ceil(q_len / ROWS) * ROWS),
        "log_tokens": log2(batch * q_len), "log_pairs": log2(batch * heads * pairs),
        "log_steps": log2(np.ceil(keys / KEYS)),
        **_waves(batch, heads, groups, q_len, mc.cores),
        "log_kv_cache": np.clip(log2(kv_bytes / mc.cache), -10, 8),
    }  # fmt: skip
    return Physics(
        base, np.maximum(t_compute, t_least),
        t_compute > moved / mc.bandwidth, floor, flops, moved, features,
        specific=("log_kv_cache",),
        keys=(
            "log_tiles_base", "log_memory_base", "floor_base", "log_keys", "log_q_len",
            "log_repeat", "log_sequences", "head_dim",
        ),
    )  # fmt: skip


def _waves(
    batch: np.ndarray, heads: np.ndarray, groups: np.ndarray, q_len: np.ndarray, cores: np.ndarray
) -> dict[str, np.ndarray]:
    """Waves of query tiles, by head and with the heads of a group packed together."""
    found = {}
    for rows in (64, 128):
        own = batch * heads * np.ceil(q_len / rows) / cores
        packed = batch * groups * np.ceil(q_len * heads / groups / rows) / cores
        found[f"log_waves_{rows}"], found[f"wave_fill_{rows}"] = log2(own), fill(own)
        found[f"log_packed_{rows}"], found[f"packed_fill_{rows}"] = log2(packed), fill(packed)
    return found | {"sequence_fill": fill(batch * groups / cores)}
