"""Commands that measure and print devices."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import Json, Out, Seed, make_console, refuse_unused, seconds_of


def profile(
    out: Out,
    device: Annotated[str, typer.Option(help="cpu, gpu, tpu or local.")] = "local",
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 2h.")] = "10m",
    seed: Seed = 0,
    suite: Annotated[str, typer.Option(help="Zoo suite: quick, standard or full.")] = "standard",
    # The default repeats DEFAULT_MIX of datagen/profile/plan.py, so that --help can show it.
    mix: Annotated[
        str, typer.Option(help="Shares of single ops, random programs and zoo programs.")
    ] = "ops=0.35,random=0.35,zoo=0.3",
    ray: Annotated[
        str, typer.Option(help="Address of a Ray cluster: measure on its hosts with the device.")
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the progress bar.")] = False,
) -> None:
    """Measure kernels and programs on a device into a dataset.

    It can be stopped at any time, and resumes. On a Ray cluster --budget is that of each host.
    """
    from ..workflows.profile import run_profile
    from ..workflows.settings import ProfileSettings

    run_profile(
        ProfileSettings(
            out=out,
            device=device,
            budget_s=seconds_of(budget),
            seed=seed,
            suite=suite,
            mix=mix,
            ray=ray,
            progress=not quiet,
        )
    )


def device(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Device name or file to print instead of measuring.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the measurement for --device local.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the catalogue.")] = False,
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
