"""Worker processes: messages, deadlines, crashes, limits, and an end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from opcast.common import child_process, worker_process
from opcast.common.worker_process import (
    WorkerEnded,
    WorkerProcess,
    WorkerTimeout,
    module_command,
    worker_environment,
)

from ..support.processes import runs, wait_for_end

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has the signal")
#: A worker that answers each message with itself reversed, unless a test says otherwise.
ECHO = """
import os, signal, subprocess, sys, time
from opcast.common.child_process import Channel
channel = Channel()
for message in channel:
    {line}
    channel.send(message[::-1])
"""


def worker(line: str = "pass", memory_bytes: int = 0) -> WorkerProcess:
    return WorkerProcess([sys.executable, "-c", ECHO.format(line=line)], memory_bytes=memory_bytes)


def test_messages_of_any_size_come_back_in_order() -> None:
    messages = [b"", b"ab", bytes(range(256)) * 4096]
    with worker() as echo:
        for message in messages:
            echo.send(message, 60)
        assert [echo.receive(60) for _ in messages] == [m[::-1] for m in messages]


def test_neither_side_blocks_while_both_send_more_than_a_pipe_holds() -> None:
    with worker() as echo:
        for _ in range(8):
            echo.send(b"x" * 500_000, 60)
        assert all(len(echo.receive(60)) == 500_000 for _ in range(8))


def test_what_a_library_prints_does_not_disturb_the_messages() -> None:
    with worker("os.write(1, b'library says'); print('so')") as echo:
        echo.send(b"ab", 60)
        assert echo.receive(60) == b"ba"
        assert "library says" in echo.errors()


@pytest.mark.parametrize(
    ("line", "status", "how", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, "signal SIGSEGV", ""),
        ("sys.exit('no more')", 1, "exit code 1", "no more"),
        ("raise ValueError('x' * 400)", 1, "exit code 1", "ValueError: xxx"),
    ],
)
def test_how_a_worker_ended(line: str, status: int, how: str, last: str) -> None:
    with worker(line) as echo:
        echo.send(b"a", 60)
        with pytest.raises(WorkerEnded):
            echo.receive(60)
        assert echo.ending() == (status, how)
        assert echo.last_error(300).startswith(last) and len(echo.last_error(300)) <= 300


def test_a_worker_that_is_gone_takes_no_message() -> None:
    with worker("sys.exit(3)") as echo:
        echo.send(b"a", 60)
        assert echo.ending() == (3, "exit code 3")
        with pytest.raises(WorkerEnded):
            echo.send(b"a", 60)


@pytest.mark.parametrize("code", ["time.sleep(99)", "kept = Channel(); time.sleep(99)"])
def test_deadlines_hold_for_both_directions(code: str) -> None:
    code = f"import time; from opcast.common.child_process import Channel; {code}"
    with WorkerProcess([sys.executable, "-c", code]) as sleeps:
        with pytest.raises(WorkerTimeout):
            sleeps.receive(0.1)
        with pytest.raises(WorkerTimeout):
            sleeps.send(b"x" * 1_000_000, 0.1)
        assert sleeps.status() is None
    assert sleeps.status() == -signal.SIGKILL


def test_a_worker_that_closes_its_output_and_stays_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "_END_S", 0.1)
    with WorkerProcess(
        [sys.executable, "-c", "import os, time; os.close(1); time.sleep(99)"]
    ) as own:
        with pytest.raises(WorkerEnded):
            own.receive(60)
        assert own.ending() == (-signal.SIGKILL, "signal SIGKILL")


@linux
def test_memory_is_limited() -> None:
    with worker("bytearray(int(message))", memory_bytes=2**30) as echo:
        echo.send(b"%d" % 2**20, 60)
        echo.receive(60)
        echo.send(b"%d" % 2**31, 60)
        with pytest.raises(WorkerEnded):
            echo.receive(60)
        assert echo.last_error() == "MemoryError"


@linux
def test_stopping_ends_what_the_worker_started() -> None:
    line = "own = subprocess.Popen(['sleep', '99']); message = str(own.pid).encode()[::-1]"
    with worker(line) as echo:
        echo.send(b"a", 60)
        grandchild = int(echo.receive(60))
        assert runs(grandchild)
    wait_for_end(grandchild)
    echo.stop()  # again is harmless


@linux
def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    parent = (
        "import sys; from opcast.common.worker_process import WorkerProcess; "
        "own = WorkerProcess([sys.executable, '-c', sys.argv[1]]); own.receive(60); "
        "print(own.pid, flush=True); own.receive(60)"
    )
    child = (
        "import time; from opcast.common.child_process import Channel; "
        "Channel().send(b''); time.sleep(99)"
    )
    with _started(["-c", parent, child]) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_for_end(pid)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "import sys; from opcast.common.child_process import begin_worker as b; b(); print('on')"
    for parent, out in ((gone.pid, ""), (os.getpid(), "on\n")):
        environment = {**os.environ, child_process.WORKER: f"{parent} 0"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (int(not out), out)


def test_the_environment_finds_the_same_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/a", "", "/b"])
    monkeypatch.setenv("LEFT_OUT", "1")
    environment = worker_environment({"SET": "2"}, without=["LEFT_OUT"], memory_bytes=7)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == ["/a", "/b"] and paths[2] == str(worker_process.PACKAGE.parent)
    assert environment["SET"] == "2" and "LEFT_OUT" not in environment
    assert environment[child_process.WORKER] == f"{os.getpid()} 7"


def test_a_module_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    command = module_command("json.tool", "--help")
    with WorkerProcess(command, messages=False) as own:
        assert own.ending() == (0, "exit code 0")


def _started(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
