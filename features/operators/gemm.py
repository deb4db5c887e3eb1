"""Physics of matrix products: tiles, waves, split-K, rotating weights, quantisation."""

from __future__ import annotations

import numpy as np

from ..devices.device import DeviceSpec
from .columns import Machine, OpTable
from .library_tiles import library_tiles
from .op import product_bytes
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
from .schema import DTYPES
from .tiles import autotuned_tiles, tile_seconds, tile_waves, tuned_tiles

FIT, TUNED = fitted("products"), fitted("tuned_products")

#: Tiles whose waves are features, of products in general and of tuned libraries.
SHOWN = ((128, 128), (256, 128), (64, 64), (64, 128), (128, 64), (32, 32))
TUNED_SHOWN = ((256, 128), (128, 128), (64, 128), (64, 64), (16, 64))
#: Products that nothing precedes.
_NOTHING = (0.0, 0.0, 0.0, 0.0)
_QUANTISED = {
    "graph/linear": FIT.rows("quantisation"),
    "graph/bmm": FIT.rows("batched_quantisation"),
}
FLOOR_CYCLES = FIT.numbers("floor_cycles")
#: Methods whose products are those of library_tiles.py; eager ones are in fp32, on vector units.
LIBRARY = ("graph/", "kernel/")


def gemm(table: OpTable) -> Physics:
    """Estimate ``out[b, m, n] = sum_k A[b, m, k] B[b, k, n]``."""
    b, m, n, k = size = table.numbers("b", "m", "n", "k")
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    sizes = product_bytes(b, m, n, k, table.weight_bytes, table.activation_bytes)
    weights, activations, out = sizes
    resident, footprint, copies = _residence(table, sizes, mc)
    # Only weights are rotated: activations are warm in every method, since benchmarks reuse one
    # buffer (README of the tensor-core pack).
    small = resident_share(activations + out, mc.cache, 1.2, 0.8)
    t_weights = stream_seconds(weights, resident, mc)
    t_memory = t_weights + stream_seconds(activations + out, small, mc)
    autotuned = table.family.startswith("xla/")
    floor = floor_s(table, mc)
    # The tiles of an autotuned product and of a library know the latency of a step themselves.
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
    # Apart from the tiles: what stalls a kernel at its boost clock (tiles, latencies) leaves power
    # unused, so a chip at its power limit is not slower by both, but by the larger one. XLA's tool
    # times single kernels, too short for the limit.
    flops = 2 * b * m * n * k
    t_power = np.zeros(len(table)) if autotuned else flops / table.power_rate()
    t_peak = flops / peak
    t_compute = np.maximum(t_peak, t_power)
    t_quant = _quantisation(table, b * m, k, small, mc)
    # Arithmetic and transfers overlap almost completely in pipelined GEMMs, hence a sharper maximum
    # than elsewhere. Depth and quantisation come before or after and add up.
    # XLA's tool gives the median over the kernels of all runs, which of two is their mean: half of
    # the call (README of the XLA pack).
    base = floor + combine(t_tiles, t_memory, t_power, power=4.0) / kernels + t_depth + t_quant
    # At data-sheet rates, each operand once, from where it lies. Quantisation is left out, and so
    # is the power limit, which holds for seconds but not for a single call.
    t_least = least_seconds(weights, resident, mc) + least_seconds(activations + out, small, mc)
    features = {
        **flags(table, DTYPES["gemm"]),
        # Shares of the parts in the estimate: where one limit takes all the time, the learned ratio
        # is a property of that part (docs/operator-learning.md, Slopes).
        **logs(
            tiles_base=t_tiles / base, memory_base=t_memory / base, compute_base=t_compute / base
        ),
        "quant_base": t_quant / base,
        "depth_base": t_depth / base,
        "floor_base": floor / base,
        "weights_base": t_weights / base,
        # Time in cycles, not seconds: overheads in cycles are alike on chips of unlike clocks. And
        # how the best tiling fits the device.
        **logs(cycles=base * mc.clock, intensity=t_compute / t_memory, waves=waves),
        "wave_fill": fill(waves),
        "tile_use": tile_use,
        **chosen,
        # Where operands lie when the kernel starts.
        "resident": resident,
        "activations_resident": small,
        "log_footprint_cache": np.clip(log2(footprint / mc.cache), -6, 6),
        # Sizes themselves, for the dispatch rules of libraries.
        **logs(m=m, n=n, k=k, b=b),
        **tile_waves(size, mc, SHOWN),
        # Alignments that kernels ask for, and the padding of few rows to a tile.
        **fills(m=(m, (16, 64, 128, 256))),
        **multiples(m=(m, (8,)), n=(n, (128, 256)), k=(k, (128, 32))),
        **multiples(n=(n, (32,))),
        "copies": copies,
        # Ratios that combine a size with one property of the chip let trees recognise the device:
        # they are `specific` below and withheld from models for unseen devices.
        "log_weights_cache": np.clip(log2(weights / mc.cache), -8, 8),
        "log_activations_cache": np.clip(log2((activations + out) / mc.cache), -10, 8),
        **logs(tile_cycles=k * 2 * 128 * 128 * mc.cores / peak * mc.clock, n_cores=n / mc.cores),
    }
    return Physics(
        base,
        # Of the same mean of kernels as the estimate.
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
    """Return the time of a kernel without work in seconds, shape ``(n,)``."""
    method = table.family.split("/")[0]
    if method == "eager":
        return np.full(len(table), FIT.eager_floor_s)
    # Intel's Arc B60 is the only device of another vendor with replayed graphs: one rough factor
    # for it. XLA's kernels start within the same cycles on MI300X as on H100.
    other = other_vendor(table, 1.0 if method == "xla" else 10.0)
    return np.asarray(FLOOR_CYCLES[method] / machine.clock * other)


def _residence(
    table: OpTable, sizes: tuple[np.ndarray, np.ndarray, np.ndarray], mc: Machine
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the share of the weights in the cache, footprint in bytes, and copies in rotation.

    Graph-timed tables rotate copies of the weights: six in vLLM and SGLang (one for nvfp4 in vLLM),
    in TensorRT-LLM as many as fill the cache, up to five, and one if one exceeds it. The others
    call again with the same operands.
    """
    weights, activations, out = sizes
    if not table.family.startswith("graph/"):
        # XLA's tool runs two sets of arguments in turn (README of the XLA pack).
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
    """Estimate the kernels that narrow 16-bit activations before the product, where they run."""
    figures = _QUANTISED.get(table.family, {})
    launch, row, moved, element = table.by_pair(("dtype", "backend"), figures, _NOTHING)
    # Rows are dealt out whole to cores (one block a row), elements evenly.
    cycles = launch + row * np.ceil(rows / mc.cores) + element * rows * k / mc.cores
    seconds = cycles / mc.clock + stream_seconds(rows * k * moved, resident, mc)
    # Without units of its format, a chip widens the weights and leaves activations as they are.
    own = table.matrix_peak() > table.of_device(lambda device: device.matrix_peak("bf16"))
    wide = table.activation_bytes >= 2
    return np.where(own | wide, seconds, 0.0)


def tuned_gemm(table: OpTable) -> Physics:
    """Estimate the fastest of a library's hundreds of kernels for one product.

    Tables of tuned libraries list the least time over all kernels, with operands quantised already.
    """
    b, m, n, k = size = table.numbers("b", "m", "n", "k")
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    out = np.maximum(table.activation_bytes, 2.0) * b * m * n
    operands = table.weight_bytes * b * n * k + table.activation_bytes * b * m * k
    moved = operands + out
    # Operands that the benchmark rotates are in no cache (README of the kernel pack).
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
    """Share of the clock that the power limit leaves full matrix units, up to 1."""
    joules = TUNED.numbers("joules").get(device.architecture, 0.0) * device.matrix_peak("bf16")
    return min(device.power_w / joules, 1.0) if joules and device.power_w else 1.0
