"""Commands for chips that do not exist yet."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Subject:
    """The program or operator that is predicted on a device and on designs of it."""

    program: ProgramOrNone = None
    op: OpOpt = ""
    device: DeviceOpt = "local"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"

    @property
    def name(self) -> str:
        """What is predicted, in words."""
        return self.op or str(self.program)

    def prices(self, context: typer.Context, device: str) -> tuple[DeviceSpec, Price]:
        """The device, and what predicts the program or operator on it and on designs of it."""
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
    """Say by how much each rate of a device changes a predicted time."""
    from ..predict.designs import sensitivity as find
    from ..predict.render.designs import print_sensitivity

    spec, price = subject.prices(context, subject.device)
    found = find(price, spec, subject.name)
    print_answer(json_output, found, print_sensitivity)


def design(context: typer.Context, subject: Subject, json_output: Json = False) -> None:
    """Compare the designs of a device file with their base.

    A ratio's interval leaves out the errors that both share; energy, area and price are compared
    where they are known.
    """
    from ..features.devices.catalogue import load_designs, unchanged
    from ..predict.designs import compare_designs
    from ..predict.render.designs import print_comparison

    device = subject.device
    base = unchanged(device) if Path(device).suffix.lower() in (".yaml", ".yml") else None
    if base is None:
        raise DeviceError(
            "names no base to compare with", where=device, hint="give a YAML file with base: NAME"
        )
    _, price = subject.prices(context, base.name)
    found = compare_designs(price, base, load_designs(device), subject.name)
    print_answer(json_output, found, print_comparison)
