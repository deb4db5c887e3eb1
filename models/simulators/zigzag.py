"""ZigZag as an estimator, by the cost of the best mapping (Mei et al., IEEE TC 70(8), 2021)."""

from __future__ import annotations

from math import floor
from typing import ClassVar

import numpy as np

from ...common.errors import ModelError
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .arrays import arrays_of, passes, product_of, require_arrays
from .base import Job, Reply, SimulatorEstimator


class ZigZagEstimator(SimulatorEstimator):
    """Cycles of the best mapping that ZigZag finds on a TPU-like accelerator.

    The accelerator has the device's systolic arrays with stationary weights, its on-chip memory and
    its main memory with its bandwidth. A convolution is its implicit GEMM; input elements that the
    GEMM repeats get fewer bits, so that each counts once in memory traffic.

    Args:
        orders: Number of loops whose permutations are searched; time grows with its factorial.
        limit_s: Seconds that the tool may take for one kernel.
        progress: Whether to show progress.
    """

    name = "zigzag"
    extra = "zigzag"
    packages: ClassVar[tuple[str, ...]] = ("zigzag-dse",)
    tool = "zigzag_tool"
    source = "simulator:zigzag"

    def __init__(self, orders: int = 5, limit_s: float = 60.0, progress: bool = True) -> None:
        if orders < 1:
            raise ModelError(f"orders must be at least 1, not {orders}")
        super().__init__(limit_s, progress, orders=orders)

    def check(self, device: DeviceSpec) -> None:
        """Refuse a device without systolic arrays or on-chip memory.

        Raises:
            DeviceError: Its description lacks the arrays, the clock or a memory.
        """
        require_arrays(device, self.name, memory=True)

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """Description of the accelerator and of the product."""
        product = product_of(kernel, row)
        if isinstance(product, str):
            return product
        bits_per_cycle = device.bandwidth * 8.0 / device.clock_hz
        return {
            "b": product.batch,
            "m": product.m,
            "n": product.n,
            "k": product.k,
            "bits": product.bits,
            # ZigZag counts in whole bits.
            "input_bits": max(round(product.bits * product.fold), 1),
            "rows": device.array_rows,
            "columns": device.array_columns,
            "arrays": arrays_of(device),
            "bits_per_cycle": max(floor(bits_per_cycle), 1),
            # ZigZag's accelerator is one core, with all arrays of the device and the memories
            # of all cores.
            "on_chip_bits": int(device.shared_bytes_per_core * device.core_count * 8),
            "memory_bits": int(device.memory_bytes * 8),
            "orders": self.params["orders"],
            "scale_s": product.times * passes(product.rate, device) / device.clock_hz,
        }

    def seconds(self, reply: Reply, job: Job) -> float:
        """Seconds of the best mapping's cycles."""
        return float(reply["cycles"] * job["scale_s"])
