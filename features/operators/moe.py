"""Physics of mixtures of experts: two grouped products over the experts that have tokens."""

from __future__ import annotations

import numpy as np

from .columns import Machine, OpTable
from .fitted import fitted
from .op import busy_rank, expert_flops, ungated
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

FIT = fitted("experts")

#: Tiles of grouped GEMMs with the share of the matrix peak that they reach: engineering estimates.
TILES = ((16, 128, 0.25), (64, 128, 0.7), (128, 128, 0.9), (128, 256, 1.0))
#: Least depth of one split of the reduction; engineering estimate.
SPLIT_DEPTH = 512
DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8")
#: Exponents of the published distributions of tokens over experts; any other name is balanced.
SKEW = {"power_law_1.01": 1.01, "power_law_1.2": 1.2}


def moe(table: OpTable) -> Physics:
    """Estimate the experts of one rank: the busiest one if the draw is skewed."""
    tokens, hidden, full, topk, experts, tp, ep = table.numbers(
        "tokens", "hidden", "inter", "topk", "experts", "tp", "ep"
    )
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    inner, local = full / tp, experts / ep
    skew = table.mapped("distribution", SKEW, 0.0)
    rows, active = busy_rank(tokens, topk, experts, ep, skew)
    rows = np.where(_everywhere(table), tokens * topk, rows)
    triton = table.says("kernel", "triton", "fused_moe", "marlin")
    bare = _ungated(table, full, topk, experts)
    # Gate, up and down projection; without a gate, up and down.
    matrices = np.where(bare, 2.0, 3.0)
    # Experts are treated as equally loaded from here on; the skew shows in rows and active.
    depth = np.maximum(rows / active, 1)
    flops = expert_flops(tokens, topk, ep, hidden, inner, 2.0) * matrices
    weights = active * hidden * inner * matrices * table.weight_bytes
    streams = _streams(table, tokens, rows, hidden, inner)
    again = np.where(triton, FIT.passes * 2 * tokens * topk * hidden, 0.0)
    footprint = weights + streams
    resident = resident_share(footprint, mc.cache, 1.1, 0.2)
    t_memory = stream_seconds(weights, resident, mc)
    t_streams = stream_seconds(streams + again, resident, mc)
    t_tiles, waves, use = _tiles(active, depth, inner, hidden, matrices, peak, mc)
    blocks = active * np.ceil(depth / 64) * np.ceil(((matrices - 1) * inner + hidden) / 128)
    t_blocks = blocks / mc.cores * FIT.block / mc.clock
    t_route = tokens * topk / mc.cores * np.where(triton, FIT.route_triton, FIT.route) / mc.clock
    floor = _floor(table, mc)
    # Weights are prefetched while products run. Routing and the passes over activations are kernels
    # before, between and after them, so they add up.
    base = floor + t_streams + t_route + combine(t_tiles + t_blocks, t_memory)
    t_compute = flops / peak
    t_least = least_seconds(footprint, resident, mc)
    features = {
        **flags(table, DTYPES),
        "skew": skew,
        "ungated": bare * 1.0,
        # Shares of the parts in the estimate, as for products (gemm.py).
        "log_tiles_base": log2(t_tiles / base),
        "log_memory_base": log2(t_memory / base),
        "log_compute_base": log2(t_compute / base),
        "floor_base": floor / base,
        "log_cycles": log2(base * mc.clock),
        "log_intensity": log2(t_compute / t_memory),
        "log_waves": log2(waves),
        "wave_fill": fill(waves),
        "tile_use": use,
        "resident": resident,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 8),
        # Rows of an expert, and how many experts have any: they decide which grouped kernel pays.
        "log_depth": log2(depth),
        "log_active": log2(active),
        "active_share": active / local,
        "log_tokens": log2(tokens),
        "log_hidden": log2(hidden),
        "log_inner": log2(inner),
        "topk": log2(topk),
        "log_local": log2(local),
        "log_rows": log2(rows),
        "log_rows_local": log2(rows / local),
        "log_tp": log2(tp),
        "log_ep": log2(ep),
        "log_experts": log2(experts),
        "weights_share": weights / footprint,
        "log_blocks": log2(np.ceil(inner / 128) * active / mc.cores),
        "inner_fill": inner / (np.ceil(inner / 128) * 128),
        "inner_of_64": (inner % 64 == 0) * 1.0,
        "streams_base": t_streams / base,
        "route_base": t_route / base,
        "log_blocks_base": log2(t_blocks / base),
        # Load of the busiest rank over that of an average one.
        "log_busy": log2(rows * ep / (tokens * topk)),
        "log_local_cores": log2(local / mc.cores),
    }
    return Physics(
        base,
        np.maximum(t_compute, t_least),
        t_compute > t_least,
        floor,
        flops,
        footprint,
        features,
        specific=("log_local_cores",),
        keys=(
            "log_tiles_base",
            "log_memory_base",
            "floor_base",
            "log_depth",
            "log_active",
            "log_hidden",
            "log_inner",
            "skew",
        ),
    )


def _ungated(
    table: OpTable, inner: np.ndarray, topk: np.ndarray, experts: np.ndarray
) -> np.ndarray:
    """Return where experts have two matrices instead of three, bool, shape ``(n,)``."""
    code, kernels = table.rows.codes("kernel")
    sizes, place = np.unique(np.stack([inner, topk, experts, code], 1), axis=0, return_inverse=True)
    found = [ungated(width, top, of, kernels[int(at)]) for width, top, of, at in sizes]
    return np.asarray(np.array(found, bool)[place.ravel()])


def _everywhere(table: OpTable) -> np.ndarray:
    """Return where each rank computes the rows of all ranks (TensorRT-LLM's Triton kernel)."""
    return np.asarray(table.is_("backend", "trtllm") & table.says("kernel", "triton_fp8"))


def _floor(table: OpTable, mc: Machine) -> np.ndarray:
    narrow = table.is_("dtype", "nvfp4") | table.is_("dtype", "w4a8_mxfp4_mxfp8")
    cycles = FIT.floor_cycles + np.where(narrow, FIT.floor_narrow, 0.0)
    # Intel's Arc B60 is the only device of another vendor with such rows: one rough factor for it.
    return np.asarray(cycles / mc.clock * np.where(non_nvidia(table) > 0, 2.0, 1.0))


def _streams(
    table: OpTable, tokens: np.ndarray, rows: np.ndarray, hidden: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """Return the bytes of activations that the group of kernels moves, shape ``(n,)``.

    Gather and quantise, two intermediate results, weighted sum.
    """
    # 2 bytes are a value of bf16; 4 are two of them (gate and up), or one of f32 (the sum).
    width = table.activation_bytes
    return np.asarray(
        rows * (hidden * (2 + width) + inner * (4 + width + 2))
        + rows * hidden * 2
        + tokens * hidden * 4
    )


def _tiles(
    active: np.ndarray,
    depth: np.ndarray,
    inner: np.ndarray,
    hidden: np.ndarray,
    matrices: np.ndarray,
    peak: np.ndarray,
    mc: Machine,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the time of both grouped products with the best tile, the first one's waves and fill.

    Seconds, waves over the cores, and the share of the tiles' rows that hold tokens, ``(n,)`` each.
    """
    time = np.full(len(active), np.inf)
    waves, use = np.ones(len(active)), np.ones(len(active))
    for rows, columns, efficiency in TILES:
        down = active * np.ceil(depth / rows)
        seconds = np.zeros(len(active))
        for width, reach in (((matrices - 1) * inner, hidden), (hidden, inner)):
            own = down * np.ceil(width / columns) / mc.cores
            split = np.clip(
                np.floor(1 / np.maximum(own, 1e-9)), 1, np.maximum(1, reach / SPLIT_DEPTH)
            )
            runs = np.where(own < 1, 1 / split, quantised(own))
            seconds += runs * rows * columns * reach * 2 / (peak / mc.cores) / efficiency
        faster = seconds < time
        first = down * np.ceil((matrices - 1) * inner / columns) / mc.cores
        time = np.where(faster, seconds, time)
        waves = np.where(faster, first, waves)
        use = np.where(faster, depth / (np.ceil(depth / rows) * rows), use)
    return time, waves, use
