"""Commands that search: for plans of transformers and of any program, and for kernels' tiles."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    HfOpt,
    Json,
    Option,
    Workload,
    table_file,
)
from ..common.progress import wrote
from ..predict.plan.case import PlanCase
from ..workflows.sweep import SweepSettings, run_sweep
from .options import (
    make_console,
    print_answer,
    print_json,
    program_of,
    refuse,
    require_plots,
    workload_of,
)


def sweep(
    context: typer.Context, settings: SweepSettings, workload: Workload = "", hf: HfOpt = None
) -> None:
    """Evaluate many parallel plans and print the Pareto front.

    The front consists of plans that fit in memory, on one or more clusters.
    """
    if not settings.trials:
        refuse(context, "a sweep over all plans, without --trials", {"seed"})
    # The Ray cluster determines the number of workers.
    if settings.ray:
        refuse(context, "a sweep on a Ray cluster (--ray)", {"workers"})
    # Checked before hours of work.
    if settings.plot is not None or settings.scaling is not None:
        require_plots()
    rows = run_sweep(make_console(), replace(settings, workload=workload_of(workload, hf)))
    if left := rows.attrs["left"]:
        typer.echo(f"stopped: {left} plans are not evaluated yet", err=True)
        raise typer.Exit(130)
    if not rows["fits"].any():
        # For scripts; the table shows it, too.
        raise typer.Exit(1)


def plan(
    context: typer.Context,
    program: Annotated[
        Path,
        Option("StableHLO for one device or with shardings, or file.py:step.", argument=True),
    ],
    case: PlanCase,
    save_program: Annotated[
        Path | None, Option("Write the program with the best plan's shardings.")
    ] = None,
    top: Annotated[int, Option("Number of plans to print.", least=1)] = 10,
    json_output: Json = False,
) -> None:
    """Search for the best mesh and shardings of a program on a cluster.

    All plans are screened by their matrix products and collectives; the best are compiled.
    """
    if json_output:
        refuse(context, "--json, which has all plans", {"top"})
    if case.ray:
        refuse(context, "a search on a Ray cluster (--ray)", {"workers"})
    from ..common.files import write_text
    from ..common.progress import counting, wrote
    from ..predict.plan.answer import find_plan
    from ..predict.render.step import print_plan

    with counting("plans") as advance:
        answer = find_plan(program_of(program), case, advance)
    code = (case.out or Path()) / "shardings.py"
    write_text(code, answer.code)
    wrote(code, "the best plan as JAX code")
    if save_program is not None:
        written = answer.save(save_program)
        what = f"the first of {len(answer.stages)} stages" if answer.stages else "the program"
        wrote(written, f"{what} with its shardings")
    print_answer(json_output, answer, print_plan, top)
    if answer.stopped:
        typer.echo("stopped: only the plans compiled so far are compared", err=True)
        raise typer.Exit(130)
    if not answer.best.fits:
        # For scripts; the table shows it, too.
        raise typer.Exit(1)


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

    The table has a row for each candidate; docs/tpu.md describes its columns.
    """
    from ..common.parquet import read_table, write_table
    from ..models.tiles import TileModel
    from ..predict.published.tile_table import rank_configurations, short_configs, ties_note
    from ..predict.render.operator import candidates_table

    read = read_table(table)
    ranked = rank_configurations(read, TileModel.find())
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


def screen(
    file: Annotated[
        Path, Option("Candidates, a JSON object a line; - for standard input.", argument=True)
    ] = Path("-"),
    device: Annotated[str, Option("Device of candidates that name none.")] = "",
    least: Annotated[
        float,
        Option("Minimum probability of being fastest for a measurement.", least=0, most=1),
    ] = 0.05,
) -> None:
    """Predict thousands of candidates, and flag those that are not worth measuring.

    Prints a line of JSON for each candidate, in order. An empty input line ends a group, which is
    then answered. docs/agents.md describes the candidates.
    """
    from ..predict.screen import answer_lines

    with contextlib.ExitStack() as stack:
        try:
            piped = str(file) == "-"
            lines = sys.stdin if piped else stack.enter_context(file.open(encoding="utf-8"))
        except OSError as error:
            raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
        good = total = 0
        for answers in answer_lines(lines, device, least):
            total += len(answers)
            good += sum("error" not in own for own in answers)
            for own in answers:
                print_json(own)
            sys.stdout.flush()
    if total and not good:
        raise typer.Exit(1)
