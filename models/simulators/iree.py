"""IREE as an estimator: kernels compiled by another compiler and run on this machine."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...common.errors import DeviceError, ModelError
from ...features.devices.device import DeviceSpec, local_device_name
from ...features.devices.identity import base_name
from ...features.kernels.kernel import Kernel
from .base import Job, Reply, SimulatorEstimator

#: On the one thread that works, the processor's time is the wall time of an idle machine, and other
#: jobs disturb it least.
TIMER = "cpu_time"
#: IREE's optimisation levels (``--iree-opt-level``).
LEVELS = ("O0", "O1", "O2", "O3")


class IreeEstimator(SimulatorEstimator):
    """Measured processor time of kernels under IREE, on one thread of this machine's CPU.

    Each kernel's HLO is turned into StableHLO without layouts, compiled by IREE for the host and
    run on inputs of ones. Kernels that have no such form (library calls, collectives, some copies)
    take the roofline.

    Args:
        opt: IREE's optimisation level.
        repeats: Number of timings, of which the median is taken.
        time_s: Least seconds of each timing.
        limit_s: Seconds that compiling and running a kernel may take.
        progress: Whether to show progress.
    """

    name = "iree"
    extra = "iree"
    packages: ClassVar[tuple[str, ...]] = ("iree-base-compiler", "iree-base-runtime")
    tool = "iree_tool"
    source = "measured:iree"

    def __init__(
        self,
        opt: str = "O2",
        repeats: int = 5,
        time_s: float = 0.05,
        limit_s: float = 60.0,
        progress: bool = True,
    ) -> None:
        if opt not in LEVELS:
            raise ModelError(f"unknown level {opt!r}", hint=f"one of: {', '.join(LEVELS)}")
        super().__init__(limit_s, progress, opt=opt, repeats=repeats, time_s=time_s)

    def check(self, device: DeviceSpec) -> None:
        """Refuse any device but this machine's CPU.

        Raises:
            DeviceError: It is another one.
        """
        if device.platform != "cpu" or base_name(device.name) != local_device_name():
            raise DeviceError(
                "iree runs kernels, and this is not the CPU of this machine",
                where=device.name,
                hint="--device local on a machine whose JAX uses the CPU; or another estimator",
            )

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """The kernel's text."""
        if kernel.kind in ("collective", "control", "custom_call") or kernel.async_role:
            return f"cannot be run by itself ({kernel.kind})"
        return {"ir": kernel.ir, "timer": TIMER, **self.params}

    def seconds(self, reply: Reply, job: Job) -> float:
        """The measured seconds."""
        return float(reply["seconds"])

    def latency(self, answered: np.ndarray, row: np.ndarray, device: DeviceSpec) -> np.ndarray:
        """The answers themselves: a measurement covers the whole kernel."""
        return answered
