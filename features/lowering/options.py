"""Options of a lowering, as one object for all callers between a command and a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...common.errors import LoweringError

if TYPE_CHECKING:
    from pathlib import Path

    from ..devices.device import DeviceSpec
    from ..ir.reader import TripCounts
    from .cache import LoweringCache
    from .target_compiler.process import CompileSettings

#: Lowerings by decreasing fidelity.
LOWERINGS = ("xla", "fused", "op")

#: The best available lowering.
AUTO = "auto"

#: XLA's option for horizontal fusion, which ``fused`` also follows. JAX 0.10's XLA dropped it.
HORIZONTAL = "xla_gpu_use_horizontal_fusion"
#: XLA's option for products with Triton kernels, which ``fused`` also follows.
GENERATED = "xla_gpu_enable_triton_gemm"
#: All compiler options that ``fused`` follows.
HEEDED = (GENERATED, HORIZONTAL)


@dataclass(frozen=True)
class LoweringOptions:
    """How a program is lowered, and for what target.

    Attributes:
        lowering: ``xla``, ``fused`` or ``op``; ``auto`` is ``xla``, or ``fused`` where the device's
            compiler is not installed.
        device: Target of the prediction: a description, a name in the catalogue, the path of a
            device file; ``local`` or ``None`` for JAX's default device.
        trip_counts: Trips of loops whose count cannot be determined: one number for all, or by name
            or source line (``model.py:12``).
        fallback: Lowering to use if the device's compiler is missing, fails or exceeds its limits;
            empty to raise.
        settings: Limits and options of that compiler; ``None`` for the defaults.
        cache: Cache of compiled programs; ``None`` for the default one, ``False`` for none.
    """

    lowering: str = AUTO
    device: DeviceSpec | str | Path | None = None
    trip_counts: TripCounts = None
    fallback: str = ""
    settings: CompileSettings | None = None
    cache: LoweringCache | Literal[False] | None = None

    @property
    def horizontal(self) -> bool:
        """Whether the compiler's options request horizontal fusion."""
        return self.settings is not None and bool(self.settings.flags.get(HORIZONTAL))

    @property
    def generated(self) -> bool:
        """Whether the compiler's options allow generated (Triton) kernels for products."""
        return self.settings is None or bool(self.settings.flags.get(GENERATED, True))

    def check(self) -> None:
        """Reject unknown lowerings.

        Raises:
            LoweringError: The lowering or the fallback is unknown.
        """
        for name in (self.lowering, self.fallback or self.lowering):
            check_lowering(name)


#: The default options.
DEFAULTS = LoweringOptions()


def check_lowering(name: str) -> None:
    """Reject an unknown lowering.

    Raises:
        LoweringError: The name is neither a lowering nor ``auto``.
    """
    if name not in (*LOWERINGS, AUTO):
        choices = ", ".join((AUTO, *LOWERINGS))
        raise LoweringError(f"unknown lowering {name!r}", hint=f"choose one of {choices}")
