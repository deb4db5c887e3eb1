"""Error responses: a status, and JSON that states what is wrong, where, and what to do."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.responses import Response

from ..common.errors import DeviceError, InternalError, ModelError, OpcastError
from .settings import ServeError

#: Seconds after which a refused request may be retried; most requests take far less. Engineering
#: estimate.
RETRY_S = 1


class RequestError(OpcastError):
    """A request that is refused before a model runs.

    Args:
        status: HTTP status.
        what: What is wrong.
        where: Part of the request.
        hint: What to do.
        name: Class name for the response; this class by default.
        retry_s: Seconds after which a request refused with 503 may be retried.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        name: str = "",
        retry_s: int = RETRY_S,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.status = status
        self.retry_s = retry_s
        self.name = name or type(self).__name__


def status_of(error: OpcastError) -> int:
    """Return the HTTP status of an error.

    A :class:`RequestError` specifies its status. Bugs of opcast are 500, a server that cannot work
    is 503, unknown devices and models are 404, and all other errors, which the client can correct,
    are 422.
    """
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, InternalError):
        return 500
    if isinstance(error, ServeError):
        return 503
    return 404 if isinstance(error, DeviceError | ModelError) else 422


def error_data(error: OpcastError) -> dict[str, object]:
    """Describe an error for a response."""
    name = error.name if isinstance(error, RequestError) else type(error).__name__
    return {"error": name, "what": error.what, "where": error.where, "hint": error.hint}


def error_response(error: OpcastError) -> Response:
    """Make the response for an error."""
    status = status_of(error)
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(error.retry_s if isinstance(error, RequestError) else RETRY_S)
    if status == 401:
        # A 401 must name the scheme (RFC 9110, section 11.6.1).
        headers["WWW-Authenticate"] = "Bearer"
    if status == 413:  # the rest of the body stays unread
        headers["Connection"] = "close"
    return json_response(error_data(error), status, headers)


def json_response(
    data: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Make a JSON response; lone surrogates from the request are replaced."""
    body = data if isinstance(data, bytes) else to_json(data)
    return Response(body, status, headers, "application/json")


def page_response(page: bytes) -> Response:
    """Make an HTML response; the page contains its content security policy."""
    return Response(page, 200, None, "text/html; charset=utf-8")
