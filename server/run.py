"""Run a server until it is stopped; open requests are answered first."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from ..models.core.store import read_manifest
from ..predict.locate import find_model, is_untrained
from .app import create_app
from .log import write_json_lines
from .settings import ServeError, ServerSettings

#: Seconds for open requests to finish when the server is stopped; documented in docs/server.md.
_GRACE_S = 30


def serve(settings: ServerSettings, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: Models, address and limits.
        ready: Called with the address once it is bound; the models are not loaded yet.

    Raises:
        ServeError: The address cannot be bound.
        ModelError: A model is missing or damaged.
    """
    for name in settings.models:
        if not is_untrained(name):
            read_manifest(find_model(name))
    # Bound before the models load, so that a taken port is reported at once.
    if settings.log_requests:
        write_json_lines()
    with bound(settings) as listener:
        address, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            create_app(settings),
            log_level="warning",
            log_config=None if settings.log_requests else LOGGING_CONFIG,
            # Counted by /metrics instead; a line for each cached answer would cost as much as the
            # answer.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=30,
            ws="none",
            # The guard refuses with JSON; this outer limit, of connections, only bounds memory, and
            # idle keep-alive connections count towards it. Engineering estimate.
            limit_concurrency=max(1024, 4 * settings.concurrency),
        )
        shown = f"[{address}]" if ":" in address else address
        ready(f"http://{shown}:{port}")
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
        if not server.started:
            raise ServeError("the server did not start", hint="the log above has the reason")


def bound(settings: ServerSettings) -> socket.socket:
    """Bind a socket to the address of the settings.

    Raises:
        ServeError: The address is taken, not this machine's, or not permitted.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Lets a restarted server bind while old connections linger in TIME_WAIT. On Windows the
        # option would let a second process take over the port.
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServeError(
            f"cannot listen at {settings.host}:{settings.port}: {error}",
            hint="choose another with --host and --port; --port 0 takes a free one",
        ) from None
    return listener
