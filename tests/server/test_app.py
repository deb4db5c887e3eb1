"""The endpoints by themselves: how requests become tasks, and errors become answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from opcast.common.errors import DeviceError, InternalError, OpcastError
from opcast.server.app import create_app
from opcast.server.metrics import JsonLines
from opcast.server.settings import ServerSettings

PROGRAM = {"device": "h100-sxm", "program": "module {}"}


class Tasks:
    """Stands in for the sandbox: keeps what it is asked, and gives one reply or error."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, object], bytes]] = []
        self.reply: tuple[int, bytes] | OpcastError = (200, b'{"latency_us": 1.0}')

    async def run(self, task: Mapping[str, object], payload: bytes) -> tuple[int, bytes]:
        self.asked.append((dict(task), payload))
        if isinstance(self.reply, OpcastError):
            raise self.reply
        return self.reply


class Client:
    """Asks an application in this process, without a server."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def get(self, path: str, **request: object) -> httpx.Response:
        return asyncio.run(self._ask("GET", path, **request))

    def post(self, path: str, **request: object) -> httpx.Response:
        return asyncio.run(self._ask("POST", path, **request))

    async def _ask(self, method: str, path: str, **request: object) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://opcast") as client:
            return await client.request(method, path, **request)


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def client(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client of an application whose models are never loaded."""
    app = create_app(ServerSettings(max_body_bytes=2000))
    service = app.state.service
    monkeypatch.setattr(service, "program_model", lambda name: name or "default")
    monkeypatch.setattr(service, "operator_model", lambda name: name or "default")
    monkeypatch.setattr(service, "check_device", lambda model, name: name)
    monkeypatch.setattr(service.sandbox, "run", tasks.run)
    yield Client(app)
    service.close()


def test_a_program_in_json_becomes_a_task(client: Client, tasks: Tasks) -> None:
    answer = client.post("/v1/predict/program", json={**PROGRAM, "lowering": "fused"})
    assert (answer.status_code, answer.json()) == (200, {"latency_us": 1.0})
    ((task, payload),) = tasks.asked
    assert payload == b"module {}"
    assert task == {
        "kind": "program",
        "model": "default",
        "device": "h100-sxm",
        "lowering": "fused",
        "fallback": "",
        "trip_count": None,
        "strict": False,
    }


@pytest.mark.parametrize("model", ["roofline", "compiler"])
def test_estimators_without_training_are_served(model: str, tasks: Tasks) -> None:
    app = create_app(ServerSettings(models=(model,)))
    service = app.state.service
    service.load()
    service.sandbox.run = tasks.run
    client = Client(app)
    (own,) = client.get("/v1/models").json()
    assert (own["name"], own["predicts"], own["families"]) == (model, "programs", [])
    assert client.post("/v1/predict/program", json=PROGRAM).status_code == 200
    # An operator's time would be that of the learned model.
    asked = {"device": "h100-sxm", "ops": ["linear m=64 n=64 k=64 dtype=bf16"]}
    refused = client.post("/v1/predict/kernels", json=asked)
    assert refused.status_code == 422 and "not single operators" in refused.json()["what"]
    service.close()


def test_an_upload_and_base64_are_the_same_task(client: Client, tasks: Tasks) -> None:
    data = {"content": b"\x00\xff", "headers": {"Content-Type": "application/octet-stream"}}
    client.post("/v1/predict/program", params={"device": "h100-sxm", "trip_count": 3}, **data)
    body = {"device": "h100-sxm", "program": "AP8=", "encoding": "base64", "trip_count": 3}
    client.post("/v1/predict/program", json=body)
    first, second = tasks.asked
    assert first == second and first[1] == b"\x00\xff" and first[0]["trip_count"] == 3


def test_a_report_is_a_page_unless_it_is_an_error(client: Client, tasks: Tasks) -> None:
    tasks.reply = 200, b"<!doctype html>"
    page = client.post("/v1/report", json=PROGRAM)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    tasks.reply = 422, b'{"error": "ProgramError"}'
    refused = client.post("/v1/report", json=PROGRAM)
    assert refused.status_code == 422 and refused.json()["error"] == "ProgramError"
    assert [task["kind"] for task, _ in tasks.asked] == ["report", "report"]


def test_a_step_becomes_a_task(client: Client, tasks: Tasks) -> None:
    body = {"workload": "llama", "cluster": "dgx-h100-x16", "model": "roofline"}
    assert client.post("/v1/simulate", json=body).status_code == 200
    ((task, payload),) = tasks.asked
    assert task["kind"] == "simulate" and task["model"] == "roofline"
    asked = json.loads(payload)
    assert asked["workload"] == "llama" and asked["cluster"] == "dgx-h100-x16"


def test_a_deployment_becomes_a_task_and_files_are_not_read(client: Client, tasks: Tasks) -> None:
    body = {"workload": "llama-3.1-8b", "cluster": "h100-sxm-x8", "rate": 4.0, "model": "roofline"}
    assert client.post("/v1/simulate-serving", json=body).status_code == 200
    ((task, payload),) = tasks.asked
    assert task["kind"] == "simulate-serving" and task["model"] == "roofline"
    asked = json.loads(payload)
    assert asked["rate"] == 4.0 and asked["prompt"] == "1024"
    refused = client.post("/v1/simulate-serving", json=body | {"cluster": "mine.yaml"})
    assert refused.status_code == 422 and "files" in refused.json()["what"]
    assert client.post("/v1/simulate-serving", json=body | {"prompt": "a/b"}).status_code == 422


def test_a_served_model_may_be_named_with_its_owner(client: Client, tasks: Tasks) -> None:
    body = {"workload": "Qwen/Qwen3-32B-FP8", "cluster": "h100-sxm-x2", "model": "roofline"}
    assert client.post("/v1/simulate-serving", json=body).status_code == 200
    assert json.loads(tasks.asked[0][1])["workload"] == "Qwen/Qwen3-32B-FP8"
    assert client.post("/v1/simulate-serving", json=body | {"prompt": 1000}).status_code == 200
    for path in ("../Qwen3-32B", "/etc/passwd", "a/b/c", "a/../b", "Qwen/", "./a"):
        refused = client.post("/v1/simulate-serving", json=body | {"workload": path})
        assert refused.status_code == 422


@pytest.mark.parametrize(
    ("error", "status"),
    [(InternalError("opcast fails at x.py:1"), 500), (DeviceError("none"), 404)],
)
def test_errors_have_a_status_and_one_form(
    client: Client, tasks: Tasks, error: OpcastError, status: int
) -> None:
    tasks.reply = error
    answer = client.post("/v1/predict/program", json=PROGRAM)
    assert answer.status_code == status
    assert answer.json() == {
        "error": type(error).__name__,
        "what": error.what,
        "where": "",
        "hint": "",
    }


@pytest.mark.parametrize(
    ("request_", "status", "where"),
    [
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, ""),
        ({"content": b"{}", "headers": {"Content-Type": "text/html"}}, 415, "Content-Type"),
        ({"json": PROGRAM, "params": {"device": "l4"}}, 400, "query 'device'"),
        ({"json": {**PROGRAM, "program": "?", "encoding": "base64"}}, 400, "program"),
        ({"json": {**PROGRAM, "lowering": "llvm"}}, 422, "lowering"),
        ({"json": {**PROGRAM, "device": "../x"}}, 422, "device"),
        ({"json": {**PROGRAM, "program": "x" * 3000}}, 413, "body"),
    ],
)
def test_malformed_requests_become_no_task(
    client: Client, tasks: Tasks, request_: dict, status: int, where: str
) -> None:
    answer = client.post("/v1/predict/program", **request_)
    assert answer.status_code == status and where in answer.json()["where"]
    assert tasks.asked == []


def test_work_ends_when_its_client_is_gone(
    client: Client, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def never(task: Mapping[str, object], payload: bytes) -> tuple[int, bytes]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        raise AssertionError

    monkeypatch.setattr(client.app.state.service.sandbox, "run", never)
    body = json.dumps(PROGRAM).encode()
    incoming = [
        {"type": "http.request", "body": body, "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Mapping[str, object]:
        return incoming.pop(0)

    sent: list[Mapping[str, object]] = []

    async def send(message: Mapping[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/predict/program", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip

    async def ask() -> None:
        await asyncio.wait_for(client.app(scope, receive, send), 10)
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert ended == ["cancelled"] and sent[0]["status"] == 499


def test_requests_have_ids_that_clients_may_give(client: Client) -> None:
    for given, kept in (("build-7.a", True), ("two lines\\n", False), ("x" * 65, False)):
        answer = client.get("/health", headers={"X-Request-ID": given})
        found = answer.headers["X-Request-ID"]
        assert (found == given) == kept and re.fullmatch(r"[\w.-]{1,64}", found)


def test_requests_are_logged_as_lines_of_json(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(ServerSettings(log_requests=True))
    caplog.handler.setFormatter(JsonLines())
    with caplog.at_level(logging.INFO, "opcast.server"):
        Client(app).get("/none", headers={"X-Request-ID": "r1"})
        Client(app).get("/health")  # asked every few seconds by load balancers: not logged
    app.state.service.close()
    (line,) = map(json.loads, caplog.text.splitlines())
    assert (line["request"], line["path"], line["status"]) == ("r1", "other", 404)
    assert line["level"] == "info" and line["seconds"] >= 0


def test_a_page_can_be_fetched_again_until_it_makes_room(client: Client, tasks: Tasks) -> None:
    tasks.reply = 200, b"<p>page</p>"
    place = client.post("/v1/report", json=PROGRAM).headers["Content-Location"]
    assert client.get(place).text == "<p>page</p>"
    answer = client.get("/v1/report/0123")
    assert answer.status_code == 404 and "no such page in the cache" in answer.json()["what"]


def test_unknown_paths_and_methods_are_refused_in_the_same_form(client: Client) -> None:
    for answer, status in ((client.get("/none"), 404), (client.get("/v1/report"), 405)):
        assert answer.status_code == status
        assert set(answer.json()) == {"error", "what", "where", "hint"}


def test_the_document_names_every_endpoint(client: Client) -> None:
    document = json.loads(client.get("/openapi.json").text)
    assert set(document["paths"]) == {
        "/health",
        "/metrics",
        "/ready",
        "/v1/devices",
        "/v1/models",
        "/v1/predict/kernels",
        "/v1/predict/program",
        "/v1/report",
        "/v1/plan-serving",
        "/v1/report/{digest}",
        "/v1/simulate",
        "/v1/simulate-serving",
        "/v1/sweep",
        "/v1/what-if",
    }
    assert "500" in document["paths"]["/v1/predict/program"]["post"]["responses"]


@pytest.mark.parametrize(
    "query",
    [
        # What a client sends that fills in each default.
        {"lowering": "auto", "fallback": "", "strict": "false"},
        {"device": "h100-sxm", "lowering": "fused"},
    ],
)
def test_json_bodies_may_come_with_a_query_that_says_no_more(
    client: Client, tasks: Tasks, query: dict[str, str]
) -> None:
    body = {**PROGRAM, "lowering": "fused"}
    answer = client.post("/v1/predict/program", json=body, params=query)
    assert answer.status_code == 200, answer.text
    assert tasks.asked[0][0]["lowering"] == "fused"


def test_an_empty_text_of_a_query_is_no_name(client: Client) -> None:
    answer = client.post("/v1/predict/program", json=PROGRAM, params={"model": ""})
    assert answer.status_code == 400 and "query 'model'" in answer.text


def test_the_document_suits_generated_clients(client: Client) -> None:
    text = client.get("/openapi.json").text
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    operations = {path: op for path, ops in document["paths"].items() for op in ops.values()}
    assert {op["operationId"] for op in operations.values()} == {
        "health", "ready", "metrics", "devices", "models",
        "predict_kernels", "predict_program", "report", "kept_report",
        "simulate", "simulate_serving", "what_if", "sweep", "plan_serving",
    }  # fmt: skip
    # Unions of texts and constants are what generated clients cannot build.
    serving = schemas["SimulateServingQuery"]["properties"]
    assert all("anyOf" not in serving[name] for name in ("device", "cluster"))
    # 0 is the default, which such clients send: it has to be allowed, and says what it means.
    assert (serving["rate"]["minimum"], serving["rate"]["default"]) == (0, 0.0)
    assert "0 for none" in serving["rate"]["description"]
    assert "sent at once" in serving["rate"]["description"]
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in schemas
    for path, answer in (
        ("predict/program", "ProgramAnswer"),
        ("simulate", "StepAnswer"),
        ("simulate-serving", "ServingAnswer"),
        ("sweep", "SweepAnswer"),
        ("plan-serving", "SearchAnswer"),
    ):
        content = operations[f"/v1/{path}"]["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{answer}"}
    assert {"latency_us", "lo_us", "hi_us", "kernels"} <= set(
        schemas["ProgramAnswer"]["properties"]
    )
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    # No token is asked of this server, nor ever for /health.
    assert {} in document["security"] and operations["/health"]["security"] == []
    # What has a default here would be sent beside every JSON body.
    options = operations["/v1/predict/program"]["parameters"]
    assert options and not any("default" in o["schema"] or "anyOf" in o["schema"] for o in options)


def test_counters_and_the_process_are_in_the_metrics(client: Client) -> None:
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    for name in ("opcast_cache_hits", "opcast_cache_misses", "opcast_crashes"):
        assert families[name].type == "counter"
        assert [s.name for s in families[name].samples] == [f"{name}_total"]
    assert families["opcast_cache_entries"].type == "gauge"
    assert families["process_resident_memory_bytes"].samples[0].value > 2**20
