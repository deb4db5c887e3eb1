"""Physics of matrix products: tiles, waves, split-K, rotating weights, quantisation.

A mixture of experts is two grouped products over the experts that receive tokens.
"""

from __future__ import annotations

import numpy as np

from ..devices.device import DeviceSpec
from .columns import OpTable
from .library_tiles import library_tiles
from .machine import Machine
from .op import expert_flops, product_bytes, ungated
from .physics import (
    Physics,
    combine,
    fill,
    fills,
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
from .routing import busy_rank
from .schema import DTYPES
from .tiles import autotuned_tiles, grouped_tiles, tile_seconds, tile_waves, tuned_tiles

FIT, TUNED, EXPERTS = fitted("products"), fitted("tuned_products"), fitted("experts")
#: Exponents of the published distributions of tokens over experts; any other name means balanced.
SKEW = {"power_law_1.01": 1.01, "power_law_1.2": 1.2}

#: Tiles whose wave counts are features, for products in general and for tuned libraries.
SHOWN = ((128, 128), (256, 128), (64, 64), (64, 128), (128, 64), (32, 32))
TUNED_SHOWN = ((256, 128), (128, 128), (64, 128), (64, 64), (16, 64))
#: Quantisation costs of a product whose activations are not quantised.
_NOTHING = (0.0, 0.0, 0.0, 0.0)
_QUANTISED = {
    "graph/linear": FIT.rows("quantisation"),
    "graph/bmm": FIT.rows("batched_quantisation"),
}
FLOOR_CYCLES = FIT.numbers("floor_cycles")
#: Methods estimated by library_tiles.py; eager products are fp32, on vector units.
LIBRARY = ("graph/", "kernel/")


def gemm(table: OpTable) -> Physics:
    """Estimate ``out[b, m, n] = sum_k A[b, m, k] B[b, k, n]``."""
    b, m, n, k = size = table.numbers("b", "m", "n", "k")
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    sizes = product_bytes(b, m, n, k, table.weight_bytes, table.activation_bytes)
    weights, activations, out = sizes
    resident, footprint, copies = _residence(table, sizes, mc)
    # Only weights are rotated: activations are warm in every method because benchmarks reuse one
    # buffer (README of the tensor-core pack).
    small = resident_share(activations + out, mc.cache, 1.2, 0.8)
    t_weights = stream_seconds(weights, resident, mc)
    t_memory = t_weights + stream_seconds(activations + out, small, mc)
    autotuned = table.family.startswith("xla/")
    floor = floor_s(table, mc)
    # The tile models for autotuned and library products already include the latency per step.
    t_depth, kernels, chosen = np.zeros(len(table)), np.ones(len(table)), {}
    if autotuned:
        tuned = autotuned_tiles(table, size, peak, mc, floor, t_memory)
        t_tiles, waves, tile_use, kernels = tuned
    elif table.family.startswith(LIBRARY):
        tiling = library_tiles(table, size, peak, mc)
        t_tiles, waves, tile_use = tiling.seconds, tiling.waves, tiling.use
        t_depth = tiling.step_s
        chosen = {"log_split": log2(tiling.split), "log_side": tiling.side}
    else:
        t_tiles, waves, tile_use = tile_seconds(size, peak, mc)
        t_depth = k * FIT.depth / mc.clock
    # Separate from the tiles: whatever stalls a kernel at its boost clock (tiles, latencies) leaves
    # power unused, so a chip at its power limit is slowed by the larger of the two, not by both.
    # XLA's tool times single kernels, which are too short to reach the limit.
    flops = 2 * b * m * n * k
    t_power = np.zeros(len(table)) if autotuned else flops / table.power_rate()
    t_peak = flops / peak
    t_compute = np.maximum(t_peak, t_power)
    t_quant = _quantisation(table, b * m, k, small, mc)
    # Arithmetic and transfers overlap almost completely in pipelined GEMMs, hence a sharper maximum
    # than elsewhere. Depth latency and quantisation come before or after and add up.
    # XLA's tool reports the median over the kernels of all runs; for two kernels per call that is
    # their mean, half of the call (README of the XLA pack).
    base = floor + combine(t_tiles, t_memory, t_power, power=4.0) / kernels + t_depth + t_quant
    # At data-sheet rates, each operand once, from where it resides. Quantisation is excluded, and
    # so is the power limit, which applies over seconds but not to a single call.
    t_least = least_seconds(weights, resident, mc) + least_seconds(activations + out, small, mc)
    features = {
        **flags(table, DTYPES["gemm"]),
        # Contribution of each part to the estimate: where one limit takes all the time, the learned
        # ratio is a property of that part (docs/operator-learning.md, Slopes).
        **logs(
            tiles_base=t_tiles / base, memory_base=t_memory / base, compute_base=t_compute / base
        ),
        "quant_base": t_quant / base,
        "depth_base": t_depth / base,
        "floor_base": floor / base,
        "weights_base": t_weights / base,
        # Time in cycles, since overheads in cycles agree on chips with different clocks; then how
        # well the best tiling fits the device.
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=waves),
        "wave_fill": fill(waves),
        "tile_use": tile_use,
        **chosen,
        # Where operands reside when the kernel starts.
        "resident": resident,
        "activations_resident": small,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 6),
        # Sizes, for the dispatch rules of libraries.
        **logs(m=m, n=n, k=k, b=b),
        **tile_waves(size, mc, SHOWN),
        # Alignments that kernels require, and the padding of few rows to a tile.
        **fills(m=(m, (16, 64, 128, 256))),
        **multiples(m=(m, (8,)), n=(n, (128, 256)), k=(k, (128, 32))),
        **multiples(n=(n, (32,))),
        "copies": copies,
        # Ratios of a size to a single property of the chip let trees recognise the device: they are
        # `specific` below and withheld from models for unseen devices.
        "log_weights_cache": np.clip(log2(weights / mc.cache), -8, 8),
        "log_activations_cache": np.clip(log2((activations + out) / mc.cache), -10, 8),
        **logs(tile_cycles=k * 2 * 128 * 128 * mc.cores / peak * mc.clock, n_cores=n / mc.cores),
    }
    return Physics(
        base,
        # Averaged over the kernels of a call, like the estimate.
        t_peak / kernels,
        t_least / kernels,
        floor,
        flops,
        weights + activations + out,
        features,
        specific=("log_weights_cache", "log_activations_cache", "log_tile_cycles", "log_n_cores"),
        keys=("log_tiles_base", "log_memory_base", "floor_base", "log_m", "log_n", "log_k"),
        kernels=kernels,
    )


def floor_s(table: OpTable, machine: Machine) -> np.ndarray:
    """Return the fixed cost of a kernel in seconds, shape ``(n,)``."""
    method = table.family.split("/")[0]
    if method == "eager":
        return np.full(len(table), FIT.eager_floor_s)
    # Intel's Arc B60 is the only non-NVIDIA device with replayed graphs: one rough factor covers
    # it. XLA's kernels start within the same number of cycles on MI300X as on H100.
    other = other_vendor(table, 1.0 if method == "xla" else 10.0)
    return np.asarray(FLOOR_CYCLES[method] / machine.clock * other)


def _residence(
    table: OpTable, sizes: tuple[np.ndarray, np.ndarray, np.ndarray], mc: Machine
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cached fraction of the weights, footprint in bytes, and number of weight copies.

    Graph-timed benchmarks rotate copies of the weights: six in vLLM and SGLang (one for nvfp4 in
    vLLM); in TensorRT-LLM as many as fill the cache, at most five, and one if a copy exceeds it.
    Other methods call again with the same operands.
    """
    weights, activations, out = sizes
    if not table.family.startswith("graph/"):
        # XLA's tool alternates between two sets of arguments (README of the XLA pack).
        sets = 2.0 if table.family.startswith("xla/") else 1.0
        footprint = sets * (weights + activations + out)
        return resident_share(footprint, mc.cache, 1.0, 0.5), footprint, np.ones(len(table))
    fitting = np.clip(np.ceil(mc.cache / weights), 1, FIT.trt_rotation)
    trt = np.where(weights >= mc.cache, 1.0, fitting)
    copies = np.where(table.is_("backend", "trtllm"), trt, FIT.rotation)
    copies = np.where(table.is_("backend", "vllm") & table.is_("dtype", "nvfp4"), 1.0, copies)
    footprint = copies * weights + activations + out
    rotating = resident_share(footprint, mc.cache)
    same = resident_share(footprint, mc.cache, 1.0, 0.5)
    return np.where(copies == 1, same, rotating), footprint, copies


def _quantisation(
    table: OpTable, rows: np.ndarray, k: np.ndarray, resident: np.ndarray, mc: Machine
) -> np.ndarray:
    """Estimate the seconds of kernels that quantise 16-bit activations before the product."""
    figures = _QUANTISED.get(table.family, {})
    launch, row, moved, element = table.by_pair(("dtype", "backend"), figures, _NOTHING)
    # Whole rows are assigned to cores (one block per row), elements evenly.
    cycles = launch + row * np.ceil(rows / mc.cores) + element * rows * k / mc.cores
    seconds = cycles / mc.clock + stream_seconds(rows * k * moved, resident, mc)
    # Without units for the format, a chip widens the weights and leaves activations unchanged.
    own = table.matrix_peak() > table.of_device(lambda device: device.matrix_peak("bf16"))
    wide = table.activation_bytes >= 2
    return np.where(own | wide, seconds, 0.0)


def tuned_gemm(table: OpTable) -> Physics:
    """Estimate the fastest of a library's hundreds of kernels for one product.

    Tables of tuned libraries list the minimum over all kernels, with operands already quantised.
    """
    b, m, n, k = size = table.numbers("b", "m", "n", "k")
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    out = np.maximum(table.activation_bytes, 2.0) * b * m * n
    operands = table.weight_bytes * b * n * k + table.activation_bytes * b * m * k
    moved = operands + out
    # Rotated operands are never cached (README of the kernel pack).
    rotated = table.columns["rotated"] > 0
    resident = np.where(rotated, 0.0, resident_share(moved, mc.cache, 1.0, 0.5))
    cold = moved / (mc.bandwidth * TUNED.cold)
    t_memory = np.where(rotated, cold, stream_seconds(moved, resident, mc))
    share = table.of_device(_clock_share)
    rate = peak * _matrix_share(table) * share
    t_tiles, waves, use, split = tuned_tiles(table, size, rate, mc)
    floor = TUNED.floor_cycles / mc.clock
    base = floor + combine(t_tiles, t_memory, power=4.0)
    flops = 2 * b * m * n * k
    features = {
        **{f"dtype_{d}": table.is_("dtype", d) * 1.0 for d in DTYPES["tuned_gemm"]},
        **{c: table.columns[c] for c in ("trans_a", "trans_b", "preshuffled", "rotated")},
        **logs(tiles_base=t_tiles / base, memory_base=t_memory / base),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock, intensity=flops / rate / t_memory, waves=waves),
        "wave_fill": fill(waves),
        "tile_use": use,
        **logs(split=split, m=m, n=n, k=k, b=b),
        **fills(m=(m, (16, 32, 64, 128, 256)), n=(n, (64, 128, 256))),
        **multiples(k=(k, (64, 128, 512))),
        **tile_waves(size, mc, TUNED_SHOWN),
        "clock_share": share,
        "log_operands_cache": np.clip(log2(operands / mc.cache), -10, 8),
        **logs(balance=peak / mc.bandwidth, n_cores=n / mc.cores),
    }
    return Physics(
        base,
        flops / peak,
        least_seconds(moved, resident, mc),
        floor,
        flops,
        moved,
        features,
        specific=("clock_share", "log_operands_cache", "log_balance", "log_n_cores"),
        keys=("log_tiles_base", "log_memory_base", "floor_base", "log_m", "log_n", "log_k"),
    )


def _matrix_share(table: OpTable) -> np.ndarray:
    other = table.mapped("dtype", TUNED.numbers("share"), TUNED.other_share)
    return np.where(table.is_on(lambda device: device.runs_cuda), TUNED.nvidia_share, other)


def _clock_share(device: DeviceSpec) -> float:
    """Return the fraction of the clock that the power limit leaves to full matrix units."""
    joules = TUNED.numbers("joules").get(device.architecture, 0.0) * device.matrix_peak("bf16")
    return min(device.power_w / joules, 1.0) if joules and device.power_w else 1.0


def moe(table: OpTable) -> Physics:
    """Estimate the experts of one rank, the busiest one if the routing is skewed."""
    tokens, hidden, full, topk, experts, tp, ep = table.numbers(
        "tokens", "hidden", "inter", "topk", "experts", "tp", "ep"
    )
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    inner, local = full / tp, experts / ep
    skew = table.mapped("distribution", SKEW, 0.0)
    rows, active = busy_rank(tokens, topk, experts, ep, skew)
    rows = np.where(_everywhere(table), tokens * topk, rows)
    triton = table.mentions("kernel", "triton", "fused_moe", "marlin")
    bare = _ungated(table, full, topk, experts)
    # Gate, up and down projection; up and down only where there is no gate.
    matrices = np.where(bare, 2.0, 3.0)
    # Experts are treated as equally loaded below; `rows` and `active` account for the skew.
    depth = np.maximum(rows / active, 1)
    flops = expert_flops(tokens, topk, ep, hidden, inner, 2.0) * matrices
    weights = active * hidden * inner * matrices * table.weight_bytes
    streams = _streams(table, tokens, rows, hidden, inner)
    again = np.where(triton, EXPERTS.passes * 2 * tokens * topk * hidden, 0.0)
    footprint = weights + streams
    resident = resident_share(footprint, mc.cache, 1.1, 0.2)
    t_memory = stream_seconds(weights, resident, mc)
    t_streams = stream_seconds(streams + again, resident, mc)
    products = [(active, depth, (matrices - 1) * inner, hidden), (active, depth, hidden, inner)]
    t_tiles, tiles, use = grouped_tiles(products, peak, mc)
    blocks = active * np.ceil(depth / 64) * np.ceil(((matrices - 1) * inner + hidden) / 128)
    t_blocks = blocks / mc.cores * EXPERTS.block / mc.clock
    t_route = (
        tokens * topk / mc.cores * np.where(triton, EXPERTS.route_triton, EXPERTS.route) / mc.clock
    )
    floor = _floor(table, mc)
    # Weights are prefetched while products run. Routing and the passes over activations are
    # separate kernels before, between and after the products, so their times add up.
    base = floor + t_streams + t_route + combine(t_tiles + t_blocks, t_memory)
    t_compute = flops / peak
    features = {
        **flags(table, DTYPES["moe"]),
        "skew": skew,
        "ungated": bare * 1.0,
        # Contribution of each part to the estimate, as for other products.
        **logs(
            tiles_base=t_tiles / base, memory_base=t_memory / base, compute_base=t_compute / base
        ),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=tiles / mc.cores),
        "wave_fill": fill(tiles / mc.cores),
        "tile_use": use,
        "resident": resident,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 8),
        # Rows per expert and number of active experts decide which grouped kernel pays.
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
            # Load of the busiest rank relative to the mean.
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
    return np.asarray(table.is_("backend", "trtllm") & table.mentions("kernel", "triton_fp8"))


def _generated(table: OpTable) -> np.ndarray:
    """Return where TensorRT-LLM's generated kernels run, bool, shape ``(n,)``.

    TensorRT-LLM uses them for 4-bit experts with 8-bit activations and when tuned for latency;
    other libraries call them through FlashInfer.
    """
    chip = table.is_on(lambda device: device.rules.paired_cores)
    narrow = table.is_("backend", "trtllm") & table.is_("dtype", "w4a8_mxfp4_mxfp8")
    return np.asarray(
        chip & (table.mentions("kernel", "min_latency", "flashinfer_trtllm") | narrow)
    )


def _floor(table: OpTable, mc: Machine) -> np.ndarray:
    narrow = table.is_("dtype", "nvfp4") | table.is_("dtype", "w4a8_mxfp4_mxfp8")
    cycles = EXPERTS.floor_cycles + np.where(narrow, EXPERTS.floor_narrow, 0.0)
    cycles = np.where(_generated(table), EXPERTS.generated_floor, cycles)
    # Intel's Arc B60 is the only non-NVIDIA device with such rows: one rough factor covers it.
    return np.asarray(cycles / mc.clock * other_vendor(table, 2.0))


def _streams(
    table: OpTable, tokens: np.ndarray, rows: np.ndarray, hidden: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """Return the bytes of activations that the group of kernels moves, shape ``(n,)``.

    These are gather and quantise, two intermediate results, and a weighted sum.
    """
    # 2 bytes are one bf16 value; 4 bytes are two of these (gate and up) or one f32 value (the sum).
    width = table.activation_bytes
    return np.asarray(
        rows * (hidden * (2 + width) + inner * (4 + width + 2))
        + rows * hidden * 2
        + tokens * hidden * 4
    )
