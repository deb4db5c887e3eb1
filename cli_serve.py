"""Command ``opcast serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_common import seconds_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Model to serve; may be given again. The first is default."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token: Annotated[
        str, typer.Option(envvar="OPCAST_TOKEN", help="What requests have to show as bearer.")
    ] = "",
    allow_compile: Annotated[
        bool, typer.Option("--allow-compile", help="Run target compilers on programs.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="Longest time of a request.")] = "60s",
    max_body: Annotated[int, typer.Option(min=1, help="MiB of a request's body.")] = 64,
    max_rows: Annotated[int, typer.Option(min=1, help="Kernels of a request.")] = 100_000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Programs and plans at a time.")] = 2,
    memory: Annotated[float, typer.Option(min=1.0, help="GiB for a program or plan.")] = 4.0,
    cache: Annotated[int, typer.Option(min=0, help="Kernels whose answers are kept.")] = 200_000,
) -> None:
    """Answer predictions over HTTP until stopped; the API is described at /docs."""
    from .features.errors import OpcastError

    try:
        from .server.run import serve as run
        from .server.settings import ServerSettings
    except ImportError as error:
        raise OpcastError(
            f"the server's packages are missing: {error}", hint="pip install 'opcast[serve]'"
        ) from None
    settings = ServerSettings(
        models=tuple(dict.fromkeys(model or ["default"])), host=host, port=port, token=token,
        allow_compile=allow_compile, max_body_bytes=max_body * 2**20, max_rows=max_rows,
        timeout_s=seconds_of(timeout), concurrency=concurrency, workers=workers,
        memory_bytes=int(memory * 2**30), cache_entries=cache,
    )  # fmt: skip
    run(settings, lambda url: typer.echo(f"{url}/docs  (loading models)", err=True))
