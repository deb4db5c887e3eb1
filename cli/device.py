"""Commands that measure and print devices."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..common.options import Json, Option
from ..workflows.settings import ProfileSettings
from .options import make_console, refuse_unused


def profile(settings: ProfileSettings) -> None:
    """Measure kernels and programs on a device into a dataset.

    It can be stopped at any time, and resumes. On a Ray cluster --budget is that of each host.
    """
    from ..workflows.profile import run_profile

    run_profile(settings)


def device(
    context: typer.Context,
    name: Annotated[
        str | None, Option("Device name or file to print instead of measuring.", argument=True)
    ] = None,
    save: Annotated[bool, Option("Keep the measurement for --device local.", ("--save",))] = False,
    listed: Annotated[bool, Option("List the catalogue.", ("--list",))] = False,
    json_output: Json = False,
) -> None:
    """Measure this device, or print a known device or the catalogue.

    A measured device is printed as a device file.
    """
    from ..workflows.device import list_devices, measure_device, show_device

    if listed:
        refuse_unused(context, "the catalogue (--list)", {"listed", "json_output"})
        list_devices(make_console(), as_json=json_output)
    elif name is not None:
        refuse_unused(context, "a known device", {"name", "json_output"})
        show_device(make_console(), name, as_json=json_output)
    else:
        # As a file: the output can be redirected, edited, and given to --device.
        sys.stdout.write(measure_device(save=save).to_json() + "\n")
