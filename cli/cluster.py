"""Commands about clusters: networks, collectives, and training steps under a parallel plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    json_file,
    page_file,
    yaml_file,
)
from ..common.progress import wrote
from ..predict.cluster.step_case import StepCase
from .options import make_console, print_answer, print_json, refuse, refuse_unused, workload_of

#: Folds of the cross-validation of a calibration.
_FOLDS = 4

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from ..features.lowering.options import LoweringOptions
    from ..models.collectives.model import CollectiveModel, FindLinks
    from ..predict.program.predictor import Predictor
    from ..simulate.clusters.topology import Cluster


def cluster(
    context: typer.Context,
    name: Annotated[
        str | None,
        Option("Name, YAML file, or ASTRA-sim's network.yml.", argument=True),
    ] = None,
    list_all: Annotated[bool, Option("List the names of common clusters.", ("--list",))] = False,
    json_output: Json = False,
    save: Annotated[Path | None, Option("Write the cluster as YAML.", check=yaml_file)] = None,
    astra: Annotated[
        Path | None, Option("Write it as ASTRA-sim's network.yml.", check=yaml_file)
    ] = None,
) -> None:
    """Print a cluster: its network, collective times and sources.

    The collectives span all ranks.
    """
    from ..common.errors import DeviceError
    from ..common.files import write_text
    from ..simulate.clusters.catalogue import cluster_names, find_cluster
    from ..simulate.clusters.files import astra_network, cluster_data, save_cluster

    if list_all:
        refuse_unused(context, "the list of names (--list)", {"list_all", "json_output"})
        names = cluster_names()
        if json_output:
            print_json(names)
        else:
            sys.stdout.write("\n".join(names) + "\n")
        return
    if name is None:
        raise DeviceError("no cluster given", hint="opcast cluster NAME, or --list")
    chosen = find_cluster(name)
    # Before anything is written, in case the device is unknown.
    device = _device_name(chosen)
    if save is not None:
        save_cluster(chosen, save)
        wrote(save, "cluster")
    if astra is not None:
        write_text(astra, astra_network(chosen.topology))
        wrote(astra, "ASTRA-sim's network")
    if json_output:
        content = cluster_data(chosen) | {"devices": chosen.size, "sources": chosen.sources}
        print_json(content)
        return
    _print_cluster(chosen, device)


def _print_cluster(cluster: Cluster, device: str) -> None:
    from rich.table import Table

    # Wider than the default: long sources would wrap in a table of seven columns.
    console = make_console(140)
    title = f"{cluster.name}: {cluster.size} × {device}"
    table = Table(
        "dimension", "kind", "size", "GB/s", "reached", "latency µs", "launch µs", title=title
    )
    for d in cluster.topology.dims:
        shape = " × ".join(map(str, d.shape)) or str(d.size)
        detail = f"{d.kind}, {d.oversubscription:g}:1" if d.oversubscription > 1 else d.kind
        figures = (d.bandwidth / 1e9, d.efficiency, d.latency * 1e6, d.launch * 1e6)
        table.add_row(d.name, detail, shape, *(f"{x:g}" for x in figures))
    console.print(table)
    if whole := [d.name or d.kind for d in cluster.topology.dims if d.efficiency == 1.0]:
        console.print(
            f"{', '.join(whole)}: the efficiency is 1 or left out, so closed forms use the whole "
            "bandwidth; in the catalogue, InfiniBand reaches 0.8 and NVLink of H100 0.69"
        )
    if cluster.size > 1:
        console.print(_times(cluster))
    for key, source in sorted(cluster.sources.items()):
        console.print(f"{key}: {source}")


def _times(cluster: Cluster) -> Table:
    """Tabulate the collective times that step predictions on the cluster use."""
    from rich.table import Table

    from ..models.collectives.on_cluster import ClusterCollectives
    from ..simulate.collectives.choose import COLLECTIVES

    # One size for each range of a collective: latency-bound, intermediate, bulk
    # (docs/collectives.md).
    sizes = (2.0**16, 2.0**24, 2.0**30)
    times = Table(
        "µs, all ranks",
        *("64 KiB", "16 MiB", "1 GiB", "90 %"),
        "by",
        caption="sizes: input bytes per rank (all_gather: its shard); 90 % interval and origin of "
        "the estimate at 1 GiB: measured curves of this machine (known) or of others (new), or the "
        "closed form of an algorithm",
    )
    collectives = ClusterCollectives()
    for kind in COLLECTIVES:
        # A transfer is between two ranks.
        group = 2 if kind == "send_recv" else cluster.size
        found = [collectives.estimate(kind, size, group, cluster) for size in sizes]
        last = found[-1]
        interval = f"{1e6 * last.lo:,.0f} – {1e6 * last.hi:,.0f}"
        by = f"measured, {last.detail}" if last.source == "learned" else last.detail
        times.add_row(kind, *(f"{1e6 * c.latency:,.1f}" for c in found), interval, by)
    return times


def _device_name(cluster: Cluster) -> str:
    """Name of a cluster's device, which the cluster may give as the path of a device file.

    Raises:
        DeviceError: There is no such device.
    """
    from ..features.devices.catalogue import read_device

    return read_device(cluster.device).name if cluster.device else "device not named"


def calibrate_collectives(
    context: typer.Context,
    data: Annotated[
        Sequence[Path],
        Option("nccl-tests output, CSV, or a folder with collectives*.csv.gz.", argument=True),
    ],
    out: Annotated[
        Path | None,
        Option("JSON file for the fitted model.", check=json_file),
    ] = None,
    device: Annotated[str, Option("Device of rows that do not name one.")] = "",
    op: Annotated[str, Option("Collective of nccl-tests output that does not name it.")] = "",
    report: Annotated[
        bool,
        Option("Print errors on held-out rows and on held-out machines.", ("--report",)),
    ] = False,
    known_only: Annotated[
        bool, Option("With --report: skip held-out machines (faster).", ("--known-only",))
    ] = False,
    fresh: Annotated[
        bool,
        Option("Fit all parameters to DATA, not only those of its machines.", ("--fresh",)),
    ] = False,
    join: Annotated[
        bool,
        Option("Keep the shipped parameters and add the libraries of DATA.", ("--join",)),
    ] = False,
    json_output: Json = False,
) -> None:
    """Fit the collective model to measurements.

    With --report, print its errors on held-out measurements.
    """
    from ..common.errors import DatasetError
    from ..common.tables_text import print_frame
    from ..models.collectives.measurements import read_collectives
    from ..models.collectives.model import CollectiveModel, fit_collectives

    if out is None and not report:
        raise DatasetError("nothing to do", hint="give --out FILE, --report, or both")
    if not report:
        refuse(context, "a fit without --report", {"known_only"})
    if out is None:
        refuse(context, "a report without --out", {"fresh", "join"})
    if fresh and join:
        raise typer.BadParameter("give one of --fresh, which fits all anew, and --join")
    rows, find = read_collectives(data, device, op)
    if report:
        _report(rows, find, not known_only, json_output)
    if out is None:
        return
    about = {"sources": sorted(set(rows["source"].astype(str))), "rows": len(rows)}
    if fresh:
        model = fit_collectives(rows, find, about)
    elif join:
        model = CollectiveModel.find().joined(rows, find, about)
        if not json_output:
            print_frame(
                make_console(140),
                model.joined_errors().reset_index(),
                "held-out rows: error in %, coverage in %",
            )
    else:
        # The rows change only the parameters of their machines.
        shipped = CollectiveModel.find()
        model = shipped.calibrated(rows, find)
        if len(rows) > 1:
            _check_left_out(shipped, rows, find, quiet=json_output)
    model.save(out)
    wrote(out, "collective model")
    if not report:
        _print_fit(rows, find, model, json_output)


def _check_left_out(
    shipped: CollectiveModel, rows: pd.DataFrame, find: FindLinks, *, quiet: bool
) -> None:
    """Cross-validate a calibration against the shipped parameters.

    Raises:
        WorseModelError: The calibration has the larger error on held-out rows.
    """
    import numpy as np
    from rich.console import Console

    from ..workflows.measured.calibration_samples import check_unseen, mean_error

    measured = np.log(rows["latency_us"].to_numpy(float) * 1e-6)
    before, after = np.log(shipped.predict(rows, find)["latency_s"].to_numpy()), np.empty(len(rows))
    part = np.arange(len(rows)) % min(_FOLDS, len(rows))
    for fold in np.unique(part):
        own = shipped.calibrated(rows[part != fold].reset_index(drop=True), find)
        left = rows[part == fold].reset_index(drop=True)
        after[part == fold] = np.log(own.predict(left, find)["latency_s"].to_numpy())
    errors = (mean_error(measured - predicted) for predicted in (before, after))
    check_unseen(
        Console(quiet=True) if quiet else make_console(), f"{len(rows)} collectives", *errors
    )


def _report(rows: pd.DataFrame, find: FindLinks, unseen: bool, json_output: bool) -> None:
    from ..common.tables_text import print_frame
    from ..models.collectives.study import KNOWN, UNSEEN, study, summary

    # Fits take minutes; progress goes to stderr, separate from --json.
    errors = study(rows, find, lambda text: typer.echo(text, err=True), unseen)
    known = [["source"], ["source", "size"], ["op"], ["machine"], ["fabric", "world_size"]]
    tables = {", ".join(by): summary(errors, by, KNOWN) for by in known}
    if unseen:
        for by in (["source"], ["architecture"], ["size"], ["op"], ["fabric"]):
            tables[f"unseen by {', '.join(by)}"] = summary(errors, by, UNSEEN)
    if json_output:
        plain = {k: t.reset_index().astype(object) for k, t in tables.items()}
        content = {k: t.where(t.notna(), None).to_dict("records") for k, t in plain.items()}
        print_json(content)
        return
    for name, table in tables.items():
        print_frame(make_console(140), table.reset_index(), f"error in %, by {name}")


def _print_fit(
    rows: pd.DataFrame, find: FindLinks, model: CollectiveModel, json_output: bool
) -> None:
    """Print launch, latency and efficiency by machine and operation, and the errors of the fit."""
    import numpy as np

    from ..common.tables_text import print_frame
    from ..models.collectives.study import fit_three, summary
    from ..models.collectives.table import collective_table

    table, latency = collective_table(rows, find), rows["latency_us"].to_numpy(float)
    predicted = model.predict(rows, find)["latency_s"].to_numpy() * 1e6
    names = {c: getattr(table, c) for c in ("machine", "fabric", "op", "backend")}
    errors = rows[[]].assign(**names, fitted=100 * np.abs(predicted / latency - 1))
    result = summary(errors, ["machine", "fabric", "op", "backend"], ["fitted"])
    three = fit_three(table, latency)
    # In the units of a cluster file, for pasting into one.
    for i, key in enumerate(("launch_us", "latency_us", "efficiency")):
        result[key] = [round(float(three[f, o, b, m][i]), 3) for m, f, o, b in result.index]
    if json_output:
        print_json(result.reset_index().to_dict("records"))
        return
    print_frame(
        make_console(140),
        result.reset_index(),
        "fitted rows: error in %; launch, latency per step, efficiency of the link",
    )


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
    # Without jitter nothing is random.
    if not case.jitter:
        refuse(context, "a step without --jitter", {"seed"})
    from ..common.chrome_trace import write_trace
    from ..common.files import write_text
    from ..predict.export.timeline import step_trace
    from ..predict.operator.step_operators import load_step_model
    from ..simulate.step.named_workloads import read_workload, workload_notes

    named = workload_of(workload, hf)
    work = read_workload(named, case.settings)
    if next_count:
        spare = {"timeline", "html", "explain", "jitter", "speed", "power_cap_w", "seed", "run"}
        refuse(context, "--next", spare)
        from ..predict.cluster.next_run import next_steps
        from ..predict.render.parts import print_next_runs

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
        # Also in the JSON, because programs do not read standard error.
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
