"""The command that serves predictions over HTTP."""

from __future__ import annotations

import typer

from ..server.settings import ServerSettings


def serve(settings: ServerSettings) -> None:
    """Serve predictions over HTTP.

    The server runs until it is stopped; /docs describes its API.
    """
    from ..common.errors import OpcastError
    from ..common.extras import extra_hint

    try:
        from ..server.run import serve as run
    except ImportError as error:
        raise OpcastError(
            f"the server's packages are not installed: {error}", hint=extra_hint("serve")
        ) from None
    # On stderr, once the port is bound: with --port 0 nobody knows it before.
    run(settings, lambda url: typer.echo(f"{url}/docs  (loading models)", err=True))
