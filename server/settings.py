"""Settings of a server: models, address, token and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ..common.errors import OpcastError

_LOOPBACK_NAME = "localhost"


class ServeError(OpcastError):
    """The server cannot be started with these settings."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        models: Names or folders of the models; the first answers where a request names none.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        token: Bearer token that requests must carry; empty for none.
        allow_compile: Whether target compilers may be run.
        max_body_bytes: Maximum size of a request's body.
        max_rows: Maximum kernels in a request.
        timeout_s: Time limit of a request.
        concurrency: Maximum concurrent requests.
        workers: Maximum programs and plans processed at a time.
        waiting: Maximum programs and plans waiting for one of ``workers``.
        memory_bytes: Limit of private memory of a program's or plan's process.
        cache_entries: Number of kernels whose answers are cached.
    """

    models: tuple[str, ...] = ("default",)
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allow_compile: bool = False
    # Limits and sizes are engineering estimates; each has an option of opcast serve.
    max_body_bytes: int = 64 * 2**20
    max_rows: int = 100_000
    timeout_s: float = 60.0
    concurrency: int = 64
    workers: int = 2
    waiting: int = 16
    memory_bytes: int = 4 * 2**30
    cache_entries: int = 200_000

    def __post_init__(self) -> None:
        """Check that the address may be bound without a token.

        Raises:
            ServeError: It is not a loopback address, and there is no token.
        """
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
