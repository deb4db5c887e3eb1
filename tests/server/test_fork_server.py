"""What becomes of a task and its process, without the models of a whole fork server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

import opcast
from opcast.common.errors import DeviceError, InternalError, PlanError
from opcast.server import fork_server
from opcast.server.fork_server import REPLY, TASK

#: A child as the fork server forks it, whose task sleeps for the seconds in its payload.
CHILD = """
import os, socket, sys, time
from opcast.server import fork_server
def answer(predictors, head, payload):
    print("begun", flush=True)
    time.sleep(float(payload))
    return 200, b"done"
fork_server.answer = answer
fork_server._child(socket.socket(fileno=int(sys.argv[1])), {}, 0, os.getppid())
"""


def begun(seconds: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-c", CHILD, str(number)]
        child = subprocess.Popen(command, pass_fds=[number], stdout=subprocess.PIPE, text=True)
    head, payload = json.dumps({"timeout_s": 60}).encode(), seconds.encode()
    ours.sendall(TASK.pack(len(head), len(payload)) + head + payload)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    return ours, child


def test_a_task_ends_when_nobody_waits_for_it() -> None:
    ours, child = begun("50")
    with child:
        try:
            assert child.poll() is None
            ours.close()
            # Long before its own 50 s, or the 60 s after which it is killed.
            child.wait(20)
        finally:
            child.kill()


def test_a_task_that_is_waited_for_is_answered() -> None:
    ours, child = begun("0.2")
    with child, ours, ours.makefile("rb") as answers:
        status, length = REPLY.unpack(answers.read(REPLY.size))
        assert (status, answers.read(length)) == (200, b"done")
        assert child.wait(20) == 0


class Predictors(dict):
    """Has no model; whoever asks for one meets the given error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __missing__(self, name):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "what"),
    [
        (DeviceError("no such device"), 404, "no such device"),
        (PlanError("too many"), 422, "too many"),
        (InternalError("opcast fails at x.py:1"), 500, "opcast fails at x.py:1"),
        (MemoryError(), 422, "more memory"),
        (RecursionError(), 422, "too deeply"),
        (IndexError("of ours"), 422, "IndexError: of ours"),
    ],
)
def test_every_error_is_an_answer(error, status, what):
    task = {"kind": "program", "model": "default", "trip_count": None}
    found, body = fork_server.answer(Predictors(error), task, b"")
    data = json.loads(body)
    assert found == status and what in data["what"] and set(data) >= {"error", "where", "hint"}


def test_json_has_no_infinity(monkeypatch):
    monkeypatch.setitem(fork_server._KINDS, "program", lambda *_: {"latency_us": float("inf")})
    status, body = fork_server.answer({}, {"kind": "program"}, b"")
    assert status == 422 and b"infinite figures" in body


def test_files_of_pytorch_are_loaded_where_the_operator_allows_it(tmp_path):
    torch = pytest.importorskip("torch")
    file = tmp_path / "m.pt2"
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(8, 64),)), file)
    predictors = {"default": opcast.load()}
    task = {
        "kind": "program", "model": "default", "device": "h100-sxm", "lowering": "fused",
        "fallback": "", "trip_count": None, "strict": False, "allow_compile": False,
        "timeout_s": 60.0, "memory_bytes": 2**32,
    }  # fmt: skip
    status, body = fork_server.answer(predictors, task, file.read_bytes())
    refused = json.loads(body)
    assert status == 403 and "may run code" in refused["what"]
    assert "opcast serve --allow-torch" in refused["hint"]
    status, body = fork_server.answer(predictors, task | {"allow_torch": True}, file.read_bytes())
    own = opcast.predict(file, device="h100-sxm", lowering="fused")
    assert status == 200
    assert json.loads(body)["latency_us"] == pytest.approx(own.latency_us, rel=1e-9)
