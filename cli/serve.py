"""The command that serves predictions over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import seconds_of


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Model to serve; may be given again. The first is the default."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; all but loopback need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    token: Annotated[
        str, typer.Option(envvar="OPCAST_TOKEN", help="Bearer token that requests must carry.")
    ] = "",
    allow_compile: Annotated[
        bool, typer.Option("--allow-compile", help="Allow requests to run target compilers.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="Time limit of a request.")] = "60s",
    # Defaults as of ServerSettings, repeated so that --help needs nothing of the extra ``serve``.
    max_body: Annotated[int, typer.Option(min=1, help="Size limit of a request body in MiB.")] = 64,
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum kernels in a request.")] = 100_000,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Maximum programs and plans at a time.")] = 2,
    memory: Annotated[
        float, typer.Option(min=1.0, help="Memory limit of a program or plan in GiB.")
    ] = 4.0,
    cache: Annotated[
        int, typer.Option(min=0, help="Number of kernel predictions to cache.")
    ] = 200_000,
) -> None:
    """Serve predictions over HTTP.

    The server runs until it is stopped; /docs describes its API.
    """
    from ..common.errors import OpcastError
    from ..common.extras import extra_hint

    try:
        from ..server.run import serve as run
        from ..server.settings import ServerSettings
    except ImportError as error:
        raise OpcastError(
            f"the server's packages are not installed: {error}", hint=extra_hint("serve")
        ) from None
    settings = ServerSettings(
        # Each model once, in the order given: the first is the default.
        models=tuple(dict.fromkeys(model or ["default"])),
        host=host,
        port=port,
        token=token,
        allow_compile=allow_compile,
        max_body_bytes=max_body * 2**20,
        max_rows=max_rows,
        timeout_s=seconds_of(timeout),
        concurrency=concurrency,
        workers=workers,
        memory_bytes=int(memory * 2**30),
        cache_entries=cache,
    )
    # On stderr, once the port is bound: with --port 0 nobody knows it before.
    run(settings, lambda url: typer.echo(f"{url}/docs  (loading models)", err=True))
