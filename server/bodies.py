"""Read request bodies: JSON of a schema, or a program uploaded as is."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from . import schemas
from .errors import RequestError
from .service import Service

T = TypeVar("T")
P = TypeVar("P", bound=schemas.ProgramQuery)
_JSON = "application/json"
# Content types of an uploaded program: its bytes are the body, its options are in the query.
_RAW = ("application/octet-stream", "text/plain")
# Built once: compiling a pydantic validator takes milliseconds, running it microseconds.
PROGRAM = TypeAdapter(schemas.ProgramQuery)
WHAT_IF = TypeAdapter(schemas.WhatIfQuery)
_UPLOAD = TypeAdapter(schemas.ProgramOptions)


async def program_task(
    request: Request, service: Service, kind: TypeAdapter[P]
) -> tuple[dict[str, object], bytes]:
    """Read a request about a program.

    Args:
        request: A request with a JSON body, or an upload if ``kind`` is :data:`PROGRAM`.
        service: Models and devices of the server.
        kind: Schema of a JSON body.

    Returns:
        The task for the sandbox, and the program.

    Raises:
        RequestError: The body has another content type or does not fit the schema.
        OpcastError: There is no such model or device.
    """
    if kind is PROGRAM and _media_type(request) in _RAW:
        for name in request.query_params:
            if len(request.query_params.getlist(name)) > 1:
                raise RequestError(
                    400, "given more than once", where=f"query {name[:80]!r}", hint="one each"
                )
        options = _checked(_UPLOAD, dict(request.query_params))
        payload = await request.body()
    else:
        query = await body(request, kind)
        _no_other(request.query_params, query)
        options, payload = query, _payload(query)
    model = service.program_model(options.model)
    device = service.check_device(model, options.device)
    # The program is passed separately, because it may be megabytes of binary data.
    left_out = {"program", "encoding"}
    if not getattr(options, "workload", ""):
        left_out |= {"workload", "settings"}
    kept = options.model_dump(exclude=left_out)
    return kept | {"model": model, "device": device}, payload


async def body(request: Request, kind: TypeAdapter[T]) -> T:
    """Parse the body as JSON of a schema.

    Raises:
        RequestError: The body has another content type or does not fit the schema.
    """
    media = _media_type(request)
    if media != _JSON:
        raise RequestError(
            415,
            f"a body of type {media[:80]!r}",
            where="header Content-Type",
            hint=f"send {_JSON}"
            + (f", or a program as is as {' or '.join(_RAW)}" if kind is PROGRAM else ""),
        )
    try:
        return kind.validate_json(await request.body())
    except ValidationError as error:
        raise malformed(error.errors(include_url=False)) from None


def _checked(kind: TypeAdapter[T], values: Mapping[str, object]) -> T:
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        raise malformed(error.errors(include_url=False)) from None


def _no_other(given: Mapping[str, str], body: schemas.ProgramQuery) -> None:
    """Refuse a query string that contradicts the body.

    Clients generated from the document may repeat options there, or send their defaults.
    """
    fields = schemas.ProgramOptions.model_fields
    for name, text in given.items():
        same: tuple[str, ...] = ()
        if name in fields:
            own = (fields[name].default, getattr(body, name))
            # null has no text form: the schema does not allow empty names or counts.
            same = tuple(_query_text(value) for value in own if value is not None)
        if text not in same:
            raise RequestError(
                400,
                "the options of a JSON request belong in its body",
                where=f"query {name[:80]!r}",
                hint="only uploads have options in the query",
            )


def _query_text(value: object) -> str:
    """Format an option's value as in a query string."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _payload(query: schemas.ProgramQuery) -> bytes:
    if bool(query.program) == bool(query.workload):
        raise RequestError(422, "give either a program or a workload", where="program")
    points = getattr(query, "points", ())
    if query.program and (query.settings or any(own.settings for own in points)):
        raise RequestError(
            422, "a program has no settings", where="settings", hint="only workloads have settings"
        )
    if query.encoding == "text":
        # JSON may contain lone surrogates, which UTF-8 cannot encode.
        return query.program.encode("utf-8", "replace")
    try:
        # By default, characters outside the base64 alphabet would be skipped silently.
        return base64.b64decode(query.program, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "the program is not base64", where="program") from None


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def malformed(errors: Any) -> RequestError:
    """Convert the first validation error, with its location."""
    first = errors[0]
    place = list(first.get("loc", ()))
    if len(place) > 1 and place[0] in ("ops", "columns", "kernels"):  # tag of the union
        place = place[1:]
    # Truncated, because keys and values come from the request.
    where = ".".join(map(str, place))[:200]
    status = 400 if first["type"] == "json_invalid" else 422
    what = first["msg"]
    if first["type"] == "string_pattern_mismatch":
        what = f"not {schemas.ALLOWED[first['ctx']['pattern']]}"
    own = next((schemas.EXAMPLES[name] for name in place if name in schemas.EXAMPLES), "")
    hint = f"such as {own}; see /docs" if own else "see /docs"
    return RequestError(status, what[:300], where=where, hint=hint)
