"""Commands about the zoo's workloads and about datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import cli_compile, cli_fidelities
from .cli_common import Json, make_console

Out = Annotated[Path, typer.Option("--out", help="Folder or file to write.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of the workload, such as batch=8.")
]


def register(app: typer.Typer) -> None:
    """Add the groups ``zoo`` and ``data``."""
    zoo = typer.Typer(no_args_is_help=True, help="Workloads of the zoo.", rich_markup_mode=None)
    zoo.command("list")(zoo_list)
    zoo.command("export")(zoo_export)
    app.add_typer(zoo, name="zoo")
    data = typer.Typer(no_args_is_help=True, help="Datasets.", rich_markup_mode=None)
    data.command("show")(data_show)
    data.command("import")(data_import)
    cli_compile.register(data)
    cli_fidelities.register_data(data)
    app.add_typer(data, name="data")


def zoo_list() -> None:
    """List the families and their settings."""
    from rich.text import Text

    from .datagen.zoo import families

    console = make_console()
    for family in families().values():
        console.print(Text.assemble((family.name, "bold"), f"  {family.summary}"))
        settings = " ".join(f"{k}={v}" for k, v in family.defaults.items())
        console.print(f"  {settings}", markup=False, highlight=False)


def zoo_export(
    name: Annotated[str, typer.Argument(help="Family.")],
    out: Out,
    settings: Settings = None,
    form: Annotated[
        str, typer.Option("--format", help="text, bytecode, portable or jax-export.")
    ] = "text",
    mesh: Annotated[
        str, typer.Option(help="Partition it over devices that need not be there: fsdp=4,tp=2.")
    ] = "",
) -> None:
    """Write a workload of the zoo as StableHLO."""
    from .datagen.zoo import export, parse_settings

    chosen = parse_settings(name, settings or [])
    if mesh:
        from .datagen.zoo.partition import export_partitioned

        export_partitioned(name, chosen, mesh, out, format=form)
    else:
        export(name, chosen, out, format=form)
    typer.echo(f"{out}: {out.stat().st_size} bytes", err=True)


def data_show(
    data: Annotated[list[Path], typer.Argument(help="Dataset folders.")],
    plot: Annotated[Path | None, typer.Option(help="Write a histogram image.")] = None,
    json_output: Json = False,
) -> None:
    """Print a dataset's counts by kind, ranges and noise floor."""
    from .workflows import show_data

    show_data(make_console(), data, plot=plot, as_json=json_output)


def data_import(
    kind: Annotated[str, typer.Argument(help="What to import: published.")],
    folder: Annotated[Path, typer.Argument(help="Folder with the tables.")],
    out: Out,
) -> None:
    """Turn tables of latencies that others published into a dataset. It resumes if stopped."""
    from .operators import run_import

    if kind != "published":
        raise typer.BadParameter(f"cannot import {kind!r}; choose: published")
    run_import(make_console(), folder, out)
