"""Commands for chips that do not exist yet."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..common.errors import DeviceError
from ..common.options import DeviceOpt, Json, LoweringOpt, ModelOpt, OpOpt, ProgramOrNone
from .options import print_answer, program_of, refuse

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..predict.designs import Price


def sensitivity(
    context: typer.Context,
    program: ProgramOrNone = None,
    op: OpOpt = "",
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    json_output: Json = False,
) -> None:
    """Say by how much each rate of a device changes a predicted time."""
    from ..predict.designs import sensitivity as find
    from ..predict.render.designs import print_sensitivity

    spec, price = _prices(context, program, op, device, model, lowering)
    found = find(price, spec, op or str(program))
    print_answer(json_output, found, print_sensitivity)


def design(
    context: typer.Context,
    program: ProgramOrNone = None,
    op: OpOpt = "",
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    json_output: Json = False,
) -> None:
    """Compare the designs of a device file with their base.

    A ratio's interval leaves out the errors that both share; energy, area and price are compared
    where they are known.
    """
    from ..features.devices.catalogue import load_designs, unchanged
    from ..predict.designs import compare_designs
    from ..predict.render.designs import print_comparison

    base = unchanged(device) if Path(device).suffix.lower() in (".yaml", ".yml") else None
    if base is None:
        raise DeviceError(
            "names no base to compare with", where=device, hint="give a YAML file with base: NAME"
        )
    _, price = _prices(context, program, op, base.name, model, lowering)
    found = compare_designs(price, base, load_designs(device), op or str(program))
    print_answer(json_output, found, print_comparison)


def _prices(
    context: typer.Context,
    program: Path | None,
    op: str,
    device: str,
    model: str,
    lowering: str,
) -> tuple[DeviceSpec, Price]:
    """The device, and what predicts the program or operator on it and on designs of it."""
    if (program is None) == (not op):
        raise typer.BadParameter("give either a PROGRAM or an operator with --op")
    if program is None:
        from ..predict.operator.case import OperatorCase
        from ..predict.operator.predict import operator_prices

        refuse(context, "an operator (--op)", {"lowering"})
        return operator_prices(OperatorCase(op, device, model))
    from ..features.lowering.options import LoweringOptions
    from ..predict.program.case import ProgramCase
    from ..predict.program.predictor import load_for_programs

    predictor = load_for_programs(model)
    case = ProgramCase(program_of(program), LoweringOptions(lowering, device))
    _, lowered, spec = case.lower(predictor)
    return spec, partial(predictor.predict_lowered, lowered)
