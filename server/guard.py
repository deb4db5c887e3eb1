"""Middleware that checks every request: token, concurrency, size and time."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..common.errors import OpcastError
from .errors import RequestError, error_response
from .metrics import REQUEST_ID, Metrics
from .sandbox import out_of_time
from .settings import ServerSettings

logger = logging.getLogger(__name__)

#: Paths that need no token, for load balancers.
_OPEN = ("/health", "/ready")
# Paths that are answered even at the concurrency limit, for diagnosis.
_FREE = (*_OPEN, "/metrics")
_ID_HEADER = b"x-request-id"
#: Request ids that clients may give; short, and without line breaks, for the log.
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

#: Most bytes of a refused body that are read to answer its client, over the limit.
_DISCARDED = 4


class Guard:
    """ASGI middleware that enforces the limits of :class:`ServerSettings`.

    Args:
        app: The application.
        settings: The limits.
        metrics: Metrics that count every request.
        paths: Paths with counters of their own; all others share one.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.paths = frozenset(paths)
        self.in_flight = 0
        # Compared as bytes, which is what ASGI headers are.
        self._token = f"Bearer {settings.token}".encode()
        metrics.in_flight.set_function(lambda: self.in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        given = next((v for k, v in scope["headers"] if k == _ID_HEADER), b"")
        own = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        REQUEST_ID.set(own.decode())

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_ID_HEADER, own)]
            await send(message)

        try:
            await self._limited(scope, receive, note)
        except (OpcastError, TimeoutError) as error:
            known = error if isinstance(error, OpcastError) else None
            answer = error_response(known or out_of_time(self.settings.timeout_s))
            # A response that has started cannot be replaced; the connection closes.
            if not status:
                await answer(scope, receive, note)
        finally:
            # Metrics keep their labels forever, so unknown paths must not become labels.
            path = scope["path"] if scope["path"] in self.paths else "other"
            seconds = time.perf_counter() - started
            self.metrics.done(path, status or 500, seconds)
            if self.settings.log_requests and path not in _FREE:
                facts = {"path": path, "status": status or 500, "seconds": round(seconds, 6)}
                logger.info("request", extra={"facts": facts})

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self.settings.token and path not in _OPEN:
            self._authorise(scope)
        if path in _FREE:
            await self.app(scope, receive, send)
            return
        if self.in_flight >= self.settings.concurrency:
            raise RequestError(
                503, f"{self.in_flight} requests are in flight", hint="try again later"
            )
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await self.app(scope, await self._with_body(scope, receive), send)
        finally:
            self.in_flight -= 1

    def _authorise(self, scope: Scope) -> None:
        shown = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        # In constant time, so that response times do not reveal a correct prefix.
        if not hmac.compare_digest(shown, self._token):
            raise RequestError(
                401,
                "the token is missing or wrong",
                where="header Authorization",
                hint="send: Authorization: Bearer TOKEN",
            )

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body up to the limit; return a ``receive`` that yields it."""
        limit = self.settings.max_body_bytes
        # Refuse by the declared length before reading; the loop also counts the bytes received,
        # since the header may be missing (chunked) or wrong.
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        # At most 20 digits: Python refuses to convert thousands.
        if length.isdigit() and int(length[:20]) > limit:
            # Who waits for "100 Continue" has sent nothing yet.
            if all(name != b"expect" for name, _ in scope["headers"]):
                await _discard(receive, _DISCARDED * limit)
            raise _too_large(limit)
        parts, size = [], 0
        while True:
            message = await receive()
            # The client disconnected, which the application must see.
            if message["type"] != "http.request":
                return _once(message, receive)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                if message.get("more_body"):
                    await _discard(receive, _DISCARDED * limit)
                raise _too_large(limit)
            if not message.get("more_body"):
                break
        whole = {"type": "http.request", "body": b"".join(parts), "more_body": False}
        return _once(whole, receive)


class Direct:
    """ASGI middleware that calls the handlers of some paths directly.

    FastAPI documents the same handlers and answers other methods, but its routing takes longer than
    a cached answer.

    Args:
        app: The application, for other paths and methods.
        handlers: Handlers of POST requests by path.
    """

    def __init__(
        self, app: ASGIApp, handlers: Mapping[str, Callable[[Request], Awaitable[Response]]]
    ) -> None:
        self.app = app
        self.handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        handler = self.handlers.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            answer = await handler(Request(scope, receive))
        except OpcastError as error:
            answer = error_response(error)
        await answer(scope, receive, send)


async def _discard(receive: Receive, most: int) -> None:
    """Read on after a body that is refused.

    Many clients read the answer only once the body is sent: else they see a broken connection.
    """
    size, more = 0, True
    while more and size <= most:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)


def _once(first: Message, rest: Receive) -> Receive:
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await rest()
        given = True
        return first

    return receive


def _too_large(limit: int) -> RequestError:
    return RequestError(
        413,
        f"the body exceeds {limit / 2**20:g} MiB",
        where="body",
        hint="split it, or start the server with: opcast serve --max-body",
    )
