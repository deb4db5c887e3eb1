"""Physics of mixtures of experts: two grouped products over the experts that have tokens."""

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
from .table import Machine, OpTable

#: Cycles of the group of kernels without work (sort, two products, activation, sum).
FLOOR_CYCLES = 45_000.0
TILES = ((16, 128, 0.25), (64, 128, 0.7), (128, 128, 0.9), (128, 256, 1.0))
SPLIT_DEPTH = 512
DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8")
SKEW = {"power_law_1.01": 1.01, "power_law_1.2": 1.2}


def moe(table: OpTable) -> Physics:
    """Physics of the experts of one rank: ``tokens × topk / ep`` rows over ``experts / ep``."""
    tokens, hidden, full, topk, experts, tp, ep = table.numbers(
        "tokens", "hidden", "inter", "topk", "experts", "tp", "ep"
    )
    mc, peak = table.machine(), table.matrix_peak()
    inner, local, rows = full / tp, experts / ep, tokens * topk / ep
    ungated = table.says("kernel", "nongated")
    matrices = np.where(ungated, 2.0, 3.0)
    skew = table.mapped("distribution", SKEW, 0.0)
    active = active_experts(local, rows, skew)
    depth = np.maximum(rows / active, 1)
    flops = 2 * rows * hidden * inner * matrices
    weights = active * hidden * inner * matrices * table.weight_bytes
    streams = _streams(table, tokens, rows, hidden, inner)
    footprint = weights + streams
    resident = resident_share(footprint, mc.cache, 1.1, 0.2)
    t_memory = stream_seconds(footprint, resident, mc)
    t_tiles, waves, use = _tiles(active, depth, inner, hidden, matrices, peak, mc)
    floor = FLOOR_CYCLES / mc.clock * np.where(non_nvidia(table) > 0, 2.0, 1.0)
    base = floor + combine(t_tiles, t_memory)
    t_compute = flops / peak
    t_least = footprint / np.maximum(mc.bandwidth, mc.cache_bandwidth * resident)
    features = {
        **flags(table, DTYPES),
        "skew": skew, "ungated": ungated * 1.0,
        "log_tiles_base": log2(t_tiles / base), "log_memory_base": log2(t_memory / base),
        "log_compute_base": log2(t_compute / base), "floor_base": floor / base,
        "log_cycles": log2(base * mc.clock), "log_intensity": log2(t_compute / t_memory),
        "log_waves": log2(waves), "wave_fill": fill(waves), "tile_use": use, "resident": resident,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 8),
        "log_depth": log2(depth), "log_active": log2(active), "active_share": active / local,
        "log_tokens": log2(tokens), "log_hidden": log2(hidden), "log_inner": log2(inner),
        "topk": log2(topk), "log_local": log2(local), "log_rows": log2(rows),
        "log_rows_local": log2(rows / local), "log_tp": log2(tp), "log_ep": log2(ep),
        "log_experts": log2(experts), "weights_share": weights / footprint,
        "log_blocks": log2(np.ceil(inner / 128) * active / mc.cores),
        "inner_fill": inner / (np.ceil(inner / 128) * 128), "inner_of_64": (inner % 64 == 0) * 1.0,
        "streams_base": streams / mc.bandwidth / base,
        "log_local_cores": log2(local / mc.cores),
    }  # fmt: skip
    return Physics(
        base, np.maximum(t_compute, t_least),
        t_compute > footprint / mc.bandwidth, floor, flops, footprint, features,
        specific=("log_local_cores",),
        keys=(
            "log_tiles_base", "log_memory_base", "floor_base", "log_depth", "log_active",
            "log_hidden", "log_inner", "skew",
        ),
    )  # fmt: skip


def active_experts(local: np.ndarray, rows: np.ndarray, skew: np.ndarray) -> np.ndarray:
    """Experts that get a row.

    All that can when rows are balanced, else as many as random draws reach on average,
    ``local × (1 - exp(-rate))``, with a rate below ``rows / local`` since the draws are skewed.
    """
    drawn = local * (1 - np.exp(-0.8 * rows / local))
    found = np.where(skew > 0, drawn, np.minimum(local, rows))
    return np.asarray(np.clip(found, 1, np.maximum(local, 1)))


def _streams(
    table: OpTable, tokens: np.ndarray, rows: np.ndarray, hidden: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """Bytes of activations: gather and quantise, two intermediate results, weighted sum."""
    width = table.activation_bytes
    return np.asarray(
        rows * (hidden * (2 + width) + inner * (4 + width + 2)) + rows * hidden * 2
        + tokens * hidden * 4
    )  # fmt: skip


def _tiles(
    active: np.ndarray, depth: np.ndarray, inner: np.ndarray, hidden: np.ndarray,
    matrices: np.ndarray, peak: np.ndarray, mc: Machine,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Time of both grouped products with the best tile, waves of the first and used share."""
    time = np.full(len(active), np.inf)
    waves, use = np.ones(len(active)), np.ones(len(active))
    for rows, columns, efficiency in TILES:
        down = active * np.ceil(depth / rows)
        found = np.zeros(len(active))
        for width, reach in (((matrices - 1) * inner, hidden), (hidden, inner)):
            own = down * np.ceil(width / columns) / mc.cores
            split = np.clip(
                np.floor(1 / np.maximum(own, 1e-9)), 1, np.maximum(1, reach / SPLIT_DEPTH)
            )
            runs = np.where(own < 1, 1 / split, quantised(own))
            found += runs * rows * columns * reach * 2 / (peak / mc.cores) / efficiency
        faster = found < time
        first = down * np.ceil((matrices - 1) * inner / columns) / mc.cores
        time = np.where(faster, found, time)
        waves = np.where(faster, first, waves)
        use = np.where(faster, depth / (np.ceil(depth / rows) * rows), use)
    return time, waves, use
