"""Commands that predict and explain programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    WITHOUT_COMPILER,
    DeviceOpt,
    Fallback,
    Json,
    LossOpt,
    LoweringOpt,
    ManyDevicesOpt,
    ModelOpt,
    OpOpt,
    PowerCapOpt,
    PricesOpt,
    ProgramOrNone,
    ProgramsOrNone,
    Timeline,
    Top,
    TorchFrameworkOpt,
    TrainOpt,
    Trips,
    make_console,
    measured_device,
    plot_file,
    prices_of,
    print_json,
    program_of,
    refuse,
    refuse_unused,
    require_plots,
    table_file,
    torch_program_of,
    trips_of,
)

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..predict.operator.torch_framework import TorchPrediction
    from ..predict.program.many import Answers
    from ..predict.program.prediction import Prediction


def predict(
    context: typer.Context,
    programs: ProgramsOrNone = None,
    device: ManyDevicesOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    top: Top = 10,
    json_output: Json = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if a kernel has no learned estimate.")
    ] = False,
    trip_count: Trips = None,
    timeline: Timeline = None,
    fallback: Fallback = "",
    op: OpOpt = None,
    cluster: Annotated[
        str, typer.Option(help="For a partitioned program: its cluster, such as h100-sxm-x4.")
    ] = "",
    by: Annotated[
        str, typer.Option("--by", help="Rows of the table: kernel, line or module.")
    ] = "kernel",
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=table_file, help="Write a table: .parquet, .csv or .json."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=plot_file, help="Plot the times of the table.")
    ] = None,
    framework: TorchFrameworkOpt = "xla",
    train: TrainOpt = "",
    loss: LossOpt = "",
    price: PricesOpt = None,
    power_cap: PowerCapOpt = None,
) -> None:
    """Predict a program's time and memory on a device or a cluster.

    Several models, comma-separated, are compared. Several programs or devices, or a device file
    with ranges, make a table. PyTorch's programs are predicted as XLA or PyTorch would run them.
    """
    program = programs[0] if programs else None
    # Operators share few options with programs; any other is refused, not ignored.
    if _one_of(program, op):
        from ..predict.operator.predict import predict_op
        from ..predict.render.operator import print_op

        used = {"op", "device", "model", "json_output", "power_cap"}
        refuse_unused(context, "an operator (--op)", used)
        estimate = predict_op(str(op), device, model, power_cap)
        print_json(asdict(estimate)) if json_output else print_op(make_console(), estimate)
        return
    assert programs and program is not None
    many = len(programs) > 1 or "," in device or out is not None or plot is not None
    if json_output and not many:
        refuse(context, "--json, which has all kernels", {"top", "by"})
    if by not in ("kernel", "line", "module"):
        raise typer.BadParameter(f"--by is kernel, line or module, not {by!r}")
    many = many or _has_ranges(device)
    if many and not cluster:
        table_of = "a table, which has a row for each program and device but no kernels: give one "
        refuse(context, table_of + "PROGRAM and one --device", {"top", "by", "timeline"})
    prices = prices_of(price or ())
    answer = _Answer(top, by, timeline, json_output, prices)
    table = _Table(programs, device.split(","), train, loss, out, plot, json_output, prices, strict)
    if framework != "xla":
        spare = {"lowering", "fallback", "trip_count", "cluster", "power_cap"}
        refuse(context, f"--framework {framework}", spare)
        if "," in model:
            raise typer.BadParameter(f"--framework {framework} takes a single --model")
        from ..predict.operator.torch_framework import TorchPredictor, check_gpu_here
        from ..predict.program.many import by_torch

        pytorch = TorchPredictor(framework, model)
        if "local" in table.devices:
            check_gpu_here()
        here = _here(table.devices, pytorch.devices)
        if many:
            table.give(by_torch(pytorch, strict=strict), pytorch.devices, here)
            return
        own = torch_program_of(program_of(program), train, loss)
        answer.give(pytorch.predict(own, here or device, strict=strict))
        return
    # A fallback could never be taken.
    if lowering in WITHOUT_COMPILER:
        refuse(context, f"--lowering {lowering}, which needs no compiler", {"fallback"})
    from ..features.lowering.options import LoweringOptions

    # A cluster names its device itself.
    options = LoweringOptions(lowering, None if cluster else device, trips_of(trip_count), fallback)
    if cluster:
        refuse(
            context,
            "a partitioned program (--cluster)",
            {"device", "strict", "out", "plot", "by", "price", "power_cap"},
        )
        if many:
            raise typer.BadParameter("--cluster takes one program")
        _refuse_torch(torch_program_of(program_of(program), train, loss))
        from .simulate import predict_on_cluster

        predict_on_cluster(
            program_of(program),
            cluster,
            model,
            options,
            top=top,
            timeline=timeline,
            json_output=json_output,
        )
        return
    # No model's name has a comma.
    if "," in model:
        refuse(
            context,
            "several models: give a single --model",
            {"strict", "timeline", "out", "plot", "by", "price", "power_cap"},
        )
        if many:
            raise typer.BadParameter("several programs or devices take a single --model")
        from .fidelities import predict_side_by_side

        own = torch_program_of(program_of(program), train, loss)
        predict_side_by_side(own, model, options, top=top, json_output=json_output)
        return
    from ..predict.program.predictor import load_for_programs

    predictor = load_for_programs(model)
    # Before the prediction, since the ceilings are part of every feature.
    here = _here(table.devices, predictor.model.devices)
    if many:
        from ..predict.program.many import by_xla

        answers = by_xla(predictor, options, strict=strict, power_cap_w=power_cap)
        table.give(answers, predictor.devices, here)
        return
    own = torch_program_of(program_of(program), train, loss)
    options = replace(options, device=here or device)
    answer.give(predictor.predict_with(own, options, strict=strict, power_cap_w=power_cap))


def _here(devices: list[str], known: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    """This machine as it was measured, and runs now; ``None`` if it was not asked for."""
    if "local" not in devices:
        return None
    found = measured_device("local", known)
    assert not isinstance(found, str)
    return found


@dataclass(frozen=True)
class _Answer:
    """How the prediction of one program is given."""

    top: int
    by: str
    timeline: Path | None
    json_output: bool
    prices: Mapping[str, float]

    def give(self, prediction: Prediction | TorchPrediction) -> None:
        from ..common.progress import wrote
        from ..predict.program.many import price_of, run_cost
        from ..predict.program.prediction import Prediction

        price = price_of(prediction.device, self.prices)
        if self.prices and price is None:
            raise typer.BadParameter(f"--price gives none of {prediction.device}")
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


def _refuse_torch(program: object) -> None:
    from ..common.errors import ProgramError
    from ..features.ir.torch.program import TorchProgram
    from ..predict.api import FOR_ONE_DEVICE

    if isinstance(program, TorchProgram):
        raise ProgramError(FOR_ONE_DEVICE[0], where=program.name, hint=FOR_ONE_DEVICE[1])


def _has_ranges(device: str) -> bool:
    """Whether a device file describes several designs."""
    if Path(device).suffix.lower() not in (".yaml", ".yml"):
        return False
    from ..features.devices.catalogue import load_designs

    return len(load_designs(device)) > 1


@dataclass(frozen=True)
class _Table:
    """A table of programs and devices, and where it goes."""

    programs: list[Path]
    devices: list[str]
    train: str
    loss: str
    out: Path | None
    plot: Path | None
    json_output: bool
    prices: Mapping[str, float]
    strict: bool

    def give(
        self, answers: Answers, known: Mapping[str, DeviceSpec], here: DeviceSpec | None
    ) -> None:
        """Predict programs on devices; exits with 1 if none, or with --strict not all, could be."""
        from ..common.parquet import json_text, write_table
        from ..common.progress import counting, wrote
        from ..predict.program.many import (
            find_chips,
            plot_predictions,
            predict_many,
        )
        from ..predict.render.many import print_many

        if self.plot is not None:
            require_plots()
        chips = find_chips(self.devices, known, here)
        with counting("predictions") as tell:
            frame = predict_many(self.programs, chips, answers, tell, self._opened, self.prices)
        if self.out is not None:
            write_table(frame, self.out)
            wrote(self.out, f"{len(frame)} rows")
        if self.plot is not None:
            plot_predictions(frame, self.plot)
            wrote(self.plot, "plot")
        if self.json_output:
            typer.echo(json_text(frame))
        else:
            print_many(make_console(), frame)
        if frame.attrs["interrupted"]:
            kept = f" and written to {self.out}" if self.out is not None else ""
            typer.echo(f"interrupted: {len(frame)} predictions are shown{kept}", err=True)
            raise typer.Exit(130)
        failed = frame["error"] != ""
        if failed.all() or (self.strict and failed.any()):
            raise typer.Exit(1)

    def _opened(self, program: Path) -> object:
        return torch_program_of(program_of(program), self.train, self.loss)


def explain(
    context: typer.Context,
    program: ProgramOrNone = None,
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Explain the kernel of this name.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of costliest kernels to explain.")] = 3,
    neighbours: Annotated[
        int, typer.Option(min=0, help="Number of measured neighbours to print for each.")
    ] = 3,
    trip_count: Trips = None,
    json_output: Json = False,
    op: OpOpt = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="With --op: dataset to search for measured neighbours."),
    ] = None,
    power_cap: PowerCapOpt = None,
    framework: TorchFrameworkOpt = "xla",
    train: TrainOpt = "",
    loss: LossOpt = "",
) -> None:
    """Explain the predicted time of a program's kernels or an operator."""
    if _one_of(program, op):
        from ..predict.operator.predict import explain_operator
        from ..predict.render.operator import print_op_explanation

        used = {"op", "device", "model", "neighbours", "data", "json_output", "power_cap"}
        refuse_unused(context, "an operator (--op)", used)
        if not data:
            refuse(context, "an operator without --data", {"neighbours"})
        reasons = explain_operator(str(op), device, model, data or (), neighbours, power_cap)
        print_json(reasons.to_dict()) if json_output else print_op_explanation(
            make_console(), reasons
        )
        return
    assert program is not None
    refuse(context, "a program", {"data", "power_cap"})
    if framework != "xla":
        spare = {"lowering", "kernel", "neighbours", "trip_count"}
        refuse(context, f"--framework {framework}", spare)
        from ..predict.operator.torch_explain import explain_torch
        from ..predict.operator.torch_framework import TorchPredictor
        from ..predict.render.operator import print_torch_explanation

        pytorch = TorchPredictor(framework, model)
        own = torch_program_of(program_of(program), train, loss)
        found = explain_torch(pytorch, own, device, top)
        if json_output:
            print_json(found.to_dict())
        else:
            print_torch_explanation(make_console(), found)
        return
    if kernel is not None:
        refuse(context, "a kernel by name (--kernel)", {"top"})
    from ..predict.program.explain import explain as explain_program
    from ..predict.program.predictor import load_for_programs

    predictor = load_for_programs(model)
    place = measured_device(device, predictor.model.devices)
    explanation = explain_program(
        predictor,
        torch_program_of(program_of(program), train, loss),
        device=place,
        lowering=lowering,
        trip_counts=trips_of(trip_count),
        kernel=kernel,
        top=top,
        neighbours=neighbours,
    )
    if json_output:
        print_json(explanation.to_dict())
        return
    from ..predict.render.explain import print_explanation

    print_explanation(make_console(), explanation)


def _one_of(program: Path | None, op: str | None) -> bool:
    """Whether an operator was given rather than a program; exactly one must be."""
    if (program is None) == (op is None):
        raise typer.BadParameter("give either a PROGRAM or an operator with --op")
    return op is not None
