"""Physics of the fastest of a library's hundreds of kernels for one matrix product.

Tables of tuned libraries list the least time over all kernels, with operands quantised already. An
output tile of a core takes, for each step of the reduction, the larger of the matrix unit's time
and that of its operands' way into the core; deep products are split among idle cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .columns import Machine, OpTable
from .fitted import fitted
from .physics import (
    Physics,
    combine,
    fill,
    least_seconds,
    log2,
    resident_share,
    stream_seconds,
)

FIT = fitted("tuned_products")
_SHARE, _JOULES = FIT.numbers("share"), FIT.numbers("joules")

#: Formats of the tables, one flag each.
DTYPES = (
    *("fp64", "fp32", "fp16", "bf16", "fp8", "fp8_block"),
    *("int8", "mxfp8", "mxfp4"),
)
#: Output tiles: all pairs of these sizes that a core's registers hold and that keep it busy.
_SIDES = (16.0, 32.0, 64.0, 128.0, 256.0)
_LARGEST, _LEAST = 256 * 128, 512
#: Parts that a reduction is split into, and their least depth. Engineering estimates.
_SPLITS, _SPLIT_DEPTH = (1.0, 2.0, 4.0, 8.0, 16.0), 128


def tuned_gemm(table: OpTable) -> Physics:
    """Estimate ``out[b, m, n] = sum_k A[b, m, k] B[b, k, n]`` by the fastest tile and split."""
    b, m, n, k = table.numbers("b", "m", "n", "k")
    mc, peak = table.machine(multiprocessors=True), table.matrix_peak()
    out = np.maximum(table.activation_bytes, 2.0) * b * m * n
    operands = table.weight_bytes * b * n * k + table.activation_bytes * b * m * k
    moved = operands + out
    # Operands that the benchmark rotates are in no cache (README of the kernel pack).
    rotated = table.columns["rotated"] > 0
    resident = np.where(rotated, 0.0, resident_share(moved, mc.cache, 1.0, 0.5))
    cold = moved / (mc.bandwidth * FIT.cold)
    t_memory = np.where(rotated, cold, stream_seconds(moved, resident, mc))
    share = _clock_share(table)
    rate = peak * _matrix_share(table) * share
    t_tiles, waves, use, split = _fastest(table, (b, m, n, k), rate, mc)
    floor = FIT.floor_cycles / mc.clock
    base = floor + combine(t_tiles, t_memory, power=4.0)
    flops = 2 * b * m * n * k
    features = {
        **{f"dtype_{d}": table.is_("dtype", d) * 1.0 for d in DTYPES},
        **{c: table.columns[c] for c in ("trans_a", "trans_b", "preshuffled", "rotated")},
        "log_tiles_base": log2(t_tiles / base),
        "log_memory_base": log2(t_memory / base),
        "floor_base": floor / base,
        "log_cycles": log2(base * mc.clock),
        "log_intensity": log2(flops / rate / t_memory),
        "log_waves": log2(waves),
        "wave_fill": fill(waves),
        "tile_use": use,
        "log_split": log2(split),
        "log_m": log2(m),
        "log_n": log2(n),
        "log_k": log2(k),
        "log_b": log2(b),
        **{f"m_fill_{t}": m / (np.ceil(m / t) * t) for t in (16, 32, 64, 128, 256)},
        **{f"n_fill_{t}": n / (np.ceil(n / t) * t) for t in (64, 128, 256)},
        **{f"k_of_{t}": (k % t == 0) * 1.0 for t in (64, 128, 512)},
        **_tile_waves(b, m, n, mc),
        "clock_share": share,
        "log_operands_cache": np.clip(log2(operands / mc.cache), -10, 8),
        "log_balance": log2(peak / mc.bandwidth),
        "log_n_cores": log2(n / mc.cores),
    }
    t_least = least_seconds(moved, resident, mc)
    t_peak = flops / peak
    return Physics(
        base,
        np.maximum(t_peak, t_least),
        t_peak > t_least,
        floor,
        flops,
        moved,
        features,
        specific=("clock_share", "log_operands_cache", "log_balance", "log_n_cores"),
        keys=("log_tiles_base", "log_memory_base", "floor_base", "log_m", "log_n", "log_k"),
    )


def _matrix_share(table: OpTable) -> np.ndarray:
    nvidia = table.of_device([float(d.runs_cuda) for d in table.devices])
    return np.where(nvidia > 0, FIT.nvidia_share, table.mapped("dtype", _SHARE, FIT.other_share))


def _clock_share(table: OpTable) -> np.ndarray:
    """Return the share of the clock that the power limit leaves full matrix units, up to 1."""
    shares = []
    for device in table.devices:
        joules = _JOULES.get(device.architecture, 0.0) * device.matrix_peak("bf16")
        shares.append(min(device.power_w / joules, 1.0) if joules and device.power_w else 1.0)
    return table.of_device(shares)


def _tiles() -> Iterator[tuple[float, float]]:
    for rows in _SIDES:
        for columns in _SIDES:
            if _LEAST <= rows * columns <= _LARGEST:
                yield rows, columns


def _fastest(
    table: OpTable,
    size: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    rate: np.ndarray,
    mc: Machine,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds, waves, used share of the tiles and parts of the reduction, ``(n,)`` each."""
    b, m, n, k = size
    width = np.maximum(table.activation_bytes, table.weight_bytes)
    best = np.full(len(m), np.inf)
    waves, use, parts = np.ones(len(m)), np.ones(len(m)), np.ones(len(m))
    for rows, columns in _tiles():
        tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
        step = np.maximum(
            2 * rows * columns * mc.cores / rate,
            (rows + columns) * width / (FIT.ingress * mc.clock),
        )
        fixed = (FIT.prologue + 2 * rows * columns / FIT.epilogue) / mc.clock
        for split in _SPLITS:
            own = tiles * split / mc.cores
            adding = FIT.adding_s + split * b * m * n * FIT.adding_bytes / mc.bandwidth
            seconds = np.ceil(own) * (step * k / split + fixed) + (adding if split > 1 else 0.0)
            faster = (seconds < best) & ((split == 1) | (k / split >= _SPLIT_DEPTH))
            best = np.where(faster, seconds, best)
            waves = np.where(faster, own, waves)
            use = np.where(faster, b * m * n / (tiles * rows * columns), use)
            parts = np.where(faster, split, parts)
    return best, waves, use, parts


def _tile_waves(b: np.ndarray, m: np.ndarray, n: np.ndarray, mc: Machine) -> dict[str, np.ndarray]:
    features = {}
    for rows, columns in ((256, 128), (128, 128), (64, 128), (64, 64), (16, 64)):
        waves = b * np.ceil(m / rows) * np.ceil(n / columns) / mc.cores
        features[f"log_waves_{rows}x{columns}"] = log2(waves)
        features[f"wave_fill_{rows}x{columns}"] = fill(waves)
    return features
