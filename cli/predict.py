"""The command that predicts programs and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import (
    DeviceList,
    DeviceOpt,
    Fallback,
    Json,
    LossOpt,
    LoweringOpt,
    ModelOpt,
    Option,
    PowerCapOpt,
    ProgramsOrNone,
    Timeline,
    Top,
    TorchFrameworkOpt,
    TrainOpt,
    Trips,
    plot_file,
    table_file,
)
from ..predict.operator.case import OperatorCase
from ..workflows.settings import Prices
from .from_dataclass import names_of
from .options import (
    WITHOUT_COMPILER,
    make_console,
    measured_device,
    print_answer,
    print_json,
    program_of,
    refuse,
    refuse_unused,
    require_plots,
    torch_program_of,
)

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.torch.program import TorchProgram
    from ..features.lowering.options import LoweringOptions
    from ..predict.operator.torch_price import TorchPrediction
    from ..predict.program.case import ProgramCase
    from ..predict.program.many import Answers
    from ..predict.program.prediction import Prediction

    Program = Path | FunctionCall | TorchProgram


#: Parameters that apply only to a program on a single device.
_OF_CASE = ("on_stream", "whole")


@dataclass(frozen=True)
class Modelled:
    """The device, model and lowering with which programs are predicted or explained."""

    device: DeviceOpt = "local"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"
    trip_count: Trips = None
    framework: TorchFrameworkOpt = "xla"
    train: TrainOpt = ""
    loss: LossOpt = ""

    def opened(self, program: Path) -> Program:
        """Load the program of an argument: a path, a JAX function or a PyTorch program."""
        return torch_program_of(program_of(program), self.train, self.loss)

    def options(self, device: DeviceSpec | str | None, fallback: str = "") -> LoweringOptions:
        """Make the lowering options for a device."""
        from ..features.lowering.options import LoweringOptions

        return LoweringOptions(self.lowering, device, self.trip_count, fallback)


@dataclass(frozen=True)
class Asked(Modelled):
    """The programs to predict, on devices or a cluster."""

    programs: ProgramsOrNone = ()
    device: DeviceList = "local"
    strict: Annotated[bool, Option("Fail if a kernel has no learned estimate.", ("--strict",))] = (
        False
    )
    fallback: Fallback = ""
    cluster: Annotated[str, Option("Cluster of a partitioned program, such as h100-sxm-x4.")] = ""
    power_cap_w: PowerCapOpt = None
    on_stream: Annotated[
        bool, Option("Exclude the launch by the host: time on the stream.", ("--on-stream",))
    ] = False
    whole: Annotated[
        bool, Option("Run a program for several devices whole on one device.", ("--whole",))
    ] = False

    @property
    def devices(self) -> list[str]:
        """The devices as a list."""
        return self.device.split(",")

    @property
    def program(self) -> Program:
        """The only program."""
        return self.opened(self.programs[0])

    def case(self, program: object, device: DeviceSpec | str | None) -> ProgramCase:
        """Make the case of a program on a device."""
        from ..predict.program.case import ProgramCase

        own = self.strict, self.power_cap_w, self.whole, self.on_stream
        return ProgramCase(program, self.options(device, self.fallback), (), {}, *own)

    def here(self, known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
        """This machine at its present speed; ``None`` if it is not among the devices."""
        if "local" not in self.devices:
            return None
        found = measured_device("local", known)
        assert not isinstance(found, str)
        return found


@dataclass(frozen=True)
class Shown:
    """How predictions are printed and written."""

    top: Top = 10
    json_output: Json = False
    timeline: Timeline = None
    by: Annotated[str, Option("Rows of the printed table: kernel, line or module.")] = "kernel"
    out: Annotated[
        Path | None, Option("Write a table: .parquet, .csv or .json.", check=table_file)
    ] = None
    plot: Annotated[Path | None, Option("Plot the times of the table.", check=plot_file)] = None
    price: Prices = field(default_factory=dict)

    def one(self, prediction: Prediction | TorchPrediction) -> None:
        """Print and write the prediction of one program."""
        from ..common.progress import wrote
        from ..predict.program.many import price_of, run_cost
        from ..predict.program.prediction import Prediction

        price = price_of(prediction.device, self.price)
        if self.price and price is None:
            raise typer.BadParameter(f"--price has no price for {prediction.device}")
        if self.timeline is not None:
            # Before printing, so that a closed pipe does not lose the file.
            from ..predict.export.timeline import write_chrome_trace

            write_chrome_trace(prediction, self.timeline)
            wrote(self.timeline, "Chrome trace")
        if self.json_output:
            data = prediction.to_dict()
            print_json(data | run_cost(data, price))
        elif isinstance(prediction, Prediction):
            from ..predict.render.program import print_prediction

            print_prediction(make_console(), prediction, self.top, self.by, price)
        else:
            from ..predict.render.operator import print_torch

            print_torch(make_console(), prediction, self.top, self.by, price)

    def table(
        self,
        asked: Asked,
        answers: Mapping[str, Answers],
        known: Mapping[str, DeviceSpec],
        here: DeviceSpec | None,
    ) -> None:
        """Predict programs on devices, and print and write a table.

        Exits with 1 if every prediction failed, or if any did and ``--strict`` is set.
        """
        from ..common.parquet import json_text, write_table
        from ..common.progress import counting, wrote
        from ..predict.program.many import find_chips, plot_predictions, predict_many
        from ..predict.render.program import print_many

        if self.plot is not None:
            require_plots()
        chips = find_chips(asked.devices, known, here)
        with counting("predictions") as tell:
            frame = predict_many(
                asked.programs, chips, answers, tell, opened=asked.opened, prices=self.price
            )
        if self.out is not None:
            write_table(frame, self.out)
            wrote(self.out, f"{len(frame)} rows")
        failed = int((frame["error"] != "").sum())
        if self.plot is not None:
            plot_predictions(frame, self.plot)
            wrote(self.plot, f"plot, without {failed} failed predictions" if failed else "plot")
        if self.json_output:
            typer.echo(json_text(frame))
        else:
            print_many(make_console(), frame)
        if left := frame.attrs["left"]:
            kept = f" and written to {self.out}" if self.out is not None else ""
            done = f"{len(frame) - left} of {len(frame)} predictions are shown{kept}"
            missing = ", ".join(dict.fromkeys(frame["device"].tail(left)))
            typer.echo(f"interrupted: {done}; missing: {missing}", err=True)
            raise typer.Exit(130)
        if failed == len(frame) or (asked.strict and failed):
            raise typer.Exit(1)


def predict(context: typer.Context, asked: Asked, shown: Shown, operator: OperatorCase) -> None:
    """Predict a program's time and memory on a device or a cluster.

    Several comma-separated models are compared. Several programs or devices, or a device file with
    ranges, give a table. PyTorch programs are predicted as run by XLA or by PyTorch.
    """
    if is_operator(context, operator, asked.programs, "json_output"):
        from ..predict.operator.predict import predict_op
        from ..predict.render.operator import print_op

        print_answer(shown.json_output, predict_op(operator), print_op)
        return
    from ..features.devices.catalogue import has_ranges

    lists = asked.device + asked.framework
    many = len(asked.programs) > 1 or "," in lists or bool(shown.out or shown.plot)
    if shown.json_output and not many:
        refuse(context, "--json, which has all kernels", {"top", "by"})
    if shown.by not in ("kernel", "line", "module"):
        raise typer.BadParameter(f"--by is kernel, line or module, not {shown.by!r}")
    many = many or has_ranges(asked.device)
    if many and not asked.cluster:
        table_of = "a table, which has a row per program and device and no kernels: give one "
        one = "PROGRAM and one --device" + " and --framework" * ("," in asked.framework)
        refuse(context, table_of + one, {"top", "by", "timeline"})
    if asked.framework != "xla":
        _predict_torch(context, asked, shown, many)
        return
    # These lowerings cannot fail, so a fallback would never be used.
    if asked.lowering in WITHOUT_COMPILER:
        refuse(context, f"--lowering {asked.lowering}, which needs no compiler", {"fallback"})
    if asked.cluster:
        _predict_on_cluster(context, asked, shown, many)
    # No model's name has a comma.
    elif "," in asked.model:
        _compare_models(context, asked, shown, many)
    else:
        _predict_xla(asked, shown, many)


def _predict_torch(context: typer.Context, asked: Asked, shown: Shown, many: bool) -> None:
    framework = asked.framework
    spare = {"lowering", "fallback", "trip_count", "cluster", "power_cap_w", *_OF_CASE}
    refuse(context, f"--framework {framework}", spare)
    if "," in asked.model:
        raise typer.BadParameter(f"--framework {framework} takes a single --model")
    from ..predict.operator.torch_framework import TorchPredictor, check_gpu_here
    from ..predict.program.many import by_torch, by_xla

    names = dict.fromkeys(name.strip() for name in framework.split(","))
    if len(names) > 1:
        refuse(context, "several frameworks", {"plot"})
    predictors = {name: TorchPredictor(name, asked.model) for name in names if name != "xla"}
    pytorch = next(iter(predictors.values()))
    if "local" in asked.devices:
        check_gpu_here()
    here = asked.here(pytorch.devices)
    if many:
        answers = by_torch(predictors, strict=asked.strict)
        if "xla" in names:
            from ..predict.program.predictor import load_for_programs

            xla = by_xla(load_for_programs(asked.model), asked.case(None, None))
            answers = {name: answers.get(name, xla) for name in names}
        shown.table(asked, answers, pytorch.devices, here)
    else:
        shown.one(pytorch.predict(asked.program, here or asked.device, strict=asked.strict))


def _predict_on_cluster(context: typer.Context, asked: Asked, shown: Shown, many: bool) -> None:
    refuse(
        context,
        "a partitioned program (--cluster)",
        {"device", "strict", "out", "plot", "by", "price", "power_cap_w", *_OF_CASE},
    )
    if many:
        raise typer.BadParameter("--cluster takes one program")
    from ..features.ir.torch.program import TorchProgram
    from .cluster import predict_on_cluster

    program = asked.program
    if isinstance(program, TorchProgram):
        from ..predict.api import torch_on_cluster

        raise torch_on_cluster(program.name)
    predict_on_cluster(
        program,
        asked.cluster,
        asked.model,
        # The cluster specifies its device.
        asked.options(None, asked.fallback),
        top=shown.top,
        timeline=shown.timeline,
        json_output=shown.json_output,
    )


def _compare_models(context: typer.Context, asked: Asked, shown: Shown, many: bool) -> None:
    refuse(
        context,
        "several models: give a single --model",
        {"strict", "timeline", "out", "plot", "by", "price", "power_cap_w"},
    )
    if many:
        raise typer.BadParameter("several programs or devices take a single --model")
    from ..predict.program.fidelities import compare_fidelities
    from ..predict.render.program import print_comparison

    names = [name.strip() for name in asked.model.split(",")]
    comparison = compare_fidelities(asked.case(asked.program, asked.device), names)
    print_answer(shown.json_output, comparison, print_comparison, shown.top)


def _predict_xla(asked: Asked, shown: Shown, many: bool) -> None:
    from ..predict.program.many import by_xla
    from ..predict.program.predictor import load_for_programs

    if asked.whole:
        _note_whole(asked.programs)
    predictor = load_for_programs(asked.model)
    # Before predicting, because the measured peaks enter every feature.
    here = asked.here(predictor.model.devices)
    if many:
        answers = {"xla": by_xla(predictor, asked.case(None, None))}
        shown.table(asked, answers, predictor.devices, here)
    else:
        shown.one(predictor.answer(asked.case(asked.program, here or asked.device)))


def _note_whole(programs: Sequence[Path]) -> None:
    """Print a note for the programs on which ``--whole`` has no effect."""
    from ..predict.program.case import states_several

    files = [p for p in programs if p.is_file()]
    functions = [str(p) for p in programs if p not in files]
    if functions:
        typer.echo(
            "note: --whole changes only the headers of files and has no effect on functions and "
            f"modules: {', '.join(functions)}",
            err=True,
        )
    single = [p.name for p in files if not states_several(p)]
    if single:
        typer.echo(
            "note: --whole has no effect on programs for one device, which always run whole: "
            f"{', '.join(single)}",
            err=True,
        )


def is_operator(
    context: typer.Context, operator: OperatorCase, programs: Sequence[Path], *used: str
) -> bool:
    """Whether an operator was given rather than a program.

    Raises:
        typer.BadParameter: Both or neither were given, or an operator with options of a program.
    """
    if bool(programs) == bool(operator.op):
        raise typer.BadParameter("give either a PROGRAM or an operator with --op")
    if operator.op:
        refuse_unused(context, "an operator (--op)", {*names_of(OperatorCase), *used})
    return bool(operator.op)
