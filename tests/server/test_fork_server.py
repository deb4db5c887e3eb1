"""What becomes of a task's process, without the models of a whole fork server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

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
