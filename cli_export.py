"""Commands for other tools: traces, tables and plug-ins out, traces in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import Json, print_json
from .models.names import OPERATOR_MODEL

export_app = typer.Typer(
    no_args_is_help=True, help="Files for other simulators.", rich_markup_mode=None
)
import_app = typer.Typer(
    no_args_is_help=True, help="Files of other simulators.", rich_markup_mode=None
)
Out = Annotated[Path, typer.Option("--out", help="Folder or file to write.")]
Operators = Annotated[str, typer.Option("--model", help="Model of operators; 'roofline' for none.")]


def register(app: typer.Typer) -> None:
    """Add the groups ``export`` and ``import``, and ``hespas``."""
    app.add_typer(export_app, name="export")
    app.add_typer(import_app, name="import")
    app.command("hespas", context_settings={"ignore_unknown_options": True})(hespas)


def hespas(
    config: Annotated[Path, typer.Argument(help="Its configuration, with method opcast.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Further arguments of HESPAS.")
    ] = None,
) -> None:
    """Run HESPAS with opcast as its estimator."""
    from .predict.plugins.hespas_run import run_hespas

    run_hespas(config, arguments or [])


@export_app.command("chakra")
def export_chakra(
    program: Annotated[Path, typer.Argument(help="A partitioned program, StableHLO or HLO.")],
    cluster: Annotated[str, typer.Option(help="Its devices, such as h100-sxm-x4, or a file.")],
    out: Out,
    model: Annotated[str, typer.Option(help="Model of kernels; 'roofline' for none.")] = "default",
    lowering: Annotated[str, typer.Option(help="auto, xla, fused or op.")] = "auto",
    json_output: Json = False,
) -> None:
    """Write one Chakra trace a rank, and all else that ASTRA-sim needs to run on the folder."""
    from .cli_simulate import kernels
    from .features.catalogue import find_device
    from .predict.chakra_export import export_chakra as write
    from .predict.partitioned import predict_partitioned
    from .simulate.cluster_catalogue import find_cluster

    where = find_cluster(cluster)
    found = predict_partitioned(program, where, kernels(model), lowering=lowering)
    result = write(found, where, find_device(found.device), out)
    _print(result, f"{out}: {{ranks}} traces, {{nodes}} nodes", json_output)


@export_app.command("table")
def export_table(
    device: Annotated[list[str], typer.Option(help="Device or file; may be given again.")],
    out: Out,
    programs: Annotated[
        list[Path] | None, typer.Argument(help="Programs whose kernels are to be in it.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", help="Operators, 'linear m=1/64 n=4096 k=4096 dtype=bf16'."),
    ] = None,
    model: Operators = OPERATOR_MODEL,
    kernels: Annotated[str, typer.Option(help="Model of kernels.")] = "default",
    lowering: Annotated[str, typer.Option(help="auto, xla, fused or op.")] = "auto",
) -> None:
    """Write latencies with intervals as parquet: operators of grids, kernels of programs."""
    import pandas as pd

    from .features.dataset import write_table
    from .features.errors import DatasetError
    from .features.lowering import lower
    from .predict.devices import resolve_device
    from .predict.latency_table import expand_ops, kernel_table, operator_table
    from .predict.predictor import load

    if not op and not programs:
        raise DatasetError("nothing to tabulate", hint="give --op, or programs")
    parts = []
    if op:
        specs = [resolve_device(d, {}) for d in device]
        texts = [t for grid in op for t in expand_ops(grid)]
        parts.append(operator_table(texts, {s.name: s for s in specs}, _operators(model)))
    if programs:
        predictor = load(kernels)
        for spec in (resolve_device(d, predictor.devices) for d in device):
            for program in programs:
                lowered = lower(program, lowering, device=spec, fallback="op")
                parts.append(kernel_table(lowered, spec, predictor.model_for(spec)))
    table = pd.concat(parts, ignore_index=True).drop_duplicates(["op", "shape", "dtype", "device"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, out)
    typer.echo(f"{out}: {len(table)} rows")


@export_app.command("vidur")
def export_vidur(
    workload: Annotated[str, typer.Option(help="llama, gpt …, or a YAML file.")],
    device: Annotated[str, typer.Option(help="Device of the catalogue, or a file.")],
    out: Out,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Sizes, layers=32,d_model=4096.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model in Vidur.")] = "",
    tp: Annotated[list[int] | None, typer.Option(help="Workers; may be given again.")] = None,
    max_tokens: Annotated[int, typer.Option(min=32, help="Of a batch and a sequence.")] = 4096,
    cluster: Annotated[str, typer.Option(help="For all_reduce.csv and send_recv.csv.")] = "",
    model: Operators = OPERATOR_MODEL,
) -> None:
    """Write the tables that Vidur's random forests train on."""
    from .predict.devices import resolve_device
    from .predict.op_calls import OperatorLatency
    from .predict.vidur import write_vidur
    from .simulate.cluster_catalogue import find_cluster
    from .simulate.step.workload import read_workload

    spec = resolve_device(device, {})
    rows = write_vidur(
        out, name or workload, spec.name, read_workload(workload, settings or []), tp or [1],
        max_tokens, OperatorLatency(spec, _operators(model)),
        find_cluster(cluster) if cluster else None, lambda file: typer.echo(file, err=True),
    )  # fmt: skip
    typer.echo("\n".join(f"{file}: {count} rows" for file, count in rows.items()))


@import_app.command("chakra")
def import_chakra(
    folder: Annotated[Path, typer.Argument(help="Folder with trace.RANK.et.")],
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
    json_output: Json = False,
) -> None:
    """Read Chakra traces back and run them with the durations that they hold."""
    from .features.chrome_trace import write_trace
    from .simulate.chakra.folder import read_folder
    from .simulate.chakra.timeline import run_traces

    traces, groups = read_folder(folder)
    run = run_traces(traces, groups)
    if timeline is not None:
        write_trace(run.chrome_trace(), timeline)
    _print(run.summary(), "{ranks} ranks, {nodes} nodes, {step_us:,.0f} µs", json_output)


def _operators(model: str) -> Any:
    """The model of operators; ``None`` for rooflines."""
    if model == "roofline":
        return None
    from .models.ops import OpModel
    from .predict.locate import find_model

    return OpModel.load(find_model(model))


def _print(result: dict[str, Any], title: str, json_output: bool) -> None:
    if json_output:
        print_json(result)
        return
    work = f"{result['compute_us']:,.0f} µs of {result['kernels']} kernels"
    lines = [title.format(**result), work]
    lines += [f"{k}: {v['count']}, {v['bytes']:,} bytes" for k, v in result["collectives"].items()]
    typer.echo("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]))
