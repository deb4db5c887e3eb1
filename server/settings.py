"""Settings of the server: models, address, token and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from ..common.errors import OpcastError
from ..common.options import Option, duration_text, seconds_of

_LOOPBACK_NAME = "localhost"


class ServeError(OpcastError):
    """The server cannot be started with these settings."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        waiting: Maximum number of programs and plans that wait for one of ``workers``.
    """

    models: Annotated[
        tuple[str, ...],
        Option(
            "Model to serve; may be given again. The first is the default.",
            ("--model",),
            "Estimates",
        ),
    ] = ("default",)
    host: Annotated[str, Option("Address to bind; needs a token unless it is loopback.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option("Port; 0 picks a free one.", least=0, most=65535)] = 8000
    token: Annotated[
        str, Option("Bearer token that requests must carry.", environment="OPCAST_TOKEN")
    ] = ""
    allow_compile: Annotated[
        bool, Option("Allow requests to run target compilers.", ("--allow-compile",))
    ] = False
    allow_torch: Annotated[
        bool,
        Option(
            "Allow requests to load PyTorch .pt2 files, which may run code.", ("--allow-torch",)
        ),
    ] = False
    timeout_s: Annotated[
        float,
        Option(
            "Time limit of a request.",
            ("--timeout",),
            "Run",
            parse=seconds_of,
            shown=duration_text,
        ),
    ] = 60.0
    # Limits and sizes are engineering estimates.
    max_body_bytes: Annotated[
        int, Option("Size limit of a request body in MiB.", ("--max-body",), unit=2**20, least=1)
    ] = 64 * 2**20
    max_rows: Annotated[int, Option("Maximum kernels in a request.", least=1)] = 100_000
    concurrency: Annotated[int, Option("Maximum concurrent requests.", least=1)] = 64
    workers: Annotated[int, Option("Maximum concurrent programs and plans.", least=1)] = 2
    memory_bytes: Annotated[
        int,
        Option("Memory limit of a program or plan in GiB.", ("--memory",), unit=2.0**30, least=1),
    ] = 4 * 2**30
    cache_entries: Annotated[
        int, Option("Number of kernel predictions to cache.", ("--cache",), least=0)
    ] = 200_000
    log_requests: Annotated[
        bool,
        Option("Log each request to standard error as a line of JSON.", ("--log-requests",), "Run"),
    ] = False
    waiting: int = 16

    def __post_init__(self) -> None:
        """Remove duplicate models, and check that the address may be bound without a token.

        Raises:
            ServeError: The address is not loopback, and no token is set.
        """
        object.__setattr__(self, "models", tuple(dict.fromkeys(self.models)))
        # The server runs models for everyone who can reach it; on loopback, only local users.
        if not self.token and not is_loopback(self.host):
            raise ServeError(
                f"{self.host} can be reached from other machines, but no token is set",
                hint="set one: --token or OPCAST_TOKEN; or bind --host 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether an address is loopback; the only such name is ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    # A name, which could resolve to any address.
    except ValueError:
        return host == _LOOPBACK_NAME
