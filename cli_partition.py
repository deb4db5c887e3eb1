"""The command that spreads a program of one device over several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command ``partition``."""
    app.command()(partition)


def partition(
    program: Annotated[Path, typer.Argument(help="StableHLO of one device.")],
    mesh: Annotated[str, typer.Option(help="Such as dp=8, fsdp=4 or dp=2,fsdp=4.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    batch_args: Annotated[
        str,
        typer.Option(help="Arguments that are the batch, as 3,4; default: those not donated."),
    ] = "",
    format: Annotated[str, typer.Option(help="text or bytecode.")] = "text",
) -> None:
    """Write a program with explicit collectives, for opcast predict --cluster."""
    from .datagen.partition_program import partition_program

    try:
        chosen = [int(n) for n in batch_args.split(",")] if batch_args else None
    except ValueError:
        raise typer.BadParameter("write --batch-args 3,4") from None
    if format not in ("text", "bytecode"):
        raise typer.BadParameter("--format is text or bytecode")
    path = partition_program(program, mesh, out, chosen, format)
    typer.echo(f"{path}: {path.stat().st_size} bytes")
