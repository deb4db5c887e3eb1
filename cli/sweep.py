"""Commands that search: for plans of transformers and of any program, and for kernels' tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    HfOpt,
    Json,
    LoweringOpt,
    ModelOpt,
    Option,
    Ray,
    Workload,
    bytes_of,
    folder,
    seconds_of,
    table_file,
)
from ..common.progress import wrote
from ..workflows.settings import SweepSettings
from .options import make_console, print_json, program_of, refuse, require_plots, workload_of


def sweep(
    context: typer.Context, settings: SweepSettings, workload: Workload = "", hf: HfOpt = None
) -> None:
    """Evaluate many parallel plans and print the Pareto front.

    The front has the plans that fit into memory, over one or more clusters.
    """
    if not settings.trials:
        refuse(context, "a sweep over all plans, without --trials", {"seed"})
    # The Ray cluster decides how many workers there are.
    if settings.ray:
        refuse(context, "a sweep on a Ray cluster (--ray)", {"workers"})
    # Before the sweep, not after hours of it.
    if settings.plot is not None or settings.scaling is not None:
        require_plots()
    from ..workflows.sweep import run_sweep

    rows = run_sweep(make_console(), replace(settings, workload=workload_of(workload, hf)))
    if not rows["fits"].any():
        # Said above; a script must see it, too.
        raise typer.Exit(1)


def _batch_dims(text: str) -> Mapping[str, int]:
    from ..predict.plan.arguments import parse_batch_dims

    return parse_batch_dims(text)


def _axes(text: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in text.split(","))


@dataclass(frozen=True)
class PlanCase:
    """What :func:`opcast.plan` is asked, beside the program."""

    cluster: Annotated[str, Option("Cluster name or file, such as dgx-h100-x64.")]
    batch_dims: Annotated[
        Mapping[str, int] | None,
        Option(
            "Batch dimensions, argument:dimension, as 3:0,4:0; default: found.", parse=_batch_dims
        ),
    ] = None
    budget_s: Annotated[
        float,
        Option(
            "Time to compile plans, such as 90s, 10m or 1h.",
            ("--budget",),
            parse=seconds_of,
            typed="10m",
        ),
    ] = 600.0
    memory: Annotated[
        float, Option("Memory that a device may use, such as 60GiB; default: all.", parse=bytes_of)
    ] = 0.0
    axes: Annotated[
        Sequence[str] | None,
        Option(
            "Axes of the mesh: pipeline,data,fsdp,sequence,expert,tensor; default: all, pipeline "
            "over several boxes or where nothing else fits.",
            parse=_axes,
        ),
    ] = None
    compiles: Annotated[int, Option("Most plans to compile.", least=1)] = 12
    remat: Annotated[
        str, Option("Layers to compute again in the backward pass: auto, all, a number.")
    ] = "auto"
    micro_batches: Annotated[
        str, Option("Parts of the batch whose gradients are added up: auto, a number.")
    ] = "auto"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"
    out: Annotated[Path, Option("Results folder; a search resumes from it.", check=folder)] = Path(
        "plan"
    )
    workers: Annotated[int, Option("Processes that compile.", least=1)] = 1
    ray: Ray = ""


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
    top: Annotated[int, Option("Number of plans to print.")] = 10,
    json_output: Json = False,
) -> None:
    """Search meshes and shardings of any program for the best on a cluster.

    All plans are screened by their products and collectives, the best are compiled.
    """
    if json_output:
        refuse(context, "--json, which has all plans", {"top"})
    if case.ray:
        refuse(context, "a search on a Ray cluster (--ray)", {"workers"})
    from ..common.files import write_text
    from ..common.progress import counting, wrote
    from ..predict.plan.answer import plan as search
    from ..predict.render.step import print_plan

    with counting("plans") as advance:
        answer = search(program_of(program), **vars(case), progress=advance)
    write_text(case.out / "shardings.py", answer.code)
    wrote(case.out / "shardings.py", "the best plan as code of JAX")
    if save_program is not None:
        written = answer.save(save_program)
        said = f"the first of {len(answer.stages)} stages" if answer.stages else "the program"
        wrote(written, f"{said} with its shardings")
    if json_output:
        print_json(answer.to_dict())
    else:
        print_plan(make_console(), answer, top)
    if answer.stopped:
        typer.echo("stopped: these are the plans that were compiled until then", err=True)
        raise typer.Exit(130)
    if not answer.best.fits:
        # Said above; a script must see it, too.
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

    The table has a row for each candidate; docs/tpu.md lists its columns.
    """
    import pandas as pd

    from ..common.errors import DatasetError
    from ..common.parquet import read_table, write_table
    from ..models.tiles.model import shipped_tiles
    from ..predict.published.tile_table import rank_configurations, short_configs, ties_note
    from ..predict.render.operator import candidates_table

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
