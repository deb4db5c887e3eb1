"""From a device's name to its description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..features.catalogue import closest_names, find_device, in_catalogue, load_device_file
from ..features.device import DeviceSpec, device_slug, local_device_name
from ..features.errors import DeviceError
from ..features.paths import home


def resolve_device(device: str | Path | DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Find a device description.

    Args:
        device: A description, the path of a JSON or YAML file with one, a name, or ``local`` for
            JAX's default device.
        known: Devices that the model was trained on.

    Returns:
        The description. The user's own measurement of a device wins over the model's, and that
        over the catalogue's. A name of the catalogue also finds what was measured or trained
        under another name of the same device.

    Raises:
        DeviceError: The name is not known; the message lists what is.
    """
    if isinstance(device, DeviceSpec):
        return device
    suffix = Path(device).suffix.lower()
    if suffix == ".json":
        return _from_path(Path(device))
    if suffix in (".yaml", ".yml"):
        return load_device_file(Path(device))
    name = local_device_name() if device == "local" else str(device)
    found = _measured_or_trained([name], known)
    if found is None and in_catalogue(name):
        listed = find_device(name)
        found = _measured_or_trained(_other_names(listed), known) or listed
    if found is not None:
        return found
    raise _unknown(name, known)


def is_known(device: str, known: Mapping[str, DeviceSpec]) -> bool:
    """Whether a device, given by name or as ``local``, was measured here or trained on.

    The catalogue does not count: a machine that is at hand had better be measured.
    """
    name = local_device_name() if device == "local" else device
    return name in known or measured_path(name).is_file()


def measured_path(name: str) -> Path:
    """Where the user's own measurement of a device is kept."""
    return home() / "devices" / f"{name}.json"


def _measured_or_trained(names: list[str], known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    for path in map(measured_path, names):
        if path.is_file():
            return _from_path(path)
    return next((known[name] for name in names if name in known), None)


def _other_names(listed: DeviceSpec) -> list[str]:
    """Names under which the same device may have been measured or trained."""
    return [listed.name, *listed.aliases, *map(device_slug, listed.aliases)]


def _unknown(name: str, known: Mapping[str, DeviceSpec]) -> DeviceError:
    trained = f"known: {', '.join(sorted(known))}; " if known else ""
    model = ", the model does not know it" if known else ""
    return DeviceError(
        f"device {name!r} has not been measured here{model}, and the catalogue does not list it",
        hint=f"{trained}close in the catalogue (opcast device --list): "
        f"{', '.join(closest_names(name))}; measure this machine with: opcast device --save",
    )


def _from_path(path: Path) -> DeviceSpec:
    try:
        return DeviceSpec.from_file(path)
    except FileNotFoundError:
        raise DeviceError("no such device file", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise DeviceError(f"not JSON: {error}", where=str(path)) from None
