"""Options of a lowering, as one value for every caller between a command and a compiler."""

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

#: Lowerings by falling fidelity.
LOWERINGS = ("xla", "fused", "op")

#: The best lowering that is possible.
AUTO = "auto"

#: XLA's option for horizontal fusion, which ``fused`` heeds too. JAX 0.10's XLA has dropped it.
HORIZONTAL = "xla_gpu_use_horizontal_fusion"
#: XLA's option for products whose kernels Triton generates, which ``fused`` heeds too.
GENERATED = "xla_gpu_enable_triton_gemm"
#: All options that ``fused`` heeds.
HEEDED = (GENERATED, HORIZONTAL)


@dataclass(frozen=True)
class LoweringOptions:
    """How a program is lowered, and for what.

    Attributes:
        lowering: ``xla``, ``fused`` or ``op``; ``auto`` is ``xla``, or ``fused`` where the device's
            compiler is not installed.
        device: What the prediction is for: a description, a name in the catalogue, the path of a
            device file; ``local`` or ``None`` for JAX's default device.
        trip_counts: Trips of loops whose count cannot be found: one number for all, or by name or
            source line (``model.py:12``).
        fallback: Lowering to take where the device's compiler is missing, fails or exceeds its
            limits; empty to raise.
        settings: Limits and options of that compiler; ``None`` takes the defaults.
        cache: Cache of compiled programs; ``None`` takes the default one, ``False`` none.
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
        """Whether the compiler's options leave products to kernels that it generates."""
        return self.settings is None or bool(self.settings.flags.get(GENERATED, True))

    def check(self) -> None:
        """Refuse unknown lowerings.

        Raises:
            LoweringError: The lowering or the fallback is unknown.
        """
        for name in (self.lowering, self.fallback or self.lowering):
            check_lowering(name)


#: The default options.
DEFAULTS = LoweringOptions()


def check_lowering(name: str) -> None:
    """Refuse an unknown lowering.

    Raises:
        LoweringError: The name is neither a lowering nor ``auto``.
    """
    if name not in (*LOWERINGS, AUTO):
        choices = ", ".join((AUTO, *LOWERINGS))
        raise LoweringError(f"unknown lowering {name!r}", hint=f"choose one of {choices}")
