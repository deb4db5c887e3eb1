"""Measure and print devices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..features.devices.device import local_device_name
from ..features.devices.identity import MEASURED_AT, anchors_of, compare_anchors, with_speed

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.devices.device import DeviceSpec

#: Seconds of a probe; rare types are left out if they do not fit.
PROBE_SECONDS = 12.0
#: Seconds after a probe for which the machine is taken to run as it did; readings of the anchors
#: for a prediction (half a second each). Engineering estimates.
_FRESH_S, _READINGS = 120.0, 3


def local_now(
    known: Mapping[str, DeviceSpec], tell: Callable[[str], None] = lambda what: None
) -> DeviceSpec:
    """Describe this machine by its own probe, made now if there is none, and its present speed.

    Args:
        known: Devices that the model was trained on.
        tell: Called with one line before a probe.
    """
    from ..predict.devices import measured_path

    spec = local_device(known, tell)
    then = anchors_of(spec)
    path = measured_path(local_device_name())
    if not then or time.time() - path.stat().st_mtime < _FRESH_S:
        return spec
    from ..datagen.profile.anchors import present_anchors

    return with_speed(spec, compare_anchors(present_anchors(_READINGS), then))


def local_device(
    known: Mapping[str, DeviceSpec], tell: Callable[[str], None] = lambda what: None
) -> DeviceSpec:
    """Describe this machine by its own probe; arguments as of :func:`local_now`."""
    from ..predict.devices import is_known, resolve_device

    if not is_known("local", known):
        tell("measuring this machine's ceilings, once (15 s)")
        measure_device(save=True)
    return resolve_device("local", known)


def measure_device(*, save: bool) -> DeviceSpec:
    """Measure the local device, and keep the result for ``--device local`` if ``save`` is set."""
    from ..common.files import write_text
    from ..datagen.profile.device_probe import probe_device
    from ..predict.devices import measured_path, time_text

    spec = probe_device(PROBE_SECONDS)
    if save:
        # Ceilings of shared machines drift, so notes of predictions state when they were taken.
        spec = replace(spec, extra={**spec.extra, MEASURED_AT: time_text(datetime.now(UTC))})
        path = measured_path(spec.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, spec.to_json())
    return spec


def show_device(console: Console, name: str, *, as_json: bool) -> None:
    """Print a device with its sources: measured here, of the catalogue, or of a device file."""
    from ..predict.devices import resolve_device
    from ..predict.locate import trained_devices
    from ..predict.render.device import print_device

    spec = resolve_device(name, trained_devices())
    if as_json:
        print(spec.to_json())
    else:
        print_device(console, spec)


def list_devices(console: Console, *, as_json: bool) -> None:
    """Print the catalogue as a table."""
    from ..features.devices.catalogue import device_names, find_device
    from ..predict.render.device import print_devices

    specs = [find_device(name) for name in device_names()]
    if as_json:
        print(json.dumps([json.loads(spec.to_json()) for spec in specs]))
    else:
        print_devices(console, specs)
