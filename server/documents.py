"""Parts of the OpenAPI document that FastAPI does not derive from the code."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel

from ..common.types import JsonObject
from . import answers, cluster_schemas, schemas

_REF = "#/components/schemas/{model}"
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_WHY = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    403: "The program would have to be compiled, or loaded by PyTorch, which was not allowed.",
    404: "The device or model is not known.",
    413: "The body, or the number of kernels, exceeds the limit.",
    415: "The body has another content type.",
    422: "The request, program, kernel or plan cannot be used; hint states what to do.",
    500: "opcast fails on a valid program: please report it.",
    503: "Too many requests are at work, or the process for programs is gone.",
    504: "It takes longer than the server allows.",
}

Responses = dict[int | str, dict[str, object]]


def _errors(*statuses: int) -> Responses:
    responses: Responses = {}
    for status in statuses:
        responses[status] = {"model": answers.ErrorAnswer, "description": _WHY[status]}
        if status == 503:
            responses[status]["headers"] = _RETRY
    return responses


def _ref(name: str) -> JsonObject:
    return {"$ref": _REF.format(model=name)}


def _answer(model: type[BaseModel], about: str) -> Responses:
    schema = _ref(model.__name__)
    return {200: {"description": about, "content": {"application/json": {"schema": schema}}}}


def _body(schema: JsonObject, **others: JsonObject) -> dict[str, object]:
    content = {"application/json": {"schema": schema}, **others}
    return {"requestBody": {"required": True, "content": content}}


# Statuses of each group of endpoints; tests/bench/fuzz_server.py holds the server to them.
FREE = _errors(401)
READY = _errors(401, 503)
LIMITED = _errors(401, 413, 503, 504)
METRICS: Responses = {
    200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
    **FREE,
}
_ASKED = _errors(400, 401, 404, 413, 415, 422, 500, 503, 504)
_UPLOAD = {"schema": {"type": "string", "format": "binary"}}
_FORMS = ("OpsQuery", "ColumnsQuery", "KernelsQuery")


def _parameters() -> list[dict[str, object]]:
    """Options of an upload, which stand in the query."""
    return [
        {
            "name": name,
            "in": "query",
            # Requests with a JSON body have no query, so even ``device`` is optional at this level.
            "required": False,
            "schema": _of_query(own),
            "description": f"Of an upload only. {own.get('description', '')}".strip(),
        }
        for name, own in schemas.ProgramOptions.model_json_schema()["properties"].items()
    ]


def _of_query(schema: JsonObject) -> JsonObject:
    """Schema of an option in a query, which has no null and need not be sent by default.

    Generated clients send every field that has a default with every request.
    """
    some: JsonObject = next((s for s in schema.get("anyOf", ()) if s != {"type": "null"}), {})
    return {k: v for k, v in schema.items() if k not in ("anyOf", "default", "description")} | some


_PROGRAM_BODY = {
    "parameters": _parameters(),
    **_body(_ref("ProgramQuery"), **{"application/octet-stream": _UPLOAD, "text/plain": _UPLOAD}),
}
_PAGE: Responses = {
    200: {"description": "A page that needs nothing else.", "content": {"text/html": {}}}
}
KEPT = _PAGE | _errors(401, 404, 413, 503, 504)
#: Responses and body of each endpoint that predicts.
POSTS = {
    "/v1/predict/kernels": (
        _answer(answers.KernelAnswers, "Predictions by column.") | _ASKED,
        _body({"oneOf": [_ref(name) for name in _FORMS]}),
    ),
    "/v1/predict/program": (
        _answer(answers.ProgramAnswer, "As `opcast predict --json` prints it.")
        | _ASKED
        | _errors(403),
        _PROGRAM_BODY,
    ),
    "/v1/report": (_PAGE | _ASKED | _errors(403), _PROGRAM_BODY),
    "/v1/what-if": (
        _answer(answers.WhatIfAnswer, "As `opcast predict --json` prints it, without kernels.")
        | _ASKED
        | _errors(403),
        _body(_ref("WhatIfQuery")),
    ),
    "/v1/simulate": (
        _answer(answers.StepAnswer, "As `opcast simulate --json` prints it.") | _ASKED,
        _body(_ref("SimulateQuery")),
    ),
    "/v1/sweep": (
        _answer(answers.SweepAnswer, "Plans as `opcast sweep` writes them.") | _ASKED,
        _body(_ref("SweepQuery")),
    ),
    "/v1/plan-serving": (
        _answer(answers.SearchAnswer, "As `opcast plan-serving --json` prints it.") | _ASKED,
        _body(_ref("PlanServingQuery")),
    ),
    "/v1/simulate-serving": (
        _answer(answers.ServingAnswer, "As `opcast simulate-serving --json` prints it.") | _ASKED,
        _body(_ref("SimulateServingQuery")),
    ),
}


def extend(app: FastAPI, *, secured: bool) -> None:
    """Add the schemas of bodies, and the token, to the document."""
    plain = app.openapi

    def openapi() -> dict[str, object]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = plain()
        parts = document.setdefault("components", {}).setdefault("schemas", {})
        parts |= schemas.QUERY.json_schema(ref_template=_REF)["$defs"]
        for body in _BODIES:
            schema = body.model_json_schema(ref_template=_REF)
            parts |= schema.pop("$defs", {})
            parts[body.__name__] = schema
        document["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": "If one is set."}
        }
        # An empty requirement makes the token optional.
        document["security"] = [{"token": []}] if secured else [{}, {"token": []}]
        document["paths"]["/health"]["get"]["security"] = []
        return document

    # FastAPI's documented way to extend the document.
    app.openapi = openapi  # type: ignore[method-assign]


# Bodies are read by hand, so FastAPI does not see their schemas.
_BODIES = (
    schemas.ProgramQuery,
    schemas.WhatIfQuery,
    cluster_schemas.SimulateQuery,
    cluster_schemas.SimulateServingQuery,
    cluster_schemas.SweepQuery,
    cluster_schemas.PlanServingQuery,
    answers.KernelAnswers,
    answers.ProgramAnswer,
    answers.WhatIfAnswer,
    answers.StepAnswer,
    answers.ServingAnswer,
    answers.SweepAnswer,
    answers.SearchAnswer,
)
