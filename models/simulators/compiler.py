"""The TPU compiler's own estimates as an estimator, of kernels that it has just made."""

from __future__ import annotations

from collections.abc import Sequence

from ...features.device import DeviceSpec
from ...features.errors import DeviceError
from ...features.kernel import Kernel
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
            DeviceError: The device is no TPU, or has no clock.
        """
        if device.platform != "tpu" or not device.clock_hz:
            raise DeviceError(
                "no compiler says how long its kernels take: only that of TPUs does",
                where=device.name, hint="--device tpu-v4 with --lowering xla; or another estimator",
            )  # fmt: skip
        return [
            Answer(kernel.cycles / device.clock_hz)
            if kernel.cycles > 0
            else Answer(0.0, f"the compiler has no estimate ({kernel.kind})")
            for kernel in kernels
        ]
