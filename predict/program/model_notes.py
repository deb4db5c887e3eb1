"""Notes on a predicted program: limits of the model for the device, and compiler decisions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ...common.files import printable
from ...features.devices.identity import BY_NAME, MEASURED_AT, base_name, former_speeds, speed_of
from ..devices import generation_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...features.devices.device import DeviceSpec
    from ...features.kernels.kernel import Kernel
    from ...models.cost_model import CostModel


#: Name suffix of instructions that XLA's HloRematerialization duplicates.
_REMATERIALISED = re.compile(r"\.remat\d*(?:\.|$)")


def model_notes(model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
    """Collect notes on the model's limits for a device and on the device's description."""
    return (*_model_limits(model, kernels, device), *_device_notes(device))


def _device_notes(device: DeviceSpec) -> tuple[str, ...]:
    """Return notes on how a device was identified, when it was measured, and its current speed."""
    speed = speed_of(device)
    changed = (
        f"this machine runs at {speed} of its speed when it was measured: times are scaled "
        "where it is slower, and intervals include both speeds",
    )
    notes = [*_taken(device), *(changed if speed.ratios else ())]
    if formers := former_speeds(device):
        low, high = 1 / formers[1].factor, formers[0].factor
        notes.append(
            f"earlier measurements of its ceilings correspond to {low:.2f} to {high:.2f} times the "
            "time: intervals include them"
        )
    return (*notes, *generation_note(device))


def _taken(device: DeviceSpec) -> tuple[str, ...]:
    """Return a note that a device was matched by name only, or when it was measured."""
    if device.extra.get(BY_NAME):
        return (
            f"this machine is assumed to be the model's {device.name} by its name only; to measure "
            "it: opcast device --save",
        )
    if isinstance(taken := device.extra.get(MEASURED_AT), str):
        # Device files are untrusted: text is truncated, and control sequences are removed.
        return (f"{device.name} was measured on {printable(taken[:40])}",)
    return ()


def _model_limits(
    model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec
) -> tuple[str, ...]:
    """Return the estimator's own notes, or a note that it was not trained on the device."""
    # Checked first, since a machine that shares its name with a trained one would pass below.
    other = model.unlike(device)
    if other is not None:
        return (
            f"{device.name} measures {other} of the {base_name(device.name)} that the model was "
            "trained on: it is treated as another device with wider intervals; profile this device "
            "and train on it, or adapt the model: opcast calibrate --device local --budget 5m",
        )
    own = getattr(model.estimator, "notes", None)
    if own is not None:
        found: tuple[str, ...] = own(kernels, device)
        return found
    if not model.devices:
        return ("nothing was learned or calibrated on any device",)
    if device.name in model.devices:
        return ()
    known = ", ".join(sorted(model.devices))
    return (
        f"the model was trained on {known}, not on {device.name}: errors may exceed the "
        "intervals; profile this device and train on it",
    )


def rematerialised(kernels: Sequence[Kernel], latency: np.ndarray) -> tuple[str, ...]:
    """Return a note if the compiler recomputes values to save memory."""
    own = np.array([bool(_REMATERIALISED.search(k.name)) for k in kernels], bool)
    if not own.any():
        return ()
    times = latency * np.array([k.multiplicity for k in kernels], np.float64)
    share = float(times[own].sum() / (times.sum() or 1.0))
    return (
        f"to save memory, the compiler computes {int(own.sum())} kernels' values again "
        f"(rematerialisation), {share:.1%} of the kernel time: a smaller batch or your own "
        "choice of recomputation may be faster",
    )


def capped_note(watts: float) -> tuple[str, ...]:
    """Return a note that the device is power-capped."""
    return (
        f"held below {watts:g} W: kernels are slowed down as the power law lowers the clock "
        "(docs/simulate.md)",
    )
