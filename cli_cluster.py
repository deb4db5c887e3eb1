"""Commands for clusters and collectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_common import Json, make_console, print_json

if TYPE_CHECKING:
    import pandas as pd

    from .simulate.topology import Cluster


def register(app: typer.Typer) -> None:
    """Add the commands ``cluster`` and ``calibrate-collectives``."""
    app.command("cluster")(cluster)
    app.command("calibrate-collectives")(calibrate_collectives)


def cluster(
    name: Annotated[
        str | None,
        typer.Argument(help="Name, YAML file, or ASTRA-sim's network.yml; all ranks as one group."),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List names of common sizes.")] = False,
    json_output: Json = False,
    save: Annotated[Path | None, typer.Option(help="Write the cluster as YAML.")] = None,
    astra: Annotated[Path | None, typer.Option(help="Write ASTRA-sim's network.yml.")] = None,
) -> None:
    """Show a cluster: dimensions, collectives' times, and where each figure comes from."""
    from .features.errors import DeviceError
    from .features.files import write_text
    from .simulate.cluster_catalogue import cluster_names, find_cluster
    from .simulate.topology_file import astra_network, cluster_data, save_cluster

    if list_all:
        names = cluster_names()
        if json_output:
            print_json(names)
        else:
            sys.stdout.write("\n".join(names) + "\n")
        return
    if name is None:
        raise DeviceError("no cluster is named", hint="opcast cluster NAME, or --list")
    found = find_cluster(name)
    if save is not None:
        save_cluster(found, save)
    if astra is not None:
        write_text(astra, astra_network(found.topology))
    if json_output:
        content = cluster_data(found) | {"devices": found.size, "sources": found.sources}
        print_json(content)
        return
    _print_cluster(found)


def _print_cluster(found: Cluster) -> None:
    from rich.table import Table

    from .simulate.algorithms import COLLECTIVES, collective_cost

    console = make_console(140)
    title = f"{found.name}: {found.size} × {found.device or 'device not named'}"
    table = Table("dimension", "kind", "size", "GB/s", "reached", "latency µs", "launch µs",
                  title=title)  # fmt: skip
    for d in found.topology.dims:
        shape = " × ".join(map(str, d.shape)) or str(d.size)
        detail = f"{d.kind}, {d.oversubscription:g}:1" if d.oversubscription > 1 else d.kind
        figures = (d.bandwidth / 1e9, d.efficiency, d.latency * 1e6, d.launch * 1e6)
        table.add_row(d.name, detail, shape, *(f"{x:g}" for x in figures))
    console.print(table)
    sizes = (2.0**16, 2.0**24, 2.0**30)
    times = Table(
        "µs, all ranks", *("64 KiB", "16 MiB", "1 GiB"), "algorithm at 1 GiB",
        caption="sizes: bytes that each rank puts in (all_gather: its own share)",
    )  # fmt: skip
    for kind in COLLECTIVES if found.size > 1 else ():
        group = 2 if kind == "send_recv" else found.size
        costs = [collective_cost(kind, size, group, found) for size in sizes]
        times.add_row(kind, *(f"{1e6 * c.total:,.1f}" for c in costs), costs[-1].algorithm)
    console.print(times)
    for key, source in sorted(found.sources.items()):
        console.print(f"{key}: {source}", highlight=False, soft_wrap=True)


def calibrate_collectives(
    data: Annotated[
        list[Path],
        typer.Argument(help="nccl-tests output, CSV, or folder with collectives*.csv.gz."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="File to write.")] = None,
    device: Annotated[str, typer.Option("--device", help="Device of rows that name none.")] = "",
    op: Annotated[
        str, typer.Option("--op", help="Operation, where nccl-tests output does not say it.")
    ] = "",
    report: Annotated[
        bool, typer.Option("--report", help="Errors on held-out rows and on machines left out.")
    ] = False,
    known_only: Annotated[
        bool, typer.Option("--known-only", help="Report without leaving machines out (faster).")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Fit everything to DATA, not only its machines.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Fit collectives to measurements; with --report, say how well that predicts others."""
    from .features.errors import DatasetError
    from .simulate.collective import CollectiveModel, fit_collectives
    from .simulate.collective_data import read_collectives

    if out is None and not report:
        raise DatasetError("nothing to do", hint="give --out FILE, --report, or both")
    rows, find = read_collectives(data, device, op)
    if report:
        _report(rows, find, not known_only, json_output)
    if out is None:
        return
    if fresh:
        about = {"sources": sorted(set(rows["source"].astype(str))), "rows": len(rows)}
        model = fit_collectives(rows, find, about)
    else:
        model = CollectiveModel.load().calibrated(rows, find)
    model.save(out)
    if not report:
        _print_fit(rows, find, model, json_output)


def _report(rows: pd.DataFrame, find: Any, unseen: bool, json_output: bool) -> None:
    from .simulate.collective_study import KNOWN, UNSEEN, study, summary

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
        _print_frame(table, f"error in %, by {name}")


def _print_fit(rows: pd.DataFrame, find: Any, model: Any, json_output: bool) -> None:
    """Three parameters of each machine and operation, and the errors of the fit on its own rows."""
    import numpy as np

    from .simulate.collective_baselines import fit_three
    from .simulate.collective_study import summary
    from .simulate.collective_table import collective_table

    table, latency = collective_table(rows, find), rows["latency_us"].to_numpy(float)
    predicted = model.predict(rows, find)["latency_s"].to_numpy() * 1e6
    names = {c: getattr(table, c) for c in ("machine", "fabric", "op", "backend")}
    errors = rows[[]].assign(**names, fitted=100 * np.abs(predicted / latency - 1))
    result = summary(errors, ["machine", "fabric", "op", "backend"], ["fitted"])
    three = fit_three(table, latency)
    for i, key in enumerate(("launch_us", "latency_us", "efficiency")):
        result[key] = [round(float(three[f, o, b, m][i]), 3) for m, f, o, b in result.index]
    if json_output:
        print_json(result.reset_index().to_dict("records"))
        return
    _print_frame(result, "fitted rows: error in %; launch, latency of a step, share of the link")


def _print_frame(frame: pd.DataFrame, title: str) -> None:
    from rich.table import Table

    flat = frame.reset_index()
    table = Table(*map(str, flat.columns), title=title)
    for values in flat.to_numpy(dtype=object):
        table.add_row(*("–" if v != v else f"{v:g}" if isinstance(v, float) else str(v)
                        for v in values))  # fmt: skip
    make_console(140).print(table)
