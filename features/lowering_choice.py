"""Which lowering a prediction takes where the user names none."""

from __future__ import annotations

from typing import NamedTuple

from .compilers import PLATFORMS, find_compiler
from .device import DeviceSpec
from .errors import CompilerError, LoweringError

#: Lowerings by falling fidelity.
LOWERINGS = ("xla", "fused", "op")
#: The best one that is possible.
AUTO = "auto"


class Choice(NamedTuple):
    """A lowering, and why it is not the best one.

    Attributes:
        lowering: One of :data:`LOWERINGS`.
        note: What the user should know; empty if the best one was taken.
    """

    lowering: str
    note: str = ""


def check_lowering(name: str) -> None:
    """Refuse an unknown lowering.

    Raises:
        LoweringError: The name is neither a lowering nor ``auto``.
    """
    if name not in (*LOWERINGS, AUTO):
        choices = ", ".join((AUTO, *LOWERINGS))
        raise LoweringError(f"unknown lowering {name!r}", hint=f"choose one of {choices}")


def choose_lowering(lowering: str, device: DeviceSpec | None, *, absent: bool) -> Choice:
    """The lowering to take.

    Args:
        lowering: What the user asked for; anything but ``auto`` is taken as it is.
        device: What the prediction is for.
        absent: Whether that needs a compiler of its own: it is not JAX's default device, and the
            program is not compiled yet.

    Returns:
        For ``auto``, ``xla`` where the compiler is at hand, and ``fused`` where it is not.

    Raises:
        LoweringError: The name is unknown.
    """
    check_lowering(lowering)
    if lowering != AUTO:
        return Choice(lowering)
    if device is None or not absent or device.platform not in PLATFORMS:
        return Choice("xla")
    try:
        find_compiler(device.platform)
    except CompilerError as error:
        return Choice(
            "fused",
            f"{error.what}: kernels are made by opcast's own fusion rules (lowering fused), not by "
            f"the compiler of {device.name}; to have it: opcast compilers install "
            f"{device.platform}",
        )
    return Choice("xla")
