"""Commands that compare a model with measurements, and adapt it to them."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    DeviceIndex,
    Json,
    ModelOpt,
    OwnDevices,
    ProgramOrNone,
    Seed,
    Top,
    TracedDevice,
    folder,
    json_file,
    make_console,
    measured_device,
    named_out,
    plot_file,
    print_json,
    program_of,
    refuse,
    refuse_unused,
    seconds_of,
)


class Allocation(StrEnum):
    """How samples of an operator model are divided among operator families.

    ``family`` gives every family the same number; ``time`` gives the next sample to the family with
    the largest product of its share of the time and the sample's expected information gain.
    """

    FAMILY = "family"
    TIME = "time"


def calibrate(
    context: typer.Context,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to adapt to, name or file; with --budget this machine by default (local)."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Dataset measured on the device; may be given again."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Without --data: time to spend on measuring here, such as 5m."),
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(help="Instead: table of measured training steps of your own cluster."),
    ] = None,
    serving: Annotated[
        Path | None,
        typer.Option(help="Instead: table of 5 to 20 measured serving runs of your own stack."),
    ] = None,
    model: ModelOpt = "default",
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="With --data: samples to learn from; for operators, of each family."
        ),
    ] = 100,
    allocate: Annotated[
        Allocation, typer.Option(help="Divide operator samples evenly, or by share of the time.")
    ] = Allocation.FAMILY,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder for the adapted model; with --steps and --serving a JSON file."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=plot_file, help="Plot error against number of samples."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Adapt a model to a device from few, actively chosen samples.

    The samples come from a dataset (--data) or are measured here (--budget). With --steps, the
    step model is adapted to a cluster; with --serving, the serving model to a stack.
    """
    named_out(out, folder if steps is None and serving is None else json_file)
    if serving is not None:
        refuse_unused(context, "calibrating on serving (--serving)", {"serving", "model", "out"})
        from ..workflows.serving.calibrate import run_calibrate_serving
        from ..workflows.settings import ServingSettings

        own = ServingSettings(serving, out or Path("serving-adapted.json"), model)
        run_calibrate_serving(make_console(), own)
        return
    if steps is not None:
        refuse_unused(context, "calibrating on steps (--steps)", {"steps", "model", "out"})
        from ..workflows.settings import StepSettings
        from ..workflows.steps import run_calibrate_steps

        chosen = StepSettings(steps, out or Path("steps-adapted.json"), model)
        run_calibrate_steps(make_console(), chosen)
        return
    # Whatever is measured here describes this machine.
    device = device or ("local" if budget is not None else None)
    if device is None:
        raise typer.BadParameter(
            "give --budget 3m to measure this machine; --device and --data of another; or --steps "
            "or --serving of a cluster"
        )
    if bool(data) == (budget is not None):
        raise typer.BadParameter("give either --data or --budget")

    # After the checks above: imports of numpy and pandas take longer than a refusal should.
    from ..workflows.settings import CalibrateSettings

    console = make_console()
    settings = CalibrateSettings(
        device=device,
        model=model,
        data=data or (),
        budget_s=None if budget is None else seconds_of(budget),
        samples=samples,
        by_time=allocate is Allocation.TIME,
        out=out,
        plot=plot,
        seed=seed,
    )
    if budget is not None:
        from ..workflows.calibrate_by_measuring import run_calibrate_budget

        # Options for datasets would be ignored silently, so they are refused.
        used = {"budget", "device", "model", "out", "seed"}
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


def drift(
    data: Annotated[
        Path, typer.Option("--data", help="Table of newly measured operators, or a folder.")
    ],
    model: ModelOpt = "default",
    samples: Annotated[
        int,
        typer.Option(min=1, help="Samples of each drifted library, family and device to repair."),
    ] = 20,
    false_alarms: Annotated[
        float,
        typer.Option(min=1e-9, max=0.5, help="Probability of one or more false alarms."),
    ] = 0.01,
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=folder, help="Folder for the repaired model."),
    ] = None,
    seed: Seed = 0,
    device: OwnDevices = None,
) -> None:
    """Say how stale a model is on new measurements, and repair it.

    Rows are judged by library, version, family and device. What has drifted is repaired with
    samples of its own, and judged on its other rows before and after.
    """
    from ..workflows.measured.drift import run_drift
    from ..workflows.settings import DriftSettings

    settings = DriftSettings(data, model, samples, false_alarms, out, seed, device or ())
    run_drift(make_console(), settings)


def check(
    context: typer.Context,
    program: ProgramOrNone = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Instead of running it: a trace of jax.profiler, torch.profiler or Nsight Systems."
        ),
    ] = None,
    device: TracedDevice = None,
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
        if json_output:
            print_json(found.to_dict())
        else:
            print_trace_check(make_console(), found, top)
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
    if json_output:
        print_json(result.to_dict())
    else:
        print_check(make_console(), result, top)


def _saved(program: Path, folder: Path) -> Path:
    """The file of a program; a function is written to one, since it is measured from there."""
    own = program_of(program)
    if isinstance(own, Path):
        return own
    from ..predict.api import save

    return save(own, path=folder / f"{str(program).rpartition(':')[2]}.mlir")
