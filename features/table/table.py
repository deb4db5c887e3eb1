"""Convert kernels to a table of dimensionless features for the tabular models.

Every feature is a flag, a fraction, a count or the logarithm of a ratio; none carries a unit. So a
model can be used for shapes and devices that it was not trained on (see docs/features.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..devices.device import DeviceSpec, MemoryLevel
from ..kernels.kernel import Kernel
from .columns import (
    AMOUNTS,
    CODE,
    CODE_FLAGS,
    COLUMNS,
    COMMON_COUNTS,
    COMMON_FLAGS,
    INDEX,
    RARE_COUNTS,
    RARE_FLAGS,
)
from .roofline import compute_seconds, main_bytes, memory_seconds, peaks, roofline_of_rows
from .row import code_flags, rows

#: Incremented whenever the meaning or the set of features changes.
SCHEMA_VERSION = 2

# Rows per chunk: an intermediate float64 column takes 8 kB, so about a hundred of them fit into L2.
_CHUNK = 1024
_COUNTS, _FLAGS = (COMMON_COUNTS, RARE_COUNTS), (COMMON_FLAGS, RARE_FLAGS)

_MIN_FLOOR = 1e-9  # seconds; for a device described without a launch floor
_LIMIT = 30.0  # octaves; no real ratio of sizes or times exceeds 2^30
# Elements per block of an element-wise kernel, for waves: 256 threads of 4 elements. Engineering
# estimate for all devices.
_BLOCK = 1024.0
# Kinds of work that partition a kernel's total; ``work_integer`` overlaps with them.
_WORK = tuple(n for n in AMOUNTS if n.startswith("work_") and n != "work_integer")
#: Elements moved, by kind of movement; an element may be moved in several ways.
_MOVES = tuple(name for name in AMOUNTS if name.startswith("moved_"))

Columns = dict[str, np.ndarray]


def log_ratio(a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """Return ``log2(a / b)`` clipped to ±30; zero over zero gives 0."""
    # Far below any time in seconds or size in bytes, so ratios of positive values do not change.
    tiny = 1e-30
    ratio = np.log2((a + tiny) / (b + tiny))
    return np.asarray(np.clip(ratio, -_LIMIT, _LIMIT))


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Device figures that features are relative to.

    Attributes:
        floor: Launch floor in seconds, never zero.
        cores: Number of cores.
        first: Bytes of the first memory level.
        middle: Bytes of the middle cache level.
        last: Bytes of the last cache.
        bandwidth: Main-memory bytes/s.
        features: Dimensionless features of the device by name.
    """

    floor: float
    cores: float
    first: float
    middle: float
    last: float
    bandwidth: float
    features: dict[str, float]

    @classmethod
    def of(cls, device: DeviceSpec) -> DeviceFacts:
        """Derive the facts of ``device``.

        Raises:
            DeviceError: The device lists no peaks.
        """
        # Without caches in the description (TPUs), main memory stands in: ratios to it are then far
        # below one and carry little information.
        caches = device.levels[:-1] or device.levels
        floor, cores = max(device.floor, _MIN_FLOOR), float(max(device.core_count, 1))
        first, middle, last = (caches[i].capacity for i in (0, len(caches) // 2, -1))
        features = _device_features(device, floor, cores, first, last)
        return cls(floor, cores, first, middle, last, device.bandwidth, features)


def _device_features(
    device: DeviceSpec, floor: float, cores: float, first: float, last: float
) -> dict[str, float]:
    matrix, vector = device.matrix_peak, device.vector_peak
    main, fastest = device.levels[-1], device.levels[0]
    # Without a clock, features in cycles become neutral: a floor of one cycle.
    clock = device.clock_hz or 1.0 / floor
    # f32 and bf16 represent most kernels; other rates follow from features of the kernels.
    pairs = {
        "device_matrix_over_vector": (matrix("f32"), vector("f32")),
        "device_bf16_over_f32": (matrix("bf16"), matrix("f32")),
        "device_f64_over_f32": (matrix("f64"), matrix("f32")),
        "device_int8_over_f32": (matrix("s8"), matrix("f32")),
        "device_half_over_f32_vector": (vector("bf16"), vector("f32")),
        # FLOPs per byte of main memory at which a kernel becomes compute-bound.
        "device_balance_f32": (matrix("f32"), main.bandwidth),
        "device_balance_bf16": (matrix("bf16"), main.bandwidth),
        "device_balance_vector": (vector("f32"), main.bandwidth),
        "device_cache_growth": (last, first),
        "device_cache_bandwidth": (fastest.bandwidth, main.bandwidth),
        "device_floor_bytes_over_cache": (floor * main.bandwidth, last),
        "device_flops_per_cycle_core": (vector("f32"), clock * cores),
        "device_floor_cycles": (floor * clock, 1.0),
        "device_cores": (cores, 1.0),
    }
    features = {name: float(log_ratio(a, b)) for name, (a, b) in pairs.items()}
    # Clipped like the logarithms: it would be huge for descriptions without a floor.
    features["device_gap_over_floor"] = min(device.launch_gap / floor, 16.0)
    features["device_levels"] = float(len(device.levels))
    for platform in ("cpu", "gpu", "tpu"):
        features[f"device_{platform}"] = float(device.platform == platform)
    return features


def derived_features(row: np.ndarray, facts: DeviceFacts, device: DeviceSpec) -> Columns:
    """Derive features by name, each of shape ``(n,)``, from rows of shape ``(n, columns)``."""
    c = dict(zip(INDEX, np.ascontiguousarray(row.T), strict=True))
    work = np.sum([c[name] for name in _WORK], axis=0)
    used = _cores_used(c, facts, device)
    return {
        **_times(row, c, work, used, facts, device),
        **_memory(c, facts),
        **_shares(c, work),
        **_tiles(c, facts),
        **_parallel(c, used, facts),
    }


def _times(
    row: np.ndarray,
    c: Columns,
    work: np.ndarray,
    used: np.ndarray,
    facts: DeviceFacts,
    device: DeviceSpec,
) -> Columns:
    matmul, vector = compute_seconds(row, device)
    matrix_peak, vector_peak = peaks(row, device)
    moved = main_bytes(row, device)
    memory = memory_seconds(moved, device)
    compute, weighted = matmul + vector, work / vector_peak
    # Time on the cores that the kernel actually uses (XLA:CPU may run a loop on one core).
    serial = np.maximum((matmul + np.maximum(vector, weighted)) / used, memory)
    floor = facts.floor
    # A thousandth of a floor is added so that ratios level off far below the floor: taking a
    # millionth of the launch time is as irrelevant as taking a thousandth.
    return {
        "log_roofline_floor": log_ratio(np.maximum(compute, memory) + 2**-10 * floor, floor),
        "log_compute_floor": log_ratio(compute + 2**-10 * floor, floor),
        "log_memory_floor": log_ratio(memory + 2**-10 * floor, floor),
        "log_matmul_floor": log_ratio(matmul + 2**-10 * floor, floor),
        # A depthwise convolution runs far below the matrix peak, even next to a large product.
        "log_grouped_floor": log_ratio(c["grouped_flops"] / vector_peak + 2**-10 * floor, floor),
        "log_weighted_floor": log_ratio(weighted + 2**-10 * floor, floor),
        "log_serial_floor": log_ratio(serial + 2**-10 * floor, floor),
        "log_main_memory_floor": log_ratio(moved / facts.bandwidth + 2**-10 * floor, floor),
        "compute_over_memory": log_ratio(compute + 2**-10 * floor, memory + 2**-10 * floor),
        "weighted_over_memory": log_ratio(weighted + 2**-10 * floor, memory + 2**-10 * floor),
        "weighted_over_roofline": log_ratio(
            weighted + 2**-10 * floor, np.maximum(compute, memory) + 2**-10 * floor
        ),
        "intensity_over_balance": log_ratio(c["flops"] * facts.bandwidth, moved * matrix_peak),
        "work_over_balance": log_ratio(work * facts.bandwidth, moved * vector_peak),
    }


def _memory(c: Columns, facts: DeviceFacts) -> Columns:
    moved = c["bytes_in"] + c["bytes_out"] + 1.0
    buffers = c["operand_bytes"] + c["result_bytes"] + 1.0
    return {
        # The cache that fits the kernel's traffic, then its entire buffers, then single operands: a
        # product may keep one operand in a cache while it streams the other.
        "set_over_first": log_ratio(moved, facts.first),
        "set_over_middle": log_ratio(moved, facts.middle),
        "set_over_last": log_ratio(moved, facts.last),
        "buffers_over_last": log_ratio(buffers, facts.last),
        "operand_over_last": log_ratio(c["operand_bytes_max"] + 1.0, facts.last),
        "result_over_last": log_ratio(c["result_bytes"] + 1.0, facts.last),
        "lhs_over_first": log_ratio(c["gemm_lhs_bytes"] + 1.0, facts.first),
        "rhs_over_first": log_ratio(c["gemm_rhs_bytes"] + 1.0, facts.first),
        "rhs_over_last": log_ratio(c["gemm_rhs_bytes"] + 1.0, facts.last),
        "in_over_out": log_ratio(c["bytes_in"] + 1.0, c["bytes_out"] + 1.0),
        "touched_share": log_ratio(moved, buffers),
        "largest_input_share": c["operand_bytes_max"] / (c["operand_bytes"] + 1.0),
        "window_over_first": log_ratio(
            c["reduce_run"] * np.maximum(c["dtype_bits"], 1.0) / 8 + 1.0, facts.first
        ),
    }


def _shares(c: Columns, work: np.ndarray) -> Columns:
    total = np.maximum(work, 1.0)
    largest = np.maximum(c["elements_max"], 1.0)
    out = np.maximum(c["out_elements"], 1.0)
    shares = {f"share_{name[5:]}": c[name] / total for name in (*_WORK, "work_integer")}
    # An element may be moved several times on its way; more than eight make no difference.
    shares |= {f"share_{name}": np.minimum(c[name] / largest, 8.0) for name in _MOVES}
    shares["share_matmul"] = c["matmul_flops"] / np.maximum(c["flops"], c["matmul_flops"] + 1e-9)
    shares["share_grouped"] = c["grouped_flops"] / np.maximum(c["dense_flops"], 1.0)
    # Below one for convolutions with padding or holes, which dense_flops counts but the cost rules
    # do not.
    shares["share_useful"] = np.where(
        c["dense_flops"] > 0, c["matmul_flops"] / np.maximum(c["dense_flops"], 1.0), 1.0
    )
    shares["elements_per_output"] = log_ratio(c["elements_all"] + 1.0, out)
    shares["largest_per_output"] = log_ratio(c["elements_max"] + 1.0, out)
    shares["work_per_output"] = np.log2(1.0 + work / out)
    shares["flops_per_output"] = np.log2(1.0 + c["flops"] / out)
    shares["work_per_element"] = np.log2(1.0 + work / largest)
    return shares


def real_share(size: np.ndarray, tile: float) -> np.ndarray:
    """Return the fraction of a dimension padded to whole tiles that is data; 1 if absent."""
    padded = np.ceil(size / tile) * tile
    return np.asarray(np.where(size > 0, size / np.maximum(padded, 1.0), 1.0))


def _tiles(c: Columns, facts: DeviceFacts) -> Columns:
    m, n, k, batch = c["gemm_m"], c["gemm_n"], c["gemm_k"], c["gemm_batch"]
    # Usual tiles: CPU micro-kernels (4 to 16), matrix instructions (8, 16), thread blocks (32 to
    # 128). The trees select the relevant ones.
    features = {f"fill_m{tile}": real_share(m, tile) for tile in (4, 8, 16, 64)}
    features |= {f"fill_n{tile}": real_share(n, tile) for tile in (8, 16, 32, 64)}
    features |= {f"fill_k{tile}": real_share(k, tile) for tile in (8, 16, 32)}
    features["fill_mn128"] = real_share(m, 128) * real_share(n, 128)
    features["gemm_aspect"] = log_ratio(m + 1.0, n + 1.0)
    features["gemm_depth"] = log_ratio(k + 1.0, m + n + 1.0)
    elementwise = np.ceil(c["elements_max"] / _BLOCK)
    for tile in (32.0, 128.0):
        tiles = np.where(m > 0, np.ceil(m / tile) * np.ceil(n / tile) * batch, elementwise)
        waves = tiles / facts.cores
        name = f"{tile:.0f}"
        # The constant keeps the logarithm finite; a 256th of a wave is no parallelism at all.
        features[f"waves_{name}"] = np.log2(waves + 2**-8)
        features[f"last_wave_{name}"] = np.where(
            waves > 0, waves / np.maximum(np.ceil(waves), 1), 1.0
        )
    return features


def _cores_used(c: Columns, facts: DeviceFacts, device: DeviceSpec) -> np.ndarray:
    """Return the fraction of the cores that the compiler's partitions occupy, shape ``(n,)``.

    XLA:CPU splits only loops with ``outer_dimension_partitions``; library calls, and everything on
    other devices, may use all cores.
    """
    stated = c["partitions"] > 0
    library = (c["gemm_m"] > 0) | (c["fusion"] == CODE["fusion"]["kCustom"])
    splits = stated | library | (device.platform != "cpu")
    parts = np.where(stated, c["partitions"], np.where(splits, facts.cores, 1.0))
    return np.asarray(np.minimum(parts, facts.cores) / facts.cores)


def _parallel(c: Columns, used: np.ndarray, facts: DeviceFacts) -> Columns:
    parts = c["partitions"]
    share = c["elements_max"] / np.maximum(parts, 1.0)
    return {
        "log_partitions": np.log2(1.0 + parts),
        # -1 marks a split that the compiler does not state (log of half the cores is -1, too).
        "partitions_per_core": np.where(parts > 0, log_ratio(parts, facts.cores), -1.0),
        "cores_used": used,
        # Whether there is work for every core: elements, outer loops, rows and batches.
        "elements_per_core": log_ratio(c["elements_max"] + 1.0, facts.cores),
        "log_elements_per_part": np.log2(1.0 + share),
        "outer_per_core": log_ratio(c["out_outer"] + 1.0, facts.cores),
        "kept_per_core": log_ratio(c["reduce_kept"] + 1.0, facts.cores),
        "batch_per_core": log_ratio(c["gemm_batch"] + 1.0, facts.cores),
    }


@dataclass(slots=True)
class FeatureTable:
    """Features of ``n`` kernels on one device.

    Attributes:
        X: Features, float32, shape ``(n, d)``, finite.
        names: Their ``d`` names.
        roofline_s: Roofline latency of one execution in seconds, shape ``(n,)``.
        bound: Bottleneck at the roofline, shape ``(n,)`` (see :class:`Roofline`).
        base_s: Time that learned ratios refer to, in seconds, shape ``(n,)``: roofline plus floor.
    """

    X: np.ndarray
    names: tuple[str, ...]
    roofline_s: np.ndarray
    bound: np.ndarray
    base_s: np.ndarray


def feature_table(kernels: Sequence[Kernel], device: DeviceSpec) -> FeatureTable:
    """Compute the features of all kernels on one device.

    The device-independent part of each kernel is computed once and cached in ``kernel.row``.

    Args:
        kernels: ``n`` kernels.
        device: Device that they run on.

    Raises:
        DeviceError: The device lists no peaks.
    """
    names = feature_names()
    n = len(kernels)
    X = np.empty((n, len(names)), np.float32)
    latency, bound = np.empty(n), np.empty(n, "<U13")
    facts = DeviceFacts.of(device)
    # Chunk by chunk, so that intermediate columns stay in the processor's cache.
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        row = rows(kernels[part])
        line = roofline_of_rows(row, device)
        latency[part], bound[part] = line.latency_s, line.bound
        _fill(X[part], row, facts, device)
    return FeatureTable(X, names, latency, bound, latency + device.floor)


def _fill(X: np.ndarray, row: np.ndarray, facts: DeviceFacts, device: DeviceSpec) -> None:
    derived = derived_features(row, facts, device)
    # Column by column into contiguous memory, then transposed once: writing columns of a row-major
    # table directly would stride through all of it for each feature.
    block = np.empty((len(derived), len(row)), np.float32)
    for values, target in zip(derived.values(), block, strict=True):
        target[:] = values
    # Logarithms compress counts over many orders of magnitude; adding one keeps zero at zero.
    counts = [np.log2(1 + _columns(row, names).astype(np.float32)) for names in _COUNTS]
    flags = [_columns(row, names) for names in _FLAGS]
    device_part = np.broadcast_to(list(facts.features.values()), (len(row), len(facts.features)))
    parts = [*counts, *flags, *code_flags(row), block.T, device_part]
    np.concatenate(parts, axis=1, out=X, casting="unsafe")


def _columns(row: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    first = INDEX[names[0]]
    return row[:, first : first + len(names)]


@cache
def feature_names() -> tuple[str, ...]:
    """Return the names of the features, in order."""
    empty = np.zeros((0, len(COLUMNS)))
    facts = DeviceFacts.of(_ANY)
    derived = derived_features(empty, facts, _ANY)
    counts = tuple(f"log_{name}" for group in _COUNTS for name in group)
    flags = tuple(name for group in _FLAGS for name in group)
    return (*counts, *flags, *CODE_FLAGS, *derived, *facts.features)


@cache
def schema_hash(names: tuple[str, ...] = ()) -> str:
    """Return a digest of version and feature names; models store it and reject any other.

    Args:
        names: Names of the features; by default :func:`feature_names`.
    """
    text = "\n".join((str(SCHEMA_VERSION), *(names or feature_names())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# A device with all figures 1, since feature names do not depend on them.
_ANY = DeviceSpec("any", "cpu", {"f32": 1.0}, {"f32": 1.0}, (MemoryLevel(1.0, 1.0),), 1.0)
