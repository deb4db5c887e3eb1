"""Commands for other tools: traces, tables and plug-ins out, traces in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

export_app = typer.Typer(
    no_args_is_help=True, help="Files for other simulators.", rich_markup_mode=None
)
import_app = typer.Typer(
    no_args_is_help=True, help="Files of other simulators.", rich_markup_mode=None
)
Out = Annotated[Path, typer.Option("--out", help="Folder or file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
    model: Operators = "gpu-operators",
    lowering: Annotated[str, typer.Option(help="auto, fused or op.")] = "auto",
    json_output: Json = False,
) -> None:
    """Write one Chakra trace a rank, and all else that ASTRA-sim needs to run on the folder."""
    from .cli_simulate import operators
    from .features.catalogue import find_device
    from .predict.chakra_export import export_chakra as write
    from .predict.partitioned import predict_partitioned
    from .simulate.cluster_catalogue import find_cluster

    where = find_cluster(cluster)
    found = predict_partitioned(program, where, operators(model), lowering=lowering)
    result = write(found, where, find_device(found.device), out)
    _print(result, f"{out}: {{ranks}} traces, {{nodes}} nodes", json_output)


@import_app.command("chakra")
def import_chakra(
    folder: Annotated[Path, typer.Argument(help="Folder with trace.RANK.et.")],
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
    json_output: Json = False,
) -> None:
    """Read Chakra traces back and run them with the durations that they hold."""
    from .features.dataset import write_text
    from .simulate.chakra.folder import read_folder
    from .simulate.chakra.timeline import run_traces

    traces, groups = read_folder(folder)
    run = run_traces(traces, groups)
    if timeline is not None:
        write_text(timeline, json.dumps(run.chrome_trace()))
    _print(run.summary(), "{ranks} ranks, {nodes} nodes, {step_us:,.0f} µs", json_output)


def _print(result: dict[str, Any], title: str, json_output: bool) -> None:
    if json_output:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    work = f"{result['compute_us']:,.0f} µs of {result['kernels']} kernels"
    lines = [title.format(**result), work]
    lines += [f"{k}: {v['count']}, {v['bytes']:,} bytes" for k, v in result["collectives"].items()]
    typer.echo("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]))
