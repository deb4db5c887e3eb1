"""Physics of matrix products: tiles, waves, split-K, rotating weights, quantisation."""

from __future__ import annotations

import numpy as np

from .autotuned_gemm import autotuned_tiles
from .columns import Machine, OpTable
from .fitted import fitted
from .library_tiles import library_tiles
from .op import product_bytes
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

FIT = fitted("products")

#: Output tiles (rows, columns) that GEMM libraries choose from, with the share of the matrix peak
#: that their inner loops reach. Small tiles reload operands from shared memory more often for each
#: product. Sizes are CUTLASS's usual ones; shares are engineering estimates.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.94),
    (64, 128, 0.8),
    (128, 64, 0.8),
    (64, 64, 0.65),
    (32, 64, 0.4),
    (64, 32, 0.4),
    (16, 64, 0.25),
    (16, 32, 0.15),
)
#: Tiles whose waves are features, whichever of :data:`TILES` is fastest, so that a model can learn
#: that a library chose another one.
SHOWN = ((128, 128), (256, 128), (64, 64), (64, 128), (128, 64), (32, 32))
_SHOWN_ROWS, _SHOWN_COLUMNS = (
    np.array(sides, float)[:, None] for sides in zip(*SHOWN, strict=True)
)
#: Heights of tiles that few rows are padded to.
_PADDED = (16, 64, 128, 256)
_PADDED_ROWS = np.array(_PADDED, float)[:, None]
#: Least depth of one split of the reduction: shallower ones spend their time on the prologue and on
#: adding up partial results. Engineering estimate.
SPLIT_DEPTH = 256
#: Products that nothing precedes.
_NOTHING = (0.0, 0.0, 0.0, 0.0)
_QUANTISED = {
    "graph/linear": FIT.rows("quantisation"),
    "graph/bmm": FIT.rows("batched_quantisation"),
}
FLOOR_CYCLES = FIT.numbers("floor_cycles")
#: Methods whose products are those of library_tiles.py; eager ones are in fp32, on vector units.
LIBRARY = ("graph/", "kernel/")
#: Dtypes of the published GEMM tables, one flag each.
DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "int8_sq", "int8_wo", "int4_wo")


def gemm(table: OpTable) -> Physics:
    """Estimate ``out[b, m, n] = sum_k A[b, m, k] B[b, k, n]``."""
    b, m, n, k = table.numbers("b", "m", "n", "k")
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
        tuned = autotuned_tiles(table, (b, m, n, k), peak, mc, floor, t_memory)
        t_tiles, waves, tile_use, kernels = tuned
    elif table.family.startswith(LIBRARY):
        tiling = library_tiles(table, (b, m, n, k), peak, mc)
        t_tiles, waves, tile_use = tiling.seconds, tiling.waves, tiling.use
        t_depth = tiling.step_s
        chosen = {"log_split": log2(tiling.split), "log_side": tiling.side}
    else:
        t_tiles, waves, tile_use = tile_seconds(b, m, n, k, peak, mc)
        t_depth = k * FIT.depth / mc.clock
    # Apart from the tiles: what stalls a kernel at its boost clock (tiles, latencies) leaves power
    # unused, so a chip at its power limit is not slower by both, but by the larger one. XLA's tool
    # times single kernels, too short for the limit.
    t_power = np.zeros(len(table)) if autotuned else 2 * b * m * n * k / table.power_rate()
    t_peak = 2 * b * m * n * k / peak
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
    # Of the same mean of kernels as the estimate.
    roofline = np.maximum(t_peak, t_least) / kernels
    logs = _logs(
        tiles_base=t_tiles / base,
        memory_base=t_memory / base,
        compute_base=t_compute / base,
        cycles=base * mc.clock,
        intensity=t_compute / t_memory,
        waves=waves,
        footprint=footprint / mc.cache,
        m=m,
        n=n,
        k=k,
        b=b,
        weights=weights / mc.cache,
        activations=(activations + out) / mc.cache,
        tile_cycles=k * 2 * 128 * 128 * mc.cores / peak * mc.clock,
        n_cores=n / mc.cores,
    )
    features = {
        **flags(table, DTYPES),
        # Shares of the parts in the estimate: where one limit takes all the time, the learned ratio
        # is a property of that part (docs/operator-learning.md, Slopes).
        "log_tiles_base": logs["tiles_base"],
        "log_memory_base": logs["memory_base"],
        "log_compute_base": logs["compute_base"],
        "quant_base": t_quant / base,
        "depth_base": t_depth / base,
        "floor_base": floor / base,
        "weights_base": t_weights / base,
        # Time in cycles, not seconds: overheads in cycles are alike on chips of unlike clocks.
        "log_cycles": logs["cycles"],
        "log_intensity": logs["intensity"],
        # How the best tiling of TILES fits the device.
        "log_waves": logs["waves"],
        "wave_fill": fill(waves),
        "tile_use": tile_use,
        **chosen,
        # Where operands lie when the kernel starts.
        "resident": resident,
        "activations_resident": small,
        "log_footprint_cache": np.clip(logs["footprint"], -6, 6),
        # Sizes themselves, for the dispatch rules of libraries.
        "log_m": logs["m"],
        "log_n": logs["n"],
        "log_k": logs["k"],
        "log_b": logs["b"],
        **_waves(b, m, n, mc),
        # Alignments that kernels ask for, and the padding of few rows to a tile.
        **_padding(m),
        "m_of_8": (m % 8 == 0) * 1.0,
        "n_of_128": (n % 128 == 0) * 1.0,
        "n_of_256": (n % 256 == 0) * 1.0,
        "k_of_128": (k % 128 == 0) * 1.0,
        "k_of_32": (k % 32 == 0) * 1.0,
        "n_of_32": (n % 32 == 0) * 1.0,
        "copies": copies,
        # Ratios that combine a size with one property of the chip let trees recognise the device:
        # they are `specific` below and withheld from models for unseen devices.
        "log_weights_cache": np.clip(logs["weights"], -8, 8),
        "log_activations_cache": np.clip(logs["activations"], -10, 8),
        "log_tile_cycles": logs["tile_cycles"],
        "log_n_cores": logs["n_cores"],
    }
    return Physics(
        base,
        roofline,
        t_peak > t_least,
        floor,
        2 * b * m * n * k,
        weights + activations + out,
        features,
        specific=("log_weights_cache", "log_activations_cache", "log_tile_cycles", "log_n_cores"),
        keys=("log_tiles_base", "log_memory_base", "floor_base", "log_m", "log_n", "log_k"),
        kernels=kernels,
    )


def _logs(**values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the logarithms of columns by name, which takes as long as one for a few rows."""
    return dict(zip(values, log2(np.array(list(values.values()))), strict=True))


def floor_s(table: OpTable, machine: Machine) -> np.ndarray:
    """Return the time of a kernel without work in seconds, shape ``(n,)``."""
    method = table.family.split("/")[0]
    if method == "eager":
        return np.full(len(table), FIT.eager_floor_s)
    # Intel's Arc B60 is the only device of another vendor with replayed graphs: one rough factor
    # for it. XLA's kernels start within the same cycles on MI300X as on H100.
    other = np.where((non_nvidia(table) > 0) & (method != "xla"), 10.0, 1.0)
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


def tile_seconds(
    b: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray, peak: np.ndarray, mc: Machine
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the time of the fastest tiling in seconds, its waves, and the used share of its tiles.

    All have shape ``(n,)``. Tiles that do not fill the device split the reduction among idle cores.
    """
    time = np.full(len(m), np.inf)
    waves, use = np.ones(len(m)), np.ones(len(m))
    for rows, columns, efficiency in TILES:
        tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
        own = tiles / mc.cores
        deepest = np.maximum(1, np.floor(k / SPLIT_DEPTH))
        split = np.clip(np.floor(mc.cores / tiles), 1, deepest)
        # Below one wave, splitting shortens the only wave; a tile is never faster than its split.
        runs = np.where(own < 1, 1 / split, quantised(own))
        seconds = runs * mc.cores * rows * columns * k * 2 / peak / efficiency
        faster = seconds < time
        time = np.where(faster, seconds, time)
        waves = np.where(faster, own, waves)
        use = np.where(faster, b * m * n / (tiles * rows * columns), use)
    return time, waves, use


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
    own = table.matrix_peak() > table.of_device([d.matrix_peak("bf16") for d in table.devices])
    wide = table.activation_bytes >= 2
    return np.where(own | wide, seconds, 0.0)


def _waves(b: np.ndarray, m: np.ndarray, n: np.ndarray, mc: Machine) -> dict[str, np.ndarray]:
    # All tiles at once, shape (tiles, n): of a single product each call takes as long as a number.
    waves = b * np.ceil(m / _SHOWN_ROWS) * np.ceil(n / _SHOWN_COLUMNS) / mc.cores
    features = {}
    for (rows, columns), log, full in zip(SHOWN, log2(waves), fill(waves), strict=True):
        features[f"log_waves_{rows}x{columns}"] = log
        features[f"wave_fill_{rows}x{columns}"] = full
    return features


def _padding(m: np.ndarray) -> dict[str, np.ndarray]:
    wanted = m / (np.ceil(m / _PADDED_ROWS) * _PADDED_ROWS)
    return {f"m_fill_{rows}": own for rows, own in zip(_PADDED, wanted, strict=True)}
