"""Commands for clusters: the time of one step of a model under a parallel plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import Json, make_console, print_json, require_plots
from .models.names import OPERATOR_MODEL

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Sizes such as layers=32,d_model=4096; may be given again."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(simulate)
    app.command()(sweep)
    app.command("simulate-serving")(simulate_serving)


def simulate(
    workload: Annotated[
        str, typer.Option(help="llama, moe, gpt or bert; or a YAML file with family and sizes.")
    ],
    cluster: Annotated[
        str, typer.Option(help="Such as dgx-h100-x128 or tpu-v5e-x16, or a YAML file.")
    ],
    plan: Annotated[str, typer.Option(help="Such as tp=8,pp=2,dp=8, or a YAML file.")] = "",
    settings: Settings = None,
    model: Annotated[
        str, typer.Option(help="Model of operators; 'roofline' for none.")
    ] = OPERATOR_MODEL,
    jitter: Annotated[
        float, typer.Option(min=0.0, help="Relative noise of a task's time on one device.")
    ] = 0.0,
    speed: Annotated[
        list[str] | None, typer.Option("--speed", help="Relative speed of a rank, RANK=0.9.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    json_output: Json = False,
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with timeline.")] = None,
) -> None:
    """Predict one training step on a cluster: time, its parts, memory, efficiency."""
    from .features.chrome_trace import write_trace
    from .features.files import write_text
    from .predict.op_calls import load_step_model
    from .predict.step import StepPredictor
    from .simulate.cluster_catalogue import find_cluster
    from .simulate.step.plan import Plan, parse_plan
    from .simulate.step.trace import step_trace
    from .simulate.step.workload import read_workload

    work = read_workload(workload, settings or [])
    where = find_cluster(cluster)
    chosen = parse_plan(plan) if plan else Plan(dp=where.size)
    predictor = StepPredictor(where, load_step_model(model))
    found = predictor.predict(work, chosen, jitter, _speeds(speed or []), seed=seed)
    if timeline is not None:
        title = f"{found.plan.text()} on {found.cluster}"
        write_trace(step_trace(found.step, found.plan, title), timeline)
    if html is not None:
        from .predict.page.step import step_page

        write_text(html, step_page(found))
    if json_output:
        print_json(found.to_dict())
        return

    from .predict.render_step import print_step

    print_step(make_console(), found)


def sweep(
    workload: Annotated[str, typer.Option(help="As for simulate.")],
    cluster: Annotated[list[str], typer.Option(help="Cluster or file; may be given again.")],
    out: Annotated[Path, typer.Option("--out", help="Folder; a sweep resumes from it.")],
    settings: Settings = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be given again.")] = None,
    grid: Annotated[
        str, typer.Option(help="Values by axis, such as tp=4/8,recompute=none/full; or YAML.")
    ] = "",
    trials: Annotated[
        int, typer.Option(min=0, help="Search with Optuna for so many plans; 0 tries all.")
    ] = 0,
    model: Annotated[str, typer.Option(help="As for simulate.")] = OPERATOR_MODEL,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster; 'local' starts one.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    top: Annotated[int, typer.Option(help="Rows to print.")] = 15,
    plot: Annotated[Path | None, typer.Option(help="Write memory against time.")] = None,
    scaling: Annotated[
        Path | None, typer.Option(help="Write strong and weak scaling over the clusters.")
    ] = None,
) -> None:
    """Judge many plans on one or more clusters; print the Pareto front of those that fit."""
    from .predict import sweep as sweeps
    from .predict.render_step import print_front
    from .predict.sweep_job import SweepJob
    from .predict.sweep_reasons import reasons
    from .predict.sweep_space import axis_values, parse_grid
    from .simulate.cluster_catalogue import find_cluster
    from .simulate.step.workload import read_workload

    if plot is not None or scaling is not None:
        require_plots()
    work = read_workload(workload, settings or [])
    batches = batch or [work.batch]
    given = parse_grid(grid) if grid else {}
    job = sweeps.Sweep(SweepJob(work, model), out, workers, ray)
    with _bar() as advance:
        if trials:
            values = axis_values(work, find_cluster(cluster[0]), given)
            found = sweeps.search(job, cluster, batches, values, trials, seed, advance)
        else:
            found = sweeps.grid(job, cluster, batches, given, advance)
    if plot is not None:
        sweeps.plot(found, plot)
    if scaling is not None:
        from .predict.scaling import plot_scaling

        plot_scaling(found, scaling)
    console = make_console()
    print_front(console, sweeps.pareto(found), len(found), int(found["fits"].sum()), top)
    for line in reasons(found):
        console.print(f"because of {line}", highlight=False, markup=False)
    console.print(f"all results: {out / 'sweep.parquet'}", highlight=False)


def simulate_serving(
    workload: Annotated[str, typer.Option(help="As for simulate.")],
    cluster: Annotated[str, typer.Option(help="As for simulate.")],
    plan: Annotated[str, typer.Option(help="tp and dp only, such as tp=4,dp=2.")] = "",
    settings: Settings = None,
    requests: Annotated[
        Path | None, typer.Option(help="CSV with arrival_s, prompt and output.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Without a trace: requests a second.")] = 1.0,
    count: Annotated[int, typer.Option(help="Number of requests.")] = 200,
    prompt: Annotated[int, typer.Option(help="Mean tokens of a prompt.")] = 1024,
    output: Annotated[int, typer.Option(help="Mean tokens of an output.")] = 256,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 256,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens of an iteration.")] = 2048,
    model: Annotated[str, typer.Option(help="As for simulate.")] = OPERATOR_MODEL,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    json_output: Json = False,
) -> None:
    """Serve requests with continuous batching: TTFT, TPOT, throughput, size of the cache."""
    from .predict.op_calls import load_step_model
    from .predict.serving import ServingPredictor, poisson_requests, read_requests
    from .simulate.cluster_catalogue import find_cluster
    from .simulate.step.plan import Plan, parse_plan
    from .simulate.step.workload import read_workload

    work, where = read_workload(workload, settings or []), find_cluster(cluster)
    chosen = parse_plan(plan) if plan else Plan(tp=where.size)
    predictor = ServingPredictor(work, chosen, where, load_step_model(model))
    if requests is not None:
        trace = read_requests(requests)
    else:
        trace = poisson_requests(rate, count, prompt, output, seed)
    data = predictor.predict(trace, max_batch, token_budget).to_dict()
    if json_output:
        print_json(data)
        return
    for name, value in data.items():
        typer.echo(f"{name:<22} {value:.5g}" if isinstance(value, float) else f"{name:<22} {value}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, told how many of how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("plans", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def predict_on_cluster(
    program: Path, cluster: str, model: str, lowering: str, *, trips: Any, top: int,
    timeline: Path | None, json_output: bool, fallback: str = "",
) -> None:  # fmt: skip
    """Predict a partitioned program; what ``opcast predict --cluster`` does."""
    from .features.chrome_trace import write_trace
    from .predict.partitioned import predict_partitioned, stream_trace
    from .simulate.cluster_catalogue import find_cluster

    found = predict_partitioned(
        program, find_cluster(cluster), kernels(model), lowering=lowering, trip_counts=trips,
        fallback=fallback,
    )  # fmt: skip
    if timeline is not None:
        write_trace(stream_trace(found), timeline)
    if json_output:
        print_json(found.to_dict())
        return

    from .predict.render_partitioned import print_partitioned

    print_partitioned(make_console(), found, top)


def kernels(model: str) -> Any:
    """Who answers for kernels of programs; ``None`` for rooflines."""
    if model == "roofline":
        return None
    from .predict.predictor import load_for_programs

    return load_for_programs(model)


def _speeds(pairs: list[str]) -> dict[int, float]:
    try:
        return {int(rank): float(value) for rank, value in (p.split("=", 1) for p in pairs)}
    except ValueError:
        raise typer.BadParameter("write --speed RANK=0.9") from None
