"""Tools of agents, through the client of the official package, in this process."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio
import pytest

from opcast.predict.library import latency

from ..support.commands import opcast

pytest.importorskip("mcp")
from mcp import Client

from opcast.server.agent import make_server

OP = "linear m=4096 n=4096 k=4096 dtype=bf16"
STEP = {"workload": "llama-3-8b", "cluster": "dgx-h100-x16", "settings": {"batch": 64, "seq": 4096}}


def ask(work: Callable[[Client], Awaitable[object]]) -> object:
    async def run() -> object:
        async with Client(make_server()) as client:
            return await work(client)

    return anyio.run(run)


def call(name: str, arguments: dict[str, object]) -> dict:
    """The answer of a tool; an error's text under ``error``."""
    found = ask(lambda client: client.call_tool(name, arguments))
    text = found.content[0].text
    return {"error": text} if found.is_error else json.loads(text)


def test_six_tools_are_described_with_their_types():
    tools = {tool.name: tool for tool in ask(lambda client: client.list_tools()).tools}
    assert set(tools) == {
        "predict_program", "predict_operator", "predict_step", "predict_serving", "find_plan",
        "explain",
    }  # fmt: skip
    for tool in tools.values():
        assert len(tool.description) > 40 and tool.input_schema["properties"]
    program = tools["predict_program"].input_schema
    assert program["required"] == ["program", "device"]
    assert program["properties"]["lowering"]["enum"] == ["auto", "xla", "fused", "op"]
    step = json.dumps(tools["predict_step"].input_schema)
    assert "parallel plan" in step.lower() and "cluster" in step
    # Plans are texts here.
    assert "YAML file" not in step


def test_documents_list_what_may_be_asked():
    def read(name: str) -> str:
        found = ask(lambda client: client.read_resource(f"opcast://{name}"))
        return found.contents[0].text

    assert "h100-sxm" in read("devices").splitlines()
    assert "llama-3-8b" in read("workloads").splitlines()
    assert any(line.startswith("graph/linear: ") for line in read("operators").splitlines())


def test_answers_are_those_of_the_commands(tmp_path):
    found = call("predict_operator", {"op": OP, "device": "h100-sxm"})
    assert found["latency_us"] == pytest.approx(latency(OP, "h100-sxm").latency_us)
    file = tmp_path / "mlp.mlir"
    assert opcast("zoo", "export", "mlp", "--set", "batch=64", "--out", file).returncode == 0
    asked = {"program": str(file), "device": "h100-sxm", "lowering": "fused", "top": 3}
    found = call("predict_program", asked)
    words = ("--device", "h100-sxm", "--lowering", "fused")
    same = json.loads(opcast("predict", file, *words, "--json").stdout)
    assert found["latency_us"] == pytest.approx(same["latency_us"])
    assert len(found["kernels"]) == 3 and found["kernel_count"] == len(same["kernels"])
    explained = call("explain", {**asked, "top": 1})
    assert explained["latency_us"] == pytest.approx(same["latency_us"])
    assert "contributions" in json.dumps(call("explain", {"op": OP, "device": "h100-sxm"}))


def test_steps_plans_and_serving():
    step = call("predict_step", {"query": {**STEP, "plan": "tp=8,dp=2"}})
    assert step["step_us"] > 0 and step["plan"].startswith("dp=2")
    plans = call("find_plan", {"query": {**STEP, "grid": "tp=4/8,pp=1"}})
    assert plans["judged"] >= 2 and plans["front"]
    load = {"workload": "llama-3-8b", "device": "h100-sxm", "concurrency": 4, "count": 20}
    served = call("predict_serving", {"query": {**load, "prompt": "64", "output": "8"}})
    assert "tpot" in json.dumps(served)


def test_errors_say_what_to_do(monkeypatch):
    wrong = call("predict_operator", {"op": "nonsense m=1", "device": "h100-sxm"})
    assert "no operator" in wrong["error"]
    assert "no such file" in call("predict_program", {"program": "x", "device": "a30"})["error"]
    assert "either" in call("explain", {"device": "a30"})["error"]
    assert "device" in call("predict_operator", {"op": OP})["error"]
    other = call("predict_operator", {"op": OP, "device": "a30", "lowring": "op"})
    assert "lowring" in other["error"] and "not permitted" in other["error"]

    def broken(*given: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("opcast.predict.operator.predict.predict_op", broken)
    lost = call("predict_operator", {"op": OP, "device": "a30"})["error"]
    assert "a fault of opcast: ZeroDivisionError: by zero at test_agent.py" in lost
