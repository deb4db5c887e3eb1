"""What browsers get: the page at ``/``, and what FastAPI cannot derive of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from fastapi import FastAPI
from pydantic import BaseModel

from .. import __version__
from ..common.types import JsonObject
from ..datagen.zoo import all_families
from ..datagen.zoo.registry import COMMON_CHOICES
from ..features.devices.catalogue import find_device, in_catalogue
from ..predict.page.assemble import Page, assemble, short
from ..simulate.clusters.catalogue import cluster_names
from ..simulate.serving.policies import frameworks
from ..simulate.step.presets import find_preset, preset_names
from . import answers, cluster_schemas, schemas
from .service import Service

_REF = "#/components/schemas/{model}"
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_WHY = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    403: "The server does not allow compiling the program, or loading it with PyTorch.",
    404: "The device or model is unknown.",
    413: "The body, or the number of kernels, exceeds the limit.",
    415: "The body has another content type.",
    422: "The request, program, kernel or plan is invalid; hint describes a remedy.",
    500: "opcast fails on a valid program: please report it.",
    503: "Too many requests are in flight, or the process for programs is not running.",
    504: "The request exceeds the time limit of the server.",
}

Responses = dict[int | str, dict[str, object]]
_SCRIPTS = (
    "breakdown.js",
    "ask.js",
    "charts.js",
    "plans.js",
    "answers.js",
    "change.js",
    "explore.js",
)
#: Zoo workloads of the named models, with the settings that the models' sizes do not determine.
_OF_MODELS = {
    "llama": {"batch": 1, "dtype": "bf16", "scan_layers": "true"},
    "moe": {"batch": 1, "dtype": "bf16"},
}
_DENSE = {"layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "seq"}
_SIZES = {"llama": _DENSE, "moe": _DENSE | {"experts", "top_k"}}
_TITLE = "opcast: how long will it take?"


def _errors(*statuses: int) -> Responses:
    responses: Responses = {}
    for status in statuses:
        responses[status] = {"model": answers.ErrorAnswer, "description": _WHY[status]}
        if status == 503:
            responses[status]["headers"] = _RETRY
    return responses


def _ref(name: str) -> JsonObject:
    return {"$ref": _REF.format(model=name)}


def _body(schema: JsonObject, **others: JsonObject) -> dict[str, object]:
    content = {"application/json": {"schema": schema}, **others}
    return {"requestBody": {"required": True, "content": content}}


# Statuses of each group of endpoints; checked by tests/bench/fuzz_server.py.
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
    """Options of an upload, given in the query."""
    return [
        {
            "name": name,
            "in": "query",
            # Not even ``device``, because requests with a JSON body have no query.
            "required": False,
            "schema": _of_query(own),
            "description": f"For uploads only. {own.get('description', '')}".strip(),
        }
        for name, own in schemas.ProgramOptions.model_json_schema()["properties"].items()
    ]


def _of_query(schema: JsonObject) -> JsonObject:
    """Schema of an option in a query: without null, and without a default.

    Generated clients send fields that have a default with every request.
    """
    some: JsonObject = next((s for s in schema.get("anyOf", ()) if s != {"type": "null"}), {})
    return {k: v for k, v in schema.items() if k not in ("anyOf", "default", "description")} | some


_PROGRAM_BODY = {
    "parameters": _parameters(),
    **_body(_ref("ProgramQuery"), **{"application/octet-stream": _UPLOAD, "text/plain": _UPLOAD}),
}
_PAGE: Responses = {
    200: {"description": "A self-contained HTML page.", "content": {"text/html": {}}}
}
KEPT = _PAGE | _errors(401, 404, 413, 503, 504)
#: Request and response of each kind of task, which FastAPI does not see.
_TASKS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "predict/program": (schemas.ProgramQuery, answers.ProgramAnswer),
    "what-if": (schemas.WhatIfQuery, answers.WhatIfAnswer),
    "simulate": (cluster_schemas.SimulateQuery, answers.StepAnswer),
    "simulate-serving": (cluster_schemas.SimulateServingQuery, answers.ServingAnswer),
    "sweep": (cluster_schemas.SweepQuery, answers.SweepAnswer),
    "plan-serving": (cluster_schemas.PlanServingQuery, answers.SearchAnswer),
}
_COMPILED = _errors(403)


def _answer(model: type[BaseModel], about: str) -> Responses:
    content = {"application/json": {"schema": _ref(model.__name__)}}
    return {200: {"description": about, "content": content}, **_ASKED}


def _posts() -> Iterator[tuple[str, tuple[Responses, dict[str, object]]]]:
    """Yield path, responses and request body of each endpoint that predicts."""
    kernels = _answer(answers.KernelAnswers, "Predictions by column.")
    yield "/v1/predict/kernels", (kernels, _body({"oneOf": [_ref(name) for name in _FORMS]}))
    yield "/v1/report", (_PAGE | _ASKED | _COMPILED, _PROGRAM_BODY)
    described = {
        "predict/program": "Output of `opcast predict --json`.",
        "what-if": "Output of `opcast predict --json` without kernels, for each point.",
        "sweep": "Plans as written by `opcast sweep`.",
    }
    for path, (query, answer) in _TASKS.items():
        responses = _answer(answer, described.get(path, f"Output of `opcast {path} --json`."))
        body = _PROGRAM_BODY if path == "predict/program" else _body(_ref(query.__name__))
        compiled = _COMPILED if path in ("predict/program", "what-if") else {}
        yield f"/v1/{path}", (responses | compiled, body)


POSTS = dict(_posts())


def extend(app: FastAPI, *, secured: bool) -> None:
    """Add the request and response schemas and the token to the document."""
    plain = app.openapi

    def openapi() -> dict[str, object]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = plain()
        parts = document.setdefault("components", {}).setdefault("schemas", {})
        parts |= schemas.QUERY.json_schema(ref_template=_REF)["$defs"]
        bodies: list[type[BaseModel]] = [
            answers.KernelAnswers,
            *chain.from_iterable(_TASKS.values()),
        ]
        for body in bodies:
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


def explorer_page(service: Service) -> str:
    """Make the page with the server's devices, models and workloads.

    Args:
        service: State of the server.
    """
    data = {
        "version": __version__,
        "devices": [_device(entry) for entry in service.devices()],
        "zoo": {name: family.defaults for name, family in all_families().items()},
        "dtypes": list(COMMON_CHOICES["dtype"]),
        "presets": _presets(),
        "models": list(service.predictors),
        "workloads": preset_names(),
        "clusters": cluster_names(),
        "frameworks": sorted(frameworks()),
        "compiles": service.settings.allow_compile,
        "secured": bool(service.settings.token),
        "example": schemas.PROGRAM,
    }
    return assemble(Page(_TITLE, data, _SCRIPTS, asks=True))


def _device(entry: JsonObject) -> dict[str, object]:
    """A device with the figures that the page can change, by the keys of a device file."""
    # Only devices in the catalogue can be the base of a modified device.
    spec = find_device(entry["name"]) if in_catalogue(entry["name"]) else None
    figures = {
        "hbm_bandwidth_gbps": spec.bandwidth / 1e9 if spec else 0.0,
        "boost_mhz": spec.clock_hz / 1e6 if spec else 0.0,
        "power_w": spec.power_w if spec else 0.0,
    }
    return {name: entry[name] for name in ("name", "platform", "learned")} | {
        name: short(value) for name, value in figures.items() if value
    }


def _presets() -> dict[str, dict[str, str]]:
    """Named models that a zoo workload can represent, with the workload and its settings."""
    found = {}
    for name in preset_names():
        preset = find_preset(name)
        sizes = preset.settings if preset else {}
        for family, fixed in _OF_MODELS.items():
            if set(sizes) == _SIZES[family]:
                settings = {**sizes, **fixed}
                text = ",".join(f"{key}={value}" for key, value in settings.items())
                found[name] = {"workload": family, "settings": text}
    return found
