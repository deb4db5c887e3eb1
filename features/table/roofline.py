"""Roofline: lower bounds on the time of a kernel's arithmetic and memory traffic on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..devices.device import DeviceSpec
from ..kernels.kernel import Kernel
from .columns import CODE, INDEX
from .row import rows

#: Vector operations per transcendental (exp, log, tanh …): about a polynomial with its range
#: reduction. Engineering estimate; learned ratios correct it (see ``ir/ops.toml``).
TRANSCENDENTAL_FLOPS = 16.0
#: Largest reduction window that a TPU computes element by element; wider ones are computed in
#: passes. Engineering estimate.
WINDOW = 16.0
#: Octaves around a level's capacity over which its hit rate falls from one to zero: from half to
#: twice the capacity. Engineering estimate; a step would make the time jump at the capacity.
_SPILL_OCTAVES = 2.0


@dataclass(slots=True)
class Roofline:
    """Rooflines of ``n`` kernels, one execution each; arrays have shape ``(n,)``.

    Attributes:
        latency_s: Larger of compute and memory time, in seconds.
        compute_s: Time of the arithmetic at the device's peaks, in seconds.
        memory_s: Time of the traffic at the bandwidth available to its working set, in seconds.
        bound: ``compute``, ``memory``, ``latency`` (below the device's floor) or
            ``communication``.
    """

    latency_s: np.ndarray
    compute_s: np.ndarray
    memory_s: np.ndarray
    bound: np.ndarray


def roofline(kernels: Sequence[Kernel], device: DeviceSpec) -> Roofline:
    """Compute the rooflines of all kernels on one device (Williams et al., 2009).

    ``compute = matmul FLOPs / matrix peak + (other FLOPs + 16 · transcendentals) / vector peak``;
    ``memory = bytes / bandwidth(bytes)``, see :func:`memory_seconds`, excluding arrays that a TPU's
    compiler keeps in on-chip memory; ``latency = max`` of both.

    Args:
        kernels: ``n`` kernels.
        device: Peaks, memory levels and floor.

    Raises:
        DeviceError: The device lists no peaks.
    """
    return roofline_of_rows(rows(kernels), device)


def roofline_of_rows(row: np.ndarray, device: DeviceSpec) -> Roofline:
    """Compute rooflines from kernel rows of shape ``(n, len(COLUMNS))``."""
    matmul_s, vector_s = compute_seconds(row, device)
    # Added, not overlapped: a fusion's epilogue runs after its product; where units do overlap, the
    # learned ratio corrects it.
    compute = matmul_s + vector_s
    memory = memory_seconds(main_bytes(row, device), device)
    latency = np.maximum(compute, memory)
    bound = np.where(compute >= memory, "compute", "memory").astype("<U13")
    bound[latency < device.floor] = "latency"
    # A kernel without work or traffic on a device described without a floor.
    bound[latency == 0.0] = "latency"
    bound[row[:, INDEX["kind"]] == CODE["kind"]["collective"]] = "communication"
    return Roofline(latency, compute, memory, bound)


def least_seconds(kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Return a physical lower bound on the seconds of one execution of each kernel, ``(n,)``.

    The bound is the roofline with its caches. A TPU's on-chip memory is not a cache: the compiler
    fills it ahead of use and passes values on in it, so up to its capacity operands need not come
    from main memory, and only the excess counts. TPU units run in parallel, and transcendentals
    have a separate unit: ``max(products / peak, other FLOPs / peak, (bytes - on-chip) /
    bandwidth)``.

    Raises:
        DeviceError: The device lists no peaks.
    """
    row = rows(kernels)
    line = roofline_of_rows(row, device)
    if device.platform != "tpu":
        return line.latency_s
    # VMEM of all cores: with megacore (v4, v5p) the chip's two cores work as one device.
    beyond = main_bytes(row, device) - device.core_count * device.shared_bytes_per_core
    memory = memory_seconds(np.maximum(beyond, 0.0), device)
    # Unlike the estimate, a bound may assume perfect overlap of the units.
    products, other = compute_seconds(row, device, transcendental=0.0)
    return np.asarray(np.maximum(np.maximum(products, other), memory))


def main_bytes(row: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Sum the bytes that pass through the memory levels, ``(n,)``; on a TPU excluding VMEM."""
    moved = row[:, INDEX["bytes_in"]] + row[:, INDEX["bytes_out"]]
    if device.platform != "tpu":
        return np.asarray(moved)
    near = row[:, INDEX["on_chip_in"]] + row[:, INDEX["on_chip_out"]]
    return np.asarray(np.maximum(moved - near, 0.0))


def compute_seconds(
    row: np.ndarray, device: DeviceSpec, transcendental: float = TRANSCENDENTAL_FLOPS
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds on the matrix unit and on the vector unit, each of shape ``(n,)``.

    A TPU's compiler expresses reductions whose result is broadcast as windows over the whole array,
    which formally visit the array once per element but run in a few passes: there a window counts
    as at most :data:`WINDOW` elements.

    Args:
        row: Rows, shape ``(n, len(COLUMNS))``.
        device: Peaks.
        transcendental: Vector operations per transcendental.
    """
    matmul = row[:, INDEX["matmul_flops"]]
    # Calls of unknown work may have a product but no FLOPs: the rest must not be negative.
    other = np.maximum(row[:, INDEX["flops"]] - matmul, 0.0)
    if device.platform == "tpu":
        other = other * np.minimum(1.0, WINDOW / np.maximum(row[:, INDEX["window_size"]], 1.0))
    other = other + transcendental * row[:, INDEX["transcendentals"]]
    matrix_peak, vector_peak = peaks(row, device)
    return matmul / matrix_peak, other / vector_peak


def peaks(row: np.ndarray, device: DeviceSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix and vector FLOP/s for each row's dtypes, each of shape ``(n,)``."""
    matrix, vector = device.rates
    matrix_code = row[:, INDEX["matrix_dtype"]].astype(np.intp)
    vector_code = row[:, INDEX["vector_dtype"]].astype(np.intp)
    return matrix[matrix_code], vector[vector_code]


def memory_seconds(moved: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Estimate the seconds to move ``moved`` bytes, ``(n,)``, through the level that they fit into.

    A working set up to half of a level's capacity is served by that level, one above twice the
    capacity by the next; in between, the time per byte is interpolated in the logarithm of the
    size. So the time is continuous and never falls as bytes grow.
    """
    # A described or measured cache may be slower than main memory; accumulating keeps the time per
    # byte from falling as the working set grows.
    per_byte = np.maximum.accumulate([1.0 / level.bandwidth for level in device.levels])
    # Time per byte of the fastest level, plus each step down as far as the set has spilled.
    cost = np.full(moved.shape, per_byte[0])
    octaves = np.log2(np.maximum(moved, 1.0))
    for level, faster, slower in zip(device.levels[:-1], per_byte[:-1], per_byte[1:], strict=True):
        spilled = (octaves - np.log2(level.capacity)) / _SPILL_OCTAVES + 0.5
        cost += np.clip(spilled, 0.0, 1.0) * (slower - faster)
    return np.asarray(moved * cost)
