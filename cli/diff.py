"""Commands for checks of pull requests: two versions of a program, and whether a model fits."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.options import Json, Option, Top
from ..workflows.versions.diff import DiffSettings
from .options import make_console, print_json, refuse


def diff(
    context: typer.Context,
    settings: DiffSettings,
    top: Top = 10,
    markdown: Annotated[bool, Option("Print Markdown.", ("--markdown",))] = False,
    json_output: Json = False,
) -> None:
    """Compare two versions of a program: slower or faster, how sure that is, and why.

    Kernels that both have cancel. With limits it exits with 1 beyond one of them.
    """
    if settings.budget is None:
        if not (settings.new and settings.device):
            raise typer.BadParameter("give OLD, NEW and --device, or a revision and --budget")
        if settings.fail_above is None:
            refuse(context, "a comparison without --fail-above", {"sure"})
    if markdown and json_output:
        raise typer.BadParameter("give one of --markdown and --json")
    if json_output:
        refuse(context, "--json, which has all changes", {"top"})
    from ..predict.render.difference import markdown_differences, print_difference
    from ..workflows.versions.diff import run_diff

    report = run_diff(settings)
    if json_output:
        print_json(report.to_dict())
    elif markdown:
        rows = ((own.name, own.difference, own.excess) for own in report.results)
        typer.echo(markdown_differences(rows, top), nl=False)
    else:
        console = make_console()
        for number, own in enumerate(report.results):
            if number:
                console.print()
            print_difference(console, own.name, own.difference, own.excess, top)
    if not report.passes:
        raise typer.Exit(1)
