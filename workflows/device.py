"""Measure and print devices."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..features.devices.identity import MEASURED_AT

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.devices.device import DeviceSpec


def measure_device(*, save: bool) -> DeviceSpec:
    """Measure the local device, and keep the result for ``--device local`` if ``save`` is set."""
    from ..common.files import write_text
    from ..datagen.profile.device_probe import probe_device
    from ..predict.devices import measured_path, time_text

    spec = probe_device()
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
