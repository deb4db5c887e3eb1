"""Commands that compare estimators and tile configurations, and label datasets by simulators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import Devices, Json, LoweringOpt, Option, Out, table_file
from ..common.progress import wrote
from ..workflows.settings import FidelitySettings
from .options import make_console, print_json


def data_simulate(
    program: Annotated[Sequence[Path], Option("StableHLO programs.", argument=True)],
    out: Out,
    tool: Annotated[str, Option("Simulator: scalesim, zigzag or iree.", ("--with",))] = "scalesim",
    device: Devices = (),
    lowering: LoweringOpt = "auto",
    family: Annotated[
        str, Option("Family name for all programs; default: each program's name.")
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


def fidelities(settings: FidelitySettings, json_output: Json = False) -> None:
    """Rank-correlate estimators over the zoo's programs.

    Prints rank correlations over programs and over kernels. The default devices are tpu-v3 and
    tpu-v4.
    """
    from ..workflows.reports.fidelities import print_report, run_fidelity_report

    report = run_fidelity_report(settings)
    if json_output:
        print_json(report.to_dict())
    else:
        print_report(make_console(), report)


def tune_kernel(
    table: Annotated[
        Path,
        Option(
            "Candidates, .parquet or .csv: device, op, implementation, args, config and sizes.",
            argument=True,
        ),
    ],
    out: Annotated[
        Path | None,
        Option("Write all candidates: .parquet, .csv or .json.", check=table_file),
    ] = None,
    top: Annotated[int, Option("Candidates of each kernel to print.", least=1)] = 5,
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
