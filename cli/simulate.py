"""The command that predicts a training step under a parallel plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ..common.options import (
    ClusterOpt,
    CompiledOpt,
    FrameworkOpt,
    HfOpt,
    Json,
    OperatorModelOpt,
    Option,
    PowerCapOpt,
    PriceOpt,
    Settings,
    SourceOpt,
    StepModelOpt,
    Timeline,
    Workload,
    page_file,
)
from ..common.progress import wrote
from ..models.core.registry import OPERATOR_MODEL
from .options import make_console, print_json, refuse, workload_of

if TYPE_CHECKING:
    from ..features.lowering.options import LoweringOptions
    from ..predict.program.predictor import Predictor


def simulate(
    context: typer.Context,
    cluster: ClusterOpt,
    workload: Workload = "",
    hf: HfOpt = None,
    plan: Annotated[str, Option("Parallel plan such as tp=8,pp=2,dp=8, or a YAML file.")] = "",
    settings: Settings = (),
    model: OperatorModelOpt = OPERATOR_MODEL,
    framework: FrameworkOpt = "",
    compiled: CompiledOpt = False,
    source: SourceOpt = "own",
    steps: StepModelOpt = "default",
    explain: Annotated[bool, Option("Take the step apart into terms.", ("--explain",))] = False,
    price: PriceOpt = None,
    power_cap: PowerCapOpt = None,
    jitter: Annotated[
        float, Option("Relative noise of a task's time on a device.", least=0.0)
    ] = 0.0,
    speed: Annotated[
        Sequence[str],
        Option("Relative speed of a rank, RANK=0.9; may be given again."),
    ] = (),
    seed: Annotated[int, Option("With --jitter: random seed.")] = 0,
    json_output: Json = False,
    timeline: Timeline = None,
    html: Annotated[
        Path | None, Option("Write an HTML page with a timeline.", check=page_file)
    ] = None,
) -> None:
    """Predict one training step on a cluster: time, memory, efficiency."""
    # Without jitter nothing is drawn, so a seed would have no effect.
    if not jitter:
        refuse(context, "a step without --jitter", {"seed"})
    from ..common.chrome_trace import write_trace
    from ..common.files import write_text
    from ..models.steps.model import find_step_model
    from ..predict.cluster.step import StepPredictor
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.plan import Plan, parse_plan
    from ..simulate.step.trace import step_trace
    from ..simulate.step.workload import read_workload, workload_notes

    named = workload_of(workload, hf)
    work = read_workload(named, settings)
    where = find_cluster(cluster)
    # Data parallelism fits every model's sizes; whether it fits into memory is reported.
    chosen = parse_plan(plan) if plan else Plan(dp=where.size)
    operators = load_step_model(model)
    learned = find_step_model(steps)
    predictor = StepPredictor(
        where,
        operators,
        framework=framework,
        compiled=compiled,
        learned=learned,
        source=source,
        power_cap_w=power_cap,
    )
    prediction = predictor.predict(
        work, chosen, jitter, _speeds(speed), seed=seed, explain=explain, price=price
    )
    if timeline is not None:
        title = f"{prediction.plan.text()} on {prediction.cluster}"
        write_trace(step_trace(prediction.step, prediction.plan, title), timeline)
        wrote(timeline, "Chrome trace")
    if html is not None:
        from ..predict.page.cluster import step_page

        write_text(html, step_page(prediction))
        wrote(html, "page; open it in a browser")
    if json_output:
        # Said on standard error as well, which programs do not read.
        notes = [*workload_notes(named), *prediction.notes()]
        print_json({**prediction.to_dict(), "notes": notes})
        return

    from ..predict.render.step import print_step

    print_step(make_console(), prediction)


def predict_on_cluster(
    program: object,
    cluster: str,
    model: str,
    options: LoweringOptions,
    *,
    top: int,
    timeline: Path | None,
    json_output: bool,
) -> None:
    """Predict a partitioned program, as ``opcast predict --cluster`` does."""
    from ..common.chrome_trace import write_trace
    from ..predict.cluster.partitioned import predict_partitioned
    from ..predict.export.timeline import stream_trace
    from ..simulate.clusters.catalogue import find_cluster

    prediction = predict_partitioned(program, find_cluster(cluster), kernels(model), options)
    if timeline is not None:
        write_trace(stream_trace(prediction), timeline)
        wrote(timeline, "Chrome trace")
    if json_output:
        print_json(prediction.to_dict())
        return

    from ..predict.render.program import print_partitioned

    print_partitioned(make_console(), prediction, top)


def kernels(model: str) -> Predictor | None:
    """Load the kernel model; ``None`` for the plain roofline."""
    if model == "roofline":
        return None
    from ..predict.program.predictor import load_for_programs

    return load_for_programs(model)


class StepOptions(NamedTuple):
    """How a step is predicted: operator model, framework, whether it is compiled, step model."""

    model: str
    framework: str
    compiled: bool
    steps: str


def export_step_traces(
    workload: str,
    settings: Sequence[str],
    plan: str,
    cluster: str,
    out: Path,
    options: StepOptions,
) -> dict[str, object]:
    """Predict a step and write its traces, as ``opcast export chakra --workload`` does."""
    from ..models.steps.model import find_step_model
    from ..predict.cluster.step import StepPredictor
    from ..predict.export.chakra import export_step
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.plan import Plan, parse_plan
    from ..simulate.step.workload import read_workload

    work, where = read_workload(workload, settings), find_cluster(cluster)
    model = OPERATOR_MODEL if options.model == "default" else options.model
    predictor = StepPredictor(
        where,
        load_step_model(model),
        framework=options.framework,
        compiled=options.compiled,
        learned=find_step_model(options.steps),
    )
    chosen = parse_plan(plan) if plan else Plan(dp=where.size)
    prediction = predictor.predict(work, chosen, remedy=False)
    return export_step(prediction, predictor.costs(work), where, predictor.spec, out)


def _speeds(pairs: Sequence[str]) -> dict[int, float]:
    try:
        # Ranks as plans number them: tp innermost, pp outermost (docs/simulate.md).
        return {int(rank): float(value) for rank, value in (p.split("=", 1) for p in pairs)}
    except ValueError:
        raise typer.BadParameter("write --speed RANK=0.9") from None
