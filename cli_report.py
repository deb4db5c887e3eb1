"""Reports: accuracy figures on the console, and pages of programs and of tracked runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .cli_common import make_console, measure_once, trips_of

#: What the options that belong to one kind of report start with.
_TABLES = "Of operator tables: "
_PROGRAM = "Of a program: "


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    program: Annotated[
        Path | None, typer.Argument(help="Make the page of this program: StableHLO or HLO.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="File for the page; default: NAME.html.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help=_PROGRAM + "name, device file, or 'local'. With --devices: may be given again."
        ),
    ] = None,
    lowering: Annotated[
        str,
        typer.Option(help=_PROGRAM + "auto, xla, fused or op. With --devices: xla, fused or op."),
    ] = "",
    fallback: Annotated[
        str, typer.Option(help=_PROGRAM + "lowering where the compiler is missing or fails.")
    ] = "",
    trip_count: Annotated[
        list[str] | None, typer.Option("--trip-count", help=_PROGRAM + "trips, LOOP=N or N.")
    ] = None,
    compare: Annotated[
        str, typer.Option(help=_PROGRAM + "devices to compare with, such as l4,tpu-v4; or none.")
    ] = "",
    compare_lowering: Annotated[
        str, typer.Option(help=_PROGRAM + "lowering of the comparison.")
    ] = "fused",
    accuracy: Annotated[
        str | None,
        typer.Option(help="Make the page of tracked runs: id or name of a run, or 'opcast'."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Dataset; default: the committed one."),
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(help="Report on the operator tables of this folder instead."),
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            "--study",
            help=_TABLES + "estimators, left-out, tensor-core, tensor-core-left-out; "
            "may be given again. Default: all.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help=_TABLES + "estimator; may be given again. " + _PROGRAM + "model."
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(help=_TABLES + "such as eager/bmm; may be given again."),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=200,
            help=_TABLES + "most rows of a family to learn from, and of a split to judge on.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write them as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    threads: Annotated[int, typer.Option("--threads", help="Threads for training.")] = 2,
    track: Annotated[bool, typer.Option(help="Log operator reports to MLflow.")] = True,
    devices: Annotated[
        bool, typer.Option("--devices", help="Report on devices that are not here instead.")
    ] = False,
    programs: Annotated[
        list[str] | None,
        typer.Option(help="With --devices: program by name; may be given again. Default: all."),
    ] = None,
    clusters: Annotated[
        bool,
        typer.Option(
            "--clusters",
            help="Report on clusters instead; collectives from the tables of --published.",
        ),
    ] = False,
) -> None:
    """Print accuracy beside the label noise; or make the page of a program or of tracked runs."""
    if program is not None and accuracy is not None:
        raise typer.BadParameter("give a PROGRAM or --accuracy, not both")
    if program is not None:
        _program_page(
            program, html, _only(device), (model or ["default"])[0], lowering=lowering or "auto",
            compare=compare,
            compare_lowering=compare_lowering, fallback=fallback, trip_count=trip_count,
        )  # fmt: skip
        return
    if accuracy is not None:
        _accuracy_page(accuracy, html)
        return
    if html is not None:
        raise typer.BadParameter("--html needs a PROGRAM or --accuracy RUN")
    if devices:
        from .device_report import run_device_report

        if data or published or study or model or family or max_rows:
            raise typer.BadParameter("--devices goes with --programs, --device, --lowering, --out")
        run_device_report(
            make_console(160), programs or (), device or (), lowering=lowering or "xla", out=out
        )
        return
    if programs or device:
        raise typer.BadParameter("--programs needs --devices, --device that or a PROGRAM")
    if clusters:
        from . import cluster_report

        if data or study or model or family or max_rows:
            raise typer.BadParameter("--clusters takes --published, --out and --threads only")
        wanted = cluster_report.ClusterRequest(
            published, out or cluster_report.OUT, workers=threads
        )
        cluster_report.run_cluster_report(make_console(170), wanted)
        return
    if published is None:
        from .workflows import run_report

        if study or model or family or max_rows:
            raise typer.BadParameter("--study, --model, --family, --max-rows need --published DIR")
        run_report(make_console(), data, out=out, threads=threads)
        typer.echo("operators of GPUs are not in this report: give --published DIR")
        return
    from .operator_report import OUT, Request, run_operator_report

    if data:
        raise typer.BadParameter("give --data or --published, not both")
    request = Request(
        tuple(study or ()), tuple(model or ()), tuple(family or ()), max_rows, seed, threads
    )
    run_operator_report(make_console(), published, request, out=out or OUT, track=track)


def _only(devices: list[str] | None) -> str:
    if devices and len(devices) > 1:
        raise typer.BadParameter("a page is of one --device; use --compare for others")
    return devices[0] if devices else "local"


def _program_page(
    program: Path, html: Path | None, device: str, model: str, *, lowering: str, compare: str,
    compare_lowering: str, fallback: str, trip_count: list[str] | None,
) -> None:  # fmt: skip
    from .predict.devices import resolve_device
    from .predict.page.compare import DEVICES
    from .predict.page.report import ReportOptions, report_page
    from .predict.predictor import load_for_programs

    predictor = load_for_programs(model)
    measure_once(device, predictor)
    names = tuple(name.strip() for name in compare.split(",") if name.strip())
    for name in () if compare == "none" else names:
        resolve_device(name, predictor.devices)  # a misspelt one is told before the work
    options = ReportOptions(
        lowering=lowering,
        trip_counts=trips_of(trip_count),
        fallback=fallback,
        compare=() if compare == "none" else names or DEVICES,
        compare_lowering=compare_lowering,
    )
    with _status() as tell:
        page = report_page(predictor, program, device, options, tell)
    _write(page, html or Path(f"{program.stem}.html"))


def _accuracy_page(run: str, html: Path | None) -> None:
    from .predict.page.accuracy import accuracy_page

    with _status() as tell:
        page = accuracy_page(run, tell)
    _write(page, html or Path("accuracy.html"))


def _write(page: str, path: Path) -> None:
    from .features.files import write_text

    write_text(path, page)
    typer.echo(f"{path}: {len(page.encode()) / 1e3:.0f} kB; open it in a browser")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is done."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("reading") as status:
        yield lambda what: status.update(escape(what))
