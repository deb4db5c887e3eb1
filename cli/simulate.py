"""The command that predicts a training step under a parallel plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import (
    HfOpt,
    Json,
    NextOpt,
    Option,
    Timeline,
    Workload,
    page_file,
)
from ..common.progress import wrote
from ..predict.cluster.step_case import StepCase
from .options import make_console, print_answer, print_json, refuse, workload_of

if TYPE_CHECKING:
    from ..features.lowering.options import LoweringOptions
    from ..predict.program.predictor import Predictor


def simulate(
    context: typer.Context,
    case: StepCase,
    workload: Workload = "",
    hf: HfOpt = None,
    next_count: NextOpt = 0,
    json_output: Json = False,
    timeline: Timeline = None,
    html: Annotated[
        Path | None, Option("Write an HTML page with a timeline.", check=page_file)
    ] = None,
) -> None:
    """Predict one training step on a cluster: time, memory, efficiency."""
    # Without jitter nothing is drawn, so a seed would have no effect.
    if not case.jitter:
        refuse(context, "a step without --jitter", {"seed"})
    from ..common.chrome_trace import write_trace
    from ..common.files import write_text
    from ..predict.export.timeline import step_trace
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.step.workload import read_workload, workload_notes

    named = workload_of(workload, hf)
    work = read_workload(named, case.settings)
    if next_count:
        spare = {"timeline", "html", "explain", "jitter", "speed", "power_cap_w", "seed"}
        refuse(context, "--next", spare)
        from ..predict.cluster.next_run import next_steps
        from ..predict.render.next_runs import print_next_runs

        chosen = next_steps(
            replace(case, workload=str(named)), work, load_step_model(case.model), next_count
        )
        print_answer(json_output, chosen, print_next_runs)
        return
    prediction = case.predict(work, load_step_model(case.model))
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
    from ..predict.render.step import print_partitioned

    print_answer(json_output, prediction, print_partitioned, top)


def kernels(model: str) -> Predictor | None:
    """Load the kernel model; ``None`` for the plain roofline."""
    if model == "roofline":
        return None
    from ..predict.program.predictor import load_for_programs

    return load_for_programs(model)
