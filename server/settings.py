"""Settings of a server: models, address, token and limits."""

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
    """Settings of a server: models, address and limits.

    Attributes:
        waiting: Maximum programs and plans waiting for one of ``workers``.
    """

    models: Annotated[
        tuple[str, ...],
        Option(
            "Model to serve; may be given again. The first is the default.",
            ("--model",),
            "Estimates",
        ),
    ] = ("default",)
    host: Annotated[str, Option("Address to bind; all but loopback need a token.")] = "127.0.0.1"
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
            "Allow requests to load PyTorch's .pt2 files, which may run code.", ("--allow-torch",)
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
    workers: Annotated[int, Option("Maximum programs and plans at a time.", least=1)] = 2
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
        """Take each model once, and check that the address may be bound without a token.

        Raises:
            ServeError: It is not a loopback address, and there is no token.
        """
        # In the order given: the first is the default.
        object.__setattr__(self, "models", tuple(dict.fromkeys(self.models)))
        # The server runs models for whoever reaches it; on loopback only local users can.
        if not self.token and not is_loopback(self.host):
            raise ServeError(
                f"{self.host} can be reached from other machines, and no token is set",
                hint="set one: --token or OPCAST_TOKEN; or bind --host 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback one; of names, only ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    # Not an address but a name, which a resolver could point anywhere.
    except ValueError:
        return host == _LOOPBACK_NAME
