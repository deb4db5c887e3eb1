"""The command that evaluates many parallel plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..models.core.registry import OPERATOR_MODEL
from .options import (
    CompiledOpt,
    FrameworkOpt,
    HfOpt,
    OperatorModelOpt,
    Settings,
    StepModelOpt,
    Workload,
    make_console,
    prices_of,
    refuse,
    require_plots,
    workload_of,
)


def sweep(
    context: typer.Context,
    cluster: Annotated[list[str], typer.Option(help="Cluster name or file; may be given again.")],
    out: Annotated[Path, typer.Option("--out", help="Results folder; a sweep resumes from it.")],
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
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            help="Price of a device for an hour, 2.5, or of one by name, h100-sxm=2.5; may be "
            "given again. Adds the cost to rows and front.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    seed: Annotated[int, typer.Option(help="With --trials: random seed of the search.")] = 0,
    top: Annotated[int, typer.Option(help="Number of plans to print.")] = 15,
    plot: Annotated[Path | None, typer.Option(help="Plot memory against time.")] = None,
    scaling: Annotated[
        Path | None, typer.Option(help="Plot strong and weak scaling over the clusters.")
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

    run_sweep(
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
            workers=workers,
            ray=ray,
            seed=seed,
            top=top,
            plot=plot,
            scaling=scaling,
        ),
    )
