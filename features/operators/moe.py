"""Physics of mixtures of experts: two grouped products over the experts that have tokens."""

from __future__ import annotations

import numpy as np

from .columns import Machine, OpTable
from .op import busy_rank, expert_flops, ungated
from .physics import (
    Physics,
    combine,
    fill,
    fitted,
    flags,
    least_seconds,
    log2,
    logs,
    multiples,
    other_vendor,
    resident_share,
    stream_seconds,
)
from .schema import DTYPES
from .tiles import grouped_tiles

FIT = fitted("experts")

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
    products = [(active, depth, (matrices - 1) * inner, hidden), (active, depth, hidden, inner)]
    t_tiles, tiles, use = grouped_tiles(products, peak, mc)
    blocks = active * np.ceil(depth / 64) * np.ceil(((matrices - 1) * inner + hidden) / 128)
    t_blocks = blocks / mc.cores * FIT.block / mc.clock
    t_route = tokens * topk / mc.cores * np.where(triton, FIT.route_triton, FIT.route) / mc.clock
    floor = _floor(table, mc)
    # Weights are prefetched while products run. Routing and the passes over activations are kernels
    # before, between and after them, so they add up.
    base = floor + t_streams + t_route + combine(t_tiles + t_blocks, t_memory)
    t_compute = flops / peak
    features = {
        **flags(table, DTYPES["moe"]),
        "skew": skew,
        "ungated": bare * 1.0,
        # Shares of the parts in the estimate, as for products (gemm.py).
        **logs(
            tiles_base=t_tiles / base, memory_base=t_memory / base, compute_base=t_compute / base
        ),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=tiles / mc.cores),
        "wave_fill": fill(tiles / mc.cores),
        "tile_use": use,
        "resident": resident,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 8),
        # Rows of an expert, and how many experts have any: they decide which grouped kernel pays.
        **logs(depth=depth, active=active),
        "active_share": active / local,
        **logs(tokens=tokens, hidden=hidden, inner=inner),
        "topk": log2(topk),
        **logs(local=local, rows=rows, rows_local=rows / local, tp=tp, ep=ep, experts=experts),
        "weights_share": weights / footprint,
        **logs(blocks=np.ceil(inner / 128) * active / mc.cores),
        "inner_fill": inner / (np.ceil(inner / 128) * 128),
        **multiples(inner=(inner, (64,))),
        "streams_base": t_streams / base,
        "route_base": t_route / base,
        **logs(
            blocks_base=t_blocks / base,
            # Load of the busiest rank over that of an average one.
            busy=rows * ep / (tokens * topk),
            local_cores=local / mc.cores,
        ),
    }
    return Physics(
        base,
        t_compute,
        least_seconds(footprint, resident, mc),
        floor,
        flops,
        footprint,
        features,
        specific=("log_local_cores",),
        keys=(
            *("log_tiles_base", "log_memory_base", "floor_base", "log_depth", "log_active"),
            *("log_hidden", "log_inner", "skew"),
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
    return np.asarray(cycles / mc.clock * other_vendor(table, 2.0))


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
