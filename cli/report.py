"""Reports: the page of a program, and the accuracy of the models on several kinds of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.progress import stages, wrote
from .options import (
    DeviceOpt,
    Devices,
    Fallback,
    LoweringOpt,
    ModelOpt,
    ProgramArg,
    Seed,
    Threads,
    Trips,
    called,
    json_file,
    make_console,
    measured_device,
    page_file,
    program_of,
    refuse,
    refuse_unused,
    trips_of,
)

Html = Annotated[Path | None, typer.Option("--html", callback=page_file, help="File for the page.")]
FiguresFile = Annotated[
    Path, typer.Option("--out", callback=json_file, help="JSON file for the figures.")
]
Figures = Annotated[
    Path | None,
    typer.Option("--out", callback=json_file, help="Also write the figures as JSON."),
]


def program(
    context: typer.Context,
    program: ProgramArg,
    html: Html = None,
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    fallback: Fallback = "",
    trip_count: Trips = None,
    compare: Annotated[
        str, typer.Option(help="Devices to compare with, such as l4,tpu-v4; or none.")
    ] = "",
    compare_lowering: Annotated[str, typer.Option(help="Lowering of the comparison.")] = "fused",
) -> None:
    """Write an HTML page that shows a program's prediction.

    The page is named after the program unless --html names it.
    """
    if compare == "none":
        refuse(context, "a page without comparison (--compare none)", {"compare_lowering"})
    from ..features.lowering.options import LoweringOptions
    from ..predict.devices import resolve_device
    from ..predict.page.report import DEVICES, ReportOptions, report_page
    from ..predict.program.predictor import load_for_programs

    predictor = load_for_programs(model)
    place = measured_device(device, predictor.model.devices)
    others = [name.strip() for name in compare.split(",") if name.strip()]
    names = () if compare == "none" else tuple(others) or DEVICES
    for name in others if names else ():
        resolve_device(name, predictor.devices)  # report an unknown name before the work starts
    options = ReportOptions(
        lowering=LoweringOptions(lowering, place, trips_of(trip_count), fallback),
        compare=names,
        compare_lowering=compare_lowering,
    )
    with stages("reading") as tell:
        page = report_page(predictor, program_of(program), options, tell)
    _write(page, html or Path(f"{program.stem}.html"))


def accuracy(
    context: typer.Context,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Dataset; default: the committed one.")
    ] = None,
    out: Figures = None,
    threads: Threads = 2,
    run: Annotated[
        str,
        typer.Option("--run", help="Instead, page of a tracked run: its id or name, or opcast."),
    ] = "",
    html: Html = None,
) -> None:
    """Print every model's accuracy beside the label noise.

    The models are trained and tested on every split of a dataset of kernels. With --run, write an
    HTML page of the runs that were tracked in MLflow instead.
    """
    if run:
        from ..predict.page.accuracy import accuracy_page

        refuse_unused(context, "the page of tracked runs (--run)", {"run", "html"})
        with stages("reading") as tell:
            page = accuracy_page(run, tell)
        _write(page, html or Path("accuracy.html"))
        return
    from ..workflows.reports.accuracy import run_accuracy_report
    from ..workflows.reports.settings import AccuracyReportSettings

    refuse(context, "the figures of a dataset, without --run", {"html"})
    run_accuracy_report(make_console(), AccuracyReportSettings(data or (), out, threads))
    # The other half of the models' accuracy, which needs published tables.
    typer.echo("for operators of GPUs: opcast report operators --published DIR")


def devices(
    programs: Annotated[
        list[str] | None, typer.Option(help="Program by name; may be given again. Default: all.")
    ] = None,
    device: Devices = None,
    lowering: Annotated[str, typer.Option(help="xla, fused or op.")] = "xla",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            callback=called(".md", ".json"),
            help="Also write the figures: Markdown (.md) or JSON.",
        ),
    ] = None,
) -> None:
    """Compare predictions for devices that are not attached.

    Programs of the zoo are lowered by each device's compiler, predicted at several fidelities and
    checked against physical limits.
    """
    from ..workflows.reports.devices import run_device_report
    from ..workflows.reports.settings import DeviceReportSettings

    settings = DeviceReportSettings(programs or (), device or (), lowering, out)
    # Wide enough for the eleven columns of the report.
    run_device_report(make_console(160), settings)


def clusters(
    published: Annotated[
        Path | None, typer.Option(help="Folder with tables of measured collectives.")
    ] = None,
    out: FiguresFile = Path("report-out/clusters.json"),
    threads: Annotated[int, typer.Option("--threads", help="Processes.")] = 2,
) -> None:
    """Check collectives and training steps on clusters.

    Prints errors of collectives, error and cost of composing a step, scaling, and the best plans.
    """
    from ..workflows.reports.clusters import run_cluster_report
    from ..workflows.reports.settings import ClusterReportSettings

    # Plans are long words that must not be cut.
    run_cluster_report(make_console(170), ClusterReportSettings(published, out, workers=threads))


def operators(
    published: Annotated[Path, typer.Option(help="Folder with tables of published latencies.")],
    study: Annotated[
        list[str] | None,
        typer.Option(
            "--study",
            help="estimators, left-out, tensor-core, tensor-core-left-out, next-version; may be "
            "given again. Default: all.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Estimator; may be given again.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Such as eager/bmm; may be given again.")
    ] = None,
    max_rows: Annotated[
        int | None,
        # Families with fewer than 200 rows are not learned (docs/operators.md).
        typer.Option(min=200, help="Maximum rows of a family to learn from, and of a test split."),
    ] = None,
    out: FiguresFile = Path("report-out/operators.json"),
    seed: Seed = 0,
    threads: Threads = 2,
    track: Annotated[bool, typer.Option(help="Log to MLflow.")] = True,
) -> None:
    """Compare estimators on published operator tables.

    Each chip is also left out of training in turn. A report that was stopped resumes.
    """
    from ..workflows.reports.operators import run_operator_report
    from ..workflows.reports.settings import OperatorReportSettings

    settings = OperatorReportSettings(
        published=published,
        out=out,
        studies=study or (),
        estimators=model or (),
        families=family or (),
        max_rows=max_rows,
        seed=seed,
        threads=threads,
        track=track,
    )
    run_operator_report(make_console(), settings)


def _write(page: str, path: Path) -> None:
    from ..common.files import write_text

    write_text(path, page)
    wrote(path, "page; open it in a browser")
