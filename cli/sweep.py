"""The commands that search for plans: of transformers by their sizes, and of any program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..models.core.registry import OPERATOR_MODEL
from .options import (
    CompiledOpt,
    FrameworkOpt,
    HfOpt,
    Json,
    LoweringOpt,
    ModelOpt,
    OperatorModelOpt,
    PowerCapOpt,
    PricesOpt,
    Settings,
    StepModelOpt,
    Workload,
    bytes_of,
    folder,
    make_console,
    plot_file,
    prices_of,
    print_json,
    program_of,
    refuse,
    require_plots,
    seconds_of,
    workload_of,
)


def sweep(
    context: typer.Context,
    cluster: Annotated[list[str], typer.Option(help="Cluster name or file; may be given again.")],
    out: Annotated[
        Path,
        typer.Option("--out", callback=folder, help="Results folder; a sweep resumes from it."),
    ],
    workload: Workload = "",
    hf: HfOpt = None,
    settings: Settings = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be given again.")] = None,
    grid: Annotated[
        str,
        typer.Option(
            help="Values of each axis, such as tp=4/8,recompute=none/full; or a YAML file."
        ),
    ] = "",
    trials: Annotated[
        int, typer.Option(min=0, help="Number of plans to search with Optuna; 0 evaluates all.")
    ] = 0,
    model: OperatorModelOpt = OPERATOR_MODEL,
    framework: FrameworkOpt = "",
    compiled: CompiledOpt = False,
    steps: StepModelOpt = "default",
    price: PricesOpt = None,
    power_cap: PowerCapOpt = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    seed: Annotated[int, typer.Option(help="With --trials: random seed of the search.")] = 0,
    top: Annotated[int, typer.Option(help="Number of plans to print.")] = 15,
    plot: Annotated[
        Path | None, typer.Option(callback=plot_file, help="Plot memory against time.")
    ] = None,
    scaling: Annotated[
        Path | None,
        typer.Option(callback=plot_file, help="Plot strong and weak scaling over the clusters."),
    ] = None,
) -> None:
    """Evaluate many parallel plans and print the Pareto front.

    The front has the plans that fit into memory, over one or more clusters.
    """
    if not trials:
        refuse(context, "a sweep over all plans, without --trials", {"seed"})
    # The Ray cluster decides how many workers there are.
    if ray:
        refuse(context, "a sweep on a Ray cluster (--ray)", {"workers"})
    # Before the sweep, not after hours of it.
    if plot is not None or scaling is not None:
        require_plots()
    from ..workflows.settings import SweepSettings
    from ..workflows.sweep import run_sweep

    rows = run_sweep(
        make_console(),
        SweepSettings(
            workload=workload_of(workload, hf),
            clusters=cluster,
            out=out,
            sizes=settings or (),
            batches=batch or (),
            grid=grid,
            trials=trials,
            model=model,
            framework=framework,
            compiled=compiled,
            steps=steps,
            prices=prices_of(price or ()),
            power_cap_w=power_cap,
            workers=workers,
            ray=ray,
            seed=seed,
            top=top,
            plot=plot,
            scaling=scaling,
        ),
    )
    if not rows["fits"].any():
        # Said above; a script must see it, too.
        raise typer.Exit(1)


def plan(
    context: typer.Context,
    program: Annotated[
        Path, typer.Argument(help="StableHLO for one device or with shardings, or file.py:step.")
    ],
    cluster: Annotated[str, typer.Option(help="Cluster name or file, such as dgx-h100-x64.")],
    batch_dims: Annotated[
        str,
        typer.Option(help="Batch dimensions, argument:dimension, as 3:0,4:0; default: found."),
    ] = "",
    budget: Annotated[
        str, typer.Option(help="Time to compile plans, such as 90s, 10m or 1h.")
    ] = "10m",
    memory: Annotated[
        str, typer.Option(help="Memory that a device may use, such as 60GiB; default: all.")
    ] = "",
    axes: Annotated[
        str,
        typer.Option(
            help="Axes of the mesh: pipeline,data,fsdp,sequence,expert,tensor; default: all, "
            "pipeline over several boxes or where nothing else fits."
        ),
    ] = "",
    compiles: Annotated[int, typer.Option(min=1, help="Most plans to compile.")] = 12,
    remat: Annotated[
        str, typer.Option(help="Layers to compute again in the backward pass: auto, all, a number.")
    ] = "auto",
    micro_batches: Annotated[
        str, typer.Option(help="Parts of the batch whose gradients are added up: auto, a number.")
    ] = "auto",
    model: ModelOpt = "default",
    lowering: LoweringOpt = "auto",
    out: Annotated[
        Path,
        typer.Option("--out", callback=folder, help="Results folder; a search resumes from it."),
    ] = Path("plan"),
    save_program: Annotated[
        Path | None, typer.Option(help="Write the program with the best plan's shardings.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    top: Annotated[int, typer.Option(help="Number of plans to print.")] = 10,
    json_output: Json = False,
) -> None:
    """Search meshes and shardings of any program for the best on a cluster.

    All plans are screened by their products and collectives, the best are compiled.
    """
    if json_output:
        refuse(context, "--json, which has all plans", {"top"})
    if ray:
        refuse(context, "a search on a Ray cluster (--ray)", {"workers"})
    from ..common.files import write_text
    from ..common.progress import counting, wrote
    from ..predict.plan.answer import plan as search
    from ..predict.plan.arguments import parse_batch_dims
    from ..predict.render.plan import print_plan

    limit = seconds_of(budget)
    most = bytes_of(memory) if memory else 0.0
    with counting("plans") as advance:
        answer = search(
            program_of(program),
            cluster=cluster,
            batch_dims=parse_batch_dims(batch_dims) if batch_dims else None,
            budget_s=limit,
            memory=most,
            axes=tuple(axis.strip() for axis in axes.split(",")) if axes else None,
            compiles=compiles,
            remat=remat,
            micro_batches=micro_batches,
            out=out,
            model=model,
            lowering=lowering,
            workers=workers,
            ray=ray,
            progress=advance,
        )
    write_text(out / "shardings.py", answer.code)
    wrote(out / "shardings.py", "the best plan as code of JAX")
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
    if not answer.best["fits"]:
        # Said above; a script must see it, too.
        raise typer.Exit(1)
