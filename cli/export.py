"""Commands that exchange traces and tables with other simulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.options import (
    AbsentDevice,
    ClusterOpt,
    HfOpt,
    Json,
    LoweringOpt,
    OperatorModelOpt,
    Option,
    Out,
    Settings,
    Timeline,
    Workload,
    called,
    json_file,
    table_file,
)
from ..common.progress import wrote
from ..common.types import JsonObject
from ..models.core.registry import OPERATOR_MODEL
from ..predict.cluster.step_case import PlannedStep
from .from_dataclass import names_of
from .options import print_json, program_of, refuse, workload_of

if TYPE_CHECKING:
    from ..predict.operator.step_operators import OperatorLatency
    from ..simulate.step.workload import Workload as Sizes


def hespas(
    config: Annotated[Path, Option("HESPAS configuration with method opcast.", argument=True)],
    arguments: Annotated[
        Sequence[str], Option("Further arguments for HESPAS.", argument=True)
    ] = (),
) -> None:
    """Run HESPAS with opcast as its estimator."""
    from ..predict.export.hespas_run import run_hespas

    run_hespas(config, list(arguments))


def export_chakra(
    context: typer.Context,
    case: PlannedStep,
    out: Out,
    program: Annotated[
        Path | None, Option("Partitioned program, StableHLO or HLO.", argument=True)
    ] = None,
    model: Annotated[
        str,
        Option(
            "Kernel model of a program, operator model of a step; 'roofline' for the plain "
            "roofline."
        ),
    ] = "default",
    lowering: LoweringOpt = "auto",
    workload: Workload = "",
    hf: HfOpt = None,
    json_output: Json = False,
) -> None:
    """Write Chakra traces and ASTRA-sim's input files.

    The traces, one per rank, are of a partitioned program or of a training step as predicted by
    opcast simulate (--workload). ASTRA-sim runs on the folder.
    """
    if program is None:
        if not workload and hf is None:
            raise typer.BadParameter("give a partitioned program, or --workload NAME for a step")
        refuse(context, "a step", {"lowering"})
        result = _export_step(workload_of(workload, hf), case, out, model)
    else:
        of_steps = names_of(PlannedStep) - {"cluster", "model"}
        refuse(context, "a program", of_steps | {"workload", "hf"})
        result = _export_program(program, case.cluster, out, model, lowering)
    title = "{ranks} traces, {nodes} nodes"
    if program is None:
        title += (
            "; step {step_us:,.0f} µs, communication per rank {communication_us:,.0f} µs, by "
            "ASTRA-sim's formulas {astra_sim_communication_us:,.0f} µs"
        )
    _print(result, title, json_output)
    wrote(out, "traces and input files of ASTRA-sim")


def _export_step(workload: str, case: PlannedStep, out: Path, model: str) -> JsonObject:
    from ..predict.export.chakra import export_step
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.step.named_workloads import read_workload

    work = read_workload(workload, case.settings)
    operators = load_step_model(OPERATOR_MODEL if model == "default" else model)
    predictor = case.predictor(case.cluster, operators)
    where = predictor.cluster
    prediction = predictor.predict(work, case.taken(predictor, work).plan, remedy=False)
    return export_step(prediction, predictor.costs(work), where, predictor.spec, out)


def _export_program(
    program: Path, cluster: str, out: Path, model: str, lowering: str
) -> dict[str, object]:
    from ..features.lowering.options import LoweringOptions
    from ..predict.cluster.partitioned import predict_partitioned
    from ..predict.devices import cluster_device
    from ..predict.export.chakra import export_chakra as write
    from ..simulate.clusters.catalogue import find_cluster
    from .cluster import kernels

    where = find_cluster(cluster)
    prediction = predict_partitioned(program, where, kernels(model), LoweringOptions(lowering))
    return write(prediction, where, cluster_device(where), out)


def export_table(
    context: typer.Context,
    device: Annotated[Sequence[str], Option("Device or file; may be given again.")],
    out: Annotated[
        Path,
        Option("Table to write: .parquet, .csv or .json.", check=table_file),
    ],
    programs: Annotated[
        Sequence[Path], Option("Programs whose kernels to tabulate.", argument=True)
    ] = (),
    op: Annotated[
        Sequence[str],
        Option("Grid of operators: 'linear m=1/64 n=4096 k=4096 dtype=bf16'."),
    ] = (),
    model: OperatorModelOpt = OPERATOR_MODEL,
    kernels: Annotated[str, Option("Kernel model.")] = "default",
    lowering: LoweringOpt = "auto",
) -> None:
    """Write latencies of operators and kernels as a table.

    The operators come from grids (--op), the kernels from programs; each row has an interval. A
    device file with ranges gives rows for each design and a column for each range.
    """
    from ..common.errors import DatasetError
    from ..common.parquet import write_table
    from ..models.operators import OpModel
    from ..predict.export.latency_table import latency_table
    from ..predict.locate import find_model
    from ..predict.program.predictor import load

    if not op and not programs:
        raise DatasetError("nothing to tabulate", hint="give --op or programs")
    if not op:
        refuse(context, "a table without operators (--op)", {"model"})
    if not programs:
        refuse(context, "a table without programs", {"kernels", "lowering"})
    operators = OpModel.load(find_model(model)) if op and model != "roofline" else None
    predictor = load(kernels) if programs else None
    sources = [program_of(program) for program in programs]
    table, notes = latency_table(device, op, operators, sources, predictor, lowering)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    write_table(table, out)
    wrote(out, f"{len(table)} rows")


@dataclass(frozen=True)
class Layers:
    """A model whose layers are tabulated on a device, by tensor-parallel degree."""

    workload: Workload
    device: AbsentDevice
    settings: Settings = ()
    tp: Annotated[Sequence[int], Option("Tensor-parallel degree; may be given again.")] = ()
    model: OperatorModelOpt = OPERATOR_MODEL

    @property
    def degrees(self) -> list[int]:
        """Tensor-parallel degrees without repetitions; a single worker if none is given."""
        return list(dict.fromkeys(self.tp)) or [1]

    def read(self) -> Sizes:
        """Read the model's sizes."""
        from ..simulate.step.named_workloads import read_workload

        return read_workload(self.workload, self.settings)

    def latency(self) -> OperatorLatency:
        """Predictor of operators on the device; warns where it differs from ``predict --op``."""
        from ..predict.devices import resolve_device
        from ..predict.operator.step_operators import OperatorLatency, load_step_model

        spec = resolve_device(self.device, {})
        if not spec.runs_cuda:
            typer.echo(
                f"note: {spec.name} does not run CUDA kernels, on which the operator model is "
                "trained: operators are predicted as rooflines at the efficiency of tuned "
                "kernels, as in opcast simulate; opcast predict --op may differ by more than its "
                "interval",
                err=True,
            )
        return OperatorLatency(spec, load_step_model(self.model))


def export_vidur(
    layers: Layers,
    out: Out,
    name: Annotated[str, Option("Name for the model in Vidur.")] = "",
    max_tokens: Annotated[
        int, Option("Maximum tokens of a batch and of a sequence.", least=32)
    ] = 4096,
    cluster: Annotated[str, Option("Cluster, to write all_reduce.csv and send_recv.csv too.")] = "",
) -> None:
    """Write the tables that Vidur's random forests train on."""
    from ..predict.export.vidur import INSTEAD, write_vidur
    from ..simulate.clusters.catalogue import find_cluster

    latency, work = layers.latency(), layers.read()
    rows = write_vidur(
        out,
        name or layers.workload,
        latency.spec.name,
        work,
        layers.degrees,
        max_tokens,
        latency,
        find_cluster(cluster) if cluster else None,
        lambda file, count: wrote(file, f"{count} rows"),
    )
    if cluster and not any("all_reduce" in file for file in rows):
        typer.echo("no all_reduce.csv: a single worker (--tp 1) has no all-reduce", err=True)
    if work.experts:
        typer.echo(f"no mlp.csv: it has no columns for routed experts; {INSTEAD}", err=True)


def export_llmservingsim(
    layers: Layers,
    out: Annotated[Path, Option("File to write: layers.csv.", check=called(".csv"))],
    max_tokens: Annotated[int, Option("Maximum tokens of a batch.", least=1)] = 2048,
) -> None:
    """Write LLMServingSim's table of layers."""
    from ..common.parquet import write_table
    from ..predict.export.simulators import llmservingsim_layers

    latency = layers.latency()
    table = llmservingsim_layers(layers.read(), layers.degrees, max_tokens, latency)
    write_table(table, out)
    wrote(out, f"{len(table)} rows")


def export_simai(
    workload: Workload,
    cluster: ClusterOpt,
    out: Annotated[Path, Option("File to write.")],
    plan: Annotated[str, Option("Parallel plan of tp, dp and ep, such as tp=8,dp=2.")],
    settings: Settings = (),
    model: OperatorModelOpt = OPERATOR_MODEL,
) -> None:
    """Write SimAI's workload of a training step."""
    from ..common.files import write_text
    from ..predict.devices import cluster_device
    from ..predict.export.simulators import simai_workload
    from ..predict.operator.step_operators import OperatorLatency, load_step_model
    from ..simulate.clusters.catalogue import find_cluster
    from ..simulate.step.named_workloads import read_workload
    from ..simulate.step.plan import parse_plan

    where = find_cluster(cluster)
    latency = OperatorLatency(cluster_device(where), load_step_model(model))
    work = read_workload(workload, settings)
    text = simai_workload(work, parse_plan(plan), where.size, latency)
    write_text(out, text)
    wrote(out, f"{len(text.splitlines()) - 2} lines")


def export_calculon(
    cluster: ClusterOpt,
    out: Annotated[Path, Option("JSON file to write.", check=json_file)],
    model: OperatorModelOpt = OPERATOR_MODEL,
) -> None:
    """Write a cluster as Calculon's system."""
    import json

    from ..common.files import write_text
    from ..predict.devices import cluster_device
    from ..predict.export.simulators import calculon_system
    from ..predict.operator.step_operators import OperatorLatency, load_step_model
    from ..simulate.clusters.catalogue import find_cluster

    where = find_cluster(cluster)
    spec = cluster_device(where)
    system = calculon_system(where, spec, OperatorLatency(spec, load_step_model(model)))
    write_text(out, json.dumps(system, indent=1) + "\n")
    wrote(out, f"{where.name}, {where.size} devices")


def export_xla_perf_table(
    device: Annotated[str, Option("NVIDIA GPU: a name or a device file.", argument=True)],
    out: Annotated[Path, Option("File for the table of products.")],
    collectives: Annotated[
        Path | None, Option("File for the table of scale-up collectives.")
    ] = None,
    program: Annotated[
        Path | None,
        Option("Tabulate the matrix products of this program, not those of XLA's table."),
    ] = None,
    dtype: Annotated[
        Sequence[str],
        Option("Number format: bf16 (default), f16 or f32; may be given again."),
    ] = (),
    model: OperatorModelOpt = OPERATOR_MODEL,
) -> None:
    """Write the tables of products and collectives that XLA's scheduler reads."""
    from ..common.errors import ProgramError
    from ..common.files import write_text
    from ..features.ir.platforms import platform_of
    from ..features.ir.reader import read_program
    from ..models.collectives.model import CollectiveModel
    from ..models.operators import OpModel
    from ..predict.devices import resolve_device
    from ..predict.export import xla_perf_table as tables
    from ..predict.locate import find_model

    spec = resolve_device(device, {})
    unknown = [name for name in dtype if name not in tables.DTYPES]
    if unknown:
        raise typer.BadParameter(f"--dtype {unknown[0]}; choose: {', '.join(tables.DTYPES)}")
    if program is None:
        shapes = tables.own_shapes(dtype or ["bf16"])
    else:
        source = read_program(program_of(program), platform=platform_of(spec))
        shapes = tables.program_shapes(source.program)
        shapes = [shape for shape in shapes if not dtype or shape[-1] in dtype]
        if not shapes:
            raise ProgramError(
                "the program has no matrix product in a format of --dtype", where=str(program)
            )
    text, notes = tables.matmul_table(shapes, spec, OpModel.load(find_model(model)))
    flag = "--xla_gpu_experimental_{}_perf_table_path={}"
    files = [(out, text, flag.format("matmul", out))]
    if collectives is not None:
        worlds = [n for n in (2, 4, 8) if n <= max(2, spec.devices_per_node)]
        text, _ = tables.collective_table(spec, worlds, CollectiveModel.find())
        files.append((collectives, text, flag.format("collective", collectives)))
    for path, content, option in files:
        write_text(path, content)
        wrote(path, f"{content.count('instruction {')} entries; {option}")
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(
        "XLA reads them with --xla_gpu_enable_analytical_sol_latency_estimator=true", err=True
    )


def import_chakra(
    folder: Annotated[Path, Option("Folder with trace.RANK.et files.", argument=True)],
    timeline: Timeline = None,
    json_output: Json = False,
) -> None:
    """Read Chakra traces and replay them with the durations that they record."""
    from ..common.chrome_trace import write_trace
    from ..simulate.chakra.folder import read_folder
    from ..simulate.chakra.timeline import run_traces

    traces, groups = read_folder(folder)
    run = run_traces(traces, groups)
    if timeline is not None:
        write_trace(run.chrome_trace(), timeline)
        wrote(timeline, "Chrome trace")
    _print(run.summary(), "{ranks} ranks, {nodes} nodes, {step_us:,.0f} µs", json_output)


def _print(result: JsonObject, title: str, json_output: bool) -> None:
    if json_output:
        print_json(result)
        return
    work = f"{result['compute_us']:,.0f} µs of {result['kernels']} kernels"
    lines = [title.format(**result), work]
    lines += [f"{k}: {v['count']}, {v['bytes']:,} bytes" for k, v in result["collectives"].items()]
    typer.echo("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]))
