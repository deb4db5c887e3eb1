"""Command ``opcast models``."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_common import Json, make_console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="models")(models)


def models(
    name: Annotated[
        str | None, typer.Argument(help="Model whose card to print; without it all are listed.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List the models that ship or were registered, or print one's model card."""
    from .shipped import list_models, show_model

    if name is None:
        list_models(make_console(), as_json=json_output)
    else:
        show_model(make_console(), name, as_json=json_output)
