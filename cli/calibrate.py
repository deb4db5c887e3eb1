"""Commands that compare a model with measurements, and adapt it to them."""

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
        Path | None, Option("Instead: table of measured training steps of your own cluster.")
    ] = None,
    serving: Annotated[
        Path | None, Option("Instead: table of 5 to 20 measured serving runs of your own stack.")
    ] = None,
) -> None:
    """Adapt a model to a device from few, actively chosen samples.

    The samples come from a dataset (--data) or are measured here (--budget). With --steps, the
    step model is adapted to a cluster; with --serving, the serving model to a stack.
    """
    named_out(settings.out, folder if steps is None and serving is None else json_file)
    if (steps or serving) is not None:
        run_kind(context, kinds_of("calibrate"))
        return
    measured = settings.budget_s is not None
    # Whatever is measured here describes this machine.
    settings = replace(settings, device=settings.device or ("local" if measured else ""))
    if not settings.device:
        raise typer.BadParameter(
            "give --budget 3m to measure this machine; --device and --data of another; or --steps "
            "or --serving of a cluster"
        )
    if bool(settings.data) == measured:
        raise typer.BadParameter("give either --data or --budget")

    # After the checks above: imports of numpy and pandas take longer than a refusal should.
    console = make_console()
    if measured:
        from ..workflows.calibrate_by_measuring import run_calibrate_budget

        # Options for datasets would be ignored silently, so they are refused.
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
    """Say how stale a model is on new measurements, and repair it.

    Rows are judged by library, version, family and device. What has drifted is repaired with
    samples of its own, and judged on its other rows before and after.
    """
    from ..workflows.measured.drift import run_drift

    run_drift(make_console(), settings)


def check(
    context: typer.Context,
    program: ProgramOrNone = None,
    trace: Annotated[
        Path | None,
        Option("Instead of running it: a trace of jax.profiler, torch.profiler or Nsight Systems."),
    ] = None,
    device: Annotated[
        str | None,
        Option("What a trace ran on: name or device file; by default as it says, or this machine."),
    ] = None,
    device_index: DeviceIndex = None,
    model: ModelOpt = "default",
    top: Top = 10,
    json_output: Json = False,
) -> None:
    """Compare predicted with measured times, kernel by kernel.

    The program runs here; or, with --trace, ran somewhere, and what explains the difference is
    shown: kernels by class, gaps, communication, the clock.
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
            "the program runs on this machine; --device names what a --trace ran on, and opcast "
            "predict --device predicts for another"
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
    """The file of a program; a function is written to one, since it is measured from there."""
    own = program_of(program)
    if isinstance(own, Path):
        return own
    from ..predict.api import save

    return save(own, path=folder / f"{str(program).rpartition(':')[2]}.mlir")
