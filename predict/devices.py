"""Resolve a device's name to its description."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DeviceError
from ..common.files import file_stamp, is_description, own_data, printable
from ..common.paths import home
from ..features.devices.catalogue import (
    base_of,
    closest_names,
    device_file,
    find_device,
    in_catalogue,
    typed_name,
)
from ..features.devices.device import DeviceSpec, device_slug, local_device_name
from ..features.devices.identity import BY_NAME, MEASURED_AT, base_name, identified, is_measured
from ..features.devices.rules import generations

if TYPE_CHECKING:
    from ..simulate.clusters.topology import Cluster


def resolve_device(
    device: str | Path | DeviceSpec | None, known: Mapping[str, DeviceSpec]
) -> DeviceSpec:
    """Find a device description.

    Args:
        device: A description, the path of a JSON or YAML file with one, a name or an unambiguous
            abbreviation, or ``local`` or ``None`` for JAX's default device.
        known: Devices that the model was trained on.

    Returns:
        The description. The user's own measurement takes precedence over the model's description,
        which takes precedence over the catalogue's. A catalogue name also finds a device that was
        measured or trained under one of its aliases. A measurement whose ceilings differ from
        those of the trained device of the same name is another device with its own name: ``local``
        finds it, the trained device's name does not.

    Raises:
        DeviceError: The name is unknown or ambiguous; the message lists candidates.
    """
    if isinstance(device, DeviceSpec):
        return device
    device = "local" if device is None else device
    if (described := device_file(device)) is not None:
        return described
    if device == "local":
        spec = _local(known)
        name = local_device_name() if spec is None else spec.name
    else:
        name = str(device)
        spec = _measured_or_trained([name], known)
        name = name if spec else typed_name(name) or name
    if spec is None and in_catalogue(name):
        listed = find_device(name)
        # The catalogue comes last, but its aliases help to find a measured or trained device of the
        # same chip, which describes it better than a data sheet.
        spec = _measured_or_trained(_other_names(listed), known) or listed
    if spec is not None:
        return spec
    raise _unknown(name, known)


def find_anywhere(device: str | Path | DeviceSpec) -> DeviceSpec:
    """Find a device as :func:`resolve_device`, known to any shipped or registered model.

    Raises:
        DeviceError: The name is unknown or ambiguous; the message lists candidates.
    """
    # Imported here: the lists of models take a while, and most callers have a model's devices.
    from .locate import trained_devices

    return resolve_device(device, trained_devices())


def cluster_device(cluster: Cluster, known: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """Find the description of a cluster's device.

    Args:
        cluster: The cluster.
        known: Devices that the model was trained on.

    Raises:
        DeviceError: The cluster does not name its device, or the name is unknown.
    """
    if not cluster.device:
        raise DeviceError(
            "the cluster does not name its device",
            where=cluster.name,
            hint="add device: NAME to its file",
        )
    return resolve_device(cluster.device, known or {})


def shown_devices(where: str) -> tuple[str, ...]:
    """Return the names of default devices.

    Args:
        where: A key of ``shown_devices.yaml``.
    """
    return tuple(own_data("predict/shown_devices.yaml")[where])


def generation_note(spec: DeviceSpec) -> tuple[str, ...]:
    """Return notes on a GPU of unknown generation, and on design figures that are not modelled.

    Args:
        spec: The device.

    Returns:
        For a GPU outside the catalogue whose generation has no rules, a note that says whose
        kernels it is priced by; and a note for each design figure that no time depends on.
    """
    return (*_generation(spec), *_unread(spec))


def _unread(spec: DeviceSpec) -> Iterator[str]:
    """Yield notes on figures that differ from the base design's but that no time depends on."""
    base = base_of(spec)
    if base is None:
        return
    shared = spec.shared_bytes_per_core, base.shared_bytes_per_core
    if all(shared) and shared[0] != shared[1]:
        yield (
            f"{spec.name} has {shared[0] / shared[1]:.3g} × the shared memory of {base.name}: "
            "products and attention keep its tiles; intervals cover the traffic of other tiles"
        )
    if spec.dies and spec.dies != (base.dies or 1):
        yield (
            f"{spec.name} has {spec.dies} dies, {base.name} {base.dies or 1}: traffic between dies "
            "is not priced, and intervals are as wide as between architectures"
        )


def _generation(spec: DeviceSpec) -> tuple[str, ...]:
    """Return the architecture note of :func:`generation_note`."""
    named = spec.architecture
    if spec.platform != "gpu" or named in generations().architectures or in_catalogue(spec.name):
        return ()
    maker = "NVIDIA" if spec.runs_cuda else spec.vendor
    own = [name for name, rules in generations().architectures.items() if rules.vendor == maker]
    said = f"{spec.name} does not name an architecture"
    if named:
        said = f"{spec.name} names the architecture {printable(named)!r}, which has no rules"
    if spec.vendor not in ("", maker):
        said += f", and no GPU of {printable(spec.vendor)} was measured"
    close = difflib.get_close_matches(named.lower(), own, n=1)
    wanted = close[0] if close else ", ".join(own[-3:])
    return (
        f"{said}: all commands price it as a GPU of {maker} of unknown generation; to use the "
        f"kernels of a generation, set `architecture:` in the device file ({wanted})",
    )


def device_stamp(device: str | Path) -> tuple[object, ...]:
    """Return a value that changes when a device's name or file may mean another description.

    The device is not read.

    Returns:
        The stamp of the file; for a name, the stamps of all the user's measurements, since any may
        be of the device by one of its aliases (:func:`resolve_device`, with the same trained
        devices).
    """
    if is_description(device):
        return (str(device), file_stamp(device))
    folder = home() / "devices"
    try:
        own = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple((str(path), file_stamp(path)) for path in own)


def is_known(device: str, known: Mapping[str, DeviceSpec]) -> bool:
    """Return whether a device, given by name or as ``local``, was measured here or trained on.

    The catalogue does not count, since a machine at hand should be measured. Nor does a trained
    device with the name of ``local``, since it may be another machine.
    """
    if device == "local":
        return measured_path(local_device_name()).is_file()
    return device in known or measured_path(device).is_file()


def measured_path(name: str) -> Path:
    """Return the path of the user's own measurement of a device."""
    return home() / "devices" / f"{name}.json"


def _local(known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    """Return this machine as measured, else the trained device of its name, marked as such."""
    name = local_device_name()
    spec = _measured(name, known)
    if spec is None and name in known:
        trained = known[name]
        if not is_measured(trained):
            return trained
        # Virtual machines on different hosts share a CPU name, so a match by name alone is marked
        # and later noted beside the prediction.
        return replace(trained, extra={**trained.extra, BY_NAME: True})
    return spec


def _measured_or_trained(names: list[str], known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    for name in names:
        spec = _measured(base_name(name), known)
        # A machine that differs from the trained one of this name has another name, and is not
        # meant.
        if spec is not None and (spec.name == name or base_name(spec.name) == spec.name):
            return spec
    return next((known[name] for name in names if name in known), None)


def _measured(name: str, known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    """Return the user's own measurement of a device, renamed if it equals a trained device."""
    path = measured_path(name)
    if not path.is_file():
        return None
    spec = DeviceSpec.from_file(path)
    if is_measured(spec) and MEASURED_AT not in spec.extra:
        # Files of earlier versions lack the time; the file's modification time replaces it.
        taken = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        spec = replace(spec, extra={**spec.extra, MEASURED_AT: time_text(taken)})
    return identified(spec, known)


def time_text(time: datetime) -> str:
    """Format a time for notes, to the minute."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def _other_names(listed: DeviceSpec) -> list[str]:
    """Return the names under which the same device may have been measured or trained."""
    return [listed.name, *listed.aliases, *map(device_slug, listed.aliases)]


def _unknown(name: str, known: Mapping[str, DeviceSpec]) -> DeviceError:
    trained = f"known: {', '.join(sorted(known))}; " if known else ""
    model = ", the model does not have it" if known else ""
    return DeviceError(
        f"device {name!r} has not been measured here{model}, and the catalogue does not list it",
        hint=f"{trained}close in the catalogue (opcast device --list): "
        f"{', '.join(closest_names(name))}; measure this machine with: opcast device --save",
    )
