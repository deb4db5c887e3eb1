"""The command that explains programs and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import Json, NextOpt, Option, PriceOpt, ProgramOrNone
from ..predict.operator.case import OperatorCase
from .options import measured_device, print_answer, refuse
from .predict import Modelled, is_operator


@dataclass(frozen=True)
class Explained(Modelled):
    """The program or operator to explain."""

    program: ProgramOrNone = None
    kernel: Annotated[str | None, Option("Without --next: explain the kernel of this name.")] = None
    top: Annotated[
        int, Option("Without --next: number of costliest kernels to explain.", least=1)
    ] = 3
    neighbours: Annotated[
        int, Option("Without --next: number of measured neighbours to print for each.", least=0)
    ] = 3
    data: Annotated[
        Sequence[Path],
        Option("With --op: dataset to search for measured neighbours."),
    ] = ()


def explain(
    context: typer.Context,
    asked: Explained,
    operator: OperatorCase,
    next_count: NextOpt = 0,
    price: PriceOpt = None,
    json_output: Json = False,
) -> None:
    """Explain the predicted time of a program's kernels or an operator."""
    programs = [asked.program] if asked.program is not None else []
    if not next_count:
        refuse(context, "an explanation without --next", {"price"})
    own = ("neighbours", "data", "json_output", "next_count", "price")
    if is_operator(context, operator, programs, *own):
        if next_count:
            refuse(context, "--next", {"neighbours", "data", "power_cap_w"})
            from ..predict.next_samples import next_operators
            from ..predict.render.parts import print_next_runs

            chosen = next_operators(operator, next_count, price)
            print_answer(json_output, chosen, print_next_runs)
            return
        from ..predict.operator.predict import explain_operator
        from ..predict.render.operator import print_op_explanation

        if not asked.data:
            refuse(context, "an operator without --data", {"neighbours"})
        reasons = explain_operator(operator, asked.data, asked.neighbours)
        print_answer(json_output, reasons, print_op_explanation)
        return
    refuse(context, "a program", {"data", "power_cap_w"})
    if next_count:
        refuse(context, "--next", {"neighbours", "kernel", "top"})
    if asked.framework != "xla":
        spare = {"lowering", "kernel", "neighbours", "trip_count", "next_count"}
        refuse(context, f"--framework {asked.framework}", spare)
        if "," in asked.framework:
            raise typer.BadParameter("explain takes a single --framework")
        from ..predict.operator.torch_framework import TorchPredictor, explain_torch
        from ..predict.render.operator import print_torch_explanation

        pytorch = TorchPredictor(asked.framework, asked.model)
        found = explain_torch(pytorch, asked.opened(programs[0]), asked.device, asked.top)
        print_answer(json_output, found, print_torch_explanation)
        return
    if asked.kernel is not None:
        refuse(context, "a kernel by name (--kernel)", {"top"})
    from ..predict.devices import resolve_device
    from ..predict.program.case import ProgramCase
    from ..predict.program.explain import explain as explain_program
    from ..predict.program.predictor import load_for_programs
    from ..predict.render.program import print_explanation

    predictor = load_for_programs(asked.model)
    place = measured_device(asked.device, predictor.model.devices)
    if next_count:
        from ..predict.next_samples import next_kernels
        from ..predict.render.parts import print_next_runs

        case = ProgramCase(asked.opened(programs[0]), asked.options(place))
        print_answer(json_output, next_kernels(predictor, case, next_count, price), print_next_runs)
        return
    model = predictor.model_for(resolve_device(place, predictor.devices))
    if model.neighbours is None:
        refuse(context, f"model {model.name}, which keeps no kernels", {"neighbours"})
    case = ProgramCase(asked.opened(programs[0]), asked.options(place))
    explained = explain_program(
        predictor, case, kernel=asked.kernel, top=asked.top, neighbours=asked.neighbours
    )
    print_answer(json_output, explained, print_explanation)
