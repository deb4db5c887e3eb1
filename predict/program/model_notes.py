"""Notes on a predicted program: what its model knows of the device, and what the compiler did."""

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


#: Names that XLA's HloRematerialization gives to the copies that it computes again.
_REMATERIALISED = re.compile(r"\.remat\d*(?:\.|$)")


def model_notes(model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec) -> tuple[str, ...]:
    """Collect notes on the model's limits for a device and on the device's description."""
    return (*_model_limits(model, kernels, device), *_device_notes(device))


def _device_notes(device: DeviceSpec) -> tuple[str, ...]:
    """Notes on how a device was found, when it was measured, and how fast it runs now."""
    speed = speed_of(device)
    changed = (
        f"this machine runs at {speed} of when it was measured: times are scaled by what is "
        "slower, and intervals hold both speeds",
    )
    notes = [*_taken(device), *(changed if speed.ratios else ())]
    if formers := former_speeds(device):
        low, high = 1 / formers[1].factor, formers[0].factor
        notes.append(
            f"earlier measurements of its ceilings give {low:.2f} to {high:.2f} times the time: "
            "intervals hold them"
        )
    return (*notes, *generation_note(device))


def _taken(device: DeviceSpec) -> tuple[str, ...]:
    """A note that a device was matched by name alone, or the time of its measurement."""
    if device.extra.get(BY_NAME):
        return (
            f"this machine is taken for the {device.name} of the model by its name alone; "
            "to measure it: opcast device --save",
        )
    if isinstance(taken := device.extra.get(MEASURED_AT), str):
        # Device files are untrusted: their text is cut and printed without control sequences.
        return (f"{device.name} was measured on {printable(taken[:40])}",)
    return ()


def _model_limits(
    model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec
) -> tuple[str, ...]:
    """The estimator's own notes, or a note that it was not trained on the device."""
    # First: a machine that only shares its name with a trained one would pass as known below.
    other = model.unlike(device)
    if other is not None:
        return (
            f"{device.name} measures {other} of the {base_name(device.name)} that the model was "
            "trained on: it is taken for another device, intervals are wider; profile this device "
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
    """A note if the compiler computes values again that it has no memory to keep."""
    own = np.array([bool(_REMATERIALISED.search(k.name)) for k in kernels], bool)
    if not own.any():
        return ()
    times = latency * np.array([k.multiplicity for k in kernels], np.float64)
    share = float(times[own].sum() / (times.sum() or 1.0))
    return (
        f"to need less memory, the compiler computes {int(own.sum())} kernels' values again "
        f"(rematerialisation), {share:.1%} of the kernels' time: a smaller batch or "
        "recomputation of your own choice may be faster",
    )


def capped_note(watts: float | None) -> tuple[str, ...]:
    """A note that the device is held below a power; none without one."""
    if watts is None:
        return ()
    return (
        f"held below {watts:g} W: kernels are slower by what the law of power takes off the clock "
        "(docs/simulate.md)",
    )
