"""Commands that write reports: the page of a program, and the accuracy of the models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    DeviceOpt,
    Fallback,
    Json,
    LoweringOpt,
    ModelOpt,
    Option,
    ProgramArg,
    Trips,
    page_file,
)
from ..common.progress import stages, wrote
from ..workflows.reports.settings import (
    AccuracyReportSettings,
    ClusterReportSettings,
    DeviceReportSettings,
    FidelitySettings,
    OperatorReportSettings,
    PagesSettings,
    SupportReportSettings,
)
from .options import make_console, measured_device, print_answer, program_of, refuse, refuse_unused

Html = Annotated[Path | None, Option("File for the page.", ("--html",), check=page_file)]


def program(
    context: typer.Context,
    program: ProgramArg,
    html: Html = None,
    device: DeviceOpt = "local",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    fallback: Fallback = "",
    trip_count: Trips = None,
    compare: Annotated[str, Option("Devices to compare with, such as l4,tpu-v4; or none.")] = "",
    compare_lowering: Annotated[str, Option("Lowering of the comparison.")] = "fused",
) -> None:
    """Write an HTML page that shows a program's prediction.

    The file is named after the program unless --html is given.
    """
    if compare == "none":
        refuse(context, "a page without comparison (--compare none)", {"compare_lowering"})
    from ..features.lowering.options import LoweringOptions
    from ..predict.devices import resolve_device, shown_devices
    from ..predict.page.report import ReportOptions, report_page
    from ..predict.program.predictor import load_for_programs

    predictor = load_for_programs(model)
    place = measured_device(device, predictor.model.devices)
    others = [name.strip() for name in compare.split(",") if name.strip()]
    names = () if compare == "none" else tuple(others) or shown_devices("reports")
    for name in others if names else ():
        resolve_device(name, predictor.devices)  # report an unknown name before the work starts
    options = ReportOptions(
        lowering=LoweringOptions(lowering, place, trip_count, fallback),
        compare=names,
        compare_lowering=compare_lowering,
    )
    with stages("reading") as tell:
        page = report_page(predictor, program_of(program), options, tell)
    _write(page, html or Path(f"{program.stem}.html"))


def accuracy(
    context: typer.Context,
    settings: AccuracyReportSettings,
    run: Annotated[
        str, Option("Instead, write the page of a tracked run: id or name, or opcast for all.")
    ] = "",
    html: Html = None,
) -> None:
    """Print the accuracy of every model beside the label noise.

    The models are trained and tested on every split of a kernel dataset. With --run, an HTML page
    of runs tracked in MLflow is written instead.
    """
    if run:
        from ..predict.page.accuracy import accuracy_page

        refuse_unused(context, "the page of tracked runs (--run)", {"run", "html"})
        with stages("reading") as tell:
            page = accuracy_page(run, tell)
        _write(page, html or Path("accuracy.html"))
        return
    from ..workflows.reports.accuracy import run_accuracy_report

    refuse(context, "the figures of a dataset, without --run", {"html"})
    run_accuracy_report(make_console(), settings)
    typer.echo("for operators of GPUs: opcast report operators --published DIR")


def devices(settings: DeviceReportSettings) -> None:
    """Compare predictions for devices that are not attached.

    Zoo programs are lowered by each device's compiler, predicted at several fidelities and checked
    against physical limits.
    """
    from ..workflows.reports.devices import run_device_report

    # Wide enough for the eleven columns of the report.
    run_device_report(make_console(160), settings)


def support(settings: SupportReportSettings) -> None:
    """Print the measurements that exist for each device, and the errors on them."""
    from ..workflows.reports.accuracy import run_support_report

    # Wide enough for its thirteen columns.
    run_support_report(make_console(160), settings)


def pages(settings: PagesSettings) -> None:
    """Write the accuracy pages from the figures stored in the shipped models."""
    from ..workflows.reports.pages import run_pages

    run_pages(make_console(), settings)


def clusters(settings: ClusterReportSettings) -> None:
    """Check collectives and training steps on clusters.

    Prints errors of collectives, error and run time of the composition of a step, scaling, and the
    best plans.
    """
    from ..workflows.reports.clusters import run_cluster_report

    # Wide enough for plans, which must not be cut.
    run_cluster_report(make_console(170), settings)


def operators(settings: OperatorReportSettings) -> None:
    """Compare estimators on published operator tables.

    Each chip is also left out of training in turn. A stopped report resumes when it is run again.
    """
    from ..workflows.reports.operators import run_operator_report

    run_operator_report(make_console(), settings)


def fidelities(settings: FidelitySettings, json_output: Json = False) -> None:
    """Rank-correlate estimators over the zoo's programs.

    Prints rank correlations over programs and over kernels. The default devices are tpu-v3 and
    tpu-v4.
    """
    from ..workflows.reports.fidelities import print_report, run_fidelity_report

    report = run_fidelity_report(settings)
    print_answer(json_output, report, print_report)


def _write(page: str, path: Path) -> None:
    from ..common.files import write_text

    write_text(path, page)
    wrote(path, "page; open it in a browser")
