"""Commands that put estimators side by side, and that make datasets with simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Json, make_console, print_json


def register(app: typer.Typer) -> None:
    """Add the command ``fidelities``."""
    app.command("fidelities")(fidelities)


def register_data(data_app: typer.Typer) -> None:
    """Add the command ``data simulate``."""
    data_app.command("simulate")(data_simulate)


def predict_side_by_side(
    program: Path,
    device: str,
    models: str,
    lowering: str,
    *,
    trips: dict[str, int] | int | None,
    fallback: str,
    top: int,
    json_output: bool,
) -> None:
    """What ``opcast predict`` does with a list of models."""
    from .predict.fidelities import compare_fidelities
    from .predict.render_fidelities import print_comparison

    found = compare_fidelities(
        program, device, [name.strip() for name in models.split(",")], lowering=lowering,
        trip_counts=trips, fallback=fallback,
    )  # fmt: skip
    if json_output:
        print_json(found.to_dict())
    else:
        print_comparison(make_console(), found, top)


def data_simulate(
    program: Annotated[list[Path], typer.Argument(help="StableHLO programs.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the dataset.")],
    tool: Annotated[str, typer.Option("--with", help="scalesim, zigzag or iree.")] = "scalesim",
    device: Annotated[
        list[str] | None, typer.Option(help="Device; may be given again. Default: tpu-v3.")
    ] = None,
    lowering: Annotated[str, typer.Option(help="auto, xla, fused or op.")] = "auto",
    family: Annotated[
        str, typer.Option(help="Family of the programs; default: each its own.")
    ] = "",
) -> None:
    """Label the kernels of programs with a simulator. It resumes if stopped."""
    from .simulated_labels import simulate_dataset

    devices = device or (["local"] if tool == "iree" else ["tpu-v3"])
    for name in devices:
        done = simulate_dataset(out, program, name, tool, lowering=lowering, family=family)
        typer.echo(
            f"{out}: {done.samples} kernels of {done.programs} programs on {done.device}, source "
            f"{done.source}; {done.skipped} programs were there, {done.refused} kernels have no "
            "label"
        )


def fidelities(
    device: Annotated[
        list[str] | None, typer.Option(help="Device; may be given again. Default: tpu-v3, tpu-v4.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Estimators, comma-separated.")
    ] = "roofline,scalesim,zigzag,learned,compiler",
    suite: Annotated[
        str, typer.Option(help="Suite of the zoo: quick, standard, full; default: small programs.")
    ] = "",
    lowering: Annotated[str, typer.Option(help="auto, xla, fused or op.")] = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Most programs; 0 for all.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the answers; a run resumes from it.")
    ] = Path("fidelities-out"),
    json_output: Json = False,
) -> None:
    """Compare estimators over the zoo: rank correlations over programs and over kernels."""
    from .fidelity_report import Request, print_report, run_report

    request = Request(
        tuple(device or ("tpu-v3", "tpu-v4")), tuple(n.strip() for n in model.split(",")), suite,
        lowering, limit,
    )  # fmt: skip
    found = run_report(request, out)
    if json_output:
        print_json(found.to_dict())
    else:
        print_report(make_console(), found)
