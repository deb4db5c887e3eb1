"""Commands that compare a model with measurements and adapt it to them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    DeviceIndex,
    Json,
    ModelOpt,
    Option,
    ProgramOrNone,
    Top,
    folder,
    json_file,
)
from ..workflows.settings import CalibrateSettings, DriftSettings
from .options import (
    kinds_of,
    make_console,
    measured_device,
    named_out,
    print_answer,
    program_of,
    refuse,
    refuse_unused,
    run_kind,
)


def calibrate(
    context: typer.Context,
    settings: CalibrateSettings,
    steps: Annotated[
        Path | None, Option("Instead, a table of training steps measured on your cluster.")
    ] = None,
    serving: Annotated[
        Path | None, Option("Instead, a table of 5 to 20 serving runs measured on your stack.")
    ] = None,
) -> None:
    """Adapt a model to a device from a few actively chosen samples.

    The samples come from a dataset (--data) or are measured here (--budget). --steps adapts the
    step model to a cluster instead, --serving the serving model to a serving stack.
    """
    named_out(settings.out, folder if steps is None and serving is None else json_file)
    if (steps or serving) is not None:
        run_kind(context, kinds_of("calibrate"))
        return
    measured = settings.budget_s is not None
    # Measuring happens on this machine.
    settings = replace(settings, device=settings.device or ("local" if measured else ""))
    if not settings.device:
        raise typer.BadParameter(
            "give --budget 3m to measure this machine, --device and --data for another device, or "
            "--steps or --serving for a cluster"
        )
    if bool(settings.data) == measured:
        raise typer.BadParameter("give either --data or --budget")

    # Imported after the checks, so that a refusal is immediate.
    console = make_console()
    if measured:
        from ..workflows.calibrate_by_measuring import run_calibrate_budget

        used = {"budget_s", "device", "model", "out", "seed"}
        refuse_unused(context, "measuring here (--budget)", used)
        run_calibrate_budget(console, settings)
        return
    from ..features.dataset import Dataset
    from ..workflows.calibrate_from_dataset import run_calibrate_kernels, run_calibrate_operators

    dataset = Dataset.load(*settings.data)
    if dataset.of_operators:
        run_calibrate_operators(console, dataset, settings)
    else:
        refuse(context, "a dataset of kernels", {"allocate"})
        run_calibrate_kernels(console, dataset, settings)


def drift(settings: DriftSettings) -> None:
    """Test whether new measurements have drifted from a model, and repair it.

    Rows are tested by library, version, family and device. Each drifted group is repaired with a
    few of its samples; its other rows give the error before and after.
    """
    from ..workflows.measured.drift import run_drift

    run_drift(make_console(), settings)


def check(
    context: typer.Context,
    program: ProgramOrNone = None,
    trace: Annotated[
        Path | None,
        Option("Instead of running it: trace of jax.profiler, torch.profiler or Nsight Systems."),
    ] = None,
    device: Annotated[
        str | None,
        Option("Device of the trace, name or file; default: the one that it records, or local."),
    ] = None,
    device_index: DeviceIndex = None,
    model: ModelOpt = "default",
    top: Top = 10,
    json_output: Json = False,
) -> None:
    """Compare predicted with measured times, kernel by kernel.

    The program runs here. With --trace, a recorded run is compared instead, and the difference is
    attributed to classes of kernels, gaps, communication and the clock.
    """
    if json_output:
        refuse(context, "--json, which has all kernels", {"top"})
    if trace is not None:
        from ..workflows.traces.checking import CheckOptions, check_trace, print_trace_check

        options = CheckOptions(device, model, device_index)
        ran = None if program is None else program_of(program)
        found = check_trace(trace, ran, options, lambda what: typer.echo(what, err=True))
        print_answer(json_output, found, print_trace_check, top)
        return
    refuse(context, "running the program here", {"device_index"})
    if device not in (None, "local"):
        raise typer.BadParameter(
            "the program runs on this machine: --device names the device of a --trace; to predict "
            "for another device, use opcast predict --device"
        )
    if program is None:
        raise typer.BadParameter("give a PROGRAM to run, or --trace")
    from ..predict.program.predictor import load_for_programs
    from ..workflows.check import check_programs, print_check

    predictor = load_for_programs(model)
    measured_device("local", predictor.model.devices)
    with tempfile.TemporaryDirectory(prefix="opcast-function-") as scratch:
        (result,) = check_programs([_saved(program, Path(scratch))], predictor)
    print_answer(json_output, result, print_check, top)


def _saved(program: Path, folder: Path) -> Path:
    """File of a program; a function is first written to one, because measuring reads a file."""
    own = program_of(program)
    if isinstance(own, Path):
        return own
    from ..predict.api import save

    return save(own, path=folder / f"{str(program).rpartition(':')[2]}.mlir")
