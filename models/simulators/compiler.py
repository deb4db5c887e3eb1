"""The TPU compiler's own estimates as an estimator, of kernels that it has just made."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.errors import DeviceError
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .answers import Answer, AnsweringEstimator


class CompilerEstimator(AnsweringEstimator):
    """What libtpu wrote beside each kernel: ``cycles / clock``. Estimates, not measurements.

    Only lowering ``xla`` for a TPU has them, and not for every kernel.
    """

    name = "compiler"
    source = "compiler:libtpu"

    def __init__(self) -> None:
        super().__init__()

    @property
    def version(self) -> str:
        """The estimates come with the kernels, whose compiler the prediction names."""
        return "the TPU's compiler"

    def answers(self, kernels: Sequence[Kernel], device: DeviceSpec) -> list[Answer]:
        """The compiler's estimate of each kernel.

        Raises:
            DeviceError: The device is not a TPU, or its clock is unknown.
        """
        if device.platform != "tpu" or not device.clock_hz:
            raise DeviceError(
                "no compiler estimates the time of its kernels: only that of TPUs does",
                where=device.name,
                hint="--device tpu-v4 with --lowering xla; or another estimator",
            )
        return [
            Answer(kernel.cycles / device.clock_hz)
            if kernel.cycles > 0
            else Answer(0.0, f"the compiler has no estimate ({kernel.kind})")
            for kernel in kernels
        ]
