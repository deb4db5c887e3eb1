"""Commands about devices, zoo workloads and datasets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..common.options import (
    Budget,
    DeviceIndex,
    Devices,
    Json,
    LoweringOpt,
    ModelOpt,
    Option,
    Out,
    OwnDevices,
    Seed,
    plot_file,
    table_file,
)
from ..common.progress import wrote
from ..datagen.campaign.plan import CampaignSettings
from ..workflows.settings import ProfileSettings
from .options import make_console, print_json, refuse, refuse_unused


def zoo_list() -> None:
    """List the workload families and their settings."""
    from rich.text import Text

    from ..datagen.zoo import all_families

    console = make_console()
    for family in all_families().values():
        console.print(Text.assemble((family.name, "bold"), f"  {family.summary}"))
        settings = " ".join(f"{k}={v}" for k, v in family.defaults.items())
        console.print(f"  {settings}")


def zoo_export(
    context: typer.Context,
    name: Annotated[str, Option("Workload family (opcast zoo list).", argument=True)],
    out: Annotated[Path, Option("File to write.")],
    settings: Annotated[
        Sequence[str],
        Option("Setting of the workload, such as batch=8; may be given again.", ("--set",)),
    ] = (),
    form: Annotated[str, Option("text, bytecode, portable or jax-export.", ("--format",))] = "text",
    mesh: Annotated[str, Option("Mesh to partition it over, such as fsdp=4,tp=2.")] = "",
    device: Annotated[
        str, Option("Device that JAX lowers it for, which affects random numbers.")
    ] = "local",
) -> None:
    """Write a workload as StableHLO."""
    from ..datagen.zoo import export, parse_settings
    from ..features.ir.platforms import platform_of
    from ..predict.devices import find_anywhere

    chosen = parse_settings(name, settings)
    if mesh:
        refuse(context, "a partitioned workload (--mesh)", {"device"})
        from ..datagen.partition.workload import export_partitioned

        export_partitioned(name, chosen, mesh, out, format=form)
    else:
        platform = None if device == "local" else platform_of(find_anywhere(device)).name
        export(name, chosen, out, format=form, platform=platform)
    wrote(out, f"{out.stat().st_size} bytes")


def data_show(
    data: Annotated[Sequence[Path], Option("Dataset folders.", argument=True)],
    plot: Annotated[
        Path | None, Option("Plot a histogram of the latencies.", check=plot_file)
    ] = None,
    json_output: Json = False,
) -> None:
    """Summarise a dataset: counts, ranges, noise."""
    from ..workflows.profile import show_data

    show_data(make_console(), data, plot=plot, as_json=json_output)


def data_import(
    context: typer.Context,
    kind: Annotated[str, Option("What to import: published, trace or campaign.", argument=True)],
    paths: Annotated[
        Sequence[Path],
        Option(
            "A folder with published tables; or traces: xplane.pb or log directory of "
            "jax.profiler, JSON of torch.profiler, SQLite or CSV of Nsight Systems; or the folder "
            "or archive of a campaign.",
            argument=True,
        ),
    ],
    out: Out,
    program: Annotated[
        Sequence[Path],
        Option("Program of a trace that contains no HLO; may be given again."),
    ] = (),
    device: Annotated[
        Sequence[str],
        Option(
            "Device of a trace or campaign, name or file; default: the one that it records, or "
            "local. For published tables: file of a device that is not in the catalogue; may be "
            "given again."
        ),
    ] = (),
    device_index: DeviceIndex = None,
    keep_names: Annotated[
        bool,
        Option("For traces: keep names of programs, kernels and operators.", ("--keep-names",)),
    ] = False,
) -> None:
    """Convert published latency tables, traces or a campaign into a dataset.

    A stopped import resumes when it is run again.
    """
    if kind == "trace":
        from ..workflows.traces.importing import run_import_traces

        if device and len(device) > 1:
            raise typer.BadParameter("a trace ran on one device: give one --device")
        run_import_traces(
            make_console(),
            paths,
            out,
            device=device[0] if device else None,
            programs=program,
            index=device_index,
            keep_names=keep_names,
            tell=lambda what: typer.echo(what, err=True),
        )
        return
    if kind == "campaign":
        from ..workflows.campaign import run_import_campaign

        refuse(context, "a campaign", {"program", "device_index", "keep_names"})
        if len(paths) > 1 or len(device) > 1:
            raise typer.BadParameter("give one campaign, and one --device at most")
        run_import_campaign(
            make_console(),
            paths[0],
            out,
            device=device[0] if device else None,
            tell=lambda what: typer.echo(what, err=True),
        )
        return
    if kind != "published":
        raise typer.BadParameter(f"cannot import {kind!r}; choose: published, trace, campaign")
    refuse(context, "published tables", {"program", "device_index", "keep_names"})
    if len(paths) > 1:
        raise typer.BadParameter("give one folder with published tables")
    from ..workflows.train_operators import run_import

    run_import(paths[0], out, device)


def audit(
    table: Annotated[
        Path,
        Option(
            "Table of operators, products, layers or collectives, a folder of them, or a dataset.",
            argument=True,
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            "File for the flagged rows with their evidence: .parquet, .csv or .json.",
            check=table_file,
        ),
    ] = None,
    device: OwnDevices = (),
    json_output: Json = False,
) -> None:
    """Find impossible or contradictory rows in measured tables.

    The exit status is 1 if a row is impossible, such as one that exceeds the device's peak.
    """
    from ..common.parquet import write_table
    from ..common.tables_text import print_frame
    from ..predict.published.audit import audit as check
    from ..workflows.train_operators import described_devices

    found = check(table, described_devices(device))
    counts = found.counts()
    rows = len(found.flagged[["file", "row"]].drop_duplicates())
    if out is not None:
        write_table(found.flagged, out)
        wrote(out, f"{len(found.flagged)} rows")
    if json_output:
        figures = {"rows": found.rows, "flagged": rows, "impossible": found.impossible}
        figures |= {"marked": found.marked, "marked_and_flagged": found.found}
        print_json({**figures, "reasons": counts.to_dict("records"), "notes": found.notes})
    else:
        console = make_console()
        if len(counts):
            print_frame(console, counts.assign(share=counts["share"].map("{:.2%}".format)), "")
        for note in found.notes:
            console.print(note)
        console.print(
            f"{found.rows} rows checked, {rows} flagged, {found.impossible} of them impossible"
        )
        if found.marked:
            others = found.rows - found.marked
            share = found.alarms / max(others, 1)
            console.print(
                f"of {found.marked} rows that the table itself marks as wrong, {found.found} are "
                f"flagged; of {others} others, {found.alarms} ({share:.2%})"
            )
    if found.impossible:
        raise typer.Exit(1)


def data_compile(
    out: Out,
    device: Devices = (),
    budget: Budget = 1200.0,
    suite: Annotated[str, Option("Zoo suite: quick, standard, full; '' for none.")] = "quick",
    # Programs per round: engineering estimates, many small programs for each real model.
    ops: Annotated[int, Option("Single-op programs in a round.", least=0)] = 16,
    random: Annotated[int, Option("Random programs in a round.", least=0)] = 8,
    zoo: Annotated[int, Option("Zoo programs in a round.", least=0)] = 1,
    large: Annotated[
        int, Option("Single-op programs in a round at the sizes of large models.", least=0)
    ] = 0,
    seed: Seed = 0,
    merge: Annotated[
        bool, Option("Merge the shards into one file at the end, with one row per kernel.")
    ] = True,
) -> None:
    """Collect the TPU compiler's estimates of kernels.

    The labels are the compiler's cost estimates, not measurements.
    """
    from ..datagen.compile.plan import CompilePlan
    from ..datagen.compile.run import compile_dataset, merge_dataset
    from ..features.devices.catalogue import find_typed
    from ..features.lowering.target_compiler.target import compiled_tpus

    result = compile_dataset(
        out,
        [find_typed(name) for name in device or compiled_tpus()],
        budget,
        plan=CompilePlan(ops, random, suite, seed, zoo, large),
    )
    wrote(
        result.folder,
        f"{result.samples} estimates of kernels of {result.programs} programs, {result.failed} "
        f"failed, {result.elapsed_s:.0f} s, {result.stopped}",
    )
    # Ends with status 130; the finished compilations are on disk.
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    if merge and result.samples:
        typer.echo(f"{len(merge_dataset(result.folder))} distinct kernels; libtpu's estimates")


def data_agree(
    program: Annotated[Sequence[Path], Option("StableHLO programs.", argument=True)],
    device: Devices = (),
    model: ModelOpt = "default",
    json_output: Json = False,
) -> None:
    """Compare the TPU compiler's estimates with a model's."""
    from ..features.devices.catalogue import find_typed
    from ..features.lowering.target_compiler.target import compiled_tpus
    from ..predict.program.predictor import load
    from ..workflows.check import agreement, print_agreement

    predictor = load(model)
    rows = [
        agreement(path, find_typed(name), predictor)
        for path in program
        for name in device or compiled_tpus()
    ]
    if json_output:
        print_json([asdict(row) for row in rows])
    else:
        print_agreement(make_console(), rows)


def data_simulate(
    program: Annotated[Sequence[Path], Option("StableHLO programs.", argument=True)],
    out: Out,
    tool: Annotated[str, Option("Simulator: scalesim, zigzag or iree.", ("--with",))] = "scalesim",
    device: Devices = (),
    lowering: LoweringOpt = "auto",
    family: Annotated[
        str, Option("Family name for all programs; default: each program's name.")
    ] = "",
) -> None:
    """Label the kernels of programs with a simulator.

    The default device is tpu-v3, or this machine with iree. A stopped run resumes when it is run
    again.
    """
    from ..predict.devices import shown_devices
    from ..workflows.label_with_simulator import simulate_dataset

    # IREE runs the kernels on this machine.
    devices = device or (["local"] if tool == "iree" else shown_devices("simulators"))
    for name in devices:
        done = simulate_dataset(out, program, name, tool, lowering=lowering, family=family)
        wrote(
            out,
            f"{done.samples} kernels of {done.programs} programs on {done.device}, source "
            f"{done.source}; {done.skipped} programs skipped as already labelled, {done.refused} "
            "kernels not supported",
        )


def profile(settings: ProfileSettings) -> None:
    """Measure kernels and programs on a device into a dataset.

    It can be stopped at any time and resumes when it is run again. On a Ray cluster, --budget
    applies to each host.
    """
    from ..workflows.profile import run_profile

    run_profile(settings)


def campaign(settings: CampaignSettings) -> None:
    """Measure a GPU or TPU in minutes, most valuable cases first, into one archive to share.

    It ends on time, and resumes when it was killed. The exit status is 3 if --slice ended it and
    running it again continues, and 1 if nothing could be measured. --plan lists the cases without
    measuring them.
    """
    from ..workflows.campaign import run_campaign

    status = run_campaign(settings, lambda what: typer.echo(what, err=True))
    if status:
        raise typer.Exit(status)


def device(
    context: typer.Context,
    name: Annotated[
        str | None, Option("Device name or file to print instead of measuring.", argument=True)
    ] = None,
    save: Annotated[bool, Option("Keep the measurement for --device local.", ("--save",))] = False,
    listed: Annotated[bool, Option("List the catalogue.", ("--list",))] = False,
    json_output: Json = False,
) -> None:
    """Measure this device, or print a known device or the catalogue.

    A measured device is printed as a device file.
    """
    from ..workflows.profile import list_devices, measure_device, show_device

    if listed:
        refuse_unused(context, "the catalogue (--list)", {"listed", "json_output"})
        list_devices(make_console(), as_json=json_output)
    elif name is not None:
        refuse_unused(context, "a known device", {"name", "json_output"})
        show_device(make_console(), name, as_json=json_output)
    else:
        # Printed as a device file, which can be edited and given to --device.
        spec = measure_device(save=save, tell=lambda what: typer.echo(f"warning: {what}", err=True))
        sys.stdout.write(spec.to_json() + "\n")
