"""Runs a tool's jobs in a process of its own, each within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

#: Seconds that a tool may take to be imported, on top of the limit of its first job.
START_S = 60.0
#: No compiler of absent devices is to be looked for in the tool's process.
_SET = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "2"}


class ToolProcess:
    """A tool's process, started when it is needed and anew after it hung or died.

    Args:
        tool: Module of this package with a function ``run(job) -> reply``.
        limit_s: Seconds of one job.
    """

    def __init__(self, tool: str, limit_s: float) -> None:
        self._tool = tool
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> ToolProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The tool's reply, or ``{"error": …}``; with ``"hung": True`` if the limit passed."""
        limit_s = self._limit_s + (START_S if self._process is None else 0.0)
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        line = _line(process.stdout, limit_s)
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        died = process.poll() is not None or line == b"dead"
        said = self._last_words() if died else ""
        self.stop()
        if died:
            return {"error": f"the tool's process died{': ' if said else ''}{said}"}
        return {"error": f"no answer within {self._limit_s:g} s", "hung": True}

    def stop(self) -> None:
        """End the process and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        root = Path(__file__).resolve().parents[2]
        paths = [p for p in (*sys.path, str(root.parent)) if p]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", self._tool],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
            env={**os.environ, **_SET, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )  # fmt: skip
        return self._process

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _line(stream: IO[bytes], limit_s: float) -> bytes:
    """A whole line; what there is of it when the limit passes, or ``dead`` at the stream's end."""
    found, end = b"", time.monotonic() + limit_s
    while not found.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return found
        part = os.read(stream.fileno(), 65536)
        if not part:
            return b"dead"
        found += part
    return found
