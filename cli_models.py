"""Command ``opcast models``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="models")(models)


def models(
    name: Annotated[
        str | None, typer.Argument(help="Model whose card to print; without it all are listed.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that ship or were registered, or print one's model card."""
    from .shipped import list_models, show_model

    if name is None:
        list_models(_console(), as_json=json_output)
    else:
        show_model(_console(), name, as_json=json_output)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)
