"""The TPU compiler's own estimates as an estimator, for kernels that it has just compiled."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.errors import DeviceError
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .answers import Answer, AnsweringEstimator


class CompilerEstimator(AnsweringEstimator):
    """Returns the cycles that libtpu wrote into each kernel's ``backend_config``, over the clock.

    They are estimates, not measurements. Only lowering ``xla`` for a TPU has them, and not for
    every kernel (docs/tpu.md).
    """

    name = "compiler"
    source = "compiler:libtpu"

    def __init__(self) -> None:
        super().__init__()

    @property
    def version(self) -> str:
        """A generic name: the prediction names the version that compiled the kernels."""
        return "the TPU's compiler"

    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The compiler's estimate of each kernel.

        Raises:
            DeviceError: The device is not a TPU, or its clock is unknown.
        """
        if device.platform != "tpu" or not device.clock_hz:
            raise DeviceError(
                "no compiler estimates the time of its kernels: only the TPUs' does",
                where=device.name,
                hint="--device tpu-v4 with --lowering xla; or another estimator",
            )
        return [
            Answer(kernel.cycles / device.clock_hz)
            if kernel.cycles > 0
            else Answer(0.0, f"the compiler has no estimate ({kernel.kind})")
            for kernel in kernels
        ]
