"""Commands that compare estimators and tile configurations, and label datasets by simulators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.progress import wrote
from .options import (
    Devices,
    Json,
    LoweringOpt,
    Out,
    folder,
    make_console,
    print_json,
    table_file,
)

if TYPE_CHECKING:
    from ..features.lowering.options import LoweringOptions


def predict_side_by_side(
    program: object,
    models: str,
    options: LoweringOptions,
    *,
    top: int,
    json_output: bool,
) -> None:
    """Compare several models, as ``opcast predict --model A,B`` does."""
    from ..predict.program.fidelities import compare_fidelities
    from ..predict.render.fidelities import print_comparison

    comparison = compare_fidelities(program, [name.strip() for name in models.split(",")], options)
    if json_output:
        print_json(comparison.to_dict())
    else:
        print_comparison(make_console(), comparison, top)


def data_simulate(
    program: Annotated[list[Path], typer.Argument(help="StableHLO programs.")],
    out: Out,
    tool: Annotated[
        str, typer.Option("--with", help="Simulator: scalesim, zigzag or iree.")
    ] = "scalesim",
    device: Devices = None,
    lowering: LoweringOpt = "auto",
    family: Annotated[
        str, typer.Option(help="Family name for all programs; default: each program's name.")
    ] = "",
) -> None:
    """Label the kernels of programs with a simulator.

    The default device is tpu-v3, or this machine with iree. A run that was stopped resumes.
    """
    from ..workflows.label_with_simulator import simulate_dataset

    # IREE runs the kernels on this machine; SCALE-Sim and ZigZag model devices with systolic
    # arrays.
    devices = device or (["local"] if tool == "iree" else ["tpu-v3"])
    for name in devices:
        done = simulate_dataset(out, program, name, tool, lowering=lowering, family=family)
        wrote(
            out,
            f"{done.samples} kernels of {done.programs} programs on {done.device}, source "
            f"{done.source}; {done.skipped} programs were done before, {done.refused} kernels are "
            "not supported",
        )


def fidelities(
    device: Devices = None,
    model: Annotated[
        str, typer.Option(help="Estimators, comma-separated.")
    ] = "roofline,scalesim,zigzag,learned,compiler",
    suite: Annotated[
        str, typer.Option(help="Zoo suite: quick, standard, full; default: small programs.")
    ] = "",
    lowering: LoweringOpt = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of programs; 0 for all.")] = 0,
    out: Annotated[
        Path,
        typer.Option(
            "--out", callback=folder, help="Folder for the predictions; a run resumes from it."
        ),
    ] = Path("fidelities-out"),
    json_output: Json = False,
) -> None:
    """Rank-correlate estimators over the zoo's programs.

    Prints rank correlations over programs and over kernels. The default devices are tpu-v3 and
    tpu-v4.
    """
    from ..workflows.reports.fidelities import print_report, run_fidelity_report
    from ..workflows.settings import FidelitySettings

    settings = FidelitySettings(
        devices=device or ("tpu-v3", "tpu-v4"),
        models=[name.strip() for name in model.split(",")],
        out=out,
        suite=suite,
        lowering=lowering,
        limit=limit,
    )
    report = run_fidelity_report(settings)
    if json_output:
        print_json(report.to_dict())
    else:
        print_report(make_console(), report)


def tune_kernel(
    table: Annotated[
        Path,
        typer.Argument(
            help="Candidates, .parquet or .csv: device, op, implementation, args, config and sizes."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=table_file, help="Write all candidates: .parquet, .csv or .json."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Candidates of each kernel to print.")] = 5,
    json_output: Json = False,
) -> None:
    """Rank implementations and tile configurations of kernels.

    The table has a row for each candidate; docs/tpu.md lists its columns.
    """
    import pandas as pd

    from ..common.errors import DatasetError
    from ..common.parquet import read_table, write_table
    from ..models.tiles.model import shipped_tiles
    from ..predict.published.tile_table import rank_configurations, short_configs, ties_note
    from ..predict.render.tiles import candidates_table

    if not table.is_file():
        raise DatasetError("no such table", where=str(table))
    read = pd.read_csv(table) if table.suffix.lower() == ".csv" else read_table(table)
    ranked = rank_configurations(read, shipped_tiles())
    if out is not None:
        write_table(ranked, out)
        wrote(out, f"{len(ranked)} rows")
    shorter = ranked.assign(config=short_configs(ranked))
    best = ranked[ranked["rank"] <= top]
    if json_output:
        typer.echo(best.to_json(orient="records"))
        return
    best = shorter[ranked["rank"] <= top]
    console = make_console()
    console.print(f"{len(ranked)} candidates")
    console.print(candidates_table(best, console.width))
    if note := ties_note(ranked):
        console.print(f"note: {note}")
