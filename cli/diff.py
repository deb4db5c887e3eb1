"""Commands that compare versions of programs and devices, and check whether memory suffices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.errors import DeviceError
from ..common.files import is_yaml
from ..common.options import (
    DeviceOpt,
    Json,
    LoweringOpt,
    ModelOpt,
    OpOpt,
    Option,
    ProgramOrNone,
    Top,
)
from ..workflows.versions.diff import DiffSettings
from ..workflows.versions.fits import FitSettings
from .options import (
    make_console,
    print_answer,
    print_json,
    program_of,
    refuse,
    torch_program_of,
    workload_of,
)

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..predict.designs import Price


def diff(
    context: typer.Context,
    settings: DiffSettings,
    top: Top = 10,
    markdown: Annotated[bool, Option("Print Markdown.", ("--markdown",))] = False,
    json_output: Json = False,
) -> None:
    """Compare two versions of a program: which is faster, with what probability, and why.

    Errors of kernels that both versions contain cancel. The exit status is 1 if a limit is
    exceeded.
    """
    if settings.budget is None:
        if not (settings.new and settings.device):
            raise typer.BadParameter("give OLD, NEW and --device, or a revision and --budget")
        if settings.fail_above is None:
            refuse(context, "a comparison without --fail-above", {"sure"})
    if markdown and json_output:
        raise typer.BadParameter("give one of --markdown and --json")
    if json_output:
        refuse(context, "--json, which has all changes", {"top"})
    from ..predict.render.difference import markdown_differences, print_difference
    from ..workflows.versions.diff import run_diff

    report = run_diff(settings)
    if json_output:
        print_json(report.to_dict())
    elif markdown:
        typer.echo(markdown_differences(report.results, top), nl=False)
    else:
        console = make_console()
        for number, own in enumerate(report.results):
            if number:
                console.print()
            print_difference(console, own, top)
    if not report.passes:
        raise typer.Exit(1)


#: Parameters that apply only to a step, and only to a program.
_OF_STEPS = ("hf", "settings", "cluster", "plan")
_OF_PROGRAMS = ("train", "loss", "lowering", "trip_count")


def fit(context: typer.Context, asked: FitSettings, json_output: Json = False) -> None:
    """Check whether a program or a training step fits in device memory; exits with 1 if not.

    Give a program and --device, or a model by --workload or --hf and --device or --cluster.
    """
    stepped = bool(asked.workload or asked.hf)
    if stepped == (asked.program is not None):
        raise typer.BadParameter("give either a PROGRAM, or a model by --workload or --hf")
    if bool(asked.device) == bool(asked.cluster):
        raise typer.BadParameter("give one of --device and --cluster")
    from ..predict.render.difference import print_fit
    from ..workflows.versions.fits import program_fits, step_fits

    if asked.program is not None:
        refuse(context, "a program", _OF_STEPS)
        if asked.framework not in ("", "xla"):
            refuse(context, f"--framework {asked.framework}", {"lowering", "trip_count"})
        program = torch_program_of(program_of(asked.program), asked.train, asked.loss)
        found = program_fits(asked, program)
    else:
        refuse(context, "a training step", _OF_PROGRAMS)
        found = step_fits(asked, workload_of(asked.workload, asked.hf))
    if json_output:
        fits = all(own.fits for own in found)
        print_json({"fits": fits, "results": [own.to_dict() for own in found]})
    else:
        console = make_console()
        for own in found:
            print_fit(console, own)
    if not all(own.fits for own in found):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Subject:
    """A program or operator to predict on a device and on variants of the device."""

    program: ProgramOrNone = None
    op: OpOpt = ""
    device: DeviceOpt = "local"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"

    @property
    def name(self) -> str:
        """Name of the program or operator, for messages."""
        return self.op or str(self.program)

    def prices(self, context: typer.Context, device: str) -> tuple[DeviceSpec, Price]:
        """The device, and a function that predicts the program or operator on variants of it."""
        if (self.program is None) == (not self.op):
            raise typer.BadParameter("give either a PROGRAM or an operator with --op")
        if self.program is None:
            from ..predict.operator.case import OperatorCase
            from ..predict.operator.predict import operator_prices

            refuse(context, "an operator (--op)", {"lowering"})
            return operator_prices(OperatorCase(self.op, device, self.model))
        from ..features.lowering.options import LoweringOptions
        from ..predict.program.case import ProgramCase
        from ..predict.program.predictor import load_for_programs

        predictor = load_for_programs(self.model)
        case = ProgramCase(program_of(self.program), LoweringOptions(self.lowering, device))
        _, lowered, spec = case.lower(predictor)
        return spec, partial(predictor.predict_lowered, lowered)


def sensitivity(context: typer.Context, subject: Subject, json_output: Json = False) -> None:
    """Print how much each hardware rate of a device changes a predicted time."""
    from ..predict.designs import sensitivity as find
    from ..predict.render.difference import print_sensitivity

    spec, price = subject.prices(context, subject.device)
    found = find(price, spec, subject.name)
    print_answer(json_output, found, print_sensitivity)


def design(context: typer.Context, subject: Subject, json_output: Json = False) -> None:
    """Compare the designs in a device file with the device that they are based on.

    The interval of a ratio excludes errors that both designs share. Energy, area and price are
    compared if they are known.
    """
    from ..features.devices.catalogue import load_designs, unchanged
    from ..predict.designs import compare_designs
    from ..predict.render.difference import print_comparison

    device = subject.device
    base = unchanged(device) if is_yaml(device) else None
    if base is None:
        raise DeviceError(
            "has no base device to compare with",
            where=device,
            hint="give a YAML file with base: NAME",
        )
    _, price = subject.prices(context, base.name)
    found = compare_designs(price, base, load_designs(device), subject.name)
    print_answer(json_output, found, print_comparison)
