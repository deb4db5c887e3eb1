"""Worker processes, for work that may crash, hang or run out of memory.

All have the environment to import the same packages, a separate process group, a memory limit,
messages with a deadline, the last lines of standard error for error messages, and end with this
process (:mod:`opcast.common.child_process` is the worker's side).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from .child_process import LENGTH_BYTES, WORKER
from .paths import PACKAGE

#: Variables for the number of threads of numerical libraries.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: Seconds for a worker that closed its output to end, so that its status can be reported.
_END_S = 5.0
#: Bytes at the end of standard error to read for error messages.
_TAIL_BYTES = 2**18
#: Bytes to move at a time: the capacity of a pipe on Linux.
_PIECE_BYTES = 2**16


class WorkerEnded(Exception):
    """The worker ended before it answered."""


class WorkerTimeout(Exception):
    """The worker did not answer within the time limit."""


def memory_bytes() -> float:
    """Return the machine's main memory in bytes, or its cgroup's limit if lower; 0 if unknown."""
    try:
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return 0.0
    # cgroup v2; the file contains "max" without a limit.
    with contextlib.suppress(OSError, ValueError):
        total = min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def module_command(module: str, *arguments: str) -> list[str]:
    """Make the command that runs a module of opcast, without its folder on the path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def worker_environment(
    variables: Mapping[str, str] | None = None,
    *,
    without: Collection[str] = (),
    memory_bytes: int = 0,
) -> dict[str, str]:
    """Copy this process's environment so that a worker imports the same packages.

    Args:
        variables: Variables to set.
        without: Variables to leave out.
        memory_bytes: The worker's memory limit; 0 for none.
    """
    # PYTHONPATH carries over this process's path: the worker is started with -P.
    paths = [path for path in (*sys.path, str(PACKAGE.parent)) if path]
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {
        **kept,
        **(variables or {}),
        "PYTHONPATH": os.pathsep.join(paths),
        WORKER: f"{os.getpid()} {memory_bytes}",
    }


class WorkerProcess:
    """A process in its own session: Ctrl-C only reaches this process, which then ends the worker.

    Args:
        command: Command to run, such as from :func:`module_command`.
        variables: Environment variables to set.
        without: Environment variables of this process to leave out.
        memory_bytes: Limit of the worker's private memory; 0 for none.
        messages: Whether it exchanges messages through a
            :class:`~opcast.common.child_process.Channel`.
        keep_errors: Whether to keep its standard error for error messages; else it is inherited.
        pass_fds: Open files that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        memory_bytes: int = 0,
        messages: bool = True,
        keep_errors: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._errors: IO[bytes] | None = None
        if keep_errors:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._stopped = False
        self._unsent, self._received = bytearray(), bytearray()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if messages else subprocess.DEVNULL,
            stdout=subprocess.PIPE if messages else self._errors or subprocess.DEVNULL,
            stderr=self._errors,
            bufsize=0,
            env=worker_environment(variables, without=without, memory_bytes=memory_bytes),
            # Its own group, so that stop() reaches processes started by the worker.
            start_new_session=True,
            pass_fds=pass_fds,
        )
        if self._process.stdin is not None:
            # A worker that does not read must not block this process: poll() reports free space.
            os.set_blocking(self._process.stdin.fileno(), False)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; ``None`` while it runs."""
        return self._process.poll()

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send a message; replies that arrive meanwhile are stored, so that neither side blocks.

        Raises:
            WorkerEnded: The worker has ended.
            WorkerTimeout: It does not read the message within the limit.
        """
        self._unsent += len(message).to_bytes(LENGTH_BYTES, "little")
        self._unsent += message
        self._exchange(lambda: not self._unsent, timeout_s)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next message of the worker.

        Raises:
            WorkerEnded: The worker has ended.
            WorkerTimeout: No message arrives within the limit.
        """
        self._exchange(lambda: len(self._received) >= self._frame_bytes(), timeout_s)
        size = self._frame_bytes()
        message = bytes(self._received[LENGTH_BYTES:size])
        del self._received[:size]
        return message

    def ending(self) -> tuple[int, str]:
        """Return the exit status of a worker that closed its output, also as text."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it closed its output and stays
            self._kill()
            status = self._process.wait()
        if status >= 0:
            return status, f"exit code {status}"
        try:
            return status, f"signal {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal has no name
            return status, f"signal {-status}"

    def errors(self) -> str:
        """Return the end of its standard error, if kept."""
        if self._errors is None or self._errors.closed:
            return ""
        file = self._errors.fileno()
        # Not read(): the worker writes at the same file position.
        start = max(0, os.fstat(file).st_size - _TAIL_BYTES)
        return os.pread(file, _TAIL_BYTES, start).decode(errors="replace")

    def last_error(self, length: int = 300) -> str:
        """Return the last non-empty line of :meth:`errors`, cut to a length."""
        lines = [line.strip() for line in self.errors().splitlines() if line.strip()]
        return lines[-1][:length] if lines else ""

    def stop(self) -> None:
        """End the worker with all processes of its group; no effect if it has ended."""
        if self._stopped:  # the group's id may be another's by now
            return
        self._stopped = True
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _frame_bytes(self) -> int:
        """Bytes of the oldest message including its length; of the length alone if absent."""
        if len(self._received) < LENGTH_BYTES:
            return LENGTH_BYTES
        return LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")

    def _exchange(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Move bytes both ways until ``done`` is true."""
        sends, receives = self._process.stdin, self._process.stdout
        assert sends is not None and receives is not None
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            # Both directions at once: a worker that writes a long reply before it has read all of a
            # request would otherwise block both sides.
            poller = select.poll()
            poller.register(receives, select.POLLIN)
            if self._unsent:
                poller.register(sends, select.POLLOUT)
            # poll() counts milliseconds.
            left = None if end is None else max(0.0, end - time.monotonic()) * 1000
            ready = [file for file, _ in poller.poll(left)]
            if not ready:
                raise WorkerTimeout
            if receives.fileno() in ready:
                piece = os.read(receives.fileno(), _PIECE_BYTES)
                if not piece:
                    raise WorkerEnded
                self._received += piece
            if sends.fileno() in ready:
                try:
                    count = os.write(sends.fileno(), self._unsent[:_PIECE_BYTES])
                except BrokenPipeError:
                    raise WorkerEnded from None
                del self._unsent[:count]
