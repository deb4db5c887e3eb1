"""Depthwise convolutions by direct kernels: each output multiplies its own window.

    time = launch + softmax(moved / bandwidth, loads / loads that cores start in a second)

Such a convolution is no product of matrices, so it runs on the vector units, which wait for loads:
a product of forward passes and input gradients loads an element and a weight from L1, one of filter
gradients two elements at positions of their own.
"""

from __future__ import annotations

import numpy as np

from ...features.devices.device import DeviceSpec
from .memory_passes import CLOCK, MemoryParams, Traffic, pass_seconds, soft_maximum
from .routes import COLUMN_BYTES

#: Loads that a core starts in a clock: lanes of the load units of a multiprocessor of NVIDIA's
#: (CUDA C++ Programming Guide and white papers, Volta to Hopper), and of a compute unit of AMD's,
#: whose L1 answers 16 lanes, 64 bytes, a clock (CDNA 2 white paper).
LOAD_LANES, LOAD_LANES_ELSEWHERE = 32.0, 16.0
#: Loads of a product. MIOpen's filter gradients reach 2.3 to 4.9 products a clock of a compute unit
#: where the other directions reach 6 to 9 (published-kernels pack, MI60 to MI250X), so that their
#: two loads count double.
LOADS, FILTER_LOADS = 2.0, 4.0
#: Log distances of the ends of the 90 % interval. On those four chips, measured times are 0.8 (5 %)
#: to 3.1 (85 %) times the estimate; where a library lacks a kernel for a size, ten times.
LOWER, UPPER = float(np.log(1.6)), float(np.log(4.0))


def depthwise_seconds(
    moved: np.ndarray,
    elements: np.ndarray,
    multiplied: np.ndarray,
    filters: np.ndarray,
    device: DeviceSpec,
    params: MemoryParams,
) -> np.ndarray:
    """Time of depthwise convolutions without their launch, seconds, shape ``(n,)``.

    Args:
        moved: Bytes of the tensors read and written, shape ``(n,)``.
        elements: Elements of them, shape ``(n,)``.
        multiplied: Products: outputs of the forward pass times taps, shape ``(n,)``.
        filters: Whether the gradient of a filter is computed, bool, shape ``(n,)``.
        device: Device they run on.
        params: Constants of passes over memory.
    """
    # A thread reads one element at a time, as column reductions do; gradients of filters read
    # along rows.
    zero = np.zeros(len(moved))
    extra = np.where(filters, 0.0, COLUMN_BYTES * elements)
    passes = Traffic(moved + extra, zero, zero, np.ones(len(moved)))
    memory = pass_seconds(passes, device, params).memory
    loads = np.where(filters, FILTER_LOADS, LOADS) * multiplied
    return soft_maximum(memory, loads / _load_rate(device))


def _load_rate(device: DeviceSpec) -> float:
    """Loads of all cores in a second."""
    lanes = LOAD_LANES if device.runs_cuda else LOAD_LANES_ELSEWHERE
    if device.core_count <= 1:
        # The description gives no cores. A core has four times as many lanes that multiply and
        # add as lanes that load (64 to 16 on CDNA, 128 to 32 on Hopper).
        return device.vector_peak("f32") / 8.0
    return lanes * device.core_count * (device.clock_hz or CLOCK)
