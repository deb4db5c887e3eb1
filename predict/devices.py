"""From a device's name to its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..features.device import DeviceSpec, local_device_name
from ..features.errors import DeviceError
from ..features.paths import home


def resolve_device(device: str | Path | DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Find a device description.

    Args:
        device: A description, the path of a JSON file with one, a name, or ``local`` for JAX's
            default device.
        known: Devices that the model was trained on.

    Returns:
        The description. The user's own measurement of a device wins over the model's.

    Raises:
        DeviceError: The name is not known; the message lists what is.
    """
    if isinstance(device, DeviceSpec):
        return device
    if str(device).endswith(".json"):
        return _from_path(Path(device))
    name = local_device_name() if device == "local" else str(device)
    own = measured_path(name)
    if own.is_file():
        return _from_path(own)
    if name in known:
        return known[name]
    what = f"device {name!r} has not been measured here and the model does not know it"
    choices = ", ".join(sorted(known)) or "none"
    hint = f"known: {choices}; measure this machine with: opcast device --save"
    raise DeviceError(what, hint=hint)


def is_known(device: str, known: Mapping[str, DeviceSpec]) -> bool:
    """Whether :func:`resolve_device` finds a description of a device given by name or ``local``."""
    name = local_device_name() if device == "local" else device
    return name in known or measured_path(name).is_file()


def measured_path(name: str) -> Path:
    """Where the user's own measurement of a device is kept."""
    return home() / "devices" / f"{name}.json"


def _from_path(path: Path) -> DeviceSpec:
    try:
        return DeviceSpec.from_file(path)
    except FileNotFoundError:
        raise DeviceError("no such device file", where=str(path)) from None
    except json.JSONDecodeError as error:
        raise DeviceError(f"not JSON: {error}", where=str(path)) from None
