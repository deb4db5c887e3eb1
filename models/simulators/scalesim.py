"""SCALE-Sim as an estimator of products on systolic arrays (Samajdar et al., ISPASS 2020)."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

import numpy as np

from ...common.errors import ModelError
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .arrays import arrays_of, passes, product_of, require_arrays, shared_cycles
from .base import Job, Reply, SimulatorEstimator

#: SCALE-Sim's names: what stays in the array (weights, outputs, inputs).
DATAFLOWS = ("ws", "os", "is")


class ScaleSimEstimator(SimulatorEstimator):
    """Cycles of SCALE-Sim's systolic array for products and convolutions.

    The simulator computes one fold; a product of ``F`` folds takes ``F`` times that, shared among
    the device's arrays. Either operand may be the weights: the faster choice counts. Loading
    weights is not overlapped with computing, so products with few rows come out too slow
    (docs/fidelities.md).

    Args:
        dataflow: What stays in the array: ``ws`` weights (as in a TPU), ``os`` outputs, ``is``
            inputs.
        limit_s: Seconds that the tool may take for one kernel.
        progress: Whether to show progress.
    """

    name = "scalesim"
    extra = "scalesim"
    packages: ClassVar[tuple[str, ...]] = ("scalesim",)
    tool = "scalesim_tool"
    source = "simulator:scalesim"

    def __init__(self, dataflow: str = "ws", limit_s: float = 60.0, progress: bool = True) -> None:
        if dataflow not in DATAFLOWS:
            raise ModelError(
                f"unknown dataflow {dataflow!r}", hint=f"one of: {', '.join(DATAFLOWS)}"
            )
        super().__init__(limit_s, progress, dataflow=dataflow)

    def check(self, device: DeviceSpec) -> None:
        """Refuse a device without a systolic array.

        Raises:
            DeviceError: Its description lacks the arrays or the clock.
        """
        require_arrays(device, self.name)

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """Sizes of the array and of the product; the tool tries either operand as the weights."""
        product = product_of(kernel, row)
        if isinstance(product, str):
            return product
        return {
            **asdict(product),
            "rows": device.array_rows,
            "columns": device.array_columns,
            "dataflow": self.params["dataflow"],
            "arrays": arrays_of(device),
            "cycle_s": passes(product.rate, device) / device.clock_hz,
        }

    def seconds(self, reply: Reply, job: Job) -> float:
        """Seconds with the faster choice of weights."""
        # With outputs in place, time runs over the sum: splitting it would leave partial sums in
        # several arrays.
        split = job["dataflow"] != "os"
        cycles = min(
            shared_cycles(
                way["folds"] * job["batch"],
                way["length"] if split else 0,
                way["overhead"] + (0 if split else way["length"]),
                job["arrays"],
            )
            for way in reply["ways"]
        )
        return float(cycles * job["times"] * job["cycle_s"])
